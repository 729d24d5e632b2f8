"""Any bytes at all in the log's files: a clean answer, never bytes that are not the ones saved, never a wild allocation."""

from __future__ import annotations

import shutil
import struct
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path
from tempfile import TemporaryDirectory

import numpy as np
import pytest
import xxhash
from hypothesis import given
from hypothesis import strategies as st

from stepwell.base.errors import StoreError
from stepwell.base.ids import Level
from stepwell.base.meters import ManualClock
from stepwell.store.api import Read, ReadOutcome, Space
from stepwell.store.log.disk.files import BLOCK_BYTES, Disk
from stepwell.store.log.format import snapshot, superblock
from stepwell.store.log.format.batch import Batch, BatchKind, levels_of, pack_values, parse_header, write_header
from stepwell.store.log.format.scan import scan
from stepwell.store.log.opening import open_directory
from stepwell.store.log.state.index import Index
from stepwell.store.log.store import LogStore
from stepwell.store.log.writing.upkeep import Direct
from stepwell.store.seal import Verdict, verify
from stepwell.testing.store_contract import key, offer, payload

HERE = Space(digest=b"x" * 32, label="model", tenant="tenant-a")
SEED, SEGMENT_BYTES, BUDGET_BYTES = 99, 64 * 1024, 800 * 1024
SIZES = {f"v{at}": size for at, size in enumerate((10, 500, 1024, 2000, 4096, 9000, 20_000) * 6)}


def header() -> bytearray:
    """A batch of small and large values, as it would be written."""
    levels = (*Level, Level.NORMAL)
    writes = [offer(HERE, name, SIZES[name], level=level) for name, level in zip(("v0", "v1", "v3", "v5"), levels, strict=True)]
    draft = pack_values(HERE, writes, SEGMENT_BYTES)
    assert draft is not None
    into = memoryview(bytearray(draft.header_bytes))
    batch = Batch(
        kind=draft.kind, segment=3, offset=8192, header_bytes=draft.header_bytes, total_bytes=draft.total_bytes, seq=7, settled=6,
        space=HERE, entries=draft.entries,
    )  # fmt: skip
    write_header(batch, into, seed=SEED)
    return bytearray(into)


def parse(content: bytearray) -> Batch | None:
    return parse_header(memoryview(content), seed=SEED, segment=3, offset=8192, segment_bytes=SEGMENT_BYTES)


def open_at(directory: Path) -> LogStore:
    return open_directory(
        directory, clock=ManualClock(), budget_bytes=BUDGET_BYTES, segment_bytes=SEGMENT_BYTES, direct=Direct.OFF
    )


@pytest.fixture(scope="module")
def original() -> Iterator[Path]:
    """A store with a few segments, deletes and carried values, closed as it should be."""
    with TemporaryDirectory() as folder:
        with closing(open_at(Path(folder) / "store")) as store:
            for name, size in SIZES.items():
                store.write_from(HERE, [offer(HERE, name, size)])
                if name.endswith("3"):
                    store.delete(HERE, [key(name)])
        yield Path(folder) / "store"


def served(store: LogStore) -> tuple[set[str], set[str]]:
    """The names whose bytes verify, and those that a reader of stamps would turn away. All that verify are the ones saved."""
    sound, broken = set(), set()
    for name, size in SIZES.items():
        into = memoryview(bytearray(size))
        (result,) = store.read_into(HERE, [Read(key=key(name), into=into)])
        if result.outcome is ReadOutcome.FOUND and verify(HERE, key(name), into, result.stamp) is Verdict.INTACT:
            assert bytes(into) == payload(name, size), f"{name} came back with other bytes"
            sound.add(name)
        elif result.outcome is not ReadOutcome.MISSING:
            broken.add(name)
    return sound, broken


@given(st.integers(0, 2**20), st.integers(1, 255))
def test_a_header_with_any_byte_changed_is_no_header(at: int, flip: int) -> None:
    content = header()
    content[at % len(content)] ^= flip
    assert parse(content) is None


@given(st.integers(0, 1100), st.binary(min_size=1, max_size=16))
def test_a_header_that_lies_but_verifies_never_points_outside_its_batch(at: int, lie: bytes) -> None:
    content = header()
    content[at : at + len(lie)] = lie
    struct.pack_into("<Q", content, 8, xxhash.xxh3_64_intdigest(memoryview(content)[16:], SEED))
    batch = parse(content)
    if batch is not None and len(batch.entries):
        ends = batch.entries["offset"].astype(object) + batch.entries["length"].astype(object)
        assert max(ends) <= batch.total_bytes <= SEGMENT_BYTES - 8192
        assert batch.kind is not BatchKind.PUT or set(levels_of(batch.entries).tolist()) <= {*Level}


