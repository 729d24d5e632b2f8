"""Values in a Mooncake cluster: shared by all machines that joined, lost when the machines that hold them leave.

    value    one Mooncake object: 64 bytes of stamp, then the bytes
    name     sw1-<digest of the space>-<key>, in hex: spaces never collide, even with other users of the cluster
    group    a Mooncake group of the same space: its members are evicted together, except those in use

Mooncake does not receive the tenant of a space: in Mooncake a tenant belongs to a whole client (`tenant_id`), so deployments that
want Mooncake's quotas open one store for each tenant. It does not receive parents and depths either: it evicts by age. VALUABLE
values are softly pinned when written, so they are evicted last for a while. Pins cannot be changed later, so levels cannot
either, and EXPENDABLE values are like ordinary ones.
Never decides what to keep, and never verifies a stamp: the layers above do both.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from itertools import takewhile
from threading import Lock

from stepwell.base.errors import StoreError
from stepwell.base.ids import Level
from stepwell.base.meters import Clock, Counters, SystemClock
from stepwell.store.api import STAMP_BYTES, Read, ReadOutcome, ReadResult, Space, Traits, Write, WriteOutcome, never
from stepwell.store.mooncake import client as codes
from stepwell.store.mooncake.client import Client
from stepwell.store.mooncake.lanes import Lane, Passage, address_of
from stepwell.store.mooncake.session import TRANSFER_LIMIT_S, Session, Stalled

NAMES_PER_CALL = 4096
TURN_BYTES = 64 * 2**20  # large calls cost a third less CPU than those of 8 MiB
EVICTION_WAIT_S = 0.02  # a full master evicts in the background: 60 % of 3,200 writes were refused at once, none after this
_READ_OUTCOMES = {codes.NOT_FOUND: ReadOutcome.MISSING, codes.NOT_READY: ReadOutcome.MISSING}
_FULL = (codes.NO_SPACE, codes.OVER_QUOTA)
_WRITE_OUTCOMES = {
    codes.OK: WriteOutcome.STORED,
    codes.ALREADY_THERE: WriteOutcome.EXISTS,
    codes.NO_SPACE: WriteOutcome.NO_ROOM,
    codes.OVER_QUOTA: WriteOutcome.NO_ROOM,
}
_KEPT = (WriteOutcome.STORED, WriteOutcome.EXISTS)


class MooncakeStore:
    """One client of a Mooncake cluster as a store. Large values inside registered memory (`register`) are not copied.

    One read and one write move data at a time; other callers wait. A master that does not answer is a StoreError, up to
    4.5 s after the call. A transfer that stalls is one too, after Mooncake's 60 s: the store then leaves the cluster and joins
    it again with the next verb. `counters` counts failures by verb and Mooncake's code.
    """

    def __init__(
        self,
        join: Callable[[], Client],
        *,
        staging_bytes: int,
        clock: Clock | None = None,
        sleep: Callable[[float], None] = time.sleep,
    ) -> None:
        """Joins at once. Raises the errors of `join`, or StoreError if its memory cannot be registered; holds nothing then."""
        self.counters = Counters()
        self._join = join
        self._staging_bytes = staging_bytes
        self._buffers: dict[int, memoryview] = {}  # registered by the caller, by address
        self._clock = clock or SystemClock()
        self._sleep = sleep
        self._lock = Lock()
        self._closed = False
        self._session = self._begin()
        self._capacity = self._session.writing.capacity

    @property
    def traits(self) -> Traits:
        return Traits(
            name="mooncake", durable=False, shared=True, groups=True, clears=True, max_value_bytes=self._capacity,
            turn_bytes=TURN_BYTES, registers=True, late_write_s=TRANSFER_LIMIT_S,
        )  # fmt: skip

    def contains(self, space: Space, keys: Sequence[bytes]) -> list[bool]:
        """Which keys have a value now. Mooncake counts this as a use: it renews the lease of existing values."""
        with self._verb() as session:
            return self._exist(session, _names(space, keys))

    def read_into(self, space: Space, reads: Sequence[Read], *, cancelled: Callable[[], bool] = never) -> list[ReadResult]:
        """Fills each buffer with its value. `cancelled` is called between batches of up to 160 values."""
        results: list[ReadResult] = []
        with self._verb() as session, session.reading_lane() as lane:
            while len(results) < len(reads) and not cancelled():
                results += self._read_batch(session, lane, space, reads, len(results))
        return results + [ReadResult(outcome=ReadOutcome.CANCELLED)] * (len(reads) - len(results))

    def write_from(self, space: Space, writes: Sequence[Write]) -> list[WriteOutcome]:
        """Stores the values that are not there yet, in batches of up to 160. The values of one batch appear together."""
        first = {write.key: index for index, write in reversed(list(enumerate(writes)))}
        wanted = [write for index, write in enumerate(writes) if first[write.key] == index]
        outcomes = {write.key: WriteOutcome.TOO_LARGE for write in wanted if write.data.nbytes > self._capacity}
        with self._verb() as session, session.write_lock:  # what another thread is writing exists before this reports EXISTS
            there = self._exist(session, _names(space, [write.key for write in wanted]))
            outcomes.update((write.key, WriteOutcome.EXISTS) for write, found in zip(wanted, there, strict=True) if found)
            new = [write for write in wanted if write.key not in outcomes]
            while new:
                written = self._write_batch(session, space, new)
                outcomes.update((write.key, outcome) for write, outcome in zip(new, written, strict=False))
                new = new[len(written) :]
        return [_again(outcomes[write.key], first=first[write.key] == index) for index, write in enumerate(writes)]

    def delete(self, space: Space, keys: Sequence[bytes]) -> int:
        """Deletes values at once, even while others read them: those readers get bytes that fail their stamp, or none."""
        deleted = 0
        with self._verb() as session:
            for names in _parts(_names(space, keys)):
                for code in session.client.remove(names):
                    deleted += code == codes.OK
                    if code not in (codes.OK, codes.NOT_FOUND):
                        self._count("delete", code)
        return deleted

    def clear(self, digest: bytes) -> int:
        """Deletes all values of a space at once, on every machine, like `delete`. Does not see values of other tenants."""
        with self._verb() as session:
            removed = session.client.remove_all(_start(digest))
        if removed < 0:
            self._count("clear", removed)
            raise StoreError(f"Mooncake could not delete a space (code {removed})")
        return removed

    def flush(self) -> None:
        """Does nothing: when the write returns, a value is in the memory of its holders, and nowhere else."""
        with self._verb():
            pass

    def close(self) -> None:
        """Waits for running verbs, then leaves the cluster; what this client held for it is lost."""
        with self._lock:
            self._closed = True
        self._session.leave()

    def register(self, memory: Sequence[memoryview]) -> None:
        """Registers memory with Mooncake, now and whenever the store joins the cluster again. Other verbs wait meanwhile."""
        with self._lock:
            if self._closed:
                raise StoreError("this Mooncake store is closed")
            shown = {address_of(each): each for each in memory if each.nbytes}
            new = {start: each for start, each in shown.items() if not self._knows(start, each)}
            if self._session.is_open:
                self._session.register(list(new.values()))
            self._buffers.update(new)

    def unregister(self, memory: Sequence[memoryview]) -> None:
        with self._lock:
            known = [each for each in memory if each.nbytes and self._knows(address_of(each), each)]
            for each in known:
                del self._buffers[address_of(each)]
            session = self._session
        session.unregister(known)

    def _knows(self, start: int, memory: memoryview) -> bool:
        return start in self._buffers and self._buffers[start].nbytes == memory.nbytes

    def _begin(self) -> Session:
        buffers = list(self._buffers.values())
        return Session(self._join(), staging_bytes=self._staging_bytes, buffers=buffers, clock=self._clock)

    @contextmanager
    def _verb(self) -> Iterator[Session]:
        with self._lock:
            if self._closed:
                raise StoreError("this Mooncake store is closed")
            if not self._session.is_open:
                self._session = self._begin()
            session = self._session
        try:
            with session.verb():
                yield session
        except Stalled:
            session.leave()
            with self._lock:
                self.counters.add("mooncake_stalled")
            raise StoreError("a Mooncake transfer stalled; the store left the cluster and joins again when it is used") from None

    def _exist(self, session: Session, names: list[str]) -> list[bool]:
        answers = [code for part in _parts(names) for code in session.client.exist(part)]
        for code in answers:
            if code < 0:
                self._count("contains", code)
        return [code == 1 for code in answers]

    def _read_batch(self, session: Session, lane: Lane, space: Space, reads: Sequence[Read], start: int) -> list[ReadResult]:
        """Reads the values that fit into the lane, beginning at `start`; at least one."""
        passages = lane.admit(read.into for read in _until_repeated(reads, start))
        if not passages:
            return [ReadResult(outcome=ReadOutcome.FAILED)]  # larger than any value that this client could have written
        batch = reads[start : start + len(passages)]
        names = _names(space, [read.key for read in batch])
        pointers, sizes = lane.pointers(passages), lane.sizes(passages)
        received = session.get(lambda: session.client.get(names, pointers, sizes))
        results = []
        for name, passage, read, count in zip(names, passages, batch, received, strict=True):
            outcome = self._read_outcome(session, name, STAMP_BYTES + passage.size, count)
            stamp = lane.unload(passage, read.into) if outcome is ReadOutcome.FOUND else b""
            results.append(ReadResult(outcome=outcome, stamp=stamp))
        return results

    def _read_outcome(self, session: Session, name: str, wanted: int, received: int) -> ReadOutcome:
        """FOUND for exactly the requested bytes. Mooncake has no code for a wrong length, so unclear cases are looked up."""
        if received == wanted:
            return ReadOutcome.FOUND
        if received in _READ_OUTCOMES:
            return _READ_OUTCOMES[received]
        doubtful = received in (codes.BAD_REQUEST, codes.TRANSFER_FAILED)
        stored = session.client.size(name) if doubtful else received
        if stored >= 0 and stored != wanted:
            return ReadOutcome.LENGTH
        self._count("read", received)
        return ReadOutcome.FAILED

    def _write_batch(self, session: Session, space: Space, writes: Sequence[Write]) -> list[WriteOutcome]:
        """Writes the values that fit into the lane; at least one. The caller holds the write lock."""
        lane, pinned = session.writing, writes[0].level >= Level.VALUABLE
        writes = list(takewhile(lambda write: (write.level >= Level.VALUABLE) is pinned, writes))  # a call has one pin for all
        passages = lane.admit(write.data for write in writes)
        assert passages, f"a value of {writes[0].data.nbytes} bytes is too large for a lane of {lane.capacity}"
        batch = writes[: len(passages)]
        for passage, write in zip(passages, batch, strict=True):
            lane.load(passage, write.stamp, write.data)
        answers = self._put(session, space, batch, passages)
        refused = [i for i, code in enumerate(answers) if code in _FULL]
        if refused:
            self._sleep(EVICTION_WAIT_S)
            retried = self._put(session, space, [batch[i] for i in refused], [passages[i] for i in refused])
            for i, code in zip(refused, retried, strict=True):
                answers[i] = code
        return [self._write_outcome(code) for code in answers]

    def _put(self, session: Session, space: Space, batch: Sequence[Write], passages: Sequence[Passage]) -> list[int]:
        lane = session.writing
        names = _names(space, [write.key for write in batch])
        pinned = batch[0].level >= Level.VALUABLE
        groups = [name if write.group else "" for name, write in zip(_names(space, [w.group for w in batch]), batch, strict=True)]
        return session.move(
            lambda: session.client.put(names, lane.pointers(passages), lane.sizes(passages), groups, pinned=pinned)
        )

    def _write_outcome(self, code: int) -> WriteOutcome:
        if code not in _WRITE_OUTCOMES:
            self._count("write", code)
        return _WRITE_OUTCOMES.get(code, WriteOutcome.FAILED)

    def _count(self, verb: str, code: int) -> None:
        with self._lock:
            self.counters.add(f"mooncake_{verb}_error_{-code}")


def _names(space: Space, keys: Sequence[bytes]) -> list[str]:
    start = _start(space.digest)
    return [start + key.hex() for key in keys]


def _start(digest: bytes) -> str:
    """The common prefix of the names of a space's values, and of no others."""
    return f"sw1-{digest.hex()}-"


def _parts(names: list[str]) -> Iterator[list[str]]:
    for start in range(0, len(names), NAMES_PER_CALL):
        yield names[start : start + NAMES_PER_CALL]


def _until_repeated(reads: Sequence[Read], start: int) -> Iterator[Read]:
    """The reads up to the first repeated key: if a name is twice in one call, Mooncake fills one buffer and reports both."""
    seen = set()
    for index in range(start, len(reads)):
        if reads[index].key in seen:
            return
        seen.add(reads[index].key)
        yield reads[index]


def _again(outcome: WriteOutcome, *, first: bool) -> WriteOutcome:
    """The outcome of a second write of the same key in one batch."""
    return WriteOutcome.EXISTS if not first and outcome in _KEPT else outcome
