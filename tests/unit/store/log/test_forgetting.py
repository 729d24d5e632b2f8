"""Deleted values leave nothing behind: emptied namespaces, deletes, clears. And nothing that was deleted comes back."""

from __future__ import annotations

from contextlib import closing
from pathlib import Path
from random import Random
from threading import Event, Thread

import pytest
from log_fixtures import OpenLog

from stepwell.base.meters import ManualClock
from stepwell.store.api import Space, WriteOutcome
from stepwell.store.log.opening import open_directory
from stepwell.store.log.state import index as log_index
from stepwell.store.log.store import LogStore
from stepwell.store.log.writing.upkeep import Direct
from stepwell.testing.store_contract import fetch, key, offer, space

HERE = space("here")
KIB = 1024


def open_at(directory: Path, budget: int = 2400 * KIB) -> LogStore:
    return open_directory(directory, clock=ManualClock(), budget_bytes=budget, segment_bytes=64 * KIB, direct=Direct.OFF)


def nth(number: int) -> Space:
    return Space(digest=number.to_bytes(32, "big"), label=f"salt {number}")


def empty_one(store: LogStore, number: int, how: str) -> None:
    where = nth(number)
    assert store.write_from(where, [offer(where, "x", 8)]) == [WriteOutcome.STORED]
    assert (store.delete(where, [key("x")]) if how == "delete" else store.clear(where.digest)) == 1


@pytest.mark.parametrize("how", ["delete", "clear"])
def test_emptied_namespaces_cost_nothing_of_what_others_keep(how: str, tmp_path: Path) -> None:
    names = [f"v{at}" for at in range(60)]
    with closing(open_at(tmp_path)) as store:
        for name in names:
            store.write_from(HERE, [offer(HERE, name, 9000)])
        most, size = store.stat().max_segments, store._state.next_snapshot_bytes
        for turn in range(40):
            for at in range(20):
                empty_one(store, turn * 20 + at, how)
            assert all(fetch(store, HERE, name, 9000) for name in names), f"a value went in turn {turn}"
        assert store.stat().max_segments == most and store._state.next_snapshot_bytes <= size + KIB
        assert store._state.index.num_spaces == 1 and len(store._state.index.spaces) <= 2
        store.audit()
    assert (tmp_path / "snapshot").stat().st_size <= size + KIB
    with closing(open_at(tmp_path)) as store:
        assert [stat.digest for stat in store.stat().spaces] == [HERE.digest]


def test_a_namespace_that_was_given_up_is_forgotten_and_may_come_back(open_here: OpenLog) -> None:
    store = open_here()
    for number in range(100):
        store.write_from(nth(number), [offer(nth(number), "x", 9000)])
    there = [number for number in range(100) if store.contains(nth(number), [key("x")]) == [True]]
    assert store._state.index.num_spaces == len(there) < 100
    assert len(store._state.index.spaces) < 100, "numbers of spaces are given again"
    store.write_from(nth(0), [offer(nth(0), "y", 9000)])
    assert fetch(store, nth(0), "y", 9000)
    store.audit()
    store = open_here()
    assert fetch(store, nth(0), "y", 9000) and {stat.label for stat in store.stat().spaces} >= {"salt 0", "salt 99"}


def test_deletes_are_in_no_snapshot(tmp_path: Path) -> None:
    names = [f"v{at}" for at in range(3000)]
    with closing(open_at(tmp_path, 4096 * KIB)) as store:
        store.write_from(HERE, [offer(HERE, name, 8) for name in names])
        store.snapshot()
        assert store.delete(HERE, [key(name) for name in names[10:]]) == 2990
        assert store.stat().marks == 2990
        store.snapshot()
        assert (tmp_path / "snapshot").stat().st_size < 16 * KIB
    for _ in range(2):
        with closing(open_at(tmp_path, 4096 * KIB)) as store:
            assert store.contains(HERE, [key(name) for name in names]) == [True] * 10 + [False] * 2990
        (tmp_path / "snapshot").unlink()


