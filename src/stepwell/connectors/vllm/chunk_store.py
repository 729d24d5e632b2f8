"""Chunks of vLLM's host tier over a verified store. Calls return at once; the work happens in the background.

    lookup   ->  unknown at first; `flush` queries the store for all chunks of a step; known in a later step
    load     ->  chunks are read, verified, and only then copied into the host tier's memory
    store    ->  chunks are stamped and written from where they lie

Only `drain` and `close` wait for the store, bounded by its deadlines. The caller supplies the namespace of a chunk and its place
in the prompt. One thread at a time. Imports no vLLM.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import NamedTuple

from stepwell.base.ids import JobId
from stepwell.base.meters import Clock
from stepwell.base.tasks import ItemStatus
from stepwell.jobs.workers import RankJobs, WorkQueue
from stepwell.store.api import NO_PARENT, Space
from stepwell.verified.runs import ReadRuns, WriteRuns
from stepwell.verified.store import QUESTION_S, VerifiedStore

log = logging.getLogger(__name__)

CLOSE_S = 10.0  # for queued jobs when an engine ends
STORING_SHARE = 4  # at most a quarter of the host tier is pinned for a slow store


class Chunk(NamedTuple):
    """One chunk: its name in the store, its row in the host tier, and the chunk before it."""

    name: bytes
    row: int
    parent: bytes = NO_PARENT
    depth: int = 0


class Ended(NamedTuple):
    """The outcome of a job: which of its chunks were loaded or stored."""

    job: int
    good: Sequence[bool]
    took_s: float
    size_bytes: int


@dataclass(slots=True, eq=False)
class _Verdict:
    """What is known of a chunk in the store. Kept until the requests that looked it up have ended."""

    asked_s: float
    found: bool | None = None
    requests: set[str] = field(default_factory=set)


@dataclass(slots=True, frozen=True)
class _Job:
    chunks: Sequence[Chunk]
    is_load: bool


class ChunkStore:
    """Owns the verified store. `rows` is the host tier's memory, one row of bytes per chunk."""

    def __init__(self, store: VerifiedStore, space: Space, rows: memoryview, clock: Clock, *, readers: int = 2) -> None:
        assert rows.ndim == 2 and rows.c_contiguous and rows.shape is not None, f"{rows.ndim=} {rows.shape=}"
        self._store, self._space, self._clock = store, space, clock
        self._num_rows, self._row_bytes = rows.shape[0], rows.nbytes // max(rows.shape[0], 1)
        self._memory = rows.cast("B")
        self._verdicts: dict[bytes, _Verdict] = {}
        self._asked_by: dict[str, set[bytes]] = {}
        self._unasked: dict[bytes, _Verdict] = {}
        self._jobs: RankJobs[Sequence[bool]] = RankJobs(clock)
        self._open: dict[int, _Job] = {}
        self._refused: list[Ended] = []
        self._storing = 0  # chunks
        self._asks, self._stores = WorkQueue("tier-ask", clock), WorkQueue("tier-store", clock)
        self._loads = WorkQueue("tier-load", clock, threads=readers)

    # ---- what is there ------------------------------------------------------------------------------

    def lookup(self, name: bytes, request: str) -> bool | None:
        """Whether a chunk is stored; None if not known yet. A store that takes too long counts as not having it."""
        verdict = self._verdicts.get(name)
        if verdict is None:
            verdict = self._verdicts[name] = self._unasked[name] = _Verdict(self._clock.now())
        if request not in verdict.requests:
            verdict.requests.add(request)
            self._asked_by.setdefault(request, set()).add(name)
        if verdict.found is None and self._clock.now() - verdict.asked_s > QUESTION_S:
            verdict.found = False
        return verdict.found

    def flush(self) -> None:
        """Queries the store for the lookups since the last call."""
        if self._unasked:
            asked, self._unasked = self._unasked, {}
            self._asks.submit(partial(_ask, self._store, self._space, asked))

    def request_finished(self, request: str) -> None:
        """The request has ended."""
        for name in self._asked_by.pop(request, ()):
            verdict = self._verdicts[name]
            verdict.requests.discard(request)
            if not verdict.requests:
                del self._verdicts[name]
                self._unasked.pop(name, None)

    # ---- copies -------------------------------------------------------------------------------------

    def load(self, job: int, chunks: Sequence[Chunk]) -> None:
        """Starts filling rows of the host tier, which must not be used before the job has ended."""
        reads = [ReadRuns(chunk.name, [self._row(chunk.row)]) for chunk in chunks]
        self._begin(job, chunks, self._loads, partial(self._store.read, self._space, reads), is_load=True)

    def store(self, job: int, chunks: Sequence[Chunk]) -> None:
        """Starts storing rows of the host tier, unless too many are pinned for that already."""
        if self._storing and self._storing + len(chunks) > self._num_rows // STORING_SHARE:
            self.refuse(job, len(chunks))
            return
        self._storing += len(chunks)
        ordered = sorted(chunks, key=lambda chunk: chunk.depth)  # parents before their children
        writes = [WriteRuns(chunk.name, [self._row(chunk.row)], chunk.parent, chunk.depth) for chunk in ordered]
        self._begin(job, ordered, self._stores, partial(self._store.write, self._space, writes), is_load=False)

    def refuse(self, job: int, num_chunks: int) -> None:
        """Ends a job at once without effect."""
        self._refused.append(Ended(job, [False] * num_chunks, 0.0, 0))

    def ended(self) -> list[Ended]:
        """Jobs that have ended since the last call. Chunks that failed to load are not found again by the same requests."""
        ended, self._refused = self._refused, []
        for answer in self._jobs.answers():
            job = self._open.pop(answer.job)
            (good,) = answer.outcomes
            if not job.is_load:
                self._storing -= len(job.chunks)
            for chunk, is_good in zip(job.chunks, good, strict=True):
                if is_good != job.is_load and (verdict := self._verdicts.get(chunk.name)) is not None:
                    verdict.found = is_good  # a failed load, or a stored chunk
            ended.append(Ended(answer.job, good, answer.took_s, sum(good) * self._row_bytes))
        return ended

    def drain(self) -> None:
        """Cancels jobs that have not started, and waits for the others, no longer than the store's deadlines."""
        for number, job in list(self._open.items()):
            if self._jobs.withdraw(JobId(number)):
                del self._open[number]
                self._storing -= 0 if job.is_load else len(job.chunks)
                self.refuse(number, len(job.chunks))
        self._jobs.drain(float("inf"))

    def renew(self, space: Space) -> None:
        """Switches to a new space, so that nothing stored before is found. Call `drain` first."""
        self._space = space
        self._verdicts, self._asked_by, self._unasked = {}, {}, {}

    def stats(self) -> Mapping[str, int]:
        """Counters of the store."""
        return self._store.stats()

    def close(self) -> None:
        """Finishes jobs in flight, cancels slow ones, and closes the store. Raises StoreError if it does not close in time; it
        may then still read the host tier's memory.
        """
        self._jobs.drain(CLOSE_S)
        self.drain()
        for line in (self._asks, self._loads, self._stores):
            line.close()
        self._store.close()
        self._memory.release()

    # ---- inside -------------------------------------------------------------------------------------

    def _row(self, row: int) -> memoryview:
        assert 0 <= row < self._num_rows, f"{row=} {self._num_rows=}"
        return self._memory[row * self._row_bytes : (row + 1) * self._row_bytes]

    def _begin(
        self, job: int, chunks: Sequence[Chunk], line: WorkQueue, work: Callable[[], Sequence[ItemStatus]], *, is_load: bool
    ) -> None:
        self._open[job] = _Job(chunks, is_load)
        self._jobs.open(JobId(job), [line], called_off=())
        self._jobs.enqueue(JobId(job), 0, line, partial(_outcomes, work, len(chunks)))


def _outcomes(work: Callable[[], Sequence[ItemStatus]], count: int) -> Sequence[bool]:
    try:
        return [status is ItemStatus.OK for status in work()]
    except Exception:  # the worker boundary: every error is a miss
        log.exception("a copy of %d chunk(s) below vLLM's host tier failed", count)
        return [False] * count


def _ask(store: VerifiedStore, space: Space, asked: Mapping[bytes, _Verdict]) -> None:
    try:
        found = store.contains(space, list(asked))
    except Exception:  # the worker boundary
        log.exception("looking up %d chunk(s) below vLLM's host tier failed", len(asked))
        found = [False] * len(asked)
    for verdict, there in zip(asked.values(), found, strict=True):
        if verdict.found is None:
            verdict.found = there
