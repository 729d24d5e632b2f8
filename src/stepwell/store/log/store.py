"""The log store: the six verbs of `store/api.py` over one directory, and its statistics, checks and repair.

One process at a time has a directory open. Values outlive it: what `write_from` calls STORED survives a crash at any
later moment; what `delete` and `clear` removed does not come back. Reads are not verified here: the layers above verify stamps.
Recovery and `check` verify stamps too (`seal.py`): after a crash, a value with another stamp is treated as torn.

One writer at a time, many callers per sync: a caller that finds no writer writes for all callers that wait.

    caller 1   put ---- writes 1 ---- done
    caller 2       put ...wait... writes 2, 3, 4 ---- done
    caller 3         put ...wait................ done
    caller 4           put ...wait.............. done
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from itertools import islice
from threading import Condition
from typing import cast

from stepwell.base.errors import StoreError
from stepwell.base.ids import Level
from stepwell.base.meters import Clock, Counters
from stepwell.base.store_key import StoreKey
from stepwell.store.api import (
    KEY_BYTES,
    STAMP_BYTES,
    Read,
    ReadResult,
    Space,
    SpaceSize,
    StoreSize,
    Traits,
    Write,
    WriteOutcome,
    never,
)
from stepwell.store.log.disk.files import BLOCK_BYTES
from stepwell.store.log.reader import Reader
from stepwell.store.log.recovery.check import CheckReport, check
from stepwell.store.log.recovery.repair import repair
from stepwell.store.log.recovery.stat import LogStat, stat_of
from stepwell.store.log.state.log_state import IoMode, LogState
from stepwell.store.log.timed_reads import timed_reads, tried_reads
from stepwell.store.log.writing.upkeep import Direct, Probe, due, save_segment_list, save_snapshot
from stepwell.store.log.writing.writer import PutRequest, Writer

_DEPTH_END = 2**32
READERS_END_S = 60.0  # after which a reader that is still running is assumed to hang forever
GROUP_BYTES = 64 << 20  # of values in one group: the most that a caller may have to wait for


class LogStore:
    """Opened by `opening.open_log`. All verbs from any thread; `close` when no verb is running any more."""

    def __init__(self, state: LogState, *, direct: Direct, clock: Clock) -> None:
        self._state = state
        self._left = False  # in a fork: the lock belongs to the parent
        state.index.keep_order(state.quotas)
        self._reader = Reader(state)
        self._writer = Writer(state)
        self._group_commit = GroupCommit(self._put)
        self._writer.reclaim.prepare()
        for tenant in state.quotas:
            self._writer.keep_quota(tenant)
        self._probe = Probe(state, direct, clock)
        self._timed_reads = timed_reads(state, self._reader, clock)

    @property
    def traits(self) -> Traits:
        return Traits(
            name="log", durable=True, shared=False, groups=False, clears=True, sized=True, lists_spaces=True, levels=True,
            alignment=BLOCK_BYTES, max_value_bytes=self._state.budget.max_value_bytes,
            reads=self._timed_reads or tried_reads(self._state.io_mode),
        )  # fmt: skip

    @property
    def counters(self) -> Counters:
        return self._state.counters

    @property
    def measured(self) -> IoMode:
        """How bytes move on this disk, and the measured speeds."""
        return self._state.io_mode

    # ---- the six verbs ----------------------------------------------------------------------------

    def contains(self, space: Space, keys: Sequence[bytes]) -> list[bool]:
        self._state.must_be_open()
        with self._state.lock:
            known = self._state.index.rows_of(space.digest)
            return [key in known for key in keys]

    def read_into(self, space: Space, reads: Sequence[Read], *, cancelled: Callable[[], bool] = never) -> list[ReadResult]:
        self._state.must_be_open()
        if not reads:
            return []
        check_buffers([read.into for read in reads])
        return self._reader.read(space, reads, cancelled)

    def write_from(self, space: Space, writes: Sequence[Write]) -> list[WriteOutcome]:
        self._state.must_be_open()
        if not writes:
            return []
        check_writes(writes)
        request = PutRequest(space=space, writes=writes)
        self._group_commit.submit(request)
        return cast(list[WriteOutcome], request.outcomes)

    def delete(self, space: Space, keys: Sequence[bytes]) -> int:
        """Raises StoreError if the disk could not make the deletion durable."""
        self._state.must_be_open()
        return self._alone(lambda: self._writer.erase(space, keys)) if keys else 0

    def flush(self) -> None:
        """Does nothing: every verb that returned has made its work durable."""
        self._state.must_be_open()

    def close(self) -> None:
        """Saves the index, so that the next opening is fast and knows the last uses. Does nothing in a fork.

        Waits for running reads. Called again after an interruption, it continues. Raises StoreError if the disk does not complete
        a read: the file must stay open then, so the directory stays locked until this process ends.
        """
        if not self._state.closed and not self._left:
            self._group_commit.submit(ExclusiveTask(run=self._close))

    def size(self) -> StoreSize:
        self._state.must_be_open()
        state = self._state
        with state.lock:
            used = state.index.total_bytes
            is_full = state.disk_full and len(state.segments.table) < state.max_segments
        return StoreSize(used_bytes=used, budget_bytes=state.budget.total_bytes, disk_full=is_full)

    def largest_spaces(self, most: int) -> list[SpaceSize]:
        self._state.must_be_open()
        with self._state.lock:
            return self._state.index.largest_spaces(most)

    def relevel(self, space: Space, keys: Sequence[bytes], level: Level) -> int:
        """The level changes in memory, and on disk with the next snapshot or when the values are copied: after a crash, they may
        have the level again with which they were written.
        """
        self._state.must_be_open()
        with self._state.lock:
            return self._state.index.relevel(space.digest, keys, level)

    # ---- statistics and maintenance --------------------------------------------------------------

    def clear(self, digest: bytes) -> int:
        """Deletes everything in one space for good, and nothing else; returns how many values there were."""
        self._state.must_be_open()
        return self._alone(lambda: self._writer.clear(self._named(digest)))

    def snapshot(self) -> None:
        """Saves the index now: after a crash, recovery reads only what was written later."""
        self._state.must_be_open()
        self._alone(self._save)

    def stat(self) -> LogStat:
        self._state.must_be_open()
        try:
            with self._state.lock:
                return stat_of(self._state)
        except OSError as error:
            raise StoreError(f"the directory of {self._state.directory} cannot be read: {error}") from error

    def repair(self, on_progress: Callable[[int], None], key: StoreKey | None = None) -> CheckReport:
        """Verifies every byte, and drops what is damaged for good; returns the damage found and what remains of it.

        Writers wait meanwhile.
        """
        self._state.must_be_open()
        reports: list[CheckReport] = []

        def run() -> int:
            found = check(self._state, on_progress, key=key)
            repair(self._state, self._writer, found.damage)
            again = check(self._state, lambda _: None, only={one.segment for one in found.damage}, key=key)
            reports.append(replace(found, left=again.damage))
            save_segment_list(self._state)
            return self._save()

        self._alone(run)
        return reports[0]

    def audit(self) -> None:
        """Asserts that index, segments and tombstones agree. Waits for a clear that releases the lock between its steps."""
        self._group_commit.submit(ExclusiveTask(run=self._audit))

    def __repr__(self) -> str:
        return f"LogStore({str(self._state.directory)!r}, values={self._state.index.num_values}{', closed' * self._state.closed})"

    # ---- inside -----------------------------------------------------------------------------------

    def _audit(self) -> None:
        state = self._state
        with state.lock:
            state.index.audit()
            assert set(filter(state.index.live_bytes.get, state.index.live_bytes)) <= set(state.segments.table), "values nowhere"
            left = state.budget.left_with(len(state.segments.table), state.snapshot_bytes())
            assert left >= 0, f"{-left} bytes above the budget: {len(state.segments.table)=} {state.snapshot_bytes()=}"

    def _named(self, digest: bytes) -> Space:
        """A space with the tenant and label under which it was first seen."""
        return self._state.index.space_of(digest) or Space(digest=digest)

    def _alone(self, work: Callable[[], int]) -> int:
        """Runs work as the only writer."""
        results: list[int] = []

        def run() -> None:
            self._state.must_be_open()
            self._state.must_be_ours()
            try:
                results.append(work())
                self._save_if_due()
            except OSError as error:
                raise StoreError(f"the disk of {self._state.directory} failed: {error}") from error

        self._group_commit.submit(ExclusiveTask(run=run))
        return results[0]

    def _put(self, requests: Sequence[PutRequest]) -> None:
        self._state.must_be_open()
        self._state.must_be_ours()
        self._writer.put(requests)
        self._probe.run()
        self._save_if_due()

    def _save_if_due(self) -> None:
        if due(self._state, batches=self._writer.batches_since_snapshot, values=self._writer.values_since_snapshot):
            self._save()

    def _save(self) -> int:
        self._writer.batches_since_snapshot = self._writer.values_since_snapshot = 0
        save_snapshot(self._state)
        return 0

    def _close(self) -> None:
        if self._state.closed:
            return
        state = self._state
        try:
            is_ours = state.directory_lock is None or state.directory_lock.is_ours()  # else there is nothing to save it with
            if is_ours and not state.torn:
                self._save()
        finally:
            with state.lock:
                state.closed = True
                if not state.lock.wait_for(lambda: not any(s.pins for s in state.segments.table.values()), READERS_END_S):
                    raise StoreError(
                        f"a read in {state.directory} did not end within {READERS_END_S:.0f} s: check the disk; "
                        "the directory stays locked until this process ends"
                    )
                state.segments.close_all()
            state.unlock()

    def leave_in_child(self) -> None:
        """For a fork: the lock stays with the process that opened the log. Takes no other lock."""
        self._left = True
        self._state.unlock()


def check_writes(writes: Sequence[Write]) -> None:
    """Raises ValueError for invalid writes; there is at least one."""
    keys, values, stamps, parents, depths, _, levels = zip(*writes, strict=True)
    shapes = {*zip(map(len, keys), map(len, parents), map(len, stamps), strict=True)}
    if shapes != {(KEY_BYTES, KEY_BYTES, STAMP_BYTES)}:
        raise ValueError(f"keys, parents and stamps have {(KEY_BYTES, KEY_BYTES, STAMP_BYTES)} bytes, got {sorted(shapes)}")
    if min(depths) < 0 or max(depths) >= _DEPTH_END:
        raise ValueError(f"a depth is at least 0 and below {_DEPTH_END}, got {min(depths)} to {max(depths)}")
    if not {*levels} <= {*Level}:
        raise ValueError(f"levels are {[*map(int, Level)]}, got {sorted({*levels})}")
    check_buffers(values)


def check_buffers(buffers: Sequence[memoryview]) -> None:
    """Raises ValueError for memory whose length is not its number of bytes: bytes behind it would be taken for its own."""
    for buffer in buffers:
        if buffer.itemsize != 1 or buffer.ndim != 1 or not buffer.c_contiguous:
            raise ValueError(
                f"values are contiguous memoryviews of bytes, got {buffer.ndim} dimensions of {buffer.itemsize} bytes; "
                "use .cast('B')"
            )


# ---- whose turn it is to write ------------------------------------------------------------------


@dataclass(slots=True, kw_only=True, eq=False)
class ExclusiveTask:
    """Any other work that only the writer may do, alone."""

    run: Callable[[], None]
    done: bool = False
    error: BaseException | None = None


class GroupCommit:
    """Assigns the turn to write. Does not know files or formats: a turn is a function over a group of requests.

    Requests stay queued until their turn ends. If a caller is interrupted (KeyboardInterrupt, at any moment), the turn passes to
    the next caller, and every request of the interrupted group fails.
    """

    def __init__(self, put: Callable[[Sequence[PutRequest]], None]) -> None:
        self._put = put
        self._changed = Condition()
        self._queue: deque[PutRequest | ExclusiveTask] = deque()
        self._writer: PutRequest | ExclusiveTask | None = None  # the request whose caller has the turn
        self._group: list[PutRequest | ExclusiveTask] = []  # the requests that it serves: the head of the queue

    def submit(self, request: PutRequest | ExclusiveTask) -> None:
        """Returns when the request was served, here or by another thread. Raises the error of its turn, or the interruption.

        Afterwards, nothing uses the memory of the request any more.
        """
        try:
            with self._changed:
                self._queue.append(request)
            while True:
                with self._changed:
                    self._changed.wait_for(lambda: self._writer is None or request.done)
                    if request.done:
                        break
                    self._writer = request
                    self._group = self._next_group()
                self._serve(self._group)
                self._end_turn()
        except BaseException as error:
            self._withdraw(request, error)
            raise
        if request.error is not None:
            raise request.error

    def _next_group(self) -> list[PutRequest | ExclusiveTask]:
        """All puts at the head of the queue, up to a limit; or the one exclusive task there."""
        group = [self._queue[0]]
        if isinstance(group[0], PutRequest):
            size = group[0].size_bytes
            for head in islice(self._queue, 1, None):
                if not isinstance(head, PutRequest) or size + head.size_bytes > GROUP_BYTES:
                    break
                size += head.size_bytes
                group.append(head)
        return group

    def _serve(self, group: Sequence[PutRequest | ExclusiveTask]) -> None:
        error = self._try(group)
        if error is not None and len(group) > 1:  # each alone, so that only the request that caused the error fails
            for request in group:
                request.error = self._try([request])
        else:
            for request in group:
                request.error = error

    def _end_turn(self) -> None:
        with self._changed:
            for request in self._group:
                request.done = True
                self._queue.popleft()
            self._group, self._writer = [], None
            self._changed.notify_all()

    def _withdraw(self, request: PutRequest | ExclusiveTask, error: BaseException) -> None:
        """After an interruption of its caller: ends the turn if this request has it, and waits if another one serves it."""
        with self._changed:
            if self._writer is request:
                for one in self._group:
                    if not one.done:
                        what = f"the thread that wrote for this call was interrupted by {type(error).__name__}"
                        one.error = StoreError(f"{what}; the work of the call was done, or was not")
                        one.done = True
                    if one in self._queue:
                        self._queue.remove(one)
                self._group, self._writer = [], None
            elif request in self._group:
                self._changed.wait_for(lambda: request.done)
            if request in self._queue:
                self._queue.remove(request)
            self._changed.notify_all()

    def _try(self, group: Sequence[PutRequest | ExclusiveTask]) -> Exception | None:
        try:
            puts = [request for request in group if isinstance(request, PutRequest)]
            if puts:
                self._put(puts)
            for request in group:
                if isinstance(request, ExclusiveTask):
                    request.run()
        except Exception as raised:  # worker boundary: the error goes to the callers that wait
            return raised
        return None
