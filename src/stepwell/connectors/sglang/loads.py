"""Pages on the host are copied to SGLang's device pools, layer by layer, while the pass that needs them goes on.

    queue     SGLang names device pages for a request            start     the batch begins: all that is queued is copied
    cancel    a request that has not started                     finish    nothing writes to the device any more

SGLang's pools wait for a layer before they read it (`LayerProgress`). Pages come from host memory alone, so nobody waits for a
store here. The scheduler's thread, and one that copies.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from threading import Condition, Event

import torch

from stepwell.base.meters import Clock
from stepwell.connectors.sglang.device_copies import Barrier, DeviceCopies
from stepwell.connectors.sglang.device_pools import DevicePool
from stepwell.connectors.sglang.host_tier import Claim, HostTier
from stepwell.jobs.workers import WorkQueue

log = logging.getLogger(__name__)


@dataclass(slots=True)
class _Batch:
    layers: int = 0  # that are there
    failed: bool = False  # and nothing is written any more


class LayerProgress:
    """What SGLang's pools call before they read a layer. `num_layers` and `consumer_index` are read by SGLang too."""

    def __init__(self, num_layers: int) -> None:
        self.num_layers = num_layers
        self.consumer_index = -1
        self._changed = Condition()
        self._batches: dict[int, _Batch] = {}
        self._next = 0

    def set_consumer(self, index: int) -> None:
        """The batch that the next pass is of; -1 for one that loads nothing."""
        self.consumer_index = index

    def wait_until(self, threshold: int) -> None:
        """Returns when a layer is there, or never will be: `finish` says so before the pass's output is used."""
        self._wait(self.consumer_index, threshold + 1)

    def begin(self) -> int:
        with self._changed:
            index, self._next = self._next, self._next + 1
            self._batches[index] = _Batch()
            return index

    def advance(self, index: int, *, failed: bool = False) -> None:
        """One more layer is there; or none will be."""
        with self._changed:
            batch = self._batches[index]
            batch.layers += not failed
            batch.failed |= failed
            self._changed.notify_all()

    def finish(self, index: int) -> bool:
        """Whether all layers came. Waits until nothing of the batch is written any more."""
        self._wait(index, self.num_layers)
        with self._changed:
            batch = self._batches.pop(index, None)
            return batch is None or not batch.failed

    def reset(self) -> None:
        """No pass is left that waits for anything."""
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
    claim: Claim | None  # None: what was promised is gone, and the request is to fail
    indices: Mapping[str, torch.Tensor]  # of SGLang's, on the device


class Loads:
    """From one host tier to the pools of one rank."""

    def __init__(
        self, pools: Sequence[DevicePool], host: HostTier, progress: LayerProgress, copies: DeviceCopies, clock: Clock
    ) -> None:
        self._pools = {pool.name: pool for pool in pools}
        self._host, self._progress, self._copies = host, progress, copies
        self._line = WorkQueue("load", clock)
        self._queued: dict[str, _Load] = {}
        self.pages = 0

    def queue(self, request: str, claim: Claim | None, indices: Mapping[str, torch.Tensor]) -> None:
        assert request not in self._queued, f"{request} loads twice"
        self._queued[request] = _Load(claim, indices)

    def cancel(self, request: str) -> bool:
        """Whether the request had not started, and will not."""
        load = self._queued.pop(request, None)
        if load is not None and load.claim is not None:
            self._host.release(load.claim)
        return load is not None

    def start(self, ready: Barrier) -> int:
        """Begins with all that is queued, when `ready` has returned; the batch's number, or -1 for nothing."""
        if not self._queued:
            return -1
        loads, self._queued = list(self._queued.values()), {}
        index = self._progress.begin()
        self._line.submit(partial(self._run, index, loads, ready))
        return index

    def quiesce(self) -> None:
        """Cancels what has not started, and waits for the rest."""
        for request in list(self._queued):
            self.cancel(request)
        wait_for_line(self._line)

    def close(self) -> None:
        self._line.close()

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
            log.exception("pages could not be loaded")
            failed = True
        finally:
            for load in loads:
                if load.claim is not None:
                    self._host.release(load.claim)
            if failed:
                self._progress.advance(index, failed=True)

    def _copies_of(self, load: _Load) -> list[tuple[DevicePool, torch.Tensor, list[int]]]:
        """By pool: to which pages of the device, from which of the host."""
        if load.claim is None:
            raise RuntimeError("pages that were promised had to leave host memory")
        pools = [self._pools[name] for name in load.claim.pages]
        return [
            (pool, pool.page_ids(load.indices[pool.name]), [page.at for page in load.claim.pages[pool.name]]) for pool in pools
        ]


def wait_for_line(line: WorkQueue, timeout_s: float | None = None) -> None:
    """Returns when all that waits in line is done, or when time is up. Without a time for lines that ask no store."""
    done = Event()
    line.submit(done.set)
    done.wait(timeout_s)
