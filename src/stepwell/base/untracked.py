"""Objects that Python's garbage collector leaves alone.

A full collection stops every thread while it looks at every object that could be part of a cycle: seconds for the nodes of a
large tree, which are never garbage. Untracked objects cost it nothing. In exchange they are freed only by their last reference:
code that untracks objects which refer to each other must clear these references when it is done with the objects.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable

# Of a list and of an object with slots: for good. Of a dictionary: until something is added to it.
untrack: Callable[[object], None] = ctypes.pythonapi.PyObject_GC_UnTrack
untrack.argtypes = (ctypes.py_object,)  # type: ignore[attr-defined]
untrack.restype = None  # type: ignore[attr-defined]
