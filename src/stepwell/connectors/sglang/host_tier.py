"""Host memory below SGLang's device pools, a share for each pool: which pages of a prompt it holds, and which are reserved or in
use.

    reserve    the pages of a prompt that SGLang looked up stay until it loads them, at least for RESERVATION_S
    claim      pages in use by a copy stay until they are released
    take       empty pages to fill from the device or a store; `publish` makes them visible, `free` returns them

    taken  --publish-->  held  --pin--> pinned --unpin--> held       held pages may be evicted, least recently used first
       \\---- free ----> free <-------------- evicted ------/

Pages have SGLang's names. A name covers the whole prefix, so no tree is needed. Memory is divided like the device pools. Never
queries a store and copies nothing. `HostTier` may be called from any thread; `HostPages` relies on its lock, and `HostPool` reads
it like one of SGLang's own pools.
"""

from __future__ import annotations

import logging
from collections import OrderedDict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from threading import Lock
from typing import NamedTuple

import torch

from stepwell.base.errors import ConfigError
from stepwell.base.meters import Clock
from stepwell.base.units import format_bytes
from stepwell.connectors.sglang.device_pools import DevicePool
from stepwell.connectors.sglang.pages import Want, restorable
from stepwell.transfer.copy_engine import mapped, must_fit
from stepwell.transfer.torch_memory import pinned_bytes

ALIGNMENT_BYTES = 4096  # for direct I/O


@dataclass(slots=True, eq=False)
class HeldPage:
    """One filled page."""

    key: str
    at: int
    users: int = 0
    is_stored: bool = False  # as far as known
    is_named: bool = True  # otherwise not found any more, and freed when its users are gone


