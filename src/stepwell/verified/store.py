"""A verified key-value layer over any store: a read returns what was saved under this name, or a miss, in bounded time.

    contains, read, write, delete, clear      over `Space`s that `space` makes from the caller's own fingerprint

Every value is stamped when it is written and checked when it is read (`store/seal.py`, or `keyed_seal.py` with a key). A value
that does not match is deleted, so that a good copy can replace it. Only verified bytes are written to the caller's memory, and
never after a call has returned. A store that fails, hangs or is too slow is suspended for a while (`Breaker`): all calls then
miss at once. Does not decide what to keep, and never raises for a failing store. Any thread.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from functools import partial
from threading import Thread

from stepwell.base.errors import ConfigError, StoreError
from stepwell.base.meters import Clock, SystemClock
from stepwell.base.store_key import StoreKey
from stepwell.base.tasks import ItemStatus
from stepwell.jobs.workers import WorkQueue
from stepwell.policy.store_use import BreakerState
from stepwell.store.api import KEY_BYTES, MAX_LABEL_BYTES, Read, Space, Store, Traits, Write, clear
from stepwell.store.judging import OF_WRITE, UNSETTLED, deletable, judge_reads
from stepwell.store.keyed_seal import seals_for
from stepwell.verified.calls import Call
from stepwell.verified.health import Health
from stepwell.verified.runs import ReadRuns, WriteRuns, gather, good_bytes, must_be_sound, pieces, places, scatter
from stepwell.verified.staging import BUFFER_BYTES, Loan, Staging

QUESTION_S = 5.0  # a store that takes longer to say what it has is of no use to a request
_LEAST_PIECE_BYTES = 1 << 20  # less is not worth a thread of its own
_IN_FLIGHT = 1  # batches that are being written while the next one is sealed


class VerifiedStore:
    """Owns the given store. Statuses are in the order of the batch; all but OK mean a miss, or a value that was not stored."""

    def __init__(
        self, store: Store, *, key: StoreKey | None = None, deadline_s: float = 30.0, readers: int = 2, clock: Clock | None = None
    ) -> None:
        if deadline_s <= 0 or readers <= 0:
            raise ConfigError(f"deadline_s and readers must be positive, got {deadline_s} and {readers}")
        self._store, self._seals, self._deadline_s, self._readers = store, seals_for(key), deadline_s, readers
        self._clock = clock or SystemClock()
        self._staging = Staging(store, self._clock)
        self._asking, self._writing = WorkQueue("ask", self._clock), WorkQueue("write", self._clock)
        self._reading = WorkQueue("read", self._clock, threads=readers)
        self._health = Health(store.traits.name, self._clock)

    # ---- the public verbs -------------------------------------------------------------------------

    def space(self, fingerprint: bytes, *, label: str = "", tenant: str = "") -> Space:
        """The part of the store for values of one kind. The fingerprint must cover everything that must agree to share bytes.

        `stepwell store stat` shows `label`. Values of two fingerprints or of two keys never mix.
        """
        digest = hashlib.blake2b(fingerprint, digest_size=KEY_BYTES, person=b"stepwell-values").digest()
        cut = f"{label}{self._seals.label}".encode()[:MAX_LABEL_BYTES].decode(errors="ignore")
        return Space(digest=self._seals.space(digest), label=cut, tenant=tenant)

    def contains(self, space: Space, keys: Sequence[bytes]) -> list[bool]:
        """Which values exist now, according to the store. None of them while the store is suspended."""
        return self._ask(space, keys) or [False] * len(keys)

    def read(self, space: Space, reads: Sequence[ReadRuns]) -> list[ItemStatus]:
        """Fills the runs of every value that verifies, and touches no others. Returns by the deadline."""
        must_be_sound(reads, writable=True)
        statuses = [ItemStatus.FAILED] * len(reads)
        if not reads:
            return statuses
        with self._health.call(self._deadline_s, statuses) as call:
            if call is None:
                return statuses
            for first, piece in pieces(reads, self._turn_bytes(reads)):
                call.start(self._reading, partial(self._read_piece, space, piece, first, statuses))
        self._health.count("read", statuses, good_bytes(reads, statuses))
        return statuses

    def write(self, space: Space, writes: Sequence[WriteRuns]) -> list[ItemStatus]:
        """Stores values that are not there yet: OK for values stored now, and durably if the store is. Returns by the deadline.

        The memory must not change meanwhile. If it does, the value is damaged, and will be a miss.
        """
        must_be_sound(writes, writable=False)
        there = self._ask(space, [write.key for write in writes]) if writes else []
        if there is None:
            return [ItemStatus.FAILED] * len(writes)
        statuses = [ItemStatus.OK if known else ItemStatus.FAILED for known in there]
        missing = [at for at, known in enumerate(there) if not known]
        if not missing:
            return statuses
        new = [writes[at] for at in missing]
        with self._health.call(self._deadline_s, statuses) as call:
            if call is None:
                return statuses
            self._seal_and_start(call, space, new, missing, statuses)
        outcomes = [statuses[at] for at in missing]
        self._health.count("write", outcomes, good_bytes(new, outcomes))
        return statuses

    def delete(self, space: Space, keys: Sequence[bytes]) -> int:
        """Deletes values; returns how many there were. Raises StoreError if the store cannot or does not answer."""
        return self._order(lambda: self._store.delete(space, keys))

    def clear(self, space: Space) -> int:
        """Deletes all values of a space; returns how many there were. Raises StoreError like `delete`."""
        if not self.traits.clears:
            return clear(self._store, space)  # raises if it has no clear, which does not count as a failure
        return self._order(lambda: clear(self._store, space))

    @property
    def traits(self) -> Traits:
        """The traits of the store below."""
        return self._store.traits

    @property
    def state(self) -> BreakerState:
        """Whether the store is used (CLOSED) or suspended."""
        return self._health.state

    def stats(self) -> Mapping[str, int]:
        """What was read, written and missed so far, by cause."""
        return self._health.snapshot()

    def close(self) -> None:
        """Closes the store. Raises StoreError if that takes longer than a call may. A second close does nothing."""
        if not self._health.close():
            return
        for line in (self._asking, self._reading, self._writing):
            line.close()
        errors: list[Exception] = []
        ending = Thread(target=_attempt, args=(self._close_store, errors), name="stepwell-close", daemon=True)
        ending.start()
        ending.join(self._deadline_s)
        if ending.is_alive() or errors:
            raise StoreError(f"the store did not close: {errors[0] if errors else f'no answer within {self._deadline_s:g} s'}")

    # ---- reading ----------------------------------------------------------------------------------

    def _turn_bytes(self, reads: Sequence[ReadRuns]) -> int:
        total = sum([len(run) for read in reads for run in read.runs])
        return min(max(-(-total // self._readers), _LEAST_PIECE_BYTES), self._store.traits.turn_bytes, BUFFER_BYTES)

    def _read_piece(self, space: Space, reads: Sequence[ReadRuns], first: int, statuses: list[ItemStatus], call: Call) -> None:
        call.must_be_open()
        sizes = [sum(map(len, read.runs)) for read in reads]
        starts, total = places(sizes)
        loan = self._staging.borrow(total)
        try:
            views = [loan.memory[start : start + size] for start, size in zip(starts, sizes, strict=True)]
            found = self._read_staged(space, [Read(read.key, view) for read, view in zip(reads, views, strict=True)], loan, call)
            with call.landing() as wanted:
                if wanted:
                    for read, view, status in zip(reads, views, found, strict=True):
                        if status is ItemStatus.OK:
                            scatter(view, read.runs)
                    statuses[first : first + len(found)] = found
        finally:
            loan.release()

    def _read_staged(self, space: Space, reads: Sequence[Read], loan: Loan, call: Call) -> list[ItemStatus]:
        """The result of each read. Damaged values are deleted; if the store cannot delete them, they stay."""
        loan.unsettled = True
        results = self._store.read_into(space, reads, cancelled=call.is_over)
        if len(results) != len(reads):
            raise StoreError(f"the store was asked for {len(reads)} values and answered for {len(results)}")
        loan.unsettled = any(result.outcome in UNSETTLED for result in results)
        statuses, _ = judge_reads(self._seals, space, reads, results)
        bad = deletable(reads, statuses)
        if bad:
            with suppress(StoreError):
                self._store.delete(space, bad)
        return statuses

    # ---- writing ----------------------------------------------------------------------------------

    def _seal_and_start(
        self, call: Call, space: Space, writes: Sequence[WriteRuns], at: Sequence[int], statuses: list[ItemStatus]
    ) -> None:
        """Seals batch after batch, while the previous one is being written."""
        for first, batch in pieces(writes, BUFFER_BYTES):
            if not call.wait(_IN_FLIGHT) or call.error is not None:
                return
            try:
                loan = self._staging.borrow(places([sum(map(len, write.runs)) for write in batch if len(write.runs) != 1])[1])
            except (StoreError, OSError) as error:  # no memory available
                call.fail(str(error))
                return
            try:
                sealed = self._seal(space, batch, loan)
            except BaseException:
                loan.release()
                raise
            call.start(self._writing, partial(self._write_piece, space, sealed, at[first : first + len(batch)], statuses, loan))

    def _seal(self, space: Space, batch: Sequence[WriteRuns], loan: Loan) -> list[Write]:
        """Values with their stamps. Those of one run stay where they are; those of several are gathered."""
        starts, _ = places([sum(map(len, write.runs)) if len(write.runs) != 1 else 0 for write in batch])
        data = []
        for write, start in zip(batch, starts, strict=True):
            value = write.runs[0] if len(write.runs) == 1 else loan.memory[start : start + sum(map(len, write.runs))]
            if len(write.runs) != 1:
                gather(write.runs, value)
            data.append(value)
        digests = list(map(self._seals.digest, data))
        stamps = self._seals.stamp_all(space, [write.key for write in batch], list(map(len, data)), digests)
        return [
            Write(key=write.key, data=value, stamp=stamp, parent=write.parent, depth=write.depth, group=write.group)
            for write, value, stamp in zip(batch, data, stamps, strict=True)
        ]

    def _write_piece(
        self, space: Space, sealed: Sequence[Write], at: Sequence[int], statuses: list[ItemStatus], loan: Loan, call: Call
    ) -> None:
        try:
            call.must_be_open()
            outcomes = self._store.write_from(space, sealed)
            with call.landing() as wanted:
                if wanted:
                    for place, outcome in zip(at, outcomes, strict=True):
                        statuses[place] = OF_WRITE[outcome]
        finally:
            loan.release()

    # ---- queries and commands ---------------------------------------------------------------------

    def _ask(self, space: Space, keys: Sequence[bytes]) -> list[bool] | None:
        """Which values the store reports; None if it does not answer."""
        if not keys:
            return []
        found: list[bool] = []

        def piece(call: Call) -> None:
            call.must_be_open()
            answer = self._store.contains(space, keys)
            with call.landing() as wanted:
                if wanted:
                    found.extend(answer)

        with self._health.call(min(QUESTION_S, self._deadline_s), question=True) as call:
            if call is None:
                return None
            call.start(self._asking, piece)
        return found if len(found) == len(keys) else None

    def _order(self, work: Callable[[], int]) -> int:
        counts: list[int] = []

        def piece(call: Call) -> None:
            call.must_be_open()
            counts.append(work())

        with self._health.call(self._deadline_s) as call:
            if call is None:
                raise StoreError("the store is closed, or switched off after failures; try again later")
            call.start(self._writing, piece)
        if call.overdue or not counts:
            raise StoreError(call.error or f"the store did not answer within {self._deadline_s:g} s")
        return counts[0]

    def _close_store(self) -> None:
        self._staging.close()
        self._store.close()


def _attempt(work: Callable[[], None], errors: list[Exception]) -> None:
    try:
        work()
    except Exception as error:  # worker boundary: the caller raises it
        errors.append(error)
