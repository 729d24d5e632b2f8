"""The hands: they copy pages between memories when told to, and decide nothing.

`Hands` is the seam. A rank has one; all ranks run the same plans over the same page ids.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Protocol

from stepwell.base.ids import Tier
from stepwell.base.plan import Plan
from stepwell.transfer.memory import PageMemory


class Hands(Protocol):
    """One rank's copier."""

    def run(self, plan: Plan) -> None:
        """Makes every copy of the plan, and returns when all bytes are in place; raises when any could not be made.

        Called on a worker thread, for several plans at a time; no two plans write the same page.
        """
        ...


class NumpyHands:
    """Copies between memories that NumPy can index."""

    def __init__(self, memories: Mapping[Tier, PageMemory]) -> None:
        self._memories = memories

    def run(self, plan: Plan) -> None:
        for copy in plan.copies:
            source = self._memories[copy.source.tier].rows(copy.source.kind)
            target = self._memories[copy.target.tier].rows(copy.target.kind)
            for read, write in zip(copy.source.ids.tolist(), copy.target.ids.tolist(), strict=True):
                target[write] = source[read]
