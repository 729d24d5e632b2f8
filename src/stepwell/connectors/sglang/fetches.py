"""Fetches pages of a prompt from a store into host memory while the scheduler waits briefly.

SGLang's scheduler looks a prompt up and starts loading at once, so every reported page must be on the host, verified. A request
waits `wait_s` at most over all its lookups. While a store hangs, no other request waits for it. Pages that arrive later serve the
next request. Reads run on a thread; waiting is for the scheduler's thread only.
"""

from __future__ import annotations

import logging
from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import partial
from threading import Event

import torch

from stepwell.base.meters import Clock
from stepwell.connectors.sglang.host_tier import HostTier
from stepwell.connectors.sglang.pages import Pages, Want, needed, restorable
from stepwell.jobs.workers import WorkQueue

log = logging.getLogger(__name__)
BATCH_PAGES = 64  # per read
MOST_ROUNDS = 4  # after damage, the next best length is tried
MOST_REQUESTS = 1024  # remembered


@dataclass(slots=True, eq=False)
class _Fetch:
    keys: Sequence[str]
    wants: Sequence[Want]
    waited_s: float = 0.0
    abandoned: bool = False  # no request waits: do not start
    done: Event = field(default_factory=Event)


class Fetches:
    """Fetches from one store into one host tier."""

    def __init__(self, host: HostTier, *, wait_s: float, clock: Clock) -> None:
        self._host, self._wait_s, self._clock = host, wait_s, clock
        self._queue = WorkQueue("fetch", clock)
        self._fetches: OrderedDict[str, _Fetch] = OrderedDict()
        self._newest: _Fetch | None = None
        self.pages = 0
        self.not_asked = 0

    def wait_for(self, stored: Pages, request: str, keys: Sequence[str], wants: Sequence[Want]) -> None:
        """Fetches the stored pages of a prompt, as far as they arrive in time."""
        fetch = self._fetches.get(request)
        if fetch is None or fetch.keys[0] != keys[0] or fetch.keys[-1] != keys[-1]:
            if self._is_stuck():
                self.not_asked += 1
                return
            waited_s = fetch.waited_s if fetch is not None else 0.0
            fetch = self._newest = self._fetches[request] = _Fetch(list(keys), list(wants), waited_s=waited_s)
            self._queue.submit(partial(self._run, stored, fetch))
            while len(self._fetches) > MOST_REQUESTS:
                self._fetches.popitem(last=False)
        if not fetch.done.is_set():
            began_s = self._clock.now()
            fetch.done.wait(max(self._wait_s - fetch.waited_s, 0.0))
            fetch.waited_s += self._clock.now() - began_s
            fetch.abandoned = not fetch.done.is_set()

    def drop(self, request: str) -> None:
        """Drops a request's fetch, so that its next lookup queries the store again."""
        self._fetches.pop(request, None)

    def clear(self) -> None:
        self._fetches.clear()

    def close(self) -> None:
        self._queue.close()

    def _is_stuck(self) -> bool:
        """Whether the last fetch timed out and is still running."""
        return self._newest is not None and self._newest.abandoned and not self._newest.done.is_set()

    def _run(self, stored: Pages, fetch: _Fetch) -> None:
        try:
            generation = self._host.generation
            for _ in range(MOST_ROUNDS):
                if fetch.abandoned or not self._fetch_longest(stored, fetch, generation):
                    return
        except Exception:  # the worker boundary: the request is computed
            log.exception("reading a prompt from the store failed")
        finally:
            fetch.done.set()

    def _fetch_longest(self, stored: Pages, fetch: _Fetch, generation: int) -> bool:
        """Reads the missing pages of the longest length that host and store have together; false if none arrived."""
        keys, wants, there = fetch.keys, fetch.wants, {}
        for want in wants:
            held = self._host.holds(want.pool, keys)
            missing = [key for key, here in zip(keys, held, strict=True) if not here]
            found = dict(zip(missing, stored.there(want.pool, missing), strict=True))
            there[want.pool] = [here or found[key] for key, here in zip(keys, held, strict=True)]
        fitting = [each for each in restorable(there, wants).restorable if self._fits(wants, each)]
        best = max(fitting, default=0)
        if best <= max(self._host.lengths(keys, wants), default=0):
            return False
        came = 0
        for want in wants:
            at = needed(want, best)
            for first in range(at.start, at.stop, BATCH_PAGES):
                came += self._read(stored, want.pool, keys[first : min(first + BATCH_PAGES, at.stop)], generation)
        return came > 0

    def _fits(self, wants: Sequence[Want], length: int) -> bool:
        return all(len(needed(want, length)) <= self._host.pools[want.pool].num_pages for want in wants)

    def _read(self, stored: Pages, pool: str, keys: Sequence[str], generation: int) -> int:
        slots = self._host.take(pool, keys)
        if not slots:
            return 0
        try:
            good = stored.read(pool, [slot.key for slot in slots], torch.tensor([slot.at for slot in slots]))
        except BaseException:
            self._host.free(pool, slots)
            raise
        came = [slot for slot, fine in zip(slots, good, strict=True) if fine]
        self._host.publish(pool, came, generation=generation, is_stored=True)
        self._host.free(pool, [slot for slot, fine in zip(slots, good, strict=True) if not fine])
        self.pages += len(came)
        return len(came)
