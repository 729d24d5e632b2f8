"""One membership in a cluster: a client, the memory registered with it, and the verbs that are using both.

A transfer that Mooncake abandoned after its own time limit may still write into memory that its reader would reuse by then. So
the memory stays in use until the client is gone: `Stalled` is raised, and the store must leave the session. A transfer that
failed sooner ends within that limit: its reader does not touch the memory for that time (`Traits.late_write_s`). Lanes need no
such care: their values are verified after they were copied out. Does not know spaces, keys and outcomes.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from queue import SimpleQueue
from threading import Condition, Event, Lock

from stepwell.base.errors import StoreError
from stepwell.base.meters import Clock
from stepwell.store.mooncake.client import TRANSFER_FAILED, Client
from stepwell.store.mooncake.lanes import Lane, Regions, address_of, build_lanes

READING_LANES = 2
TRANSFER_LIMIT_S = 60.0  # Mooncake's own, from a transfer's beginning, for all slices of it
STALLED_S = 20.0  # with a dead holder a transfer failed within 1 s; with one that hung, Mooncake waited 60 s


class Stalled(Exception):
    """A transfer timed out. Stays inside this package: the store leaves the session and raises StoreError."""


class Session:
    """Owns a connected client. Every use runs inside `verb()`; `leave()` ends the session when no verb is running."""

    def __init__(self, client: Client, *, staging_bytes: int, buffers: Sequence[memoryview], clock: Clock) -> None:
        self.client = client
        self.write_lock = Lock()
        self._clock = clock
        self._regions = Regions(client)
        self._regions_lock = Lock()
        try:
            self.writing, *reading = self._prepare(staging_bytes, buffers)
        except StoreError:
            self._regions.release()
            client.close()
            raise
        self._reading: SimpleQueue[Lane] = SimpleQueue()
        for lane in reading:
            self._reading.put(lane)
        self._changed = Condition()
        self._verbs_running = 0
        self._leaving = False
        self._left = Event()
        self._getting = Lock()
        self._has_stalled = False

    @property
    def is_open(self) -> bool:
        return not self._leaving

    @contextmanager
    def verb(self) -> Iterator[None]:
        """Keeps the client alive while a verb runs: a call to a closed one would end the process."""
        with self._changed:
            if self._leaving:
                raise StoreError("this Mooncake store is leaving its cluster; try again later")
            self._verbs_running += 1
        try:
            yield
        finally:
            with self._changed:
                self._verbs_running -= 1
                self._changed.notify_all()

    @contextmanager
    def reading_lane(self) -> Iterator[Lane]:
        """A lane for one reader; waits while all are in use."""
        lane = self._reading.get()
        try:
            yield lane
        finally:
            self._reading.put(lane)

    def move(self, transfer: Callable[[], list[int]]) -> list[int]:
        """Runs a transfer and returns its codes; raises Stalled if parts of it may still be in progress."""
        began_s = self._clock.now()
        answers = transfer()
        if TRANSFER_FAILED in answers and self._clock.now() - began_s >= STALLED_S:
            self._has_stalled = True
            raise Stalled
        return answers

    def get(self, transfer: Callable[[], list[int]]) -> list[int]:
        """Like `move`, one at a time: over TCP two gets at once took half as much processor time again for the same bytes.

        Other readers unload their batches meanwhile: this is why there are several lanes.
        """
        with self._getting:
            if self._has_stalled:  # this transfer would stall too, and the session stays open until it ends
                raise Stalled
            return self.move(transfer)

    def register(self, memories: Sequence[memoryview]) -> None:
        """Lets values move in and out of memory without a copy: registers all of it or, raising StoreError, none."""
        with self.verb(), self._regions_lock:
            added = 0
            try:
                for memory in memories:
                    self._regions.add(memory)
                    added += 1
            except StoreError:
                for memory in memories[:added]:
                    self._regions.remove(address_of(memory))
                raise

    def unregister(self, memories: Sequence[memoryview]) -> None:
        """Unregisters memory that no verb is using. A session that is closing does so by itself."""
        with suppress(StoreError), self.verb(), self._regions_lock:
            for memory in memories:
                self._regions.remove(address_of(memory))

    def leave(self) -> None:
        """Waits for running verbs and releases everything. Returns when this is done, also if another thread began it."""
        with self._changed:
            first, self._leaving = not self._leaving, True
            self._changed.wait_for(lambda: self._verbs_running == 0)
        if not first:
            self._left.wait()
            return
        try:
            self._regions.release()
            self.client.close()
        finally:
            self._left.set()

    def _prepare(self, staging_bytes: int, buffers: Sequence[memoryview]) -> Sequence[Lane]:
        for memory in buffers:
            self._regions.add(memory)
        return build_lanes(1 + READING_LANES, staging_bytes, self._regions)
