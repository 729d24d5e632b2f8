"""A copy engine over torch memories: host memory (pinned where there is CUDA) and a device.

Loads and saves run on streams of their own, behind what the engine had queued, and beside each other. Only the worker thread
that carries out a plan waits, for its own copies. How pages are copied is said by `page_copier`.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from queue import Empty, SimpleQueue
from threading import Lock
from types import ModuleType

import torch

from stepwell.base.ids import JobId, Kind, Tier
from stepwell.base.meters import Counters
from stepwell.base.spec import ModelSpec
from stepwell.base.tasks import Copy, Plan, Purpose, Span
from stepwell.transfer.copy_engine import Work
from stepwell.transfer.copy_speeds import DEFAULT_ROUTES, checked, measured_routes
from stepwell.transfer.layer_events import LayerEvents, LayerSteps, layer_steps
from stepwell.transfer.page_copier import PageCopier, Routes, StagedIds, fall_back
from stepwell.transfer.page_tables import PagePairs, PageTable
from stepwell.transfer.torch_memory import TorchMemory

HIGH_PRIORITY, NORMAL_PRIORITY = -1, 0
AT_ONCE = 1 << 62  # bytes of a step: layers of many pages are queued slower one by one than the bus copies whole pages
PLANS_AT_ONCE = 3  # that page ids are kept room for from the start; more are made when needed


class TorchCopyEngine:
    """Copies between torch memories. On CUDA saves go on one stream and the rest on another of high priority.

    `engine_stream` is where the engine's kernels run; by default the stream that is current when a plan begins. `routes` says
    which pages the copy kernel copies; else that is measured now, while the memories are not in use. With `layerwise`, the
    spec of what the pages hold, loads are copied layer by layer and `events_for` has their events. `counters` hears of a copy
    kernel that cannot be used.
    """

    def __init__(
        self, memories: Mapping[Tier, TorchMemory], *, engine_stream: torch.cuda.Stream | None = None,
        routes: Routes | None = None, layerwise: ModelSpec | None = None, counters: Counters | None = None,
    ) -> None:  # fmt: skip
        self._memories = memories
        self._engine_stream = engine_stream
        self._layerwise = layerwise
        self._tables: dict[tuple[Tier, Kind], PageTable] = {}
        self._events: dict[JobId, LayerEvents] = {}  # a worker adds and takes out, others look: one operation each
        self._spare: SimpleQueue[StagedIds] = SimpleQueue()
        devices = [memory.bytes_B.device for memory in memories.values()]
        self._device = next((device for device in devices if device.type == "cuda"), None)
        self._copier = PageCopier(DEFAULT_ROUTES, None)
        if self._device is not None:
            with torch.cuda.device(self._device):
                self._loading = _Lane(torch.cuda.Stream(self._device, priority=HIGH_PRIORITY))
                self._saving = _Lane(torch.cuda.Stream(self._device, priority=NORMAL_PRIORITY))
                self._copier = _copier(memories, self._device, routes, counters or Counters())
                for _ in range(PLANS_AT_ONCE):
                    self._spare.put(StagedIds(self._device))

    def begin(self, plan: Plan) -> Work:
        if self._device is None:
            return partial(self._run_here, plan)
        before = torch.cuda.Event()
        before.record(self._engine_stream or torch.cuda.current_stream(self._device))
        return partial(self._run_on_stream, plan, before)

    def events_for(self, job: JobId) -> LayerEvents | None:
        """A load's events, from when all of its copies are queued until they are done; None before and after, and for all
        jobs that are not copied layer by layer. From any thread.
        """
        return self._events.get(job)

    # ---- on a worker thread -----------------------------------------------------------------------

    def _run_here(self, plan: Plan) -> None:
        for copy in plan.copies:
            self._copier.queue(self._copier.routed(self._pairs(copy).whole()))

    def _run_on_stream(self, plan: Plan, before: torch.cuda.Event) -> None:
        """Copies after what the engine had queued, and waits for the copies alone."""
        work = self._steps(plan)  # looks at every id, before anything is copied
        lane = self._saving if plan.purpose is Purpose.SAVE else self._loading
        staged = self._staged_ids()
        done = torch.cuda.Event(blocking=True)
        try:
            with lane.queueing() as stream:
                try:
                    stream.wait_event(before)
                    events = self._queue(work, staged, stream)
                    if work.step_of:
                        self._events[plan.job] = LayerEvents(work.step_of, events, self._device)
                finally:
                    done.record(stream)
        finally:  # after a failure too: pages are not used again while a copy that was queued still runs
            done.synchronize()
            self._events.pop(plan.job, None)
            staged.forget()
            self._spare.put(staged)

    def _queue(self, work: LayerSteps, staged: StagedIds, stream: torch.cuda.Stream) -> list[torch.cuda.Event]:
        """Queues all steps; an event behind each."""
        steps = [[self._copier.routed(piece) for piece in pieces] for pieces in work.steps]
        staged.stage(list(dict.fromkeys(each.piece.pairs for step in steps for each in step if each.route is not None)))
        events = []
        for step in steps:
            for routed in step:
                self._copier.queue(routed, staged)
            events.append(torch.cuda.Event())
            events[-1].record(stream)
        return events

    def _steps(self, plan: Plan) -> LayerSteps:
        """A plan's pages in the order they are copied in: layer by layer if it is a load and that is wanted, else at once."""
        copies = [(copy, self._pairs(copy)) for copy in plan.copies]
        if self._layerwise is None or plan.purpose is not Purpose.LOAD:
            return LayerSteps(steps=(tuple(pairs.whole() for _, pairs in copies),), step_of={})
        loads = [(copy.target.kind, pairs) for copy, pairs in copies if _is_load(copy)]
        others = [(copy.target.kind, pairs) for copy, pairs in copies if not _is_load(copy)]  # of a point on the device, say
        layered = layer_steps(self._layerwise, loads, step_bytes=None if self._copier.has_kernel else AT_ONCE)
        with_first = {part.state: [0] * part.layers for kind, _ in others for part in self._layerwise.parts(kind)}
        first = (*(pairs.whole() for _, pairs in others), *layered.steps[0])
        return LayerSteps(steps=(first, *layered.steps[1:]), step_of={**with_first, **layered.step_of})

    def _pairs(self, copy: Copy) -> PagePairs:
        first, onto, size = copy.common(self._memories[copy.source.tier].spec)
        source, target = self._table(copy.source).part(first, size), self._table(copy.target).part(onto, size)
        return PagePairs(source=source, target=target, source_ids=copy.source.ids, target_ids=copy.target.ids)

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
    """A stream that plans are queued on whole, one after the other.

    Were two mixed, the first could end up behind what the second waits for: a pass that waits for the first one's layers.
    """

    def __init__(self, stream: torch.cuda.Stream) -> None:
        self._stream = stream
        self._lock = Lock()

    @contextmanager
    def queueing(self) -> Iterator[torch.cuda.Stream]:
        with self._lock, torch.cuda.stream(self._stream):
            yield self._stream


def _is_load(copy: Copy) -> bool:
    return (copy.source.tier, copy.target.tier) == (Tier.HOST, Tier.DEVICE)


def _copier(memories: Mapping[Tier, TorchMemory], device: torch.device, routes: Routes | None, counters: Counters) -> PageCopier:
    """With the kernel, checked, if it can be had; else without."""
    count = partial(counters.add, "copy_kernel_fallbacks")
    try:
        kernel = _kernel()
        checked(kernel, device)
        if routes is None:
            routes = measured_routes(kernel, memories[Tier.HOST].bytes_B, device) if Tier.HOST in memories else DEFAULT_ROUTES
    except Exception as error:  # the edge to a compiler: whatever it raises, pages can still be copied one by one
        fall_back(error, count)
        return PageCopier(DEFAULT_ROUTES, None)
    return PageCopier(routes, kernel, on_fallback=count)


def _kernel() -> ModuleType:
    """Where Triton is not installed this raises ImportError."""
    from stepwell.transfer import copy_kernel

    return copy_kernel
