"""What every store promises, as tests that any author can run over theirs.

    class TestMine(StoreContract):
        @pytest.fixture
        def store(self):
            with closing(MyStore(...)) as store:
                yield store

Each method is one promise of `stepwell.store.api`. A store is asked for little enough that any budget of 64 MiB will do.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor

from stepwell.base.errors import StoreError
from stepwell.base.ids import Level
from stepwell.store.api import (
    NO_PARENT,
    Read,
    ReadOutcome,
    Space,
    Store,
    Write,
    WriteOutcome,
    largest_spaces,
    relevel,
    size_of,
)
from stepwell.store.seal import Verdict, seal, verify

SIZES = (0, 1, 63, 64, 511, 512, 513, 4095, 4096, 4097, 65536, 300_001)


def space(name: str) -> Space:
    return Space(digest=hashlib.blake2b(name.encode(), digest_size=32).digest(), label=name)


def key(name: str) -> bytes:
    return hashlib.blake2b(b"key" + name.encode(), digest_size=32).digest()


def payload(name: str, size: int) -> bytes:
    """Bytes of their own for every name."""
    return hashlib.shake_128(name.encode()).digest(size)


def offer(
    where: Space, name: str, size: int = 1000, *, parent: bytes = NO_PARENT, depth: int = 0, group: bytes = b"",
    level: Level = Level.NORMAL,
) -> Write:  # fmt: skip
    data = memoryview(payload(name, size))
    stamp = seal(where, key(name), data)
    return Write(key=key(name), data=data, stamp=stamp, parent=parent, depth=depth, group=group, level=level)


def chain(where: Space, names: Sequence[str], size: int = 1000) -> list[Write]:
    """A chain of values, each the parent of the next."""
    parents = [NO_PARENT, *(key(name) for name in names)]
    return [offer(where, name, size, parent=parents[depth], depth=depth) for depth, name in enumerate(names)]


def fetch(store: Store, where: Space, name: str, size: int = 1000) -> bytes | None:
    """The value of a name, verified; None for a miss. Fails when bytes come back that are not the ones saved."""
    into = memoryview(bytearray(size))
    (result,) = store.read_into(where, [Read(key=key(name), into=into)])
    if result.outcome is not ReadOutcome.FOUND:
        return None
    verdict = verify(where, key(name), into, result.stamp)
    assert verdict is Verdict.INTACT, f"the value of {name} came back although {verdict.value}"
    assert bytes(into) == payload(name, size), f"the value of {name} came back with other bytes"
    return bytes(into)


class StoreContract:
    """Subclass it, give it a fixture `store` that opens an empty store, and run pytest."""

    def test_a_value_comes_back_with_its_bytes_and_its_stamp(self, store: Store) -> None:
        here = space("a")
        write = offer(here, "x")
        assert store.write_from(here, [write]) == [WriteOutcome.STORED]
        into = memoryview(bytearray(1000))
        (result,) = store.read_into(here, [Read(key=write.key, into=into)])
        assert result.outcome is ReadOutcome.FOUND and result.stamp == write.stamp and into == write.data

    def test_values_of_every_size_in_one_batch(self, store: Store) -> None:
        here = space("sizes")
        writes = [offer(here, f"size {size}", size) for size in SIZES]
        assert store.write_from(here, writes) == [WriteOutcome.STORED] * len(SIZES)
        for size in SIZES:
            assert fetch(store, here, f"size {size}", size) is not None, f"a value of {size} bytes was lost"

    def test_results_are_in_the_order_of_the_batch(self, store: Store) -> None:
        here = space("order")
        store.write_from(here, [offer(here, name, 100) for name in ("a", "b", "c")])
        wanted = ("c", "none", "a", "also none", "b", "a")
        assert store.contains(here, [key(name) for name in wanted]) == [True, False, True, False, True, True]
        reads = [Read(key=key(name), into=memoryview(bytearray(100))) for name in wanted]
        outcomes = [result.outcome for result in store.read_into(here, reads)]
        missing, found = ReadOutcome.MISSING, ReadOutcome.FOUND
        assert outcomes == [found, missing, found, missing, found, found]
        for name, read in zip(wanted, reads, strict=True):
            assert "none" in name or bytes(read.into) == payload(name, 100), f"{name} was delivered out of order"

    def test_empty_batches_are_fine(self, store: Store) -> None:
        here = space("empty")
        assert store.contains(here, []) == [] and store.read_into(here, []) == [] and store.write_from(here, []) == []
        assert store.delete(here, []) == 0
        store.flush()

    def test_a_value_that_is_there_is_left_as_it_was(self, store: Store) -> None:
        here = space("first wins")
        store.write_from(here, [offer(here, "x", 100)])
        other = memoryview(payload("something else", 100))
        again = Write(key=key("x"), data=other, stamp=seal(here, key("x"), other))
        assert store.write_from(here, [again]) == [WriteOutcome.EXISTS]
        assert fetch(store, here, "x", 100) is not None

    def test_a_key_twice_in_one_batch_is_stored_once(self, store: Store) -> None:
        here = space("twice")
        assert store.write_from(here, [offer(here, "x"), offer(here, "x")]) == [WriteOutcome.STORED, WriteOutcome.EXISTS]
        assert fetch(store, here, "x") is not None

    def test_a_buffer_of_another_length_gets_nothing(self, store: Store) -> None:
        here = space("length")
        store.write_from(here, [offer(here, "x", 1000)])
        for size in (999, 1001, 1, 5000):
            (result,) = store.read_into(here, [Read(key=key("x"), into=memoryview(bytearray(size)))])
            assert result.outcome is ReadOutcome.LENGTH, f"a buffer of {size} bytes was filled from a value of 1000"

    def test_spaces_never_meet(self, store: Store) -> None:
        here, there = space("here"), space("there")
        store.write_from(here, [offer(here, "x")])
        assert store.contains(there, [key("x")]) == [False] and fetch(store, there, "x") is None
        assert store.write_from(there, [offer(there, "x")]) == [WriteOutcome.STORED]
        assert store.delete(here, [key("x")]) == 1
        assert fetch(store, here, "x") is None and fetch(store, there, "x") is not None

    def test_deleted_values_are_gone_and_can_be_written_again(self, store: Store) -> None:
        here = space("delete")
        store.write_from(here, [offer(here, "x"), offer(here, "y")])
        assert store.delete(here, [key("x"), key("never there")]) == 1
        assert store.delete(here, [key("x")]) == 0
        assert store.contains(here, [key("x"), key("y")]) == [False, True]
        assert fetch(store, here, "x") is None and fetch(store, here, "y") is not None
        assert store.write_from(here, [offer(here, "x")]) == [WriteOutcome.STORED]
        assert fetch(store, here, "x") is not None

    def test_a_read_that_is_cancelled_is_not_found(self, store: Store) -> None:
        here = space("cancel")
        store.write_from(here, [offer(here, name) for name in "abcd"])
        reads = [Read(key=key(name), into=memoryview(bytearray(1000))) for name in "abcd"]
        results = store.read_into(here, reads, cancelled=lambda: True)
        for read, result in zip(reads, results, strict=True):  # a store may not be able to stop, but it never pretends
            assert result.outcome in (ReadOutcome.CANCELLED, ReadOutcome.FOUND)
            if result.outcome is ReadOutcome.FOUND:
                assert verify(here, read.key, read.into, result.stamp) is Verdict.INTACT

    def test_a_value_beyond_the_largest_is_refused(self, store: Store) -> None:
        largest = store.traits.max_value_bytes
        if largest is None or largest > 2**28:
            return
        here = space("large")
        assert store.write_from(here, [offer(here, "x", largest + 1)]) == [WriteOutcome.TOO_LARGE]
        assert store.contains(here, [key("x")]) == [False]

    def test_chains_and_groups_change_nothing_but_who_goes_first(self, store: Store) -> None:
        here = space("chain")
        names = [f"link {depth}" for depth in range(20)]
        writes = chain(here, names)
        grouped = [
            Write(key=w.key, data=w.data, stamp=w.stamp, parent=w.parent, depth=w.depth, group=key("group")) for w in writes
        ]
        assert store.write_from(here, grouped) == [WriteOutcome.STORED] * 20
        assert all(fetch(store, here, name) is not None for name in names)

    def test_levels_change_nothing_but_who_goes_first(self, store: Store) -> None:
        here = space("levels")
        writes = [offer(here, level.name, level=level) for level in Level]
        assert store.write_from(here, writes) == [WriteOutcome.STORED] * len(Level)
        names = [key(level.name) for level in Level]
        for level in Level:
            expected = len(names) if store.traits.levels else 0
            assert relevel(store, here, [*names, key("never there")], level) == expected
        assert relevel(store, space("elsewhere"), names, Level.EXPENDABLE) == 0
        assert store.contains(here, names) == [True] * len(names)
        assert all(fetch(store, here, level.name) is not None for level in Level)

    def test_what_is_expendable_is_forgotten_first(self, store: Store) -> None:
        """With all it stands on, unless something else does."""
        here, size = space("expendable"), size_of(store)
        budget = size.budget_bytes if size is not None else None
        if not store.traits.levels or budget is None or budget > 2**27:
            return
        trunk = chain(here, ["root", "fork"], 40_000)
        kept = offer(here, "kept", 40_000, parent=key("fork"), depth=2)
        gone = offer(here, "gone", 40_000, parent=key("fork"), depth=2)
        store.write_from(here, [*trunk, kept, gone])
        store.write_from(here, [offer(here, "matters", 40_000, level=Level.VALUABLE)])
        relevel(store, here, [key("root"), key("fork"), key("gone")], Level.EXPENDABLE)
        number = 0
        while store.contains(here, [key("gone")]) == [True]:
            number += 1
            assert number * 40_000 < 2 * budget, "what is expendable outlived everything else"
            store.write_from(here, [offer(here, f"filler {number}", 40_000)])
            assert fetch(store, here, "kept", 40_000) is not None, "what is in use went before what is expendable"
        assert store.contains(here, [key(name) for name in ("root", "fork", "kept", "matters")]) == [True] * 4
        for number in range(2 * budget // 40_000):
            store.write_from(here, [offer(here, f"more {number}", 40_000)])
        assert store.contains(here, [key(name) for name in ("root", "fork", "kept", "matters")]) == [False] * 3 + [True]

    def test_buffers_need_no_alignment(self, store: Store) -> None:
        here = space("odd")
        data = memoryview(b"?" + payload("x", 70_001))[1:]
        assert store.write_from(here, [Write(key=key("x"), data=data, stamp=seal(here, key("x"), data))]) == [WriteOutcome.STORED]
        into = memoryview(bytearray(70_008))[3:70_004]
        (result,) = store.read_into(here, [Read(key=key("x"), into=into)])
        assert result.outcome is ReadOutcome.FOUND and into == data

    def test_many_threads_at_once(self, store: Store) -> None:
        here = space("threads")

        def live(thread: int) -> None:
            for turn in range(10):
                mine, shared = f"{thread}/{turn}", f"shared/{turn}"
                store.write_from(here, [offer(here, mine, 5000), offer(here, shared, 5000)])
                assert fetch(store, here, mine, 5000) is not None and fetch(store, here, shared, 5000) is not None
                if turn % 3 == 0:
                    assert store.delete(here, [key(mine)]) == 1
                    assert store.contains(here, [key(mine), key(shared)]) == [False, True]

        with ThreadPoolExecutor(4) as pool:
            for done in [pool.submit(live, thread) for thread in range(4)]:
                done.result()

    def test_a_store_that_knows_its_size_counts_what_is_written_and_deleted(self, store: Store) -> None:
        here, empty = space("size"), size_of(store)
        if empty is None:
            return
        store.write_from(here, [offer(here, "x", 20_000)])
        full = size_of(store)
        assert full is not None and full.used_bytes >= empty.used_bytes + 20_000
        assert full.budget_bytes is None or full.used_bytes <= full.budget_bytes
        store.delete(here, [key("x")])
        assert size_of(store) == empty

    def test_a_store_that_knows_its_size_says_whose_it_is(self, store: Store) -> None:
        if largest_spaces(store, 1) is None:
            return
        small, large, gone = space("small"), space("large"), space("gone")
        store.write_from(small, [offer(small, "x", 5_000)])
        store.write_from(large, [offer(large, "x", 20_000), offer(large, "y", 20_000)])
        store.write_from(gone, [offer(gone, "x", 50_000)])
        store.delete(gone, [key("x")])
        found = largest_spaces(store, 10)
        assert found is not None and [(each.space, each.values) for each in found] == [(large, 2), (small, 1)]
        assert found[0].used_bytes >= 40_000 and found[1].used_bytes >= 5_000
        assert largest_spaces(store, 1) == found[:1]

    def test_a_closed_store_says_so(self, store: Store) -> None:
        here = space("closed")
        store.close()
        store.close()
        try:
            store.contains(here, [key("x")])
        except StoreError:
            return
        raise AssertionError("a closed store answered")
