"""The verified layer returns what was saved, or a miss, in bounded time, whatever the store below does."""

from __future__ import annotations

import hashlib
import logging
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from pathlib import Path
from random import Random
from threading import Event

import pytest

from stepwell import ConfigError, ItemStatus, ReadRuns, StoreError, VerifiedStore, WriteRuns, open_store
from stepwell.base.meters import ManualClock
from stepwell.base.store_key import StoreKey
from stepwell.policy.store_use import BreakerState
from stepwell.store.api import Read, ReadOutcome, ReadResult, Space, Traits, Write, WriteOutcome, never
from stepwell.store.memory import MemoryStore
from stepwell.store.wrappers import Faults, Faulty, Wrapper
from stepwell.testing.store_contract import key, payload
from stepwell.verified.calls import Call
from waiting import PATIENCE_S, wait_until

OK, MISSING, FAILED = ItemStatus.OK, ItemStatus.MISSING, ItemStatus.FAILED


def offer(name: str, sizes: Sequence[int], *, parent: bytes = bytes(32), depth: int = 0) -> WriteRuns:
    """A value whose bytes follow from its name, lying in runs of these sizes."""
    whole, runs, end = payload(name, sum(sizes)), [], 0
    for size in sizes:
        runs.append(memoryview(bytearray(whole[end : end + size])))
        end += size
    return WriteRuns(key=key(name), runs=runs, parent=parent, depth=depth)


def want(name: str, sizes: Sequence[int]) -> ReadRuns:
    return ReadRuns(key=key(name), runs=[memoryview(bytearray(size)) for size in sizes])


def bytes_of(read: ReadRuns) -> bytes:
    return b"".join(map(bytes, read.runs))


@pytest.fixture
def verified() -> Iterator[VerifiedStore]:
    with closing(VerifiedStore(MemoryStore())) as layer:
        yield layer


