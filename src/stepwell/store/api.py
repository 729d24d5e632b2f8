"""The interface to everything below host memory: six blocking verbs over whole batches, on the caller's buffers.

A store keeps values by key, each with the stamp that `seal.py` made for it, and returns both unchanged. It may check a value
against its stamp and drop the value if they disagree; the reader checks the stamp in any case. A store may lose a value at any
time; it must never make one up. All verbs may be called from several threads at once.

    space    a namespace: values of different spaces never mix, even under equal keys
    key      32 bytes that name a value within its space; the same key always means the same value
    parent   the value without which this one is useless: a store evicts the deep end of a chain before its beginning
    group    values that are best evicted together, for stores that support it
    level    how valuable a value is; the level also applies to everything that the value depends on

Reads, writes and results are created by the thousand, so they are named tuples: quick to create, and to turn into columns.
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
    """A namespace as a store sees it. Only the digest identifies it; the other fields are for people and for quotas."""

    digest: bytes
    label: str = ""  # for people: the model's name, never a secret
    tenant: str = ""  # the tenant whose quota its values count against

    def __post_init__(self) -> None:
        assert len(self.digest) == KEY_BYTES, f"a space's digest has {KEY_BYTES} bytes, got {len(self.digest)}"
        assert len(self.label.encode()) <= MAX_LABEL_BYTES, f"{self.label!r} is too long for a label"
        assert len(self.tenant.encode()) <= MAX_TENANT_BYTES, f"{self.tenant!r} is too long for a tenant"


class TimedRead(NamedTuple):
    """How long the store took to read this many bytes when it was opened, with the number of threads of such a read."""

    size_bytes: int
    seconds: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Traits:
    """The properties of a store, as the store declares them. They are never probed."""

    name: str
    durable: bool  # acknowledged values survive the end of the process
    shared: bool  # other processes may read and write the same values at the same time
    groups: bool  # values of one group are evicted together
    alignment: int = 1  # buffers at multiples of this are transferred without an extra copy
    max_value_bytes: int | None = None
    turn_bytes: int = 8 * 2**20  # worth reading in one call: more makes other callers wait, less costs more
    registers: bool = False  # reads and writes in memory registered with it need no copy: it is a RegisteringStore
    clears: bool = False  # it can delete a whole space: it is a ClearingStore
    sized: bool = False  # it can report how full it is: it is a SizedStore
    lists_spaces: bool = False  # it can report which spaces are the largest: it is a ListingStore
    levels: bool = False  # it evicts the lowest level first, and within a level the least recently used: it is a LevelledStore
    writable: bool = True  # if False, the cache writes nothing to it: others fill it
    reads: tuple[TimedRead, ...] = ()  # measured when the store was opened; empty if it was not measured
    late_write_s: float = 0.0  # after a read that FAILED, had another LENGTH or raised, its buffer may be written for this long

    @property
    def outlives_process(self) -> bool:
        """Whether acknowledged values can still be read after this process has been killed."""
        return self.durable or self.shared


class Read(NamedTuple):
    """A requested value, and a buffer of exactly its size."""

    key: bytes
    into: memoryview


class Write(NamedTuple):
    """A value to store. The memory is one of bytes and must not change until the verb returns.

    The stamp is `seal.seal` of exactly these bytes: a value with any other stamp counts as damaged and may be dropped.
    """

    key: bytes
    data: memoryview
    stamp: bytes
    parent: bytes = NO_PARENT
    depth: int = 0  # length of the chain of values that it depends on
    group: bytes = b""
    level: Level = Level.NORMAL


class ReadOutcome(Enum):
    FOUND = "found"
    MISSING = "missing"
    LENGTH = "stored with another length"  # none of the bytes may be used
    DAMAGED = "damaged"  # the store itself detected that the stored value is not intact
    CANCELLED = "cancelled"
    FAILED = "failed"


class WriteOutcome(Enum):
    STORED = "stored"
    EXISTS = "there already"  # and left unchanged
    NO_ROOM = "no space"
    TOO_LARGE = "too large"
    FAILED = "failed"


class ReadResult(NamedTuple):
    """The result of one read. Unless it is FOUND, the content of the buffer is undefined and the stamp is empty."""

    outcome: ReadOutcome
    stamp: bytes = NO_STAMP


def never() -> bool:
    """The default for callers that never cancel."""
    return False


class Store(Protocol):
    """Everything that the cache requires of a bottom tier. Results are in the order of the batch, one for each entry.

    A value that cannot be read or written is an outcome; a store that cannot be reached at all may raise StoreError.
    """

    @property
    def traits(self) -> Traits: ...

    def contains(self, space: Space, keys: Sequence[bytes]) -> list[bool]:
        """Which keys have a value now. Does not count as a use of the values."""
        ...

    def read_into(self, space: Space, reads: Sequence[Read], *, cancelled: Callable[[], bool] = never) -> list[ReadResult]:
        """Fills each buffer with its value, completely or not at all. Counts as a use of the values and of all they depend on.

        `cancelled` is called between values where the store can stop; reads that had not begun are CANCELLED.
        """
        ...

    def write_from(self, space: Space, writes: Sequence[Write]) -> list[WriteOutcome]:
        """Stores the values that are not there yet. A durable store returns once everything it calls STORED will survive a crash.

        Earlier entries of a batch are stored before later ones.
        """
        ...

    def delete(self, space: Space, keys: Sequence[bytes]) -> int:
        """Deletes values for good; returns how many there were."""
        ...

    def flush(self) -> None:
        """Returns when everything accepted so far is as durable as it can become."""
        ...

    def close(self) -> None:
        """Releases all resources; further verbs raise StoreError. A second close does nothing."""
        ...


class RegisteringStore(Store, Protocol):
    """A store that transfers data directly to and from registered memory. Its owner registers the memory of the host tier."""

    def register(self, memory: Sequence[memoryview]) -> None:
        """Registers all of the memory or, raising StoreError, none of it. Memory already registered stays so. May take long."""
        ...

    def unregister(self, memory: Sequence[memoryview]) -> None:
        """Unregisters memory that no read or write is using. Ignores unknown memory. Does nothing once the store is closed."""
        ...


class ClearingStore(Store, Protocol):
    """A store that knows which values belong to a space."""

    def clear(self, digest: bytes) -> int:
        """Deletes every value of the space with this digest for good, and no other; returns how many there were."""
        ...


@dataclass(frozen=True, slots=True, kw_only=True)
class StoreSize:
    used_bytes: int  # of values, as stored
    budget_bytes: int | None  # None: unlimited
    disk_full: bool = False  # the disk has no space for the rest of the budget: the store evicts to write


@dataclass(frozen=True, slots=True, kw_only=True)
class SpaceSize:
    space: Space
    values: int
    used_bytes: int


class SizedStore(Store, Protocol):
    """A store that knows how full it is."""

    def size(self) -> StoreSize:
        """Fast. Raises StoreError once the store is closed."""
        ...


class ListingStore(Store, Protocol):
    """A store that knows which spaces it holds."""

    def largest_spaces(self, most: int) -> list[SpaceSize]:
        """The spaces with the most bytes, largest first. Visits spaces, not values. Raises StoreError if the store is closed."""
        ...


class LevelledStore(Store, Protocol):
    """A store that can change the level of a value."""

    def relevel(self, space: Space, keys: Sequence[bytes], level: Level) -> int:
        """Changes the level of the values that are present; returns their number. Counts as a use of them. A hint: nothing is
        written, so after a crash a value may have the level again with which it was written.
        """
        ...


def relevel(store: Store, space: Space, keys: Sequence[bytes], level: Level) -> int:
    """Changes the level of values; returns how many of them are present, 0 for a store without levels."""
    return cast(LevelledStore, store).relevel(space, keys, level) if store.traits.levels and keys else 0


def size_of(store: Store) -> StoreSize | None:
    """How full a store is; None if it does not know."""
    return cast(SizedStore, store).size() if store.traits.sized else None


def largest_spaces(store: Store, most: int) -> list[SpaceSize] | None:
    """What a store holds, by space; None if it does not know."""
    return cast(ListingStore, store).largest_spaces(most) if store.traits.lists_spaces else None


def register(store: Store, memory: Sequence[memoryview]) -> None:
    """Registers memory with a store that registers memory. Raises StoreError if it cannot."""
    if store.traits.registers:
        cast(RegisteringStore, store).register(memory)


def unregister(store: Store, memory: Sequence[memoryview]) -> None:
    """Unregisters memory from a store that it was registered with."""
    if store.traits.registers:
        cast(RegisteringStore, store).unregister(memory)


def clear(store: Store, space: Space) -> int:
    """Deletes a whole space; returns how many values there were. Raises StoreError if the store cannot."""
    if not store.traits.clears:
        raise StoreError(f"a {store.traits.name} store cannot delete a whole space: it evicts the values when it needs space")
    return cast(ClearingStore, store).clear(space.digest)
