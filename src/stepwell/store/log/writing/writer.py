"""What the writer does in its turn: stores a group of values, erases keys, clears spaces. One thread at a time.

Order: nothing enters the index before it is safe on disk, nothing leaves it by an erase before the tombstone is.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import groupby

import numpy as np

from stepwell.base.errors import StoreError
from stepwell.store.api import Space, Write, WriteOutcome
from stepwell.store.log.disk.files import up_to_block
from stepwell.store.log.format.batch import (
    ENTRY_BYTES,
    INLINE_BYTES,
    SEQ_END,
    Batch,
    BatchKind,
    PackedBatch,
    Tombstone,
    inline_bytes,
    pack_tombstones,
    pack_values,
)
from stepwell.store.log.state.log_state import LogState
from stepwell.store.log.writing.appender import Appender
from stepwell.store.log.writing.reclaim import NO_ROOM_ERRNOS, Reclaim

_EVERYTHING = bytes(32)  # the key of a clear
_LET_IN_S = 1e-4
_ENDED = object()


@dataclass(slots=True, kw_only=True, eq=False)
class PutRequest:
    """The values that one caller wants stored. The caller whose turn it is decides the outcomes."""

    space: Space
    writes: Sequence[Write]
    outcomes: list[WriteOutcome | None] = field(default_factory=list)
    sizes: list[int] = field(init=False)  # of the values
    size_bytes: int = field(init=False)
    done: bool = False
    error: BaseException | None = None

    def __post_init__(self) -> None:
        self.sizes = [len(write.data) for write in self.writes]
        self.size_bytes = sum(self.sizes)


@dataclass(slots=True, eq=False)
class _Pending:
    """What must be written for one request: values by their position in it."""

    request: PutRequest
    places: list[int]

    @property
    def digest(self) -> bytes:
        return self.request.space.digest

    def writes(self) -> list[Write]:
        writes = self.request.writes
        return list(writes) if len(self.places) == len(writes) else [writes[at] for at in self.places]

    def decide(self, outcome: WriteOutcome, count: int) -> int:
        """Decides the outcome of the first values that still wait; returns their bytes."""
        request = self.request
        decided, self.places = self.places[:count], self.places[count:]
        if len(decided) == len(request.writes):
            request.outcomes = [outcome] * len(decided)
            return request.size_bytes
        for at in decided:
            request.outcomes[at] = outcome
        return sum([request.sizes[at] for at in decided])


_Place = tuple[PutRequest, int]


class Writer:
    def __init__(self, state: LogState) -> None:
        self._state = state
        self._appender = Appender(state)
        self.reclaim = Reclaim(state, self._appender)
        self.batches_since_snapshot = 0
        self.values_since_snapshot = 0

    def put(self, requests: Sequence[PutRequest]) -> None:
        """Decides every outcome of these requests."""
        repeats: list[tuple[_Place, _Place]] = []
        for request in requests:
            request.outcomes = [None] * len(request.writes)
        with self._state.lock:
            waiting = self._admit(requests, repeats)
        self._keep_quotas(waiting)
        while waiting := [pending for pending in waiting if pending.places]:
            self._put_some(waiting)
        for (request, at), (earlier, first_at) in repeats:
            first = earlier.outcomes[first_at]
            request.outcomes[at] = WriteOutcome.EXISTS if first is WriteOutcome.STORED else first or WriteOutcome.FAILED

    def erase(self, space: Space, keys: Sequence[bytes]) -> int:
        """Erases values for good; returns how many there were. Raises StoreError if that could not be made durable."""
        state = self._state
        with state.lock:
            known, seq = state.index.rows_of(space.digest), state.index.columns.seq
            oldest = state.stale.oldest(space.digest, keys, state.segments.table.values())  # would come back without a tombstone
            there = [key for key in dict.fromkeys(keys) if key in known]
            for key in there:
                oldest[key] = min(int(seq[known[key]]), oldest.get(key, SEQ_END))
        self._write_tombstones(BatchKind.DELETE, space, [Tombstone(key=key, since=since) for key, since in oldest.items()])
        state.counters.add("deleted_values", len(there))
        return len(there)

    def hide(self, space: Space, keys: Sequence[bytes]) -> None:
        """Invalidates everything that the log holds of these keys, however old. Raises StoreError like `erase`."""
        self._write_tombstones(BatchKind.DELETE, space, [Tombstone(key=key) for key in keys])

    def clear(self, space: Space) -> int:
        """Erases every value of a space for good; returns how many there were. Raises StoreError like `erase`."""
        state = self._state
        known = state.index.rows_of(space.digest)
        rows = np.fromiter(known.values(), np.int64, len(known))  # only the writer changes them: no lock is needed
        with state.lock:
            stale = state.stale.oldest_of_space(space.digest, state.segments.table.values())
        since = min(int(state.index.columns.seq[rows].min(initial=SEQ_END)), stale)
        self._write_tombstones(BatchKind.CLEAR, space, [Tombstone(key=_EVERYTHING, since=since)])
        state.counters.add("cleared_values", len(rows))
        return len(rows)

    def settle(self) -> None:
        """Revokes what failed, if anything did, so that every batch before the next one is settled. Raises OSError."""
        if self._appender.to_revoke and not self._appender.free_bytes:
            self.reclaim.next_segment()  # which may have revoked it already, by relocating values
        if self._appender.to_revoke:
            self._appender.append([])

    # ---- inside -----------------------------------------------------------------------------------

    def _admit(self, requests: Sequence[PutRequest], repeats: list[tuple[_Place, _Place]]) -> list[_Pending]:
        """The values that must be written; the others have their outcome, or repeat one of this group.

        The ancestors of the new ones count as used.
        """
        index, largest = self._state.index, self._state.budget.max_value_bytes
        index.next_tick()
        first: dict[tuple[bytes, bytes], _Place] = {}
        all_pending = []
        for request in requests:
            writes, digest = request.writes, request.space.digest
            known, keys = index.rows_of(digest), [write.key for write in writes]
            pending = _Pending(request, list(range(len(writes))))
            new = len(set(keys)) == len(keys) and known.keys().isdisjoint(keys) and len(requests) == 1
            if not new or max(request.sizes) > largest:
                pending.places = [at for at in pending.places if self._is_wanted(request, at, known, first, repeats)]
            index.note_use(digest, {writes[at].parent for at in pending.places}.difference(keys if new else ()))
            all_pending.append(pending)
        return all_pending

    def _is_wanted(
        self,
        request: PutRequest,
        at: int,
        known: Mapping[bytes, int],
        first: dict[tuple[bytes, bytes], _Place],
        repeats: list[tuple[_Place, _Place]],
    ) -> bool:
        """Whether a value must be written; if not, it has its outcome or is listed as a repeat."""
        write, name = request.writes[at], (request.space.digest, request.writes[at].key)
        if write.key in known:
            request.outcomes[at] = WriteOutcome.EXISTS
        elif name in first:
            repeats.append(((request, at), first[name]))
        elif len(write.data) > self._state.budget.max_value_bytes:
            request.outcomes[at] = WriteOutcome.TOO_LARGE
        else:
            first[name] = (request, at)
            return True
        return False

    def _keep_quotas(self, waiting: Sequence[_Pending]) -> None:
        """Tenants with a quota evict their own coldest values for what they write now; values beyond the quota get no space.

        The part of a header that is not entries, less than 5 KiB a batch, counts for no tenant: it stays while any value of the
        batch does, and relocated values have other headers. The budget, which consists of whole segments, includes it.
        """
        state = self._state
        needed: dict[str, int] = {}
        for pending in waiting if state.quotas else ():
            tenant = self._tenant(pending.request.space)
            if tenant not in state.quotas:
                continue
            needed.setdefault(tenant, 0)
            allowed = []
            for at in pending.places:
                size = _on_disk(pending.request.writes[at])
                if needed[tenant] + size > state.quotas[tenant]:
                    pending.request.outcomes[at] = WriteOutcome.NO_ROOM
                    state.counters.add("over_quota")
                    continue
                needed[tenant] += size
                allowed.append(at)
            pending.places = allowed
        for tenant, size in needed.items():
            if size:
                self.keep_quota(tenant, size)

    def keep_quota(self, tenant: str, coming: int = 0) -> None:
        """Evicts the first values of a tenant, in the order of eviction, until it keeps its quota with `coming` more bytes."""
        self.reclaim.keep_quota(tenant, self._state.quotas[tenant] - coming)

    def _tenant(self, space: Space) -> str:
        return (self._state.index.space_of(space.digest) or space).tenant  # the first one seen determines it

    def _put_some(self, waiting: Sequence[_Pending]) -> None:
        """Writes the values that fit in the active segment, or gets another one. Values written, or failed, wait no more."""
        state = self._state
        try:
            self.reclaim.keep_spare()
            packed = self._pack(waiting)
            if not packed:
                self.reclaim.next_segment()
                return
            self._append(packed)
        except OSError as error:
            state.must_be_ours()
            outcome = WriteOutcome.NO_ROOM if error.errno in NO_ROOM_ERRNOS else WriteOutcome.FAILED
            count = sum(len(pending.places) for pending in waiting)
            state.counters.add("no_room" if outcome is WriteOutcome.NO_ROOM else "failed_writes", count)
            for pending in waiting:
                pending.decide(outcome, len(pending.places))
            return
        done = left = sum(len(one.entries) for one in packed)
        for pending in waiting:
            count = min(left, len(pending.places))
            left -= count
            state.counters.add("written_bytes", pending.decide(WriteOutcome.STORED, count))
        state.counters.add("written_values", done)

    def _pack(self, waiting: Sequence[_Pending]) -> list[PackedBatch]:
        """Batches of the first values, as far as they fit in the active segment. Earlier values are stored before later ones."""
        free_bytes = self._appender.free_bytes
        packed: list[PackedBatch] = []
        for _, all_pending in groupby(waiting, key=lambda pending: pending.digest):
            same = list(all_pending)
            writes = [write for pending in same for write in pending.writes()]
            while writes:
                one = pack_values(same[0].request.space, writes, free_bytes)
                if one is None:
                    return packed
                packed.append(one)
                free_bytes -= one.total_bytes
                writes = writes[len(one.entries) :]
        return packed

    def _write_tombstones(self, kind: BatchKind, space: Space, tombstones: Sequence[Tombstone]) -> None:
        """Writes tombstones that take effect now, and applies them."""
        try:
            while tombstones:
                self.reclaim.keep_spare()
                one = pack_tombstones(kind, space, tombstones, self._appender.free_bytes)
                if one is None:
                    self.reclaim.next_segment()
                    continue
                self._append([one])
                tombstones = tombstones[len(one.entries) :]
        except OSError as error:
            raise StoreError(f"{self._state.directory} could not make it durable: {error}; the values may come back") from error

    def _append(self, packed: Sequence[PackedBatch]) -> None:
        batches = self._appender.append(packed)
        for batch in batches:
            self._apply(batch)
        self.batches_since_snapshot += len(batches)
        self.values_since_snapshot += sum(len(batch.entries) for batch in batches)

    def _apply(self, batch: Batch) -> None:
        """Applies a batch that is safe on disk to the index. A large clear releases the lock in between."""
        state, steps = self._state, self._state.index.apply(batch)
        try:
            while self._step(steps):
                time.sleep(_LET_IN_S)  # other threads do not get a lock that is taken again at once
        finally:
            while not state.torn and self._step(steps):  # after any interruption: half a clear must not stay
                pass

    def _step(self, steps: Iterator[None]) -> bool:
        with self._state.changing():
            return next(steps, _ENDED) is not _ENDED


def _on_disk(write: Write) -> int:
    size = len(write.data)
    return ENTRY_BYTES + (inline_bytes(size) if size <= INLINE_BYTES else up_to_block(size))
