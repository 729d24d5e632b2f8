"""A copy engine over torch memories: host memory (pinned if there is CUDA) and a device.

Loads and saves run on separate streams, after the work that the engine had queued, and in parallel. Only the worker thread that
carries out a plan waits, for its own copies. `page_copier` chooses how pages are copied.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from queue import Empty, SimpleQueue
from threading import Lock

import torch

from stepwell.base.ids import JobId, Kind, Tier
from stepwell.base.meters import Counters
from stepwell.base.spec import ModelSpec
from stepwell.base.tasks import Copy, Plan, Purpose, Span
from stepwell.transfer.block_tables import BlockTables
from stepwell.transfer.copy_engine import Work
from stepwell.transfer.layer_events import LayerEvents, LayerSteps, layer_steps
from stepwell.transfer.page_copier import PageCopier, Route, Routed, StagedIds, checked_copier
from stepwell.transfer.page_tables import Cuts, PagePairs, PageTable
from stepwell.transfer.torch_memory import TorchMemory

AT_ONCE = 1 << 62  # bytes of a step: to queue layers of many pages one by one takes longer than the bus needs for whole pages
# How much is queued at a time, and after how much the queue runs empty for a moment. A copy engine that always has more copies of
# one stream does not switch to another: the few numbers of a pass would wait for the end of the load, however long it is. Small
# copies count too: a gigabyte of them takes two to three times as long when both directions are busy.
PART_BYTES, MOST_QUEUED_BYTES, PAUSE_EVERY_BYTES, PAUSE_EVERY_COPIES = 32 << 20, 128 << 20, 256 << 20, 2048
SPUN_BYTES, LOOK_AGAIN_S = 64 << 20, 50e-6  # the first take a millisecond on a bus; polling costs a tenth of a core
PLANS_AT_ONCE = 3  # that page ids have space reserved for; more is allocated when needed

ShardPairs = Callable[[Copy], list[PagePairs]]


class TorchCopyEngine:
    """Copies between torch memories. On CUDA saves use one stream and everything else another. Neither has a high
    priority: on a copy engine the few numbers that a pass needs would wait for all copies of a high-priority stream.

    `engine_stream` is where the engine's kernels run; by default the stream that is current when a plan begins. `route` says
    which pages the copy kernel copies, None: the default. With `layerwise`, the spec of the pages' content, loads are copied
    layer by layer and `events_for` returns their events. `counters` counts ways of copying that cannot be used.
    """

    def __init__(
        self, memories: Mapping[Tier, TorchMemory], *, engine_stream: torch.cuda.Stream | None = None,
        route: Route | None = None, layerwise: ModelSpec | None = None, counters: Counters | None = None,
        blocks: BlockTables | None = None, shards: ShardPairs | None = None,
    ) -> None:  # fmt: skip
        """`blocks` is the memory of an engine that manages its own: plans may copy between it and the host. `shards` says what a
        rank copies between its device and a host that has whole rows of all ranks.
        """
        self._memories = memories
        self._blocks, self._shards = blocks, shards
        self._engine_stream = engine_stream
        self._layerwise = layerwise
        self._tables: dict[tuple[Tier, Kind], PageTable] = {}
        self.on_arriving: Callable[[], None] = lambda: None  # called on the copying thread when `events_for` has a new load
        self._events: dict[JobId, LayerEvents] = {}  # workers add and remove, others read: one operation each
        self._spare: SimpleQueue[StagedIds] = SimpleQueue()
        devices = [memory.bytes_B.device for memory in memories.values()] + ([blocks.device] if blocks is not None else [])
        self._device = next((device for device in devices if device.type == "cuda"), None)
        self._copier = PageCopier()
        if self._device is not None:
            with torch.cuda.device(self._device):
                self._loading, self._saving = (_Lane(torch.cuda.Stream(self._device)) for _ in range(2))
                self._copier = checked_copier(self._device, counters or Counters(), route)
                for _ in range(PLANS_AT_ONCE):
                    self._spare.put(StagedIds(self._device))

    def begin(self, plan: Plan) -> Work:
        if self._device is None:
            return partial(self._run_here, plan)
        before = torch.cuda.Event(blocking=True)
        before.record(self._engine_stream or torch.cuda.current_stream(self._device))
        return partial(self._run_on_stream, plan, before)

    def events_for(self, job: JobId) -> LayerEvents | None:
        """A load's events, from when its copies are being queued until they are done; None before and after, and for all jobs
        that are not copied layer by layer. From any thread.
        """
        return self._events.get(job)

    # ---- on a worker thread -----------------------------------------------------------------------

    def _run_here(self, plan: Plan) -> None:
        for pairs in [pairs for copy in plan.copies for pairs in self._pairs(copy)]:  # checks every id first
            self._copier.queue(self._copier.routed(pairs.whole()))

    def _run_on_stream(self, plan: Plan, before: torch.cuda.Event) -> None:
        """Copies after the work that the engine had queued, and waits for the copies alone."""
        work = self._steps(plan)  # checks every id, before anything is copied
        lane = self._saving if plan.purpose is Purpose.SAVE else self._loading
        staged, done = self._staged_ids(), torch.cuda.Event()
        events = LayerEvents(work.step_of, [torch.cuda.Event() for _ in work.steps], self._device) if work.step_of else None
        try:
            with lane.queueing() as stream:
                try:
                    stream.wait_event(before)
                    if events is not None:
                        self._events[plan.job] = events
                        self.on_arriving()
                    self._queue(work, staged, stream, before, events)
                finally:
                    try:
                        done.record(stream)
                    finally:  # a lost device refuses that too, and no stream may wait for it
                        if events is not None:
                            events.queued()
        finally:  # after a failure too: pages must not be reused while a queued copy still runs
            try:
                _sleep_until(before)
                _wait(done, spin=work.total_bytes <= SPUN_BYTES)
            finally:
                self._events.pop(plan.job, None)
            staged.clear()
            self._spare.put(staged)

    def _queue(
        self, work: LayerSteps, staged: StagedIds, stream: torch.cuda.Stream, before: torch.cuda.Event,
        events: LayerEvents | None,
    ) -> None:  # fmt: skip
        """Queues all steps, in parts; an event after each step that a stream may wait for."""
        cuts = Cuts(PART_BYTES)
        steps = [[self._copier.routed(part) for piece in pieces for part in cuts.of(piece)] for pieces in work.steps]
        by_kernel = {each.piece.pairs: None for step in steps for each in step if each.route is not None}
        if by_kernel:
            staged.stage(list(by_kernel))
        under_way = _UnderWay(before)
        for number, step in enumerate(steps):
            for routed in step:
                under_way.wait_for_space()
                self._copier.queue(routed, staged, stream)
                under_way.add(routed, stream)
            if events is not None:
                events.record(number, stream)

    def _steps(self, plan: Plan) -> LayerSteps:
        """A plan's pages in the order of copying: layer by layer for a load if requested, otherwise at once."""
        copies = [(copy, pairs) for copy in plan.copies for pairs in self._pairs(copy)]
        if self._layerwise is None or plan.purpose is not Purpose.LOAD:
            return LayerSteps(steps=(tuple(pairs.whole() for _, pairs in copies),), step_of={})
        loads = [(copy.target.kind, pairs) for copy, pairs in copies if _is_load(copy)]
        others = [(copy.target.kind, pairs) for copy, pairs in copies if not _is_load(copy)]  # copies on the device
        layered = layer_steps(self._layerwise, loads, step_bytes=None if self._copier.takes_small_pieces else AT_ONCE)
        with_first = {part.state: [0] * part.layers for kind, _ in others for part in self._layerwise.parts(kind)}
        first = (*(pairs.whole() for _, pairs in others), *layered.steps[0])
        return LayerSteps(steps=(first, *layered.steps[1:]), step_of={**with_first, **layered.step_of})

    def _pairs(self, copy: Copy) -> list[PagePairs]:
        if self._blocks is not None and Tier.ENGINE in (copy.source.tier, copy.target.tier):
            host = copy.source if copy.target.tier is Tier.ENGINE else copy.target
            return self._blocks.pairs(copy, self._table(host))
        if self._shards is not None and Tier.HOST in (copy.source.tier, copy.target.tier):
            return self._shards(copy)
        spec = self._memories[copy.source.tier].spec
        assert not copy.turns(spec), f"{copy} is not a copy of bytes"
        first, onto, size = copy.common(spec)
        source, target = self._table(copy.source).part(first, size), self._table(copy.target).part(onto, size)
        return [PagePairs(source=source, target=target, source_ids=copy.source.ids, target_ids=copy.target.ids)]

    def _table(self, span: Span) -> PageTable:
        found = self._tables.get((span.tier, span.kind))
        if found is None:
            found = self._tables[span.tier, span.kind] = PageTable.of(self._memories[span.tier].rows(span.kind))
        return found

    def _staged_ids(self) -> StagedIds:
        assert self._device is not None
        try:
            return self._spare.get_nowait()
        except Empty:
            return StagedIds(self._device)