def stride_of(page_bytes: int) -> int:
    return -(-page_bytes // ALIGNMENT_BYTES) * ALIGNMENT_BYTES


class HostPages:
    """Pages `[num_pages, page_bytes]` over given memory."""

    page_size = 1  # each index is a page

    def __init__(self, memory: torch.Tensor, *, page_bytes: int, pool_class: str, meaning: str) -> None:
        stride = stride_of(page_bytes)
        self._rows = memory[: memory.numel() // stride * stride].view(-1, stride)
        self.rows = self._rows[:, :page_bytes]
        self.pool_class, self.layout = pool_class, meaning
        self.num_pages = len(self.rows)
        self._free = list(range(self.num_pages))[::-1]
        self._taken: set[int] = set()
        self._held: dict[str, HeldPage] = {}
        self._idle: OrderedDict[str, HeldPage] = OrderedDict()  # held and unused, the least recent first
        self._unnamed: set[HeldPage] = set()
        self.evicted = 0

    # ---- questions ----------------------------------------------------------------------------------

    def holds(self, keys: Iterable[str]) -> list[bool]:
        return [key in self._held for key in keys]

    def get(self, key: str) -> HeldPage | None:
        return self._held.get(key)

    @property
    def num_held(self) -> int:
        return len(self._held)

    @property
    def num_pinned(self) -> int:
        return len(self._held) - len(self._idle) + len(self._unnamed)

    # ---- orders -------------------------------------------------------------------------------------

    def take(self) -> int | None:
        """An empty page, evicting another if needed; None if all are in use."""
        if not self._free:
            if not self._idle:
                return None
            key, page = self._idle.popitem(last=False)
            del self._held[key]
            self._free.append(page.at)
            self.evicted += 1
        at = self._free.pop()
        self._taken.add(at)
        return at

    def free(self, at: int) -> None:
        """Returns a taken page that was not filled."""
        self._taken.remove(at)
        self._free.append(at)

    def publish(self, key: str, at: int, *, is_stored: bool) -> HeldPage:
        """Makes a filled page visible. If the name already has a page, that one is kept."""
        known = self._held.get(key)
        if known is not None:
            self.free(at)
            known.is_stored |= is_stored
            return known
        self._taken.remove(at)
        page = self._held[key] = self._idle[key] = HeldPage(key, at, is_stored=is_stored)
        return page

    def pin(self, page: HeldPage) -> None:
        assert page.is_named, f"{page.key} was cleared"
        if not page.users:
            del self._idle[page.key]
        page.users += 1

    def unpin(self, pages: Sequence[HeldPage]) -> None:
        """Ends one use of each page. The first page becomes the most recent one, because the others are useless without it."""
        for page in reversed(pages):
            assert page.users > 0, f"{page.key} is not pinned"
            page.users -= 1
            if page.users:
                continue
            if page.is_named:
                self._idle[page.key] = page
            else:
                self._unnamed.remove(page)
                self._free.append(page.at)

    def touch(self, keys: Sequence[str]) -> None:
        """Counts as a use."""
        for key in reversed(keys):
            if key in self._idle:
                self._idle.move_to_end(key)

    def clear(self) -> None:
        """Removes all pages. Pages in use are freed when their users are gone."""
        for page in self._held.values():
            page.is_named = False
            if page.users:
                self._unnamed.add(page)
            else:
                self._free.append(page.at)
        self._held.clear()
        self._idle.clear()

    def audit(self) -> None:
        """Asserts that every page is free, being filled or held, once."""
        held = [page.at for page in (*self._held.values(), *self._unnamed)]
        everywhere = sorted([*self._free, *self._taken, *held])
        assert everywhere == list(range(self.num_pages)), f"pages are lost or twice: {self.num_pages=} {len(everywhere)=}"
        for key, page in self._held.items():
            assert page.key == key and page.is_named, f"{key} is not what it is called"
            assert (page.users == 0) == (key in self._idle), f"{key}: {page.users=}, idle: {key in self._idle}"
        assert all(page.users and not page.is_named for page in self._unnamed), "a cleared page without users was not freed"

    # ---- as a pool of SGLang's ----------------------------------------------------------------------

    def get_hybrid_pool_buffer(self) -> list[torch.Tensor]:
        return [self._rows]

    def get_page_buffer_meta(self, indices: torch.Tensor) -> tuple[list[int], list[int]]:
        base, stride, size = int(self._rows.data_ptr()), int(self._rows.shape[1]), int(self.rows.shape[1])
        return [base + at * stride for at in indices.tolist()], [size] * len(indices)


log = logging.getLogger(__name__)
MAX_RESERVATIONS = 1024  # requests; SGLang does not report dropped waiting requests
RESERVATION_S = 10.0  # an older reservation may be dropped for space: SGLang looks a request up again before it continues


class Slot(NamedTuple):
    """A page to fill."""

    key: str
    at: int


@dataclass(frozen=True, slots=True)
class Claim:
    """Pages in use, by pool, in key order."""

    pages: Mapping[str, Sequence[HeldPage]]


class _Reservation(NamedTuple):
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
        self._reservations: OrderedDict[str, _Reservation] = OrderedDict()  # oldest first
        self.dropped_reservations = 0
        self.generation = 0  # pages of an older generation are not published

    # ---- lookups ------------------------------------------------------------------------------

    def holds(self, pool: str, keys: Sequence[str]) -> list[bool]:
        with self._lock:
            return self.pools[pool].holds(keys)

    def lengths(self, keys: Sequence[str], wants: Sequence[Want]) -> list[int]:
        """Prefix lengths, in pages, that can be loaded now."""
        with self._lock:
            return self._lengths(keys, wants)

    def reserve(self, request: str, keys: Sequence[str], wants: Sequence[Want]) -> list[int]:
        """As `lengths`, and reserves their pages for the request, replacing its earlier reservation."""
        with self._lock:
            self._end_reservation(request)
            lengths = self._lengths(keys, wants)
            if lengths:
                upto = keys[: max(lengths)]
                found = {want.pool: [page for page in map(self.pools[want.pool].get, upto) if page is not None] for want in wants}
                self._reservations[request] = _Reservation(self._pin(found), self._clock.now())
                if len(self._reservations) > MAX_RESERVATIONS:
                    self._drop_oldest_reservation()
            return lengths

    def claim(self, request: str, wanted: Mapping[str, Sequence[str]]) -> Claim | None:
        """Claims all pages, or returns None if one is gone. Ends the request's reservation."""
        with self._lock:
            found: dict[str, list[HeldPage]] = {}
            for pool, keys in wanted.items():
                pages = [self.pools[pool].get(key) for key in keys]
                found[pool] = [page for page in pages if page is not None]
            whole = all(len(found[pool]) == len(keys) for pool, keys in wanted.items())
            claim = self._pin(found) if whole else None
            self._end_reservation(request)
            return claim

    def claim_unstored(self, pool: str, keys: Sequence[str]) -> Claim:
        """Claims the held pages that are not known to be stored."""
        with self._lock:
            pages = self.pools[pool]
            return self._pin({pool: [page for page in map(pages.get, keys) if page is not None and not page.is_stored]})

    def release(self, claim: Claim) -> None:
        with self._lock:
            self._unpin(claim)

    # ---- new pages ------------------------------------------------------------------------------

    def take(self, pool: str, keys: Sequence[str]) -> list[Slot]:
        """Empty pages for the keys that are not held, in order, as far as space allows. The caller must publish or free them."""
        with self._lock:
            pages, slots = self.pools[pool], []
            pages.touch(keys)
            for key in keys:
                if pages.get(key) is not None:
                    continue
                at = pages.take()
                while at is None and self._has_expired_reservation():
                    self._drop_oldest_reservation()
                    at = pages.take()
                if at is None:
                    break
                slots.append(Slot(key, at))
            return slots

    def publish(self, pool: str, slots: Sequence[Slot], *, generation: int, is_stored: bool) -> None:
        """Publishes filled pages, or frees them if the tier was cleared meanwhile."""
        with self._lock:
            pages = self.pools[pool]
            for slot in reversed(slots):  # the first one is evicted last
                if generation == self.generation:
                    pages.publish(slot.key, slot.at, is_stored=is_stored)
                else:
                    pages.free(slot.at)

    def free(self, pool: str, slots: Sequence[Slot]) -> None:
        with self._lock:
            for slot in slots:
                self.pools[pool].free(slot.at)

    def clear(self) -> None:
        """Removes all pages, including those in flight."""
        with self._lock:
            self.generation += 1
            for request in list(self._reservations):
                self._end_reservation(request)
            for pages in self.pools.values():
                pages.clear()

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

    def _end_reservation(self, request: str) -> None:
        promise = self._reservations.pop(request, None)
        if promise is not None:
            self._unpin(promise.claim)

    def _has_expired_reservation(self) -> bool:
        oldest = next(iter(self._reservations.values()), None)
        return oldest is not None and self._clock.now() - oldest.made_s > RESERVATION_S

    def _drop_oldest_reservation(self) -> None:
        _, promise = self._reservations.popitem(last=False)
        self._unpin(promise.claim)
        self.dropped_reservations += 1


def _shares(pools: Sequence[DevicePool], memory_bytes: int) -> list[tuple[DevicePool, int]]:
    """Bytes per pool, divided like the device pools. Raises ConfigError if a page does not fit."""
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
                f'"host_memory" of {format_bytes(memory_bytes)} is too small for a page of pool {pool.name!r}: '
                f"use {format_bytes(-(-stride * sum(sizes) // size))} at least, better several times the device pools"
            )
        shares.append((pool, share))
    return shares
