"""Objects that refer to one another in a ring: Python frees these only when its collector looks, which may be minutes later."""

from __future__ import annotations

import gc
from collections import Counter
from collections.abc import Callable


def kept_by_rings(call: Callable[[], object]) -> Counter[str]:
    """What a call left behind that only the collector could free, by type. Other threads should make nothing meanwhile."""
    while gc.collect():
        pass
    gc.disable()
    try:
        call()
        gc.set_debug(gc.DEBUG_SAVEALL)
        gc.collect()
        return Counter(type(each).__name__ for each in gc.garbage)
    finally:
        gc.set_debug(0)
        gc.garbage.clear()
        gc.enable()
