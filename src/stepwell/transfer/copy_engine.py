"""Copies pages between memories when told to, and decides nothing.

`CopyEngine` is the seam. A rank has one; all ranks run the same plans over the same page ids.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Protocol, TypeAlias

from stepwell.base.ids import Tier
from stepwell.base.plan import Plan
from stepwell.transfer.memory import PageMemory

Work: TypeAlias = Callable[[], None]


class CopyEngine(Protocol):
    """One rank's copier."""

    def begin(self, plan: Plan) -> Work:
        """Takes a plan, on the engine's thread, and returns the work of carrying it out.

        The work runs on a worker thread, beside that of other plans; no two plans write the same page. It makes
        every copy and returns when all bytes are in place, or raises when any could not be made. What the engine
        queued on its device before this call must be done before the first byte is copied.
        """
        ...


class NumpyCopyEngine:
    """Copies between memories that NumPy can index."""

    def __init__(self, memories: Mapping[Tier, PageMemory]) -> None:
        self._memories = memories

    def begin(self, plan: Plan) -> Work:
        return lambda: self._run(plan)

    def _run(self, plan: Plan) -> None:
        for copy in plan.copies:
            source = self._memories[copy.source.tier].rows(copy.source.kind)
            target = self._memories[copy.target.tier].rows(copy.target.kind)
            for read, write in zip(copy.source.ids.tolist(), copy.target.ids.tolist(), strict=True):
                target[write] = source[read]
