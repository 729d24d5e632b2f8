"""Host memory below SGLang's device pools, a share for each: what of a prompt is there, and what is kept for whom.

    promise    the pages of a prompt that SGLang was told of stay until it loads them, for a while at least
    claim      pages that are copied now stay until they are released
    take       pages to fill, from the device or a store; `publish` makes them found

Memory is divided as the device pools are. Never asks a store and copies nothing. Any thread.
"""

from __future__ import annotations

import logging
from collections import OrderedDict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from threading import Lock
from typing import NamedTuple

import torch

from stepwell.base.errors import ConfigError
from stepwell.base.meters import Clock
from stepwell.base.units import format_bytes
from stepwell.connectors.sglang.device_pools import DevicePool
from stepwell.connectors.sglang.host_pages import HeldPage, HostPages, stride_of
from stepwell.connectors.sglang.prefix_lengths import Want, restorable
from stepwell.transfer.copy_engine import mapped, must_fit
from stepwell.transfer.torch_memory import pinned_bytes

log = logging.getLogger(__name__)
MOST_PROMISES = 1024  # requests; SGLang does not say when one is dropped that waits
PROMISE_S = 10.0  # an older promise may be broken for room: SGLang asks again for requests that it goes on with


class Slot(NamedTuple):
    """A page to fill."""

    key: str
    at: int


@dataclass(frozen=True, slots=True)
class Claim:
    """Pages in use, by pool, in the order of their keys."""

    pages: Mapping[str, Sequence[HeldPage]]


class _Promise(NamedTuple):
    claim: Claim
    made_s: float


