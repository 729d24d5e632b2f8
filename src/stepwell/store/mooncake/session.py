"""One membership in a cluster: a client, the memory registered with it, and the verbs that are using both.

A transfer that Mooncake gave up on after its own time limit may still be on its way, into memory that its reader would
use for something else by then. So nobody gets such memory back before the client is gone: `Stalled` is raised, and the
session must be left. One that failed sooner ends within that limit: its reader leaves the memory alone for so long
(`Traits.late_write_s`). Lanes need no such care: what passes through them is verified after it was copied out.
Knows nothing of spaces, keys and outcomes.
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
STALLED_S = 20.0  # from a dead holder a transfer failed within 1 s; for one that just hung Mooncake waited 60


class Stalled(Exception):
    """A transfer timed out. Never leaves this package: the store leaves the session and raises StoreError."""


class Session:
    """Begins with a connected client, and owns it. `verb()` around every use; `leave()` ends it, once nobody is inside."""

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
        """Keeps the client while a verb runs: a call to a closed one would end the process."""
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
        """A lane for one reader; waits while all are taken."""
        lane = self._reading.get()
        try:
            yield lane
        finally:
            self._reading.put(lane)

    def move(self, transfer: Callable[[], list[int]]) -> list[int]:
        """Runs a transfer and returns its codes, or raises Stalled when parts of it may not be over."""
        began_s = self._clock.now()
        answers = transfer()
        if TRANSFER_FAILED in answers and self._clock.now() - began_s >= STALLED_S:
            self._has_stalled = True
            raise Stalled
        return answers

    def get(self, transfer: Callable[[], list[int]]) -> list[int]:
        """As `move`, one at a time: over TCP two gets at once took half as much processor time again for the same bytes.

        What came before is unloaded meanwhile: so there are more lanes than one.
        """
        with self._getting:
            if self._has_stalled:  # so would this one, and nobody leaves before it is over
                raise Stalled
            return self.move(transfer)

    def register(self, memories: Sequence[memoryview]) -> None:
        """Lets values move in and out of memory without a copy: all of it or, raising StoreError, none."""
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
        """Takes back memory that no verb is using. A session that is being left does so by itself."""
        with suppress(StoreError), self.verb(), self._regions_lock:
            for memory in memories:
                self._regions.remove(address_of(memory))

    def leave(self) -> None:
        """Waits for running verbs and gives everything back. Returns when that is done, whoever began it."""
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
