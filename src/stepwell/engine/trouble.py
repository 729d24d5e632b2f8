"""What the log says of copies and stores that fail: why, and how many; that a store is left alone, and that it is used again.

A store may fail a hundred times a second: of what fails within a minute there are two lines at most.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence

from stepwell.base.meters import Clock
from stepwell.cache.facade import Cache
from stepwell.store_tier.link import LinkState

EVERY_S = 60.0
_LONGEST = 500  # characters of a reason

log = logging.getLogger(__name__)


class TroubleLog:
    """One engine's. For its thread."""

    def __init__(self, cache: Cache, clock: Clock) -> None:
        self._cache = cache
        self._clock = clock
        self._state = LinkState.DETACHED
        self._told_s: float | None = None  # when something that failed was last told
        self._untold = 0  # how much has failed since
        self._why = ""  # the last of it

    def after_step(self, failures: Sequence[str]) -> None:
        if failures:
            self._untold += len(failures)
            self._why = failures[-1][:_LONGEST]
        if self._untold and (self._told_s is None or self._clock.now() >= self._told_s + EVERY_S):
            log.warning("copies or store operations failed: %d, the last of them: %s", self._untold, self._why)
            self._told_s, self._untold = self._clock.now(), 0
        before, self._state = self._state, self._cache.store.state
        if before is LinkState.ATTACHED and self._state is LinkState.SWITCHED_OFF:
            log.warning("the store is left alone after failures, and tried again in a while: %s", self._why)
        elif before is LinkState.SWITCHED_OFF and self._state is LinkState.ATTACHED:
            log.info("the store is used again")
