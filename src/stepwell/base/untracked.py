"""Objects that Python's garbage collector ignores.

A full collection stops every thread while it scans all objects that could be part of a cycle. That takes seconds for the nodes of
a large tree, which are never garbage. Untracked objects cost nothing, but are freed only with their last reference: code that
untracks objects which refer to each other must clear these references when it is done with the objects.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable

# A list or an object with slots stays untracked; a dictionary only until something is added to it.
untrack: Callable[[object], None] = ctypes.pythonapi.PyObject_GC_UnTrack
untrack.argtypes = (ctypes.py_object,)  # type: ignore[attr-defined]
untrack.restype = None  # type: ignore[attr-defined]
