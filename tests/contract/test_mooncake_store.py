"""The Mooncake adapter keeps the contract over a stand-in for Mooncake; over a real master it does in `tests/mooncake`.

And what only a stand-in shows on demand: every code, every way through registered memory.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from threading import Event

import pytest
from mooncake_stand_in import StandIn, join

from stepwell.base.errors import StoreError
from stepwell.base.meters import ManualClock
from stepwell.store.api import STAMP_BYTES, Read, ReadOutcome, Store, Write, WriteOutcome
from stepwell.store.mooncake.lanes import COPY_BYTES, VALUES_PER_BATCH, address_of
from stepwell.store.mooncake.store import MooncakeStore
from stepwell.store.seal import seal
from stepwell.testing import StoreContract
from stepwell.testing.store_contract import fetch, key, offer, payload, space

HERE = space("here")
STAGING_BYTES = 48 * COPY_BYTES
LARGE = 4 * COPY_BYTES


class TestMooncakeStoreOverAStandIn(StoreContract):
    @pytest.fixture
    def store(self) -> Iterator[Store]:
        with closing(MooncakeStore(join(StandIn()), staging_bytes=STAGING_BYTES)) as store:
            yield store


@pytest.fixture
def raw() -> StandIn:
    return StandIn()


@pytest.fixture
def arena() -> memoryview:
    return memoryview(bytearray(8 * LARGE))


@pytest.fixture
def naps() -> list[float]:
    return []


@pytest.fixture
def store(raw: StandIn, arena: memoryview, naps: list[float]) -> Iterator[MooncakeStore]:
    with closing(MooncakeStore(join(raw), staging_bytes=STAGING_BYTES, sleep=naps.append)) as store:
        store.register([arena])
        yield store


def write(name: str, data: memoryview) -> Write:
    return Write(key=key(name), data=data, stamp=seal(HERE, key(name), data))


def test_large_values_in_registered_memory_are_not_copied(store: MooncakeStore, raw: StandIn, arena: memoryview) -> None:
    arena[:LARGE] = payload("x", LARGE)
    assert store.write_from(HERE, [write("x", arena[:LARGE])]) == [WriteOutcome.STORED]
    (result,) = store.read_into(HERE, [Read(key=key("x"), into=arena[LARGE : 2 * LARGE])])
    assert result.outcome is ReadOutcome.FOUND and arena[LARGE : 2 * LARGE] == arena[:LARGE]
    assert raw.slices == [2, 2], "the stamp and the caller's memory, both ways"


def test_one_read_moves_data_at_a_time(store: MooncakeStore, raw: StandIn) -> None:
    store.write_from(HERE, [offer(HERE, str(name)) for name in range(8)])
    running, most, pause = 0, 0, Event()

    def slow() -> None:
        nonlocal running, most
        running += 1
        most = max(most, running)
        pause.wait(0.01)  # time for another to come in
        running -= 1

    raw.slow = slow
    with ThreadPoolExecutor(4) as readers:
        values = list(readers.map(lambda name: fetch(store, HERE, str(name)), range(8)))
    assert values == [payload(str(name), 1000) for name in range(8)]
    assert most == 1


def test_who_waited_for_a_read_that_stalled_begins_none_of_its_own(raw: StandIn) -> None:
    clock, began, go_on = ManualClock(), Event(), Event()
    with closing(MooncakeStore(join(raw), staging_bytes=STAGING_BYTES, clock=clock)) as store:
        store.write_from(HERE, [offer(HERE, "x"), offer(HERE, "y")])
        session = store._session

        def stall() -> None:
            began.set()
            assert go_on.wait(60)
            clock.advance(60.0)

        raw.slow, raw.codes = stall, [-800]
        calls = len(raw.calls)
        with ThreadPoolExecutor(2) as readers:
            first = readers.submit(fetch, store, HERE, "x")
            assert began.wait(60)
            second = readers.submit(fetch, store, HERE, "y")
            wait_for(lambda: session._verbs_running == 2)
            go_on.set()
            for reader in (first, second):
                with pytest.raises(StoreError, match="stalled"):
                    reader.result(60)
        assert len(raw.calls) == calls + 1


def wait_for(condition: Callable[[], bool]) -> None:
    deadline_s = time.monotonic() + 60
    while not condition():
        assert time.monotonic() < deadline_s
        time.sleep(0.001)


def test_other_values_go_through_staging(store: MooncakeStore, raw: StandIn, arena: memoryview) -> None:
    half_outside = memoryview(bytearray(LARGE))
    store.write_from(HERE, [write("outside", half_outside), write("small", arena[:COPY_BYTES])])
    assert raw.slices == [1, 1]
    assert {len(value) for value in raw.values.values()} == {LARGE + STAMP_BYTES, COPY_BYTES + STAMP_BYTES}


def test_a_buffer_that_leaves_its_region_is_copied(raw: StandIn) -> None:
    whole = memoryview(bytearray(4 * LARGE))
    with closing(MooncakeStore(join(raw), staging_bytes=STAGING_BYTES)) as store:
        store.register([whole[LARGE : 2 * LARGE]])
        store.write_from(
            HERE,
            [
                write("begins before", whole[LARGE // 2 : LARGE + LARGE // 2]),
                write("ends after", whole[LARGE + 1 : 2 * LARGE + 1]),
            ],
        )
        assert raw.slices == [1, 1]


def test_batches_larger_than_staging_are_cut(store: MooncakeStore, raw: StandIn) -> None:
    sizes = [2 * STAGING_BYTES // 15] * 7 + [10] * (2 * VALUES_PER_BATCH)  # a lane is a third of it
    offers = [offer(HERE, f"value {i}", size) for i, size in enumerate(sizes)]
    assert store.write_from(HERE, offers) == [WriteOutcome.STORED] * len(sizes)
    reads = [Read(key=each.key, into=memoryview(bytearray(each.data.nbytes))) for each in offers]
    assert {result.outcome for result in store.read_into(HERE, reads)} == {ReadOutcome.FOUND}
    assert all(read.into == each.data for read, each in zip(reads, offers, strict=True))
    assert max(raw.calls) <= VALUES_PER_BATCH and raw.calls[:3] == [2, 2, 2]


def test_a_read_larger_than_staging_fails_alone(store: MooncakeStore) -> None:
    store.write_from(HERE, [offer(HERE, "x"), offer(HERE, "y")])
    buffers = [memoryview(bytearray(size)) for size in (1000, STAGING_BYTES, 1000)]
    results = store.read_into(HERE, [Read(key=key(name), into=into) for name, into in zip("xay", buffers, strict=True)])
    assert [result.outcome for result in results] == [ReadOutcome.FOUND, ReadOutcome.FAILED, ReadOutcome.FOUND]


def test_members_of_a_group_are_named_to_mooncake_and_others_are_not(store: MooncakeStore, raw: StandIn) -> None:
    there = space("there")
    store.write_from(HERE, [offer(HERE, "a", group=b"g"), offer(HERE, "b", group=b"g"), offer(HERE, "alone")])
    store.write_from(there, [offer(there, "a", group=b"g")])
    first, second, alone, elsewhere = raw.groups.values()
    assert first == second != "" and alone == "" and elsewhere not in ("", first), "groups of two spaces are two groups"


@pytest.mark.parametrize(
    ("code", "outcome"),
    [
        (-200, WriteOutcome.NO_ROOM),
        (-1700, WriteOutcome.NO_ROOM),
        (-705, WriteOutcome.EXISTS),
        (-800, WriteOutcome.FAILED),
        (-1, WriteOutcome.FAILED),
    ],
)
def test_every_code_of_a_write_is_an_outcome(store: MooncakeStore, raw: StandIn, code: int, outcome: WriteOutcome) -> None:
    raw.codes = [0, code, 0, code]
    assert store.write_from(HERE, [offer(HERE, name) for name in "abc"]) == [WriteOutcome.STORED, outcome, WriteOutcome.STORED]
    assert store.counters[f"mooncake_write_error_{-code}"] == (outcome is WriteOutcome.FAILED)


@pytest.mark.parametrize(
    ("code", "outcome"),
    [
        (-704, ReadOutcome.MISSING),
        (-703, ReadOutcome.MISSING),
        (-600, ReadOutcome.FAILED),
        (-707, ReadOutcome.FAILED),
        (-800, ReadOutcome.FAILED),
        (999, ReadOutcome.LENGTH),
        (5000, ReadOutcome.LENGTH),
    ],
)
def test_every_code_of_a_read_is_an_outcome(store: MooncakeStore, raw: StandIn, code: int, outcome: ReadOutcome) -> None:
    store.write_from(HERE, [offer(HERE, name) for name in "ab"])
    raw.codes = [code, 0]
    results = store.read_into(HERE, [Read(key=key(name), into=memoryview(bytearray(1000))) for name in "ab"])
    assert [result.outcome for result in results] == [outcome, ReadOutcome.FOUND] and results[0].stamp == b""
    assert store.counters[f"mooncake_read_error_{-code}"] == (outcome is ReadOutcome.FAILED)


def test_a_full_master_gets_a_moment_to_evict(store: MooncakeStore, raw: StandIn, naps: list[float]) -> None:
    raw.codes = [0, -200, -200]
    assert store.write_from(HERE, [offer(HERE, name) for name in "abc"]) == [WriteOutcome.STORED] * 3
    assert len(naps) == 1 and fetch(store, HERE, "c") is not None


def test_a_master_that_does_not_answer_is_an_error(store: MooncakeStore, raw: StandIn) -> None:
    store.write_from(HERE, [offer(HERE, "x")])
    raw.codes = [-900]
    with pytest.raises(StoreError, match="does not answer"):
        fetch(store, HERE, "x")
    raw.down = True
    with pytest.raises(StoreError, match="nowhere:0"):
        store.write_from(HERE, [offer(HERE, "y")])
    raw.down = False
    assert fetch(store, HERE, "x") is not None, "and it comes back by itself"


def test_memory_of_a_stalled_transfer_is_not_given_back_before_the_client_is_gone(raw: StandIn, arena: memoryview) -> None:
    clock = ManualClock()
    with closing(MooncakeStore(join(raw), staging_bytes=STAGING_BYTES, clock=clock)) as store:
        store.register([arena])
        store.write_from(HERE, [offer(HERE, "x")])
        raw.slow = lambda: clock.advance(60.0)
        raw.codes = [-800]
        with pytest.raises(StoreError, match="stalled"):
            fetch(store, HERE, "x")
        assert raw.closed and not raw.registered, "nothing can arrive any more"
        assert fetch(store, HERE, "x") is not None and not raw.closed, "slow is not stalled, and the next verb joins again"
        assert raw.registered[address_of(arena)] == arena.nbytes, "with the same memory"


def test_memory_of_a_transfer_that_failed_at_once_may_be_written_until_mooncake_gives_it_up(store: MooncakeStore) -> None:
    """The slices of a value are transfers of their own: one fails, the others go on. Who waits so long: `store_tier/ops.py`."""
    assert store.traits.late_write_s == 60.0


def test_memory_registered_twice_is_refused(raw: StandIn, arena: memoryview) -> None:
    with closing(MooncakeStore(join(raw), staging_bytes=STAGING_BYTES)) as store:
        own = dict(raw.registered)
        with pytest.raises(StoreError, match="register"):
            store.register([arena, arena[10:20]])
        assert raw.registered == own, "all or nothing"
        store.register([arena])
        store.register([arena[:]])  # the very same is no mistake
        assert raw.registered == {**own, address_of(arena): arena.nbytes}


def test_memory_is_taken_back_and_what_lies_in_it_is_copied_again(store: MooncakeStore, raw: StandIn, arena: memoryview) -> None:
    store.unregister([arena])
    store.unregister([arena])
    assert address_of(arena) not in raw.registered
    store.write_from(HERE, [write("x", arena[:LARGE])])
    assert raw.slices == [1]


def test_memory_can_be_shown_and_taken_back_between_sessions(raw: StandIn, arena: memoryview) -> None:
    clock, other = ManualClock(), memoryview(bytearray(LARGE))
    with closing(MooncakeStore(join(raw), staging_bytes=STAGING_BYTES, clock=clock)) as store:
        store.register([arena])
        store.write_from(HERE, [offer(HERE, "x")])
        raw.slow, raw.codes = lambda: clock.advance(60.0), [-800]
        with pytest.raises(StoreError, match="stalled"):
            fetch(store, HERE, "x")
        store.register([other])
        store.unregister([arena])
        assert raw.closed and not raw.registered
        fetch(store, HERE, "x")
        assert address_of(other) in raw.registered and address_of(arena) not in raw.registered


def test_a_closed_store_is_shown_nothing(store: MooncakeStore, arena: memoryview) -> None:
    store.close()
    store.unregister([arena])
    with pytest.raises(StoreError, match="closed"):
        store.register([arena])


def test_a_closed_store_leaves_nothing_registered(raw: StandIn, arena: memoryview) -> None:
    store = MooncakeStore(join(raw), staging_bytes=STAGING_BYTES)
    store.register([arena, arena[:0]])
    store.close()
    store.close()
    assert raw.closed and not raw.registered
    for verb in (
        lambda: store.write_from(HERE, []),
        lambda: store.read_into(HERE, []),
        lambda: store.delete(HERE, []),
        store.flush,
    ):
        with pytest.raises(StoreError, match="closed"):
            verb()
