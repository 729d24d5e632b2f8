"""Copies of SGLang's pages between device and host: loads for the next pass, layer by layer, and saves of computed pages.

    queue     SGLang names device pages for a request            start     starts a batch with all queued requests
    cancel    drops a request that has not started               finish    waits until nothing writes to the device any more

SGLang's pools wait for a layer before they read it (`LayerProgress`). Loads read from host memory only, so no pass waits for a
store.

    begin    the scheduler's thread    takes space on the host; pages already there are kept
    copy     a thread                  SGLang keeps the device pages until the save has ended
    write    another thread            pages stay on the host until they are stored

A save has ended when its pages are on the host; SGLang never waits for the store. Pages are not stored if the store is so far
behind that waiting pages would fill half of the host.
"""

from __future__ import annotations

import logging
from collections import Counter, deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from threading import Condition, Event, Lock

import torch

from stepwell.base.meters import Clock
from stepwell.connectors.sglang.device_pools import Barrier, DeviceCopies, DevicePool
from stepwell.connectors.sglang.host_tier import Claim, HostTier, Slot
from stepwell.connectors.sglang.pages import Pages
from stepwell.jobs.workers import WorkQueue

log = logging.getLogger(__name__)


@dataclass(slots=True)
class _Batch:
    layers: int = 0  # completed
    failed: bool = False  # nothing is written any more


class LayerProgress:
    """SGLang's pools call this before they read a layer. SGLang also reads `num_layers` and `consumer_index`."""

    def __init__(self, num_layers: int) -> None:
        self.num_layers = num_layers
        self.consumer_index = -1
        self._changed = Condition()
        self._batches: dict[int, _Batch] = {}
        self._next = 0

    def set_consumer(self, index: int) -> None:
        """The batch of the next pass; -1 for a pass without loads."""
        self.consumer_index = index

    def wait_until(self, threshold: int) -> None:
        """Returns when a layer was loaded or has failed; `finish` reports a failure before the pass's output is used."""
        self._wait(self.consumer_index, threshold + 1)

    def begin(self) -> int:
        with self._changed:
            index, self._next = self._next, self._next + 1
            self._batches[index] = _Batch()
            return index

    def advance(self, index: int, *, failed: bool = False) -> None:
        """Records that a layer was loaded, or that the batch failed."""
        with self._changed:
            batch = self._batches[index]
            batch.layers += not failed
            batch.failed |= failed
            self._changed.notify_all()

    def finish(self, index: int) -> bool:
        """Waits until the batch writes nothing any more. True if all layers were loaded."""
        self._wait(index, self.num_layers)
        with self._changed:
            batch = self._batches.pop(index, None)
            return batch is None or not batch.failed

    def reset(self) -> None:
        """Clears all batches. No pass may be waiting."""
        with self._changed:
            self._batches.clear()
            self.consumer_index = -1

    def _wait(self, index: int, layers: int) -> None:
        with self._changed:
            batch = self._batches.get(index)
            if batch is not None:
                self._changed.wait_for(lambda: batch.failed or batch.layers >= layers)


@dataclass(frozen=True, slots=True)
class _Load:
    claim: Claim | None  # None: a reserved page is gone, and the request must fail
    indices: Mapping[str, torch.Tensor]  # SGLang's, on the device


