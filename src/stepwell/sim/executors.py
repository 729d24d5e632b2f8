"""Executors that only count: copies and operations to the store are done at once, and nothing is moved.

The seconds that they would have taken are reported to the cache, which measures the speed of a store.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

from stepwell.base.ids import JobId, Kind, Level, Tier
from stepwell.base.prompt import manifest_key
from stepwell.base.spec import ModelSpec
from stepwell.base.tasks import (
    Completion,
    FetchCheckpoint,
    FetchPages,
    FindItems,
    ItemStatus,
    Outcome,
    PageIds,
    Plan,
    PutCheckpoint,
    PutPages,
    Relevel,
    Reply,
    StoreOp,
    Task,
)
from stepwell.jobs.jobs import DoneAtOnce
from stepwell.sim.hardware import Hardware
from stepwell.sim.store import CountingStore
from stepwell.store.api import KEY_BYTES, Space, WriteOutcome

_SPACE = Space(digest=bytes(KEY_BYTES))  # keys of two namespaces never meet
_STATUSES = {
    WriteOutcome.STORED: ItemStatus.OK,
    WriteOutcome.EXISTS: ItemStatus.OK,
    WriteOutcome.NO_ROOM: ItemStatus.NO_ROOM,
    WriteOutcome.TOO_LARGE: ItemStatus.NO_ROOM,
    WriteOutcome.FAILED: ItemStatus.FAILED,
}


class Traffic:
    """Bytes that copies and operations have read from and written to each tier so far."""

    def __init__(self) -> None:
        self.read_bytes: Counter[Tier] = Counter()
        self.written_bytes: Counter[Tier] = Counter()
        self.loaded_bytes = 0  # from the host to the device

    def note(self, source: Tier, target: Tier, size_bytes: int) -> None:
        self.read_bytes[source] += size_bytes
        self.written_bytes[target] += size_bytes
        if source is Tier.HOST and target is Tier.DEVICE:
            self.loaded_bytes += size_bytes


class CountingExecutor(DoneAtOnce[Completion]):
    """An executor of one rank whose copies succeed when they are submitted."""

    def __init__(self, spec: ModelSpec, traffic: Traffic) -> None:
        super().__init__()
        self._spec = spec
        self._traffic = traffic

    @property
    def num_ranks(self) -> int:
        return 1

    def submit(self, plan: Plan) -> None:
        for copy in plan.copies:
            size_bytes = len(copy.source.ids) * copy.common(self._spec).size_bytes
            self._traffic.note(copy.source.tier, copy.target.tier, size_bytes)
        self._done.append(Completion(job=plan.job))


class CountingStoreExecutor(DoneAtOnce[Reply]):
    """A store executor over a counting store, which answers at once. A checkpoint is one value, whatever its parts."""

    def __init__(self, spec: ModelSpec, store: CountingStore, traffic: Traffic, hardware: Hardware, *, readers: int) -> None:
        super().__init__()
        self._sizes = {kind: spec.object_bytes(kind) for kind in Kind}
        self._store = store
        self._traffic = traffic
        self._hardware = hardware
        self._readers = readers

    def submit(self, op: StoreOp) -> None:
        outcome = self._outcome(op.task)
        took_s = self._hardware.fetch_s(outcome.moved_bytes, readers=self._readers)
        self._done.append(Reply(job=op.job, outcome=outcome, took_s=took_s))

    def answer(self, job: JobId, timeout_s: float) -> Reply | None:
        reply = next((each for each in self._done if each.job == job), None)
        if reply is not None:
            self._done.remove(reply)
        return reply

    def cancel(self, job: JobId) -> None:
        pass  # everything was answered when it was submitted

    def _outcome(self, task: Task) -> Outcome:
        match task:
            case FindItems(pages=pages, boundaries=boundaries):
                keys = (*pages, *map(manifest_key, boundaries))
                return Outcome(statuses=self._statuses(keys))
            case FetchPages(keys=keys):
                return self._fetched(keys, self._sizes[Kind.PREFIX])
            case FetchCheckpoint(boundary=boundary, windows=windows, points=points):
                return self._fetched([manifest_key(boundary)], self._checkpoint_bytes(windows, points))
            case PutPages(parent=parent, keys=keys, level=level):
                return self._put(keys, self._sizes[Kind.PREFIX], parent, level)
            case PutCheckpoint(boundary=boundary, windows=windows, points=points, level=level):
                return self._put([manifest_key(boundary)], self._checkpoint_bytes(windows, points), boundary, level)
            case Relevel(pages=pages, boundaries=boundaries, level=level):
                self._store.relevel(_SPACE, (*pages, *map(manifest_key, boundaries)), level)
                return Outcome(statuses=(ItemStatus.OK,))

    def _checkpoint_bytes(self, windows: PageIds, points: PageIds) -> int:
        return len(windows) * self._sizes[Kind.WINDOW] + len(points) * self._sizes[Kind.POINT]

    def _fetched(self, keys: Sequence[bytes], size_bytes: int) -> Outcome:
        statuses = self._statuses(keys)
        self._use_last(keys)
        moved = statuses.count(ItemStatus.OK) * size_bytes
        self._traffic.note(Tier.STORE, Tier.HOST, moved)
        return Outcome(statuses=statuses, moved_bytes=moved)

    def _put(self, keys: Sequence[bytes], size_bytes: int, parent: bytes | None, level: Level) -> Outcome:
        outcomes = []
        for key in keys:
            outcomes.append(self._store.keep(key, size_bytes, parent, level))
            parent = key
        self._use_last(keys)
        moved = outcomes.count(WriteOutcome.STORED) * size_bytes
        self._traffic.note(Tier.HOST, Tier.STORE, moved)
        return Outcome(statuses=tuple(map(_STATUSES.__getitem__, outcomes)), moved_bytes=moved)

    def _statuses(self, keys: Sequence[bytes]) -> tuple[ItemStatus, ...]:
        ok, missing = ItemStatus.OK, ItemStatus.MISSING
        return tuple([ok if has else missing for has in self._store.has(keys)])

    def _use_last(self, keys: Sequence[bytes]) -> None:
        """Marks the last of these that the store has as used, and its ancestors with it."""
        last = next((key for key in reversed(keys) if key in self._store), None)
        if last is not None:
            self._store.use(last)