def test_values_of_several_runs_come_back_into_runs_of_any_sizes(verified: VerifiedStore) -> None:
    space = verified.space(b"a model")
    shapes = {"one": [1000], "two": [4096, 4096], "odd": [1, 4095, 0, 8193, 7], "empty": [0], "many": [100] * 50, "none": []}
    assert verified.write(space, [offer(name, sizes) for name, sizes in shapes.items()]) == [OK] * len(shapes)
    for name, sizes in shapes.items():
        for other in (sizes, [sum(sizes)], [sum(sizes) // 2, sum(sizes) - sum(sizes) // 2]):
            read = want(name, other)
            assert verified.read(space, [read]) == [OK] and bytes_of(read) == payload(name, sum(sizes)), (name, other)


def test_a_batch_larger_than_all_buffers_moves_in_pieces(verified: VerifiedStore) -> None:
    space, sizes = verified.space(b"x"), [700_000, 600_001]
    writes = [offer(f"v{i}", sizes) for i in range(60)]
    large = WriteRuns(key=key("large"), runs=[memoryview(bytearray(40 << 20)), memoryview(b"tail")])
    assert verified.write(space, [*writes, large]) == [OK] * 61
    reads = [want(f"v{i}", sizes) for i in range(60)]
    wanted = ReadRuns(key=key("large"), runs=[memoryview(bytearray((40 << 20) + 4))])
    assert verified.read(space, [*reads, wanted]) == [OK] * 61
    assert all(bytes_of(read) == payload(f"v{i}", sum(sizes)) for i, read in enumerate(reads))
    assert bytes_of(wanted)[-4:] == b"tail"


def test_what_is_there_is_not_written_again_and_what_is_not_is_missing(verified: VerifiedStore) -> None:
    space = verified.space(b"x")
    assert verified.write(space, [offer("a", [10])]) == [OK]
    assert verified.write(space, [offer("a", [10]), offer("b", [10])]) == [OK, OK]
    assert verified.stats()["write_values"] == 2
    assert verified.contains(space, [key("a"), key("c"), key("b")]) == [True, False, True]
    read = want("c", [10])
    assert verified.read(space, [want("a", [10]), read]) == [OK, MISSING] and bytes_of(read) == bytes(10)


def test_fingerprints_and_keys_keep_values_apart() -> None:
    store, secret = MemoryStore(), hashlib.sha512(b"secret").digest()
    plain, keyed, other = (VerifiedStore(store, key=one) for one in (None, StoreKey(secret), StoreKey(secret[::-1])))
    assert keyed.write(keyed.space(b"x"), [offer("a", [10, 10])]) == [OK]
    assert keyed.read(keyed.space(b"x"), [want("a", [20])]) == [OK]
    for layer, fingerprint in ((keyed, b"y"), (plain, b"x"), (other, b"x")):
        assert layer.read(layer.space(fingerprint), [want("a", [20])]) == [MISSING]
    assert other.read(keyed.space(b"x"), [want("a", [20])]) == [ItemStatus.OTHER_KEY]  # and so is what another writer put there
    assert keyed.contains(keyed.space(b"x"), [key("a")]) == [False]


@pytest.mark.parametrize("fault", ["flip", "short", "swap"])
def test_damage_is_a_miss_that_reaches_no_memory_and_makes_room_for_a_good_copy(fault: str) -> None:
    faulty = Faulty(MemoryStore(), Faults(), random=Random(1), sleep=lambda _: None)
    with closing(VerifiedStore(faulty, readers=1)) as layer:
        space, names = layer.space(b"x"), "abcdef"
        layer.write(space, [offer(name, [500, 501]) for name in names])
        faulty.faults = Faults(**{fault: 1.0})
        reads = [want(name, [500, 501]) for name in names]
        statuses = layer.read(space, reads)
        assert any(status.is_damage for status in statuses)
        for name, read, status in zip(names, reads, statuses, strict=True):
            assert bytes_of(read) == (payload(name, 1001) if status is OK else bytes(1001))
        faulty.faults = Faults()
        assert layer.contains(space, [key(name) for name in names]) == [status is OK for status in statuses]
        assert layer.write(space, [offer(name, [500, 501]) for name in names]) == [OK] * len(names)
        assert layer.read(space, reads) == [OK] * len(names) and layer.state is BreakerState.CLOSED


def test_another_length_is_a_miss(verified: VerifiedStore) -> None:
    space = verified.space(b"x")
    verified.write(space, [offer("a", [100])])
    assert verified.read(space, [want("a", [99])]) == [ItemStatus.LENGTH]


class Gate(Wrapper):
    """A store whose reads and writes wait until they are let through, like those of a disk that hangs."""

    def __init__(self) -> None:
        super().__init__(MemoryStore())
        self.open, self.asked = Event(), Event()
        self.open.set()

    def _wait(self) -> None:
        self.asked.set()
        self.open.wait()

    def contains(self, space: Space, keys: Sequence[bytes]) -> list[bool]:
        self._wait()
        return super().contains(space, keys)

    def read_into(self, space: Space, reads: Sequence[Read], *, cancelled: Callable[[], bool] = never) -> list[ReadResult]:
        self._wait()
        return super().read_into(space, reads)

    def write_from(self, space: Space, writes: Sequence[Write]) -> list[WriteOutcome]:
        self._wait()
        return super().write_from(space, writes)


def test_a_hung_store_is_given_up_on_and_never_writes_into_the_callers_memory(caplog: pytest.LogCaptureFixture) -> None:
    store, clock = Gate(), ManualClock()
    layer = VerifiedStore(store, deadline_s=0.2, clock=clock)
    space, value = layer.space(b"x"), offer("a", [300, 300])
    wait_until(lambda: layer.write(space, [value]) == [OK])
    store.open.clear()
    read = want("a", [300, 300])
    with caplog.at_level(logging.WARNING):
        for _ in range(3):
            assert layer.read(space, [read]) == [FAILED]
    assert layer.state is BreakerState.OPEN and "left alone" in caplog.text
    store.asked.clear()
    assert layer.contains(space, [key("a")]) == [False] and layer.read(space, [read]) == [FAILED]
    assert layer.write(space, [offer("b", [5])]) == [FAILED] and not store.asked.is_set()  # no caller waits any more
    with pytest.raises(StoreError, match="later"):
        layer.clear(space)
    store.open.set()

    def tried_again() -> bool:
        clock.advance(100.0)
        return layer.read(space, [want("a", [600])]) == [OK]

    wait_until(tried_again)  # behind the calls that hung: those end first
    assert layer.state is BreakerState.CLOSED
    assert bytes_of(read) == bytes(600)  # what the hung calls read went nowhere
    layer.close()


def test_a_hung_write_is_given_up_on() -> None:
    store = Gate()
    layer = VerifiedStore(store, deadline_s=0.2)
    space = layer.space(b"x")
    store.open.clear()
    assert layer.write(space, [offer("a", [10])]) == [FAILED]  # its question hangs already
    assert layer.stats()["store_overdue"] == 1
    store.open.set()
    layer.close()


class SlowDisk(Gate):
    """A log on a disk that hangs: what it has is known in memory."""

    def contains(self, space: Space, keys: Sequence[bytes]) -> list[bool]:
        return Wrapper.contains(self, space, keys)


def test_a_store_that_only_answers_questions_is_left_alone_too() -> None:
    store, clock = SlowDisk(), ManualClock()
    layer = VerifiedStore(store, deadline_s=0.1, clock=clock)
    space = layer.space(b"x")
    wait_until(lambda: layer.write(space, [offer("a", [10])]) == [OK])
    store.open.clear()
    for name in ("b", "c", "d"):
        assert layer.contains(space, [key("a")]) == [True] and layer.write(space, [offer(name, [10])]) == [FAILED]
    assert layer.state is BreakerState.OPEN and layer.contains(space, [key("a")]) == [False]
    store.open.set()

    def tried_again() -> bool:
        clock.advance(100.0)
        return layer.write(space, [offer("e", [10])]) == [OK]

    wait_until(tried_again)
    assert layer.state is BreakerState.CLOSED
    layer.close()


def test_no_memory_for_a_call_is_a_failure_and_not_an_error(verified: VerifiedStore, monkeypatch: pytest.MonkeyPatch) -> None:
    space = verified.space(b"x")
    monkeypatch.setattr("stepwell.verified.staging.mmap.mmap", _no_memory)
    assert verified.write(space, [offer("a", [5, 5])]) == [FAILED] and verified.write(space, [offer("b", [5])]) == [OK]


def _no_memory(*_: object) -> None:
    raise OSError(12, "Cannot allocate memory")


def test_a_store_that_fails_is_left_alone_and_tried_again() -> None:
    faulty, clock = Faulty(MemoryStore(), Faults(fail=1.0), random=Random(1), sleep=lambda _: None), ManualClock()
    layer = VerifiedStore(faulty, clock=clock)
    space = layer.space(b"x")
    for _ in range(3):
        assert layer.read(space, [want("a", [10])]) == [FAILED]
    assert layer.state is BreakerState.OPEN
    faulty.faults = Faults()
    clock.advance(1.5)
    assert layer.write(space, [offer("a", [10])]) == [OK] and layer.state is BreakerState.CLOSED
    layer.close()
    assert layer.read(space, [want("a", [10])]) == [FAILED]


def test_a_full_store_says_so_and_is_no_failure(tmp_path: Path) -> None:
    with closing(VerifiedStore(MemoryStore(budget_bytes=1000))) as layer:
        space = layer.space(b"x")
        assert layer.write(space, [offer("small", [400, 400]), offer("large", [600, 600])]) == [OK, ItemStatus.NO_ROOM]
        assert layer.state is BreakerState.CLOSED and layer.stats()["write_no_room"] == 1


def test_children_are_evicted_before_what_they_stand_on(tmp_path: Path) -> None:
    with closing(VerifiedStore(open_store(f"log:{tmp_path}", options={"budget": "16MiB", "segment": "1MiB"}))) as layer:
        space = layer.space(b"x")
        for prompt in range(4):
            names = [f"{prompt} {page}" for page in range(100)]
            parents = [bytes(32), *map(key, names)]
            pages = zip(names, parents, range(100), strict=False)
            layer.write(space, [offer(name, [30_000, 30_000], parent=parent, depth=depth) for name, parent, depth in pages])
        for prompt in range(4):
            there = layer.contains(space, [key(f"{prompt} {page}") for page in range(100)])
            assert there == sorted(there, reverse=True), f"prompt {prompt} has a gap"
        assert not all(layer.contains(space, [key(f"0 {page}") for page in range(100)]))


def test_values_outlive_the_process_that_wrote_them(tmp_path: Path) -> None:
    with closing(VerifiedStore(open_store(f"log:{tmp_path}", options={"budget": "64MiB"}))) as layer:
        assert layer.write(layer.space(b"x"), [offer("a", [5000, 7000, 11])]) == [OK]
    with closing(VerifiedStore(open_store(f"log:{tmp_path}"))) as layer:
        read = want("a", [5000, 7000, 11])
        assert layer.read(layer.space(b"x"), [read]) == [OK] and bytes_of(read) == payload("a", 12011)


@pytest.mark.parametrize("where", ["memory:", "log:", "shared-log:"])
def test_clearing_a_space_touches_no_other(where: str, tmp_path: Path) -> None:
    options = {"budget": "64MiB"}
    store = open_store(where + str(tmp_path) if where != "memory:" else where, options=options)
    with closing(VerifiedStore(store)) as layer:
        here, there = layer.space(b"here"), layer.space(b"there")
        for space in (here, there):
            layer.write(space, [offer(name, [10]) for name in "abc"])
        assert layer.clear(here) == 3 and layer.clear(here) == 0 and layer.delete(there, [key("a")]) == 1
        assert layer.contains(here, [key("b")]) == [False] and layer.contains(there, [key("b")]) == [True]


class Forgetless(Wrapper):
    @property
    def traits(self) -> Traits:
        return Traits(name="forgetless", durable=False, shared=True, groups=False)


def test_a_store_that_cannot_clear_says_so() -> None:
    with closing(VerifiedStore(Forgetless(MemoryStore()))) as layer, pytest.raises(StoreError, match="a whole space"):
        layer.clear(layer.space(b"x"))


class LateWriter(Wrapper):
    """Says that a read failed, and writes into its buffer afterwards, as a network may."""

    def __init__(self) -> None:
        super().__init__(MemoryStore())
        self.failing, self.late = False, memoryview(bytearray(0))

    @property
    def traits(self) -> Traits:
        return Traits(name="late", durable=False, shared=True, groups=False, late_write_s=60.0)

    def read_into(self, space: Space, reads: Sequence[Read], *, cancelled: Callable[[], bool] = never) -> list[ReadResult]:
        if self.failing:
            self.late = reads[0].into
            return [ReadResult(ReadOutcome.FAILED)] * len(reads)
        results = super().read_into(space, reads)
        self.late[:] = b"!" * len(self.late)
        return results


def test_memory_that_may_still_be_written_to_is_not_used_again_before_that_is_over() -> None:
    store, clock = LateWriter(), ManualClock()
    with closing(VerifiedStore(store, readers=1, clock=clock)) as layer:
        space, read = layer.space(b"x"), want("a", [1000, 1000])
        layer.write(space, [offer("a", [2000])])
        store.failing = True
        assert layer.read(space, [read]) == [FAILED]
        store.failing = False
        assert layer.read(space, [read]) == [OK] and bytes_of(read) == payload("a", 2000)


def test_many_threads_read_and_write_at_once(verified: VerifiedStore) -> None:
    space = verified.space(b"x")

    def life(seed: int) -> bool:
        random = Random(seed)
        for _ in range(30):
            names = [f"v{random.randrange(40)}" for _ in range(5)]
            sizes = {name: [len(name) * 1000, 777] for name in names}
            good = verified.write(space, [offer(name, sizes[name]) for name in dict.fromkeys(names)])
            reads = [want(name, sizes[name]) for name in names]
            got = verified.read(space, reads)
            if {*good, *got} != {OK} or any(bytes_of(r) != payload(n, sum(sizes[n])) for n, r in zip(names, reads, strict=True)):
                return False
        return True

    with ThreadPoolExecutor(6) as threads:
        assert all(threads.map(life, range(6)))


def test_what_cannot_work_is_refused(verified: VerifiedStore) -> None:
    space = verified.space(b"x")
    with pytest.raises(ValueError, match="32 bytes"):
        verified.write(space, [WriteRuns(key=b"short", runs=[])])
    with pytest.raises(ValueError, match="cast"):
        verified.read(space, [ReadRuns(key=key("a"), runs=[memoryview(bytearray(8)).cast("I")])])
    with pytest.raises(ValueError, match="writable"):
        verified.read(space, [ReadRuns(key=key("a"), runs=[memoryview(b"fixed")])])
    with pytest.raises(ConfigError, match="positive"):
        VerifiedStore(MemoryStore(), deadline_s=0)


class Held(Wrapper):
    """Reads wait, and then write into the memory that they were given."""

    def __init__(self) -> None:
        super().__init__(MemoryStore())
        self.reading, self.go_on = Event(), Event()

    def read_into(self, space: Space, reads: Sequence[Read], *, cancelled: Callable[[], bool] = never) -> list[ReadResult]:
        self.reading.set()
        assert self.go_on.wait(PATIENCE_S)
        return super().read_into(space, reads, cancelled=cancelled)


@pytest.mark.parametrize("state", [BreakerState.CLOSED, BreakerState.TRYING])
def test_an_interrupted_call_touches_no_memory_and_leaves_the_store_to_the_next(
    state: BreakerState, monkeypatch: pytest.MonkeyPatch
) -> None:
    store, clock = Held(), ManualClock()
    with closing(VerifiedStore(store, clock=clock)) as layer:
        space = layer.space(b"x")
        assert layer.write(space, [offer("a", [100])]) == [OK]
        layer._health._data.state = state if state is BreakerState.CLOSED else BreakerState.OPEN
        clock.advance(3600)
        read, wait = want("a", [100]), Call.wait

        def interrupted(call: Call, most_running: int = 0) -> bool:
            assert store.reading.wait(PATIENCE_S) and layer.state is state
            raise KeyboardInterrupt

        with monkeypatch.context() as patch:
            patch.setattr(Call, "wait", interrupted)
            with pytest.raises(KeyboardInterrupt):
                layer.read(space, [read])
        store.go_on.set()
        assert Call.wait is wait
        again = want("a", [100])
        assert layer.read(space, [again]) == [OK] and bytes_of(again) == payload("a", 100)
        assert bytes_of(read) == bytes(100) and layer.state is BreakerState.CLOSED