class HostTier:
    """All pools of one rank."""

    def __init__(self, pools: Sequence[DevicePool], memory_bytes: int, clock: Clock, *, pinned: bool) -> None:
        shares = _shares(pools, memory_bytes)
        must_fit(memory_bytes, settings='"host_memory"')
        memory = pinned_bytes(memory_bytes) if pinned else torch.frombuffer(mapped(memory_bytes), dtype=torch.uint8)
        self.pools: dict[str, HostPages] = {}
        start = 0
        for pool, share in shares:
            self.pools[pool.name] = HostPages(
                memory[start : start + share], page_bytes=pool.page_bytes, pool_class=pool.pool_class, meaning=pool.meaning
            )
            start += share
        self._clock = clock
        self._lock = Lock()
        self._promises: OrderedDict[str, _Promise] = OrderedDict()  # the oldest first
        self.broken_promises = 0
        self.generation = 0  # of what is in here: no page of an older one comes in

    # ---- what is there ------------------------------------------------------------------------------

    def holds(self, pool: str, keys: Sequence[str]) -> list[bool]:
        with self._lock:
            return self.pools[pool].holds(keys)

    def lengths(self, keys: Sequence[str], wants: Sequence[Want]) -> list[int]:
        """The lengths of the prompt, in pages, that could be loaded now."""
        with self._lock:
            return self._lengths(keys, wants)

    def promise(self, request: str, keys: Sequence[str], wants: Sequence[Want]) -> list[int]:
        """As `lengths`, and keeps what they need for the request. A promise before that is over."""
        with self._lock:
            self._end_promise(request)
            lengths = self._lengths(keys, wants)
            if lengths:
                upto = keys[: max(lengths)]
                found = {want.pool: [page for page in map(self.pools[want.pool].get, upto) if page is not None] for want in wants}
                self._promises[request] = _Promise(self._pin(found), self._clock.now())
                if len(self._promises) > MOST_PROMISES:
                    self._break_oldest()
            return lengths

    def claim(self, request: str, wanted: Mapping[str, Sequence[str]]) -> Claim | None:
        """Takes the pages into use, or none of them where one is gone. The request's promise is over."""
        with self._lock:
            found: dict[str, list[HeldPage]] = {}
            for pool, keys in wanted.items():
                pages = [self.pools[pool].get(key) for key in keys]
                found[pool] = [page for page in pages if page is not None]
            whole = all(len(found[pool]) == len(keys) for pool, keys in wanted.items())
            claim = self._pin(found) if whole else None
            self._end_promise(request)
            return claim

    def claim_unstored(self, pool: str, keys: Sequence[str]) -> Claim:
        """Takes those into use that are held and not known to be stored."""
        with self._lock:
            pages = self.pools[pool]
            return self._pin({pool: [page for page in map(pages.get, keys) if page is not None and not page.is_stored]})

    def release(self, claim: Claim) -> None:
        with self._lock:
            self._unpin(claim)

    # ---- what comes in ------------------------------------------------------------------------------

    def take(self, pool: str, keys: Sequence[str]) -> list[Slot]:
        """Pages for those that are not held, in order, as far as there is room. They are the caller's to publish or give back."""
        with self._lock:
            pages, slots = self.pools[pool], []
            pages.touch(keys)
            for key in keys:
                if pages.get(key) is not None:
                    continue
                at = pages.take()
                while at is None and self._has_old_promise():
                    self._break_oldest()
                    at = pages.take()
                if at is None:
                    break
                slots.append(Slot(key, at))
            return slots

    def publish(self, pool: str, slots: Sequence[Slot], *, generation: int, is_stored: bool) -> None:
        """Pages that were taken have their bytes, unless everything was forgotten meanwhile."""
        with self._lock:
            pages = self.pools[pool]
            for slot in reversed(slots):  # the first of them is to leave last
                if generation == self.generation:
                    pages.publish(slot.key, slot.at, is_stored=is_stored)
                else:
                    pages.give_back(slot.at)

    def give_back(self, pool: str, slots: Sequence[Slot]) -> None:
        with self._lock:
            for slot in slots:
                self.pools[pool].give_back(slot.at)

    def forget_all(self) -> None:
        """Nothing that is here, or on its way, is found any more."""
        with self._lock:
            self.generation += 1
            for request in list(self._promises):
                self._end_promise(request)
            for pages in self.pools.values():
                pages.forget_all()

    def audit(self) -> None:
        with self._lock:
            for pages in self.pools.values():
                pages.audit()

    # ---- inside -------------------------------------------------------------------------------------

    def _lengths(self, keys: Sequence[str], wants: Sequence[Want]) -> list[int]:
        return restorable({want.pool: self.pools[want.pool].holds(keys) for want in wants}, wants).restorable

    def _pin(self, found: Mapping[str, Sequence[HeldPage]]) -> Claim:
        for pool, pages in found.items():
            for page in pages:
                self.pools[pool].pin(page)
        return Claim(found)

    def _unpin(self, claim: Claim) -> None:
        for pool, pages in claim.pages.items():
            self.pools[pool].unpin(pages)

    def _end_promise(self, request: str) -> None:
        promise = self._promises.pop(request, None)
        if promise is not None:
            self._unpin(promise.claim)

    def _has_old_promise(self) -> bool:
        oldest = next(iter(self._promises.values()), None)
        return oldest is not None and self._clock.now() - oldest.made_s > PROMISE_S

    def _break_oldest(self) -> None:
        _, promise = self._promises.popitem(last=False)
        self._unpin(promise.claim)
        self.broken_promises += 1


def _shares(pools: Sequence[DevicePool], memory_bytes: int) -> list[tuple[DevicePool, int]]:
    """Bytes for each pool, as the device divides its own. Raises ConfigError where a page would not fit."""
    sizes = [pool.num_pages * pool.page_bytes for pool in pools]
    shares = []
    for pool, size in zip(pools, sizes, strict=True):
        stride = stride_of(pool.page_bytes)
        if stride > 2 * pool.page_bytes:
            log.warning(
                "pages of pool %r have %d bytes and take %d: use a larger --page-size", pool.name, pool.page_bytes, stride
            )
        share = memory_bytes * size // sum(sizes) // stride * stride
        if not share:
            raise ConfigError(
                f'"host_memory" of {format_bytes(memory_bytes)} has no room for a page of pool {pool.name!r}: '
                f"give it {format_bytes(-(-stride * sum(sizes) // size))} at least, better several times what the device has"
            )
        shares.append((pool, share))
    return shares
