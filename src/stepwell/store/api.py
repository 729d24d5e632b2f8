"""The seam to everything below host memory: six blocking verbs over whole batches, on the caller's buffers.

A store keeps values by key, each with the stamp that `seal.py` made for it, and gives both back as they were. It may check
a value against its stamp, and drop it when they disagree; whoever reads checks it anyway. A store may lose a value at any
time; it must never make one up. All verbs may be called from several threads at once.

    space    a namespace: values of two spaces never meet, whatever their keys
    key      32 bytes that name a value within its space; the same key always means the same value
    parent   the value this one is useless without: what is deep in a chain goes before what it stands on
    group    values that are best lost together, for stores that can see to it
    level    what a value is worth; it counts for all that the value stands on as well

Reads, writes and results are made by the thousand, so they are tuples with names: quick to make, and to turn into columns.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from enum import Enum
from typing import NamedTuple, Protocol, cast

from stepwell.base.errors import StoreError
from stepwell.base.ids import Level

KEY_BYTES = 32
STAMP_BYTES = 64
NO_PARENT = bytes(KEY_BYTES)
NO_STAMP = b""
MAX_TENANT_BYTES, MAX_LABEL_BYTES = 64, 128  # as UTF-8


@dataclass(frozen=True, slots=True, kw_only=True)
class Space:
    """A namespace as a store sees it. Only the digest tells two apart; the rest is for people and for quotas."""

    digest: bytes
    label: str = ""  # for people: the model's name, never a secret
    tenant: str = ""  # whose quota its values count against

    def __post_init__(self) -> None:
        assert len(self.digest) == KEY_BYTES, f"a space's digest has {KEY_BYTES} bytes, got {len(self.digest)}"
        assert len(self.label.encode()) <= MAX_LABEL_BYTES, f"{self.label!r} is too long for a label"
        assert len(self.tenant.encode()) <= MAX_TENANT_BYTES, f"{self.tenant!r} is too long for a tenant"


class TimedRead(NamedTuple):
    """How long a store took to read so many bytes when it was opened, with as many threads as such a read would have."""

    size_bytes: int
    seconds: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Traits:
    """What a store is, said by itself and never probed."""

    name: str
    durable: bool  # acknowledged values outlive the process
    shared: bool  # other processes may read and write the same values at the same time
    groups: bool  # values of one group are evicted together
    alignment: int = 1  # buffers at multiples of this move without an extra copy
    max_value_bytes: int | None = None
    turn_bytes: int = 8 * 2**20  # worth reading in one call: more only makes others wait, less costs more
    registers: bool = False  # reads and writes inside memory it was shown need no copy: it is a RegisteringStore
    clears: bool = False  # it can forget a whole space: it is a ClearingStore
    sized: bool = False  # it can say how full it is: it is a SizedStore
    lists_spaces: bool = False  # it can say which spaces take up most: it is a ListingStore
    levels: bool = False  # it forgets the lowest level first, of one level what was used longest ago: it is a LevelledStore
    writable: bool = True  # else nothing is offered to it: others fill it
    reads: tuple[TimedRead, ...] = ()  # tried at its opening; none where that was not done
    late_write_s: float = 0.0  # after a read that FAILED, had another LENGTH or raised, its buffer may be written for so long

    @property
    def outlives_process(self) -> bool:
        """Whether what it acknowledged can be read when this process has been killed."""
        return self.durable or self.shared


class Read(NamedTuple):
    """A value wanted, and the memory for exactly its bytes."""

    key: bytes
    into: memoryview


class Write(NamedTuple):
    """A value offered. The memory, of bytes, must not change until the verb returns.

    The stamp is `seal.seal` of these very bytes: a value with any other is as good as damaged, and may be dropped.
    """

    key: bytes
    data: memoryview
    stamp: bytes
    parent: bytes = NO_PARENT
    depth: int = 0  # how many values it stands on, one on the other
    group: bytes = b""
    level: Level = Level.NORMAL


class ReadOutcome(Enum):
    FOUND = "found"
    MISSING = "missing"
    LENGTH = "stored with another length"  # nothing of it may be used
    DAMAGED = "damaged"  # the store itself saw that what it kept is not whole
    CANCELLED = "cancelled"
    FAILED = "failed"


class WriteOutcome(Enum):
    STORED = "stored"
    EXISTS = "there already"  # and left as it was
    NO_ROOM = "no room"
    TOO_LARGE = "too large"
    FAILED = "failed"


class ReadResult(NamedTuple):
    """What came of one read. Unless it is FOUND, the buffer may hold anything and the stamp is empty."""

    outcome: ReadOutcome
    stamp: bytes = NO_STAMP


def never() -> bool:
    """The answer of somebody who never cancels."""
    return False


class Store(Protocol):
    """Everything the cache asks of a bottom tier. Results are in the order of the batch, one for each entry.

    A value that cannot be read or written is an outcome; a store that cannot be reached at all may raise StoreError.
    """

    @property
    def traits(self) -> Traits: ...

    def contains(self, space: Space, keys: Sequence[bytes]) -> list[bool]:
        """Which keys have a value now. Counts as no use of them."""
        ...

    def read_into(self, space: Space, reads: Sequence[Read], *, cancelled: Callable[[], bool] = never) -> list[ReadResult]:
        """Fills each buffer with its value, all bytes or none that count. Values read count as used, with all they stand on.

        `cancelled` is asked between values where the store can stop: what was not begun is CANCELLED.
        """
        ...

    def write_from(self, space: Space, writes: Sequence[Write]) -> list[WriteOutcome]:
        """Keeps the values that are not there yet. A durable store returns when what it calls STORED will survive a crash.

        Earlier entries of a batch are kept before later ones.
        """
        ...

    def delete(self, space: Space, keys: Sequence[bytes]) -> int:
        """Forgets values for good; returns how many there were."""
        ...

    def flush(self) -> None:
        """Returns when everything accepted so far is as durable as it will get."""
        ...

    def close(self) -> None:
        """Gives everything back; further verbs raise StoreError. A second close does nothing."""
        ...


class RegisteringStore(Store, Protocol):
    """A store that moves data straight in and out of memory it knows. Whoever attaches it shows it the host tier's."""

    def register(self, memory: Sequence[memoryview]) -> None:
        """Makes memory known, all of it or, raising StoreError, nothing. Memory that is known already stays so. May take long."""
        ...

    def unregister(self, memory: Sequence[memoryview]) -> None:
        """Forgets memory, which no read or write may be using. What is not known, or a closed store, is left alone."""
        ...