@given(st.lists(st.binary(max_size=200), max_size=6), st.integers(0, 3))
def test_a_segment_of_any_bytes_is_scanned_to_its_end(parts: list[bytes], headers: int) -> None:
    content = b"".join(part.ljust(BLOCK_BYTES, b"?") for part in [*parts, *[bytes(header())] * headers])
    with TemporaryDirectory() as folder:
        (Path(folder) / "f").write_bytes(content)
        fd = Disk().open(Path(folder) / "f", writable=False)
        items = list(scan(Disk(), fd, segment=3, start=0, seed=SEED, segment_bytes=SEGMENT_BYTES))
        Disk().close(fd)
    covered = sum(item.total_bytes if isinstance(item, Batch) else item.size for item in items)
    assert covered >= len(content) // BLOCK_BYTES * BLOCK_BYTES


@given(st.integers(0, 2**20), st.binary(min_size=1, max_size=12), st.booleans())
def test_a_snapshot_of_any_bytes_is_taken_whole_or_not_at_all(original: Path, at: int, lie: bytes, resealed: bool) -> None:
    content = bytearray((original / "snapshot").read_bytes())
    at %= len(content)
    before = bytes(content)
    content[at : at + len(lie)] = lie
    block = superblock.read(Disk(), original)
    assert block is not None
    if resealed:
        struct.pack_into("<Q", content, 8, xxhash.xxh3_64_intdigest(memoryview(content)[16:], block.seed))
    shot = snapshot.decode(memoryview(content), seed=block.seed, segment_bytes=SEGMENT_BYTES)
    if not resealed:
        assert (shot is not None) == (bytes(content) == before)
    if shot is not None:
        Index().load(shot.spaces, shot.columns, shot.tick)
        ends = shot.columns["offset"] + shot.columns["length"]
        assert int(np.max(ends, initial=0)) <= SEGMENT_BYTES


MUTATIONS = ("flip", "zero", "truncate", "extend", "swap blocks", "swap files", "delete", "empty")


@given(st.lists(st.tuples(st.sampled_from(MUTATIONS), st.integers(0, 2**20), st.integers(0, 2**20)), min_size=1, max_size=4))
def test_a_directory_damaged_in_any_way_opens_and_serves_only_what_was_saved(
    original: Path, wounds: list[tuple[str, int, int]]
) -> None:
    with TemporaryDirectory() as folder:
        directory = Path(folder) / "store"
        shutil.copytree(original, directory)
        for wound in wounds:
            harm(directory, *wound)
        try:
            store = open_at(directory)
        except StoreError:
            return  # store.json itself: a clear answer
        with closing(store):
            store.audit()
            sound, _ = served(store)
            store.repair(lambda size: None)
            again, broken = served(store)
            assert again <= sound and not broken, f"repair left {broken}"
            store.write_from(HERE, [offer(HERE, "new", 3000)])
            assert not store.repair(lambda size: None).damage, "a second repair finds nothing"
        assert sum(path.stat().st_size for path in directory.iterdir()) <= BUDGET_BYTES


def harm(directory: Path, how: str, first: int, second: int) -> None:
    files = sorted(path for path in directory.iterdir() if path.name not in ("lock", "store.json"))
    path, other = files[first % len(files)], files[second % len(files)]
    content = bytearray(path.read_bytes())
    if not content:
        return
    at = second % len(content)
    if how == "flip":
        content[at] ^= 1 << first % 8
    elif how == "zero":
        content[at : at + 5000] = bytes(len(content[at : at + 5000]))
    elif how == "truncate":
        del content[at:]
    elif how == "extend":
        content += bytes(first % 100_000)
    elif how == "swap blocks":
        there = first % len(content)
        content[at : at + 4096], content[there : there + 4096] = content[there : there + 4096], content[at : at + 4096]
    elif how == "swap files":
        content, rest = bytearray(other.read_bytes()), content
        other.write_bytes(rest)
    elif how == "empty":
        content.clear()
    path.write_bytes(content)
    if how == "delete":
        path.unlink()