def test_marks_are_carried_no_longer_than_what_they_hide_is_there(tmp_path: Path) -> None:
    """The values that stay are older than any of the deletes: by age alone, all of these would have to be carried for ever."""
    with closing(open_at(tmp_path)) as store:
        for at in range(60):
            store.write_from(HERE, [offer(HERE, f"old {at}", 9000)])
        for turn in range(300):
            names = [f"{turn}/{at}" for at in range(40)]
            store.write_from(HERE, [offer(HERE, name, 100) for name in names])
            assert store.delete(HERE, [key(name) for name in names]) == 40
        assert store.stat().marks < 3000, "of 12,000: what is in the segments that are there"
        assert store.counters["dropped_values"] == 0
        store.audit()


def test_nothing_deleted_comes_back_however_often_it_was_copied_given_up_and_written_again(tmp_path: Path) -> None:
    """A few keys, written, read, deleted and cleared over and over in a full store; then the log is read anew."""
    random, spaces = Random(5), [nth(1), nth(2)]
    names = [f"k{at}" for at in range(60)]
    deleted: set[tuple[Space, str]] = set()
    copied = given_up = 0
    store = open_at(tmp_path / "store", 1200 * KIB)
    for turn in range(1000):
        where, name = random.choice(spaces), random.choice(names)
        work = random.random()
        if work < 0.7:
            deleted.discard((where, name))
            store.write_from(where, [offer(where, name, 9000)])
        elif work < 0.85:
            fetch(store, where, name, 9000)
        elif work < 0.995:
            store.delete(where, [key(name)])
            deleted.add((where, name))
        else:
            store.clear(where.digest)
            deleted |= {(where, name) for name in names}
        if turn % 25 == 24:
            copied += store.counters["carried_values"]
            given_up += store.counters["dropped_values"]
            if turn % 50 == 24:
                store.close()
            else:
                store.leave_in_child()  # as if it was killed
            if turn % 75 == 74:
                (tmp_path / "store" / "snapshot").unlink(missing_ok=True)
            store = open_at(tmp_path / "store", 1200 * KIB)
            back = sorted(name for where, name in deleted if store.contains(where, [key(name)]) == [True])
            assert not back, f"turn {turn}: {back}"
            store.audit()
    assert copied and given_up, f"the test must do both: {copied=} {given_up=}"
    store.close()


def test_a_clear_lets_readers_in_between(open_here: OpenLog, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(log_index, "_SLICE", 50)
    store, other = open_here(), space("other")
    store.write_from(HERE, [offer(HERE, f"v{at}", 8) for at in range(1000)])
    store.write_from(other, [offer(other, "x")])
    half_way, go_on = Event(), Event()
    steps = 0
    clear = log_index.Index.clear

    def slowly(self: log_index.Index, digest: bytes, as_of: int):  # type: ignore[no-untyped-def]
        nonlocal steps
        for _ in clear(self, digest, as_of):
            steps += 1
            yield
            if steps == 5:
                half_way.set()

    def pause(_: float) -> None:
        if half_way.is_set():
            assert go_on.wait(60)

    monkeypatch.setattr(log_index.Index, "clear", slowly)
    monkeypatch.setattr("stepwell.store.log.writing.writer.time.sleep", pause)
    thread = Thread(target=store.clear, args=[HERE.digest])
    thread.start()
    assert half_way.wait(60)
    assert store.contains(HERE, [key(f"v{at}") for at in range(1000)]) == [False] * 1000, "from the first step on"
    assert fetch(store, other, "x"), "who reads meanwhile does not wait for the rest"
    assert store.stat().values < 1001
    go_on.set()
    thread.join(60)
    assert not thread.is_alive() and steps >= 1000 // 50
    assert store.stat().values == 1 and store.write_from(HERE, [offer(HERE, "v1", 8)]) == [WriteOutcome.STORED]
    store.audit()


def test_a_clear_that_is_interrupted_is_finished_all_the_same(open_here: OpenLog, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(log_index, "_SLICE", 10)
    store = open_here()
    store.write_from(HERE, [offer(HERE, f"v{at}", 8) for at in range(100)])

    def interrupted(_: float) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr("stepwell.store.log.writing.writer.time.sleep", interrupted)
        with pytest.raises(KeyboardInterrupt):
            store.clear(HERE.digest)
    assert store.stat().values == 0
    store.audit()
