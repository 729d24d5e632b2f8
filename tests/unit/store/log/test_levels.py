"""The log evicts the lowest level first, keeps chains whole, and learns levels back however it was closed."""

from __future__ import annotations

import struct
from pathlib import Path

import numpy as np
import pytest
import xxhash
from log_fixtures import OpenLog

from stepwell.base.ids import Level
from stepwell.store.api import NO_PARENT, Space
from stepwell.store.log.format import snapshot
from stepwell.store.log.format.batch import ENTRY, Batch, BatchKind
from stepwell.store.log.state.index import Index
from stepwell.store.log.store import LogStore
from stepwell.store.log.writing.victim import evict_first
from stepwell.testing.store_contract import key, offer, space

HERE = space("levels")
SIZE = 9000
FILLERS = 130  # more than the budget holds


def fill(store: LogStore) -> None:
    for number in range(FILLERS):
        store.write_from(HERE, [offer(HERE, f"filler {number}", SIZE)])


def has(store: LogStore, *names: str) -> list[bool]:
    return store.contains(HERE, [key(name) for name in names])


def level_of(store: LogStore, name: str) -> Level:
    index = store._state.index
    return Level(int(index.columns.level[index.rows_of(HERE.digest)[key(name)]]))


def write_all_levels(store: LogStore) -> None:
    store.write_from(HERE, [offer(HERE, level.name, SIZE, level=level) for level in Level])


def test_what_matters_outlives_what_was_used_later(open_here: OpenLog) -> None:
    store = open_here()
    write_all_levels(store)
    fill(store)
    assert has(store, *(level.name for level in Level)) == [False, False, True]
    store.audit()


def test_a_chain_is_kept_for_what_stands_on_it(open_here: OpenLog) -> None:
    store = open_here()
    store.write_from(HERE, [offer(HERE, "root", SIZE, level=Level.EXPENDABLE)])
    store.write_from(HERE, [offer(HERE, "end", SIZE, parent=key("root"), depth=1, level=Level.VALUABLE)])
    fill(store)
    assert has(store, "root", "end") == [True, True]
    store.relevel(HERE, [key("end")], Level.EXPENDABLE)
    fill_again = [offer(HERE, f"later {number}", SIZE) for number in range(FILLERS)]
    for write in fill_again:
        store.write_from(HERE, [write])
    assert has(store, "root", "end") == [False, False]


@pytest.mark.parametrize("lost", ["nothing", "snapshot"])
def test_levels_are_learned_back(open_here: OpenLog, tmp_path: Path, lost: str) -> None:
    """From the snapshot, or from what the values were written with."""
    store = open_here()
    write_all_levels(store)
    store.close()
    if lost == "snapshot":
        (tmp_path / "store" / snapshot.NAME).unlink()
    store = open_here()
    assert [level_of(store, level.name) for level in Level] == [*Level]


def test_a_hint_is_learned_back_from_the_snapshot_and_from_values_that_were_copied(open_here: OpenLog, tmp_path: Path) -> None:
    store = open_here()
    write_all_levels(store)
    store.relevel(HERE, [key("NORMAL")], Level.VALUABLE)
    store.close()
    store = open_here()
    assert level_of(store, "NORMAL") is Level.VALUABLE
    fill(store)
    assert has(store, "NORMAL") == [True]
    store.close()
    (tmp_path / "store" / snapshot.NAME).unlink()
    store = open_here()
    assert level_of(store, "NORMAL") is Level.VALUABLE, "it was copied when its segment was reclaimed, with its level then"


def test_a_snapshot_of_another_version_is_as_good_as_none(open_here: OpenLog, tmp_path: Path) -> None:
    store = open_here()
    store.write_from(HERE, [offer(HERE, "x", SIZE), offer(HERE, "y", SIZE)])
    seed = store._state.seed
    store.close()
    path = tmp_path / "store" / snapshot.NAME
    content = bytearray(path.read_bytes())
    assert snapshot.decode(memoryview(content), seed=seed, segment_bytes=64 * 1024) is not None
    struct.pack_into("<Q", content, 16, snapshot.VERSION + 1)
    struct.pack_into("<Q", content, 8, xxhash.xxh3_64_intdigest(bytes(content[16:]), seed))
    assert snapshot.decode(memoryview(content), seed=seed, segment_bytes=64 * 1024) is None
    path.write_bytes(content)
    assert has(open_here(), "x", "y") == [True, True], "the log was read instead"


def test_a_level_that_does_not_exist_is_refused(open_here: OpenLog, tmp_path: Path) -> None:
    store = open_here()
    with pytest.raises(ValueError, match="levels are"):
        store.write_from(HERE, [offer(HERE, "x", SIZE)._replace(level=7)])  # type: ignore[arg-type]
    store.write_from(HERE, [offer(HERE, "x", SIZE)])
    seed = store._state.seed
    store.close()
    path = tmp_path / "store" / snapshot.NAME
    content = bytearray(path.read_bytes())
    content[-1] = max(Level) + 1
    struct.pack_into("<Q", content, 8, xxhash.xxh3_64_intdigest(bytes(content[16:]), seed))
    assert snapshot.decode(memoryview(content), seed=seed, segment_bytes=64 * 1024) is None


@pytest.mark.parametrize("seed", range(20))
def test_the_order_is_that_of_walking_every_chain(seed: int) -> None:
    rng = np.random.default_rng(seed)
    index, where = Index(), Space(digest=bytes([7]) * 32)
    index.keep_order([""])
    parents: dict[int, int] = {}
    levels: dict[int, int] = {}
    depths = {0: -1}
    for number in range(1, 80):
        parents[number] = int(rng.integers(0, number))
        levels[number] = int(rng.choice([*Level], p=[0.6, 0.3, 0.1]))
        depths[number] = depths[parents[number]] + 1
        entries = np.zeros(1, ENTRY)
        entries["key"] = np.frombuffer(number.to_bytes(32, "little"), np.uint8)
        parent = parents[number].to_bytes(32, "little") if parents[number] else NO_PARENT
        entries["parent"] = np.frombuffer(parent, np.uint8)
        entries["length"], entries["depth"] = 5000, depths[number]
        tick = index.next_tick()
        index.put(
            Batch(
                kind=BatchKind.PUT, segment=1, offset=0, header_bytes=4096, total_bytes=12288, seq=tick, settled=0,
                space=where, entries=entries,
            ),
            used=tick,
        )  # fmt: skip
        index.note_use(where.digest, [parent])
        index.relevel(where.digest, [number.to_bytes(32, "little")], Level(levels[number]))
    expected = dict(levels)
    for number in levels:
        here = number
        while here:
            expected[here] = max(expected[here], levels[number])
            here = parents[here]
    index.audit()
    rows = evict_first(index, "", 2**40, most=2**20)
    order = [int.from_bytes(index.columns.key[row].tobytes(), "little") for row in rows]
    assert [expected[number] for number in order] == sorted(expected.values())
    place = {number: at for at, number in enumerate(order)}
    assert all(place[number] < place[parent] for number, parent in parents.items() if parent)
