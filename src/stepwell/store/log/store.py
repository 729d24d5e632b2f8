"""The log store: the six verbs of `store/api.py` over one directory, and what people ask of it.

One process at a time has a directory open. Values outlive it: what `write_from` calls STORED survives a crash at any
later moment; what `delete` and `clear` took does not come back. Bytes are never verified here: the stamp above does that.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import cast

from stepwell.metrics.counters import Counters
from stepwell.store.api import KEY_BYTES, STAMP_BYTES, Read, ReadResult, Space, Traits, Write, WriteOutcome, never
from stepwell.store.log.check import CheckReport, check
from stepwell.store.log.commit import Job, PutRequest, Turns
from stepwell.store.log.disk import BLOCK_BYTES
from stepwell.store.log.reading import Reader
from stepwell.store.log.repair import drop
from stepwell.store.log.saving import due, save_snapshot
from stepwell.store.log.stat import LogStat, stat_of
from stepwell.store.log.state import LogState, Ways
from stepwell.store.log.writing import Writer


class LogStore:
    """Opened by `opening.open_log`. All verbs from any thread; `close` once nobody uses it any more."""

    def __init__(self, state: LogState, lock_fd: int) -> None:
        self._state = state
        self._lock_fd = lock_fd
        self._reader = Reader(state)
        self._writer = Writer(state)
        self._turns = Turns(self._put)
        self._writer.reclaim.prepare()
        for tenant in state.quotas:
            self._writer.keep_quota(tenant)

    @property
    def traits(self) -> Traits:
        return Traits(
            name="log", durable=True, shared=False, groups=False, alignment=BLOCK_BYTES,
            max_value_bytes=self._state.budget.max_value_bytes,
        )  # fmt: skip

    @property
    def counters(self) -> Counters:
        return self._state.counters

    @property
    def measured(self) -> Ways:
        """How bytes move here, and how fast they did when the store was opened."""
        return self._state.ways

    # ---- the six verbs ----------------------------------------------------------------------------

    def contains(self, space: Space, keys: Sequence[bytes]) -> list[bool]:
        self._state.must_be_open()
        with self._state.lock:
            known = self._state.index.rows_of(space.digest)
            return [key in known for key in keys]

    def read_into(self, space: Space, reads: Sequence[Read], *, cancelled: Callable[[], bool] = never) -> list[ReadResult]:
        self._state.must_be_open()
        return self._reader.read(space, reads, cancelled) if reads else []

    def write_from(self, space: Space, writes: Sequence[Write]) -> list[WriteOutcome]:
        self._state.must_be_open()
        if not writes:
            return []
        shapes = {(len(write.key), len(write.parent), len(write.stamp)) for write in writes}
        assert shapes == {(KEY_BYTES, KEY_BYTES, STAMP_BYTES)}, f"bytes of keys, parents and stamps: {shapes}"
        request = PutRequest(space=space, writes=writes, size_bytes=sum([len(write.data) for write in writes]))
        self._turns.submit(request)
        return cast(list[WriteOutcome], request.outcomes)

    def delete(self, space: Space, keys: Sequence[bytes]) -> int:
        """Raises StoreError when the disk could not make it last."""
        self._state.must_be_open()
        return self._alone(lambda: self._writer.erase(space, keys)) if keys else 0

    def flush(self) -> None:
        """Nothing to do: every verb that returned has made its work last."""
        self._state.must_be_open()

    def close(self) -> None:
        """Saves the index, so that the next opening is quick and knows who was warm."""
        if not self._state.closed:
            self._turns.submit(Job(run=self._close))

    # ---- what people ask --------------------------------------------------------------------------

    def clear(self, digest: bytes) -> int:
        """Forgets everything in one space for good, and touches no other; returns how many values there were."""
        self._state.must_be_open()
        return self._alone(lambda: self._writer.clear(self._named(digest)))

    def snapshot(self) -> None:
        """Saves the index now: a crash after this reads only what came later."""
        self._state.must_be_open()
        self._alone(self._save)

    def stat(self) -> LogStat:
        self._state.must_be_open()
        with self._state.lock:
            return stat_of(self._state)

    def repair(self, on_progress: Callable[[int], None]) -> CheckReport:
        """Verifies every byte and drops what is damaged for good; returns what was found. Keeps writers waiting meanwhile."""
        self._state.must_be_open()
        reports: list[CheckReport] = []

        def run() -> int:
            reports.append(check(self._state, on_progress))
            drop(self._state, self._writer, reports[0].damage)
            return self._save()

        self._alone(run)
        return reports[0]

    def audit(self) -> None:
        """Asserts that index, segments and marks agree."""
        state = self._state
        with state.lock:
            state.index.audit()
            assert set(filter(state.index.live_bytes.get, state.index.live_bytes)) <= set(state.segments.table), "values nowhere"
            assert len(state.segments.table) <= state.max_segments, f"{len(state.segments.table)=} {state.max_segments=}"

    def __repr__(self) -> str:
        return f"LogStore({str(self._state.directory)!r}, values={self._state.index.num_values}{', closed' * self._state.closed})"

    # ---- inside -----------------------------------------------------------------------------------

    def _named(self, digest: bytes) -> Space:
        """A space as it was first seen."""
        return next((space for space in self._state.index.spaces if space.digest == digest), Space(digest=digest))

    def _alone(self, work: Callable[[], int]) -> int:
        """Does something as the only writer."""
        results: list[int] = []

        def run() -> None:
            self._state.must_be_open()
            results.append(work())
            self._save_if_due()

        self._turns.submit(Job(run=run))
        return results[0]

    def _put(self, requests: Sequence[PutRequest]) -> None:
        self._state.must_be_open()
        self._writer.put(requests)
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
        self._save()
        with self._state.lock:
            self._state.closed = True
            while any(segment.pins for segment in self._state.segments.table.values()):
                self._state.lock.wait()
            self._state.segments.close_all()
        self._state.disk.close(self._lock_fd)
