"""What a read or a write stands on is walked later, and comes out as if it had been walked at once."""

from __future__ import annotations

import numpy as np
import pytest

from stepwell.store.api import NO_PARENT, Space
from stepwell.store.log.format.batch import ENTRY, Batch, BatchKind
from stepwell.store.log.state.index import Index

SPACE = Space(digest=bytes([7]) * 32)


def key(number: int) -> bytes:
    return number.to_bytes(32, "little")


def put(index: Index, number: int, parent: int | None) -> None:
    entries = np.zeros(1, ENTRY)
    entries["key"] = np.frombuffer(key(number), np.uint8)
    entries["parent"] = np.frombuffer(NO_PARENT if parent is None else key(parent), np.uint8)
    entries["length"] = 5000
    tick = index.next_tick()
    batch = Batch(
        kind=BatchKind.PUT, segment=1, offset=0, header_bytes=4096, total_bytes=12288, seq=tick, settled=0, space=SPACE,
        entries=entries,
    )  # fmt: skip
    index.put(batch, used=tick)
    index.note_use(SPACE.digest, [] if parent is None else [key(parent)])


def read(index: Index, *numbers: int) -> None:
    index.next_tick()
    known = index.rows_of(SPACE.digest)
    keys = [key(number) for number in numbers]
    index.use(SPACE.digest, keys, np.array([known[each] for each in keys], dtype=np.int64))


@pytest.mark.parametrize("seed", range(20))
def test_uses_that_are_put_off_come_out_as_if_walked_at_once(seed: int) -> None:
    rng = np.random.default_rng(seed)
    late, soon = Index(), Index()
    parents: dict[int, int | None] = {}
    for number in range(1, 60):
        parents[number] = int(rng.choice(list(parents))) if parents and rng.random() < 0.9 else None
        for index in (late, soon):
            put(index, number, parents[number])
        soon.settle_uses()
        there = [each for each in parents if key(each) in late.rows_of(SPACE.digest)]
        if rng.random() < 0.5:
            chosen = rng.choice(there, size=min(3, len(there)), replace=False).tolist()
            for index in (late, soon):
                read(index, *chosen)
            soon.settle_uses()
        if rng.random() < 0.1:
            gone = int(rng.choice(there))
            for index in (late, soon):
                index.remove(np.array([index.rows_of(SPACE.digest)[key(gone)]], dtype=np.int64))
    late.settle_uses()
    for name, row in late.rows_of(SPACE.digest).items():
        assert late.columns.used[row] == soon.columns.used[soon.rows_of(SPACE.digest)[name]]
    late.audit()


def test_reading_a_long_prompt_in_pieces_walks_it_once() -> None:
    """1,000 pages read ten at a time: every piece stands on all before it, but the index is not walked a hundred times."""
    index = Index()
    for number in range(1, 1001):
        put(index, number, number - 1 or None)
    index.settle_uses()
    for first in range(1, 1001, 10):
        read(index, *range(first, first + 10))
    known = index.rows_of(SPACE.digest)
    steps = 0

    class Counting(dict[bytes, int]):
        def get(self, name, default=None):  # type: ignore[no-untyped-def, override]
            nonlocal steps
            steps += 1
            return super().get(name, default)

    index._rows[0] = Counting(known)
    index.settle_uses()
    assert steps <= 1000 + 100
    assert set(index.columns.used[list(known.values())].tolist()) == {index.tick}
