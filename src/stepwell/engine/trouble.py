"""Logs failing copies and stores: how many failures and why, when a store is suspended, and when it is used again.

A store may fail a hundred times a second: failures write at most two lines a minute.
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
    """Logs the failures of one engine. For its thread."""

    def __init__(self, cache: Cache, clock: Clock) -> None:
        self._cache = cache
        self._clock = clock
        self._state = LinkState.DETACHED
        self._logged_s: float | None = None  # when a failure was last logged
        self._unlogged = 0  # failures since then
        self._why = ""  # the latest reason

    def after_step(self, failures: Sequence[str]) -> None:
        if failures:
            self._unlogged += len(failures)
            self._why = failures[-1][:_LONGEST]
        if self._unlogged and (self._logged_s is None or self._clock.now() >= self._logged_s + EVERY_S):
            log.warning("copies or store operations failed: %d, the latest: %s", self._unlogged, self._why)
            self._logged_s, self._unlogged = self._clock.now(), 0
        before, self._state = self._state, self._cache.store.state
        if before is LinkState.ATTACHED and self._state is LinkState.SWITCHED_OFF:
            log.warning("the store is suspended after failures, and tried again later: %s", self._why)
        elif before is LinkState.SWITCHED_OFF and self._state is LinkState.ATTACHED:
            log.info("the store is used again")
