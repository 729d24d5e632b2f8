"""A small, busy life of a log store, the same every time, and a ledger of what it must remember after a crash."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from random import Random

from stepwell.base.errors import StoreError
from stepwell.base.ids import Level
from stepwell.base.meters import ManualClock
from stepwell.store.api import NO_PARENT, Space, WriteOutcome
from stepwell.store.log.disk.files import BLOCK_BYTES, Disk, up_to_block
from stepwell.store.log.opening import open_directory
from stepwell.store.log.store import LogStore
from stepwell.store.log.writing.upkeep import Direct
from stepwell.store.log.writing.writer import PutRequest
from stepwell.testing.store_contract import fetch, key, offer

BUDGET_BYTES, SEGMENT_BYTES = 800 * 1024, 64 * 1024
SIZES = (40, 700, 1024, 1025, 3000, 4096, 9000)
SPACES = tuple(Space(digest=bytes([65 + at]) * 32, label=f"model {at}", tenant=f"tenant {at % 2}") for at in range(3))


def open_at(directory: Path, disk: Disk | None = None) -> LogStore:
    return open_directory(
        directory, clock=ManualClock(), budget_bytes=BUDGET_BYTES, segment_bytes=SEGMENT_BYTES, direct=Direct.OFF, disk=disk
    )


@dataclass(slots=True)
class Ledger:
    """What was promised. Names are `(space, name)`; every name always means the same bytes."""

    sizes: dict[tuple[int, str], int] = field(default_factory=dict)  # every value ever offered
    stored: set[tuple[int, str]] = field(default_factory=set)  # acknowledged, and not deleted since
    gone: set[tuple[int, str]] = field(default_factory=set)  # deleted for good, and not offered again
    in_doubt: set[tuple[int, str]] = field(default_factory=set)  # of a delete that did not return
    used: dict[tuple[int, str], None] = field(default_factory=dict)  # acknowledged or found, the latest last

    def use(self, name: tuple[int, str]) -> None:
        self.used.pop(name, None)
        self.used[name] = None

    def warmest(self, size_bytes: int) -> set[tuple[int, str]]:
        """The values used last that take up at most `size_bytes`, each with a header of its own."""
        names: set[tuple[int, str]] = set()
        for name in reversed(self.used):
            size_bytes -= BLOCK_BYTES + up_to_block(self.sizes[name])
            if size_bytes < 0:
                break
            names.add(name)
        return names


class Life:
    """Writes chains, reads some of them again, deletes, clears, saves and reopens, by a seed."""

    def __init__(self, disk: Disk, directory: Path, seed: int) -> None:
        self.ledger = Ledger()
        self.store: LogStore | None = None
        self._disk, self._directory = disk, directory
        self._random = Random(seed)
        self.level = Level(seed % len(Level))  # of all values: with several, the ones used last would not be those that stay
        self._count = 0

    def live(self, turns: int) -> None:
        self.store = open_at(self._directory, self._disk)
        for _ in range(turns):
            works = (self.write, self.crowd, self.read, self.delete, self.clear, self.save, self.reopen)
            self._random.choices(works, (8, 4, 4, 3, 1, 1, 1))[0]()
        self.store.close()

    def write(self) -> None:
        """One caller's batch."""
        self._put(1)

    def crowd(self) -> None:
        """Several callers' batches at once, kept by one sync."""
        self._put(3)

    def _put(self, callers: int) -> None:
        assert self.store is not None
        requests, names = [], []
        for _ in range(callers):
            space, writes = self._random.randrange(3), []
            for depth in range(self._random.choice((1, 2, 5))):
                name = self._name(space)
                parent = writes[-1].key if writes else NO_PARENT
                size = self.ledger.sizes[space, name]
                writes.append(offer(SPACES[space], name, size, parent=parent, depth=depth, level=self.level))
                names.append((space, name))
            requests.append(PutRequest(space=SPACES[space], writes=writes))
        self.ledger.gone -= set(names)
        self.store._put(requests)
        outcomes = [outcome for request in requests for outcome in request.outcomes]
        for name_, outcome in zip(names, outcomes, strict=True):
            if outcome in (WriteOutcome.STORED, WriteOutcome.EXISTS):
                self.ledger.stored.add(name_)
                self.ledger.use(name_)

    def _name(self, space: int) -> str:
        """A new value's name, or that of one that was deleted."""
        again = sorted(name for at, name in self.ledger.gone if at == space) if self._random.random() < 0.3 else []
        self._count += 1
        name = self._random.choice(again) if again else f"value {self._count}"
        self.ledger.sizes.setdefault((space, name), self._random.choice(SIZES))
        return name

    def read(self) -> None:
        assert self.store is not None
        for space, name in self._random.sample(sorted(self.ledger.stored), min(3, len(self.ledger.stored))):
            if fetch(self.store, SPACES[space], name, self.ledger.sizes[space, name]) is not None:
                self.ledger.use((space, name))

    def delete(self) -> None:
        assert self.store is not None
        space = self._random.randrange(3)
        mine = sorted(name for at, name in self.ledger.sizes if at == space)
        names = {(space, name) for name in self._random.sample(mine, min(2, len(mine)))}
        self._forget(names, lambda store: store.delete(SPACES[space], [key(name) for _, name in sorted(names)]))

    def clear(self) -> None:
        space = self._random.randrange(3)
        names = {name for name in self.ledger.sizes if name[0] == space}
        self._forget(names, lambda store: store.clear(SPACES[space].digest))

    def save(self) -> None:
        assert self.store is not None
        self.store.snapshot()

    def reopen(self) -> None:
        assert self.store is not None
        self.store.close()
        self.store = open_at(self._directory, self._disk)

    def _forget(self, names: set[tuple[int, str]], order) -> None:  # type: ignore[no-untyped-def]
        assert self.store is not None
        ledger = self.ledger
        ledger.in_doubt = names
        try:
            order(self.store)
        except StoreError:
            ledger.stored -= names  # it may or may not have lasted
            return
        ledger.in_doubt = set()
        ledger.stored -= names
        ledger.gone |= names

    def must_survive(self) -> set[tuple[int, str]]:
        """Acknowledged, and neither evicted nor being deleted: what the store still knew of at the end, and in any case
        what was used last: whatever happens, a store that gives up the warmest half segment has given up too much."""
        if self.store is None:
            return set()
        index = self.store._state.index
        known = {name for name in self.ledger.stored if key(name[1]) in index.rows_of(SPACES[name[0]].digest)}
        return (known | self.ledger.warmest(SEGMENT_BYTES // 2) & self.ledger.stored) - self.ledger.in_doubt


def held(store: LogStore, ledger: Ledger) -> set[tuple[int, str]]:
    """Every value the store serves, each verified byte for byte."""
    return {name for name, size in ledger.sizes.items() if fetch(store, SPACES[name[0]], name[1], size) is not None}


def bytes_on_disk(directory: Path) -> int:
    stats = [path.stat() for path in directory.iterdir()]
    return max(sum(stat.st_size for stat in stats), sum(stat.st_blocks * 512 for stat in stats))