class ClearingStore(Store, Protocol):
    """A store that knows which values a space has."""

    def clear(self, digest: bytes) -> int:
        """Forgets every value of the space with this digest for good, and touches no other; returns how many there were."""
        ...


@dataclass(frozen=True, slots=True, kw_only=True)
class StoreSize:
    used_bytes: int  # of values, as they lie there
    budget_bytes: int | None  # None: no limit
    disk_full: bool = False  # the disk has no room for more of the budget: what is stored takes the place of other things


@dataclass(frozen=True, slots=True, kw_only=True)
class SpaceSize:
    space: Space
    values: int
    used_bytes: int


class SizedStore(Store, Protocol):
    """A store that knows how full it is."""

    def size(self) -> StoreSize:
        """Quick to answer. Raises StoreError once it is closed."""
        ...


class ListingStore(Store, Protocol):
    """A store that knows which spaces it holds."""

    def largest_spaces(self, most: int) -> list[SpaceSize]:
        """The spaces with most bytes, largest first. Looks at spaces, not at values. Raises StoreError once it is closed."""
        ...


class LevelledStore(Store, Protocol):
    """A store that can be told anew what a value is worth."""

    def relevel(self, space: Space, keys: Sequence[bytes], level: Level) -> int:
        """Gives values that are there another level; returns how many. Counts as a use of them. A hint: it writes nothing, so
        a crash may bring back the level that a value was written with.
        """
        ...


def relevel(store: Store, space: Space, keys: Sequence[bytes], level: Level) -> int:
    """Says what values are worth; returns how many of them there are, none for a store that does not want to know."""
    return cast(LevelledStore, store).relevel(space, keys, level) if store.traits.levels and keys else 0


def size_of(store: Store) -> StoreSize | None:
    """How full a store is; None for one that does not know."""
    return cast(SizedStore, store).size() if store.traits.sized else None


def largest_spaces(store: Store, most: int) -> list[SpaceSize] | None:
    """What a store holds, by space; None for one that does not know."""
    return cast(ListingStore, store).largest_spaces(most) if store.traits.lists_spaces else None


def register(store: Store, memory: Sequence[memoryview]) -> None:
    """Shows memory to a store that wants to know it. Raises StoreError when it cannot have it."""
    if store.traits.registers:
        cast(RegisteringStore, store).register(memory)


def unregister(store: Store, memory: Sequence[memoryview]) -> None:
    """Takes memory back from a store that it was shown to."""
    if store.traits.registers:
        cast(RegisteringStore, store).unregister(memory)


def clear(store: Store, space: Space) -> int:
    """Forgets a whole space; returns how many values there were. Raises StoreError for a store that cannot."""
    if not store.traits.clears:
        raise StoreError(f"a {store.traits.name} store cannot forget a whole space: its values go when it needs their room")
    return cast(ClearingStore, store).clear(space.digest)
