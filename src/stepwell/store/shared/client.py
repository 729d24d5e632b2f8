"""The client's side: calls the process that owns the log. Values go through memory that both processes have mapped or open.

A connection serves one call at a time and has memory of its own; there is one for each thread that calls at the same time. A
call without an answer in time closes its connection and drops its memory: the owner can no longer touch memory that is in use.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from itertools import islice
from pathlib import Path
from threading import Condition

from stepwell.base.errors import StoreError
from stepwell.base.ids import Level
from stepwell.store.api import KEY_BYTES, Read, ReadOutcome, ReadResult, Space, Write, WriteOutcome, never
from stepwell.store.log.store import check_buffers, check_writes
from stepwell.store.shared import wire
from stepwell.store.shared.connection import Deadline, Gone, Late, Recovering, Stranger, connect
from stepwell.store.shared.memory import copy_in, copy_out, make_memory, memory_for, place
from stepwell.store.shared.server import MEMORY_BYTES
from stepwell.store.shared.settings import Settings, parse_settings
from stepwell.store.shared.wire import MAX_VALUES, Keys, Kind, Malformed, Reading, Relevelling, Writing

MAX_LANES = 16
READ_BYTES = 8 << 20  # requested at once: a cancellation may take effect only after this much
_CANCELLED = ReadResult(ReadOutcome.CANCELLED)


class Lane:
    """One connection and its memory. One thread uses it at a time."""

    def __init__(self, directory: Path, deadline: Deadline) -> None:
        """Raises Gone (or its subclass Recovering), Late, Malformed, Stranger or StoreError."""
        self.connection = connect(directory, deadline)
        self.memory_fd, self.memory_bytes = -1, 0
        try:
            self.settings = parse_settings(self.ask(Kind.HELLO, b"", deadline, answer=Kind.SETTINGS))
        except BaseException:
            self.close()
            raise

    def ask(self, kind: Kind, body: bytes, deadline: Deadline, *, answer: Kind = Kind.DONE, fd: int | None = None) -> bytes:
        """The answer to a request. Raises StoreError for what the owner refuses; Gone, Late or Malformed end the lane."""
        frame = self.connection.ask(kind, body, deadline, fd=fd)
        if frame.kind is Kind.ERROR:
            raise StoreError(wire.parse_text(frame.body))
        if frame.kind is Kind.RECOVERING:
            raise Recovering(f"process {self.connection.process} is recovering the log")
        if frame.kind is not answer:
            raise Malformed(f"{frame.kind.name} is not an answer")
        return frame.body

    def need(self, size: int, deadline: Deadline) -> None:
        """Provides memory for a value of this size. Raises like `ask`, and OSError."""
        wanted = memory_for(size, MEMORY_BYTES)
        if wanted <= self.memory_bytes:
            return
        fd = make_memory(wanted)
        try:
            self.ask(Kind.MEMORY, wire.pack_number(wanted), deadline, fd=fd)
        except BaseException:
            os.close(fd)
            raise
        self._drop_memory()
        self.memory_fd, self.memory_bytes = fd, wanted

    def close(self) -> None:
        self.connection.close()
        self._drop_memory()

    def _drop_memory(self) -> None:
        if self.memory_fd >= 0:
            os.close(self.memory_fd)
        self.memory_fd, self.memory_bytes = -1, 0


class Client:
    """The verbs of a store, carried out by the owner of a log. Any thread.

    They raise Gone when the owner has ended: this client is of no further use then. Every verb may be repeated with the next
    owner: whatever the first call stored or deleted stays stored or deleted.
    """

    def __init__(self, directory: Path, timeout_s: float, deadline: Deadline) -> None:
        """Raises like `Lane`."""
        self._directory, self._timeout_s = directory, timeout_s
        self._changed = Condition()
        self._gone = False
        first = Lane(directory, deadline)
        self._idle = [first]
        self._lanes = {first}
        self.settings: Settings = first.settings
        self.process: int = first.connection.process

    @property
    def is_gone(self) -> bool:
        return self._gone

    def contains(self, space: Space, keys: Sequence[bytes]) -> list[bool]:
        _check_keys(keys)
        found: list[bool] = []
        with self._lane() as lane:
            for part in _parts(keys):
                body = lane.ask(Kind.CONTAINS, wire.pack_keys(Keys(space, part)), self._deadline())
                found += wire.parse_found(body, len(part))
        return found

    def read_into(self, space: Space, reads: Sequence[Read], *, cancelled: Callable[[], bool] = never) -> list[ReadResult]:
        _check_keys([read.key for read in reads])
        check_buffers([read.into for read in reads])
        results: list[ReadResult] = []
        with self._lane() as lane:
            while len(results) < len(reads):
                if cancelled():
                    return results + [_CANCELLED] * (len(reads) - len(results))
                results += self._read_some(lane, space, reads[len(results) : len(results) + MAX_VALUES])
        return results

    def write_from(self, space: Space, writes: Sequence[Write]) -> list[WriteOutcome]:
        check_writes(writes)
        outcomes: list[WriteOutcome] = []
        with self._lane() as lane:
            while len(outcomes) < len(writes):
                outcomes += self._write_some(lane, space, writes[len(outcomes) : len(outcomes) + MAX_VALUES])
        return outcomes

    def delete(self, space: Space, keys: Sequence[bytes]) -> int:
        """Returns too few if an owner ended after it had deleted some values and before it had reported them."""
        _check_keys(keys)
        deleted = 0
        with self._lane() as lane:
            for part in _parts(keys):
                deleted += wire.parse_number(lane.ask(Kind.DELETE, wire.pack_keys(Keys(space, part)), self._deadline()))
        return deleted

    def relevel(self, space: Space, keys: Sequence[bytes], level: Level) -> int:
        _check_keys(keys)
        found = 0
        with self._lane() as lane:
            for part in _parts(keys):
                body = wire.pack_relevelling(Relevelling(space, part, level))
                found += wire.parse_number(lane.ask(Kind.RELEVEL, body, self._deadline()))
        return found

    def clear(self, digest: bytes) -> int:
        """Returns too few in the same case as `delete`."""
        _check_keys([digest])
        with self._lane() as lane:
            return wire.parse_number(lane.ask(Kind.CLEAR, digest, self._deadline()))

    def close(self) -> None:
        """Further verbs raise Gone, and so do those that wait for an answer."""
        with self._changed:
            self._gone = True
            lanes, self._idle = list(self._idle), []
            for lane in self._lanes - set(lanes):
                lane.connection.hang_up()
            self._changed.notify_all()
        for lane in lanes:
            lane.close()

    def leave_in_child(self) -> None:
        """For a fork, where the connections belong to the parent. Takes no lock."""
        for lane in list(self._lanes):
            lane.close()

    # ---- inside -----------------------------------------------------------------------------------

    def _read_some(self, lane: Lane, space: Space, reads: Sequence[Read]) -> list[ReadResult]:
        """Reads the first values, as far as they fit together; at least one."""
        size = len(reads[0].into)
        if size > self.settings.max_value_bytes:
            return [ReadResult(self._of_another_length(lane, space, reads[0].key))]
        lane.need(size, self._deadline())
        places = place((len(read.into) for read in reads), max(READ_BYTES, size))
        reads = reads[: len(places.sizes)]
        request = Reading(space, [read.key for read in reads], places)
        results = wire.parse_results(lane.ask(Kind.READ, wire.pack_reading(request), self._deadline()), len(reads))
        came = [at for at, result in enumerate(results) if result.outcome is ReadOutcome.FOUND]
        copy_out(lane.memory_fd, [places.offsets[at] for at in came], [reads[at].into for at in came])
        return results

    def _of_another_length(self, lane: Lane, space: Space, key: bytes) -> ReadOutcome:
        """The outcome of a read that asks for more bytes than any value has."""
        (there,) = wire.parse_found(lane.ask(Kind.CONTAINS, wire.pack_keys(Keys(space, [key])), self._deadline()), 1)
        return ReadOutcome.LENGTH if there else ReadOutcome.MISSING

    def _write_some(self, lane: Lane, space: Space, writes: Sequence[Write]) -> list[WriteOutcome]:
        """Writes the first values, as far as they fit together; at least one."""
        size, largest = len(writes[0].data), self.settings.max_value_bytes
        if size > largest:
            return [WriteOutcome.TOO_LARGE]
        lane.need(size, self._deadline())
        fitting = next((at for at, write in enumerate(writes) if len(write.data) > largest), len(writes))
        places = place((len(write.data) for write in islice(writes, fitting)), lane.memory_bytes)
        keys, values, stamps, parents, depths, _, levels = zip(*writes[: len(places.sizes)], strict=True)
        copy_in(lane.memory_fd, places.offsets, values)
        body = wire.pack_writing(Writing(space, keys, stamps, parents, depths, levels, places))
        return wire.parse_outcomes(lane.ask(Kind.WRITE, body, self._deadline()), len(keys))

    def _deadline(self) -> Deadline:
        return Deadline(self._timeout_s)

    @contextmanager
    def _lane(self) -> Iterator[Lane]:
        """A lane for one call; a broken lane is not used again."""
        lane, sound = None, False
        try:
            lane = self._take()
            yield lane
            sound = True
        except StoreError:  # an answer of the owner: the lane still works
            sound = True
            raise
        except BaseException as error:
            raise self._explained(error) from None
        finally:
            if lane is not None:
                try:
                    (self._return if sound else self._drop)(lane)
                except BaseException:
                    self._drop(lane)
                    raise

    def _explained(self, error: BaseException) -> BaseException:
        """The exception that the caller of a failed call gets."""
        who = f"process {self.process}, which has {self._directory} open,"
        if isinstance(error, Gone):
            self.close()  # the other lanes lead to the same process
        elif isinstance(error, Late):
            return StoreError(f"{who} did not answer within {self._timeout_s:g} s: see whether it is stopped, or its disk hangs")
        elif isinstance(error, Malformed):
            return StoreError(f"{who} sent an invalid answer: {error}")
        elif isinstance(error, Stranger):
            return StoreError(f"{self._directory} cannot be shared: {error}")
        elif isinstance(error, OSError):
            return StoreError(f"there is no memory for transferring values to and from {self._directory}: {error}")
        return error

    def _take(self) -> Lane:
        deadline = self._deadline()
        with self._changed:
            while not self._gone and not self._idle and len(self._lanes) >= MAX_LANES:
                if not self._changed.wait(deadline.left_s):
                    raise StoreError(f"{MAX_LANES} calls to {self._directory} were not answered within {self._timeout_s:g} s")
            if self._gone:
                raise Gone("the owner of the log ended")
            if self._idle:
                return self._idle.pop()
        lane = self._connect(deadline)
        with self._changed:
            if not self.is_gone:
                self._lanes.add(lane)
                return lane
        lane.close()
        raise Gone("the owner of the log ended")

    def _connect(self, deadline: Deadline) -> Lane:
        lane = Lane(self._directory, deadline)
        if (lane.connection.process, lane.settings) != (self.process, self.settings):
            lane.close()
            raise Gone("the owner of the log changed")
        return lane

    def _return(self, lane: Lane) -> None:
        with self._changed:
            if not self._gone:
                self._idle.append(lane)
                self._changed.notify()
                return
        self._drop(lane)

    def _drop(self, lane: Lane) -> None:
        with self._changed:
            self._lanes.discard(lane)
            if lane in self._idle:
                self._idle.remove(lane)
            self._changed.notify()
        lane.close()


def _check_keys(keys: Sequence[bytes]) -> None:
    if set(map(len, keys)) - {KEY_BYTES}:
        raise ValueError(f"keys have {KEY_BYTES} bytes, got {sorted(set(map(len, keys)))}")


def _parts(keys: Sequence[bytes]) -> Iterator[Sequence[bytes]]:
    for start in range(0, len(keys), MAX_VALUES):
        yield keys[start : start + MAX_VALUES]
