"""The offers of other servers as a store: values are read from their host memory directly into ours. Writes nothing.

An offer is a listing (`listing.py`) that a server sent for one request. While it is open, `contains` knows its keys without
asking the server. `read_into` uses the lane of the server that made the offer (`lane.py`); each server has its own. A server
whose lane was lost is not used for a while, and reads of its offers are CANCELLED meanwhile. Other servers still work, so this
does not count as a failure of the store. The reader verifies stamps, as with any store.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from threading import Lock

import numpy as np

from stepwell.base.errors import StoreError
from stepwell.base.meters import Clock, Counters, SystemClock
from stepwell.store.api import Read, ReadOutcome, ReadResult, Space, Traits, Write, WriteOutcome, never
from stepwell.store.peer.lane import Entry, Lane, LaneLost, SharedHost, Unfenced
from stepwell.store.peer.listing import Listing, SmallValue, Value

log = logging.getLogger(__name__)

STALL_S = 5.0  # a server that completes no batch for this long has stopped: a batch takes a tenth of it on a slow network
COOL_OFF_S = 10.0  # how long a server is not used after its lane was lost
LATE_WRITE_S = 120.0  # for pages of a process that could not be ended: the engine's own limits are 30 and 60 s
TURN_BYTES = 64 * 2**20
MOST_OFFERS = 4096
_MISSING = ReadResult(outcome=ReadOutcome.MISSING)
_Name = tuple[bytes, bytes]  # digest of the space, key


@dataclass(eq=False)
class _Server:
    """One server that has made offers."""

    lock: Lock = field(default_factory=Lock)  # around its lane
    lane: Lane | None = None
    lost_until_s: float = 0.0


@dataclass(frozen=True, slots=True, eq=False)
class _Offer:
    server: _Server
    listing: Listing


class PeerStore:
    """Reads what other servers offer. Reads into memory outside `memory` FAIL: nothing would copy the bytes there."""

    def __init__(
        self, memory: SharedHost, open_lane: Callable[[], Lane], *, clock: Clock | None = None, stall_s: float = STALL_S
    ) -> None:
        """`memory` is that of the host tier; `open_lane` opens the lane of one more server, and may raise StoreError."""
        self.counters = Counters()
        self._memory = memory
        self._start = 0  # of the memory, once registered
        self._open_lane = open_lane
        self._clock = clock or SystemClock()
        self._stall_s = stall_s
        self._lock = Lock()  # around everything below
        self._servers: dict[str, _Server] = {}
        self._offers: dict[str, _Offer] = {}
        self._values: dict[_Name, list[tuple[_Offer, Value | SmallValue]]] = {}  # several offers may have one
        self._closed = False

    @property
    def traits(self) -> Traits:
        return Traits(
            name="peer", durable=False, shared=True, groups=False, turn_bytes=TURN_BYTES, registers=True, writable=False,
            late_write_s=LATE_WRITE_S,
        )  # fmt: skip

    # ---- offers -----------------------------------------------------------------------------------

    def add(self, number: str, server: str, listing: Listing) -> None:
        """Adds a server's offer under a number. Raises StoreError if there are too many, or if the number is in use."""
        with self._lock:
            self._must_be_open()
            if number in self._offers or len(self._offers) >= MOST_OFFERS:
                raise StoreError("an offer has this number already, or too many are open")
            offer = self._offers[number] = _Offer(self._servers.setdefault(server, _Server()), listing)
            for value in listing:
                self._values.setdefault((listing.space, value.key), []).append((offer, value))

    def withdraw(self, number: str) -> None:
        """Removes an offer; unknown numbers are ignored."""
        with self._lock:
            offer = self._offers.pop(number, None)
            if offer is None:
                return
            for value in offer.listing:
                name = (offer.listing.space, value.key)
                left = [each for each in self._values.get(name, ()) if each[0] is not offer]
                if left:
                    self._values[name] = left
                else:
                    self._values.pop(name, None)

    @property
    def num_offers(self) -> int:
        return len(self._offers)

    def lane_pid(self, server: str) -> int | None:
        """The process of a server's lane, for tests and diagnosis."""
        lane = self._servers[server].lane if server in self._servers else None
        return None if lane is None else lane.pid

    # ---- the store's verbs ------------------------------------------------------------------------

    def contains(self, space: Space, keys: Sequence[bytes]) -> list[bool]:
        with self._lock:
            self._must_be_open()
            return [(space.digest, key) in self._values for key in keys]

    def read_into(self, space: Space, reads: Sequence[Read], *, cancelled: Callable[[], bool] = never) -> list[ReadResult]:
        """Fills the buffers, server by server. `cancelled` is called between servers."""
        with self._lock:
            self._must_be_open()
            found = [self._newest((space.digest, read.key)) for read in reads]
        results = [_MISSING] * len(reads)
        remote: dict[_Offer, list[int]] = {}
        for at, (read, each) in enumerate(zip(reads, found, strict=True)):
            if each is None:
                continue
            offer, value = each
            length = len(value.data) if isinstance(value, SmallValue) else value.length
            if length != len(read.into):
                continue  # no offer has this key, and nothing was written
            elif isinstance(value, SmallValue):
                read.into[:] = value.data
                results[at] = ReadResult(outcome=ReadOutcome.FOUND, stamp=value.stamp)
            else:
                remote.setdefault(offer, []).append(at)
        for offer, places in remote.items():
            values = [value for at in places if (each := found[at]) is not None and isinstance(value := each[1], Value)]
            outcome = ReadOutcome.CANCELLED if cancelled() else self._pull(offer, [reads[at] for at in places], values)
            for at, value in zip(places, values, strict=True):
                stamp = value.stamp if outcome is ReadOutcome.FOUND else b""
                results[at] = ReadResult(outcome=outcome, stamp=stamp)
        return results

    def write_from(self, space: Space, writes: Sequence[Write]) -> list[WriteOutcome]:
        return [WriteOutcome.NO_ROOM] * len(writes)

    def delete(self, space: Space, keys: Sequence[bytes]) -> int:
        """Removes the keys from all offers: a value that was damaged in transfer is not read again."""
        with self._lock:
            self._must_be_open()
            return sum(self._values.pop((space.digest, key), None) is not None for key in keys)

    def flush(self) -> None:
        with self._lock:
            self._must_be_open()

    def close(self) -> None:
        with self._lock:
            self._closed = True
            servers = list(self._servers.values())
            self._offers.clear()
            self._values.clear()
        for server in servers:
            with server.lock:
                if server.lane is not None:
                    server.lane.close()
                    server.lane = None

    def register(self, memory: Sequence[memoryview]) -> None:
        """Notes where the host tier lies. Raises StoreError for memory that is not mapped by the lanes."""
        (block,) = memory
        if block.nbytes != self._memory.size_bytes:
            raise StoreError("the host tier is not in the memory that the lanes have mapped")
        self._start = _address(block)

    def unregister(self, memory: Sequence[memoryview]) -> None:
        self._start = 0

    # ---- inside -----------------------------------------------------------------------------------

    def _pull(self, offer: _Offer, reads: Sequence[Read], values: Sequence[Value]) -> ReadOutcome:
        server = offer.server
        entries: list[Entry] = []
        for read, value in zip(reads, values, strict=True):
            if not value.length:
                continue  # models without prefix state have pages without bytes
            at = _address(read.into) - self._start
            if not self._start or not 0 <= at <= self._memory.size_bytes - value.length:
                return ReadOutcome.FAILED
            entries.append((at, value.address, value.length))
        if not entries:
            return ReadOutcome.FOUND
        with server.lock:
            if self._closed or self._clock.now() < server.lost_until_s:
                return ReadOutcome.CANCELLED
            try:
                server.lane = server.lane or self._open_lane()
                server.lane.read(offer.listing.session, entries, stall_s=self._stall_s)
            except (LaneLost, Unfenced, StoreError) as error:
                log.warning("host memory of %s cannot be read for %g s: %s", offer.listing.session, COOL_OFF_S, error)
                server.lane = None
                server.lost_until_s = self._clock.now() + COOL_OFF_S
                with self._lock:
                    self.counters.add("peer_lanes_lost")
                return ReadOutcome.FAILED if isinstance(error, Unfenced) else ReadOutcome.CANCELLED
        return ReadOutcome.FOUND

    def _newest(self, name: _Name) -> tuple[_Offer, Value | SmallValue] | None:
        offered = self._values.get(name)
        return offered[-1] if offered else None

    def _must_be_open(self) -> None:
        if self._closed:
            raise StoreError("this peer store is closed")


def _address(memory: memoryview) -> int:
    return int(np.frombuffer(memory, dtype=np.uint8).__array_interface__["data"][0])