class _Lane:
    """A stream on which plans are queued as a whole, one after the other.

    If two plans were mixed, one could end up behind copies that wait for it: those of a pass that waits for its layers.
    """

    def __init__(self, stream: torch.cuda.Stream) -> None:
        self._stream = stream
        self._lock = Lock()

    @contextmanager
    def queueing(self) -> Iterator[torch.cuda.Stream]:
        with self._lock:
            yield self._stream


class _UnderWay:
    """The part of a plan that is queued and not yet copied: never much, and empty now and then."""

    def __init__(self, before: torch.cuda.Event) -> None:
        self._before = before
        self._parts: deque[tuple[torch.cuda.Event, int]] = deque()
        self._queued_bytes = self._since_pause_bytes = self._since_pause_copies = 0

    def add(self, routed: Routed, stream: torch.cuda.Stream) -> None:
        size_bytes = routed.piece.total_bytes
        self._parts.append((torch.cuda.Event(), size_bytes))
        self._parts[-1][0].record(stream)
        self._queued_bytes += size_bytes
        self._since_pause_bytes += size_bytes
        if routed.route is None:  # otherwise a kernel copies them, and no copy engine is busy
            self._since_pause_copies += len(routed.runs.pages)

    def wait_for_space(self) -> None:
        """Waits until more may be queued."""
        pause = self._since_pause_bytes >= PAUSE_EVERY_BYTES or self._since_pause_copies >= PAUSE_EVERY_COPIES
        while self._parts and (pause or self._queued_bytes > MOST_QUEUED_BYTES):
            _sleep_until(self._before)
            event, size = self._parts.popleft()
            _wait(event, spin=False)
            self._queued_bytes -= size
        if pause:
            self._since_pause_bytes = self._since_pause_copies = 0


def _sleep_until(before: torch.cuda.Event) -> None:
    """Waits for the engine's own work, which may take long: the copies behind it have not begun, and none of them is late."""
    if not before.query():
        before.synchronize()


def _wait(done: torch.cuda.Event, *, spin: bool) -> None:
    """Waits for a copy. A thread that sleeps on an event wakes up late, by the time of up to 20 MiB: it polls instead, or
    spins where every microsecond counts.
    """
    while not (spin or done.query()):
        time.sleep(LOOK_AGAIN_S)
    done.synchronize()


def _is_load(copy: Copy) -> bool:
    return (copy.source.tier, copy.target.tier) == (Tier.HOST, Tier.DEVICE)
