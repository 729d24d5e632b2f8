"""Pages that SGLang has computed are copied to the host, and from there to the store.

    begin    the scheduler's thread    room on the host; pages that are there already are left as they are
    copy     one thread                SGLang keeps the device pages until it hears of the end
    write    another one               pages stay on the host until they are stored, or the store would not have them

A save has ended when its pages are on the host: SGLang never waits for the store. A store that is behind is passed over before
its pages fill half of the host.
"""

from __future__ import annotations

import logging
from collections import Counter, deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from threading import Lock

import torch

from stepwell.base.meters import Clock
from stepwell.connectors.sglang.device_copies import Barrier, DeviceCopies
from stepwell.connectors.sglang.device_pools import DevicePool
from stepwell.connectors.sglang.host_tier import Claim, HostTier, Slot
from stepwell.connectors.sglang.loads import wait_for_line
from stepwell.connectors.sglang.pages import Pages
from stepwell.jobs.workers import WorkQueue

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True, kw_only=True)
class _Save:
    """Of one pool."""

    pool: DevicePool
    keys: Sequence[str]
    slots: Sequence[Slot]  # for those that are not on the host yet
    indices: torch.Tensor  # of SGLang's, for all keys


class Saves:
    """From the pools of one rank to one host tier and its store."""

    def __init__(self, pools: Sequence[DevicePool], host: HostTier, copies: DeviceCopies, clock: Clock) -> None:
        self._pools = {pool.name: pool for pool in pools}
        self._host, self._copies = host, copies
        self._line, self._writing = WorkQueue("save", clock), WorkQueue("store-pages", clock)
        self._ended: deque[bool] = deque()
        self._lock = Lock()
        self._waiting: Counter[str] = Counter()  # pages on the host that are to be stored, by pool
        self.pages = 0
        self.passed_over = 0  # pages that a store which is behind did not get

    def begin(self, wanted: Mapping[str, tuple[Sequence[str], torch.Tensor]], ready: Barrier, stored: Pages | None) -> None:
        """Keys and SGLang's indices, by pool. The end is told in the order of begins."""
        saves = []
        for name, (keys, indices) in wanted.items():
            slots = self._host.take(name, keys)
            saves.append(_Save(pool=self._pools[name], keys=keys, slots=slots, indices=indices))
        self._line.submit(partial(self._run, saves, self._host.generation, ready, stored))

    @property
    def num_ended(self) -> int:
        return len(self._ended)

    def pop_ended(self) -> bool:
        """Whether all pages of the oldest save that has ended are on the host."""
        return self._ended.popleft()

    @property
    def num_waiting(self) -> int:
        """Pages that the store is still to get."""
        return self._waiting.total()

    def quiesce(self) -> None:
        """Waits until nothing reads the device any more, and forgets what has ended."""
        wait_for_line(self._line)
        self._ended.clear()

    def close(self, *, store_s: float) -> None:
        """Waits for the store, so long at most. After `quiesce`."""
        if self._waiting.total():
            wait_for_line(self._writing, store_s)
        self._line.close()
        self._writing.close()

    def _run(self, saves: Sequence[_Save], generation: int, ready: Barrier, stored: Pages | None) -> None:
        open_slots = {save.pool.name: save.slots for save in saves}
        whole = False
        try:
            ready()
            for save in saves:
                self._copy(save)
                self._host.publish(save.pool.name, open_slots.pop(save.pool.name), generation=generation, is_stored=False)
                self.pages += len(save.slots)
            whole = all(all(self._host.holds(save.pool.name, save.keys)) for save in saves)
            if stored is not None:
                for save in saves:
                    self._to_store(save, stored)
        except Exception:  # the worker boundary: SGLang hears that it failed
            log.exception("pages could not be saved")
        finally:
            for name, slots in open_slots.items():
                self._host.give_back(name, slots)
            self._ended.append(whole)

    def _copy(self, save: _Save) -> None:
        number = {key: at for at, key in enumerate(save.keys)}
        ids = save.pool.page_ids(save.indices)[[number[slot.key] for slot in save.slots]]
        self._copies.to_host(save.pool, ids, self._host.pools[save.pool.name].rows, [slot.at for slot in save.slots])

    def _to_store(self, save: _Save, stored: Pages) -> None:
        name = save.pool.name
        claim = self._host.claim_unstored(name, save.keys)
        count = len(claim.pages[name])
        with self._lock:
            is_behind = self._waiting[name] + count > self._host.pools[name].num_pages // 2
            self._waiting[name] += 0 if is_behind else count
        if is_behind or not count:
            self.passed_over += count
            self._host.release(claim)
            return
        self._writing.submit(partial(self._write, name, save.keys, claim, stored))

    def _write(self, name: str, keys: Sequence[str], claim: Claim, stored: Pages) -> None:
        pages = claim.pages[name]
        try:
            before = keys[: list(keys).index(pages[0].key)]
            good = stored.write(name, [page.key for page in pages], torch.tensor([page.at for page in pages]), before)
            for page, fine in zip(pages, good, strict=True):
                page.is_stored |= fine
        except Exception:  # the worker boundary: they are on the host
            log.exception("pages could not be stored")
        finally:
            with self._lock:
                self._waiting[name] -= len(pages)
            self._host.release(claim)