class Loads:
    """Loads from one host tier to the pools of one rank."""

    def __init__(
        self, pools: Sequence[DevicePool], host: HostTier, progress: LayerProgress, copies: DeviceCopies, clock: Clock
    ) -> None:
        self._pools = {pool.name: pool for pool in pools}
        self._host, self._progress, self._copies = host, progress, copies
        self._queue = WorkQueue("load", clock)
        self._queued: dict[str, _Load] = {}
        self.pages = 0

    def queue(self, request: str, claim: Claim | None, indices: Mapping[str, torch.Tensor]) -> None:
        assert request not in self._queued, f"{request} loads twice"
        self._queued[request] = _Load(claim, indices)

    def cancel(self, request: str) -> bool:
        """Cancels a request that has not started. False if it has started."""
        load = self._queued.pop(request, None)
        if load is not None and load.claim is not None:
            self._host.release(load.claim)
        return load is not None

    def start(self, ready: Barrier) -> int:
        """Starts a batch with all queued requests once `ready` returns. Returns its number, or -1 if none are queued."""
        if not self._queued:
            return -1
        loads, self._queued = list(self._queued.values()), {}
        index = self._progress.begin()
        self._queue.submit(partial(self._run, index, loads, ready))
        return index

    def quiesce(self) -> None:
        """Cancels queued requests, and waits for running batches."""
        for request in list(self._queued):
            self.cancel(request)
        wait_until_idle(self._queue)

    def close(self) -> None:
        self._queue.close()

    def _run(self, index: int, loads: Sequence[_Load], ready: Barrier) -> None:
        failed = False
        try:
            ready()
            copies = [each for load in loads for each in self._copies_of(load)]
            for layer in range(self._progress.num_layers):
                for pool, ids, at in copies:
                    self._copies.to_device(pool, layer, ids, self._host.pools[pool.name].rows, at)
                self._progress.advance(index)
            self.pages += sum(len(at) for _, _, at in copies)
        except Exception:  # the worker boundary: SGLang ends the requests of the batch
            log.exception("loading pages failed")
            failed = True
        finally:
            for load in loads:
                if load.claim is not None:
                    self._host.release(load.claim)
            if failed:
                self._progress.advance(index, failed=True)

    def _copies_of(self, load: _Load) -> list[tuple[DevicePool, torch.Tensor, list[int]]]:
        """Pools with their device pages and host pages."""
        if load.claim is None:
            raise RuntimeError("reserved pages were evicted from host memory")
        pools = [self._pools[name] for name in load.claim.pages]
        return [
            (pool, pool.page_ids(load.indices[pool.name]), [page.at for page in load.claim.pages[pool.name]]) for pool in pools
        ]


def wait_until_idle(line: WorkQueue, timeout_s: float | None = None) -> None:
    """Returns when all queued work is done, or after the timeout. Queues that use a store need a timeout."""
    done = Event()
    line.submit(done.set)
    done.wait(timeout_s)


@dataclass(frozen=True, slots=True, kw_only=True)
class _Save:
    """The pages of one pool."""

    pool: DevicePool
    keys: Sequence[str]
    slots: Sequence[Slot]  # for pages not on the host yet
    indices: torch.Tensor  # SGLang's, for all keys


class Saves:
    """Saves from the pools of one rank to one host tier and its store."""

    def __init__(self, pools: Sequence[DevicePool], host: HostTier, copies: DeviceCopies, clock: Clock) -> None:
        self._pools = {pool.name: pool for pool in pools}
        self._host, self._copies = host, copies
        self._queue, self._writing = WorkQueue("save", clock), WorkQueue("store-pages", clock)
        self._ended: deque[bool] = deque()
        self._lock = Lock()
        self._waiting: Counter[str] = Counter()  # pages on the host waiting to be stored, by pool
        self.pages = 0
        self.skipped_pages = 0  # not stored because the store is behind

    def begin(self, wanted: Mapping[str, tuple[Sequence[str], torch.Tensor]], ready: Barrier, stored: Pages | None) -> None:
        """Starts a save of keys and SGLang's indices, by pool. Saves end in the order of their starts."""
        saves = []
        for name, (keys, indices) in wanted.items():
            slots = self._host.take(name, keys)
            saves.append(_Save(pool=self._pools[name], keys=keys, slots=slots, indices=indices))
        self._queue.submit(partial(self._run, saves, self._host.generation, ready, stored))

    @property
    def num_ended(self) -> int:
        return len(self._ended)

    def pop_ended(self) -> bool:
        """Removes the oldest ended save. True if all its pages are on the host."""
        return self._ended.popleft()

    @property
    def num_waiting(self) -> int:
        """The number of pages waiting to be stored."""
        return self._waiting.total()

    def quiesce(self) -> None:
        """Waits until nothing reads the device any more, and drops ended saves."""
        wait_until_idle(self._queue)
        self._ended.clear()

    def close(self, *, store_s: float) -> None:
        """Waits for the store for `store_s` at most. Call `quiesce` first."""
        if self._waiting.total():
            wait_until_idle(self._writing, store_s)
        self._queue.close()
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
        except Exception:  # the worker boundary: SGLang gets the failure
            log.exception("saving pages failed")
        finally:
            for name, slots in open_slots.items():
                self._host.free(name, slots)
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
            self.skipped_pages += count
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
        except Exception:  # the worker boundary: the pages stay on the host
            log.exception("storing pages failed")
        finally:
            with self._lock:
                self._waiting[name] -= len(pages)
            self._host.release(claim)
