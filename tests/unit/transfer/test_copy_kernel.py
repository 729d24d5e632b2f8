"""The copy kernel in Triton's interpreter, compared with a plain loop: the same bytes, nothing else touched. No GPU needed."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from dataclasses import replace
from importlib import import_module
from types import ModuleType

import numpy as np
import pytest

torch = pytest.importorskip("torch", reason="torch is not installed")
pytest.importorskip("triton", reason="Triton is not installed")

from stepwell.transfer.page_copier import PageCopier, Route, StagedIds  # noqa: E402
from stepwell.transfer.page_tables import PagePairs, PageTable, Piece  # noqa: E402

NAME = "stepwell.transfer.copy_kernel"
BY_KERNEL = Route(crossover_bytes=1 << 40, programs=3, least_runs=1)


@pytest.fixture
def kernel(monkeypatch: pytest.MonkeyPatch) -> Iterator[ModuleType]:
    """Triton decides when a kernel is defined whether it is interpreted."""
    monkeypatch.setenv("TRITON_INTERPRET", "1")
    monkeypatch.delitem(sys.modules, NAME, raising=False)
    yield import_module(NAME)
    sys.modules.pop(NAME, None)


def random_bytes(size: int, seed: int) -> torch.Tensor:
    return torch.randint(0, 256, (size,), dtype=torch.uint8, generator=torch.Generator().manual_seed(seed))


def pairs_of(
    source_ids: list[int], target_ids: list[int], *, page_bytes: int, strides: tuple[int, int], to_device: bool, pages: int = 12
) -> PagePairs:
    """Two tables of random bytes; one stands for the device's."""
    tables = [
        PageTable.of(random_bytes(pages * stride, seed).view(pages, stride)[:, :page_bytes])
        for seed, stride in enumerate(strides)
    ]
    source, target = (replace(table, on_device=there) for table, there in zip(tables, (not to_device, to_device), strict=True))
    return PagePairs(
        source=source, target=target, source_ids=np.array(source_ids, np.int32), target_ids=np.array(target_ids, np.int32)
    )


def expected(piece: Piece) -> torch.Tensor:
    """All of the target's bytes after a plain loop."""
    pairs = piece.pairs
    out_B = pairs.target.bytes_B.clone()
    for read, write in zip(pairs.source_ids.tolist(), pairs.target_ids.tolist(), strict=True):
        first, onto = read * pairs.source.stride + piece.start, write * pairs.target.stride + piece.start
        out_B[onto : onto + piece.size_bytes] = pairs.source.bytes_B[first : first + piece.size_bytes]
    return out_B


def by_kernel(kernel: ModuleType, piece: Piece) -> None:
    copier, staged = PageCopier(BY_KERNEL, kernel=kernel, on_fallback=pytest.fail), StagedIds(torch.device("cpu"), capacity=16)
    staged.stage([piece.pairs])
    copier.queue(copier.routed(piece), staged)


@pytest.mark.parametrize("to_device", [True, False])
@pytest.mark.parametrize(
    ("page_bytes", "strides", "start", "size"),
    [
        (4096, (4096, 4096), 0, 4096),  # one block
        (9216, (12288, 12288), 0, 9216),  # several of the smaller ones
        (70000, (73728, 73728), 32768, 32768),  # the largest block, inside the page
        (8192, (8192, 12288), 528, 656 * 3),  # rows of 656 bytes; strides differ
        (4096, (4096, 4096), 8, 584),  # words of eight bytes
        (4096, (4096, 4096), 132, 132 * 5),  # of four
        (1000, (1024, 1024), 2, 998),  # of two
        (777, (1024, 1024), 0, 777),  # of one, down to the last byte
        (777, (1024, 1024), 776, 1),
        (32, (32, 32), 0, 32),
    ],
)
def test_a_range_of_every_page_goes_where_a_loop_would_put_it(
    kernel: ModuleType, to_device: bool, page_bytes: int, strides: tuple[int, int], start: int, size: int
) -> None:
    pairs = pairs_of([3, 0, 11, 4], [7, 8, 2, 11], page_bytes=page_bytes, strides=strides, to_device=to_device)
    piece = Piece(pairs=pairs, start=start, size_bytes=size)
    wanted = expected(piece)
    by_kernel(kernel, piece)
    assert torch.equal(pairs.target.bytes_B, wanted)


@pytest.mark.parametrize("seed", range(20))
def test_random_pages_and_ranges(kernel: ModuleType, seed: int) -> None:
    random = np.random.default_rng(seed)
    page_bytes = int(random.integers(1, 5000))
    step = int(random.choice([1, 4, 16, 256]))
    strides = tuple(-(-page_bytes // step) * step + step * int(random.integers(0, 3)) for _ in range(2))
    start = int(random.integers(0, page_bytes))
    num_pages = int(random.integers(1, 12))
    source_ids = random.integers(0, 12, num_pages).tolist()  # one page may go to several places
    target_ids = random.permutation(12)[:num_pages].tolist()
    pairs = pairs_of(source_ids, target_ids, page_bytes=page_bytes, strides=strides, to_device=bool(seed % 2))
    piece = Piece(pairs=pairs, start=start, size_bytes=int(random.integers(1, page_bytes - start + 1)))
    wanted = expected(piece)
    by_kernel(kernel, piece)
    assert torch.equal(pairs.target.bytes_B, wanted)


def test_more_pages_than_a_tile_and_more_programs_than_pages(kernel: ModuleType) -> None:
    many = pairs_of(list(range(200)), list(range(199, -1, -1)), page_bytes=512, strides=(512, 512), to_device=True, pages=200)
    for piece in (many.whole(), pairs_of([5], [6], page_bytes=512, strides=(512, 512), to_device=True).whole()):
        wanted = expected(piece)
        by_kernel(kernel, piece)
        assert torch.equal(piece.pairs.target.bytes_B, wanted)


def test_nothing_to_copy_changes_nothing(kernel: ModuleType) -> None:
    pairs = pairs_of([], [], page_bytes=512, strides=(512, 512), to_device=True)
    before = pairs.target.bytes_B.clone()
    by_kernel(kernel, pairs.whole())
    none = torch.zeros(0, dtype=torch.int32)
    kernel.copy_pages(
        pairs.source.bytes_B, pairs.target.bytes_B, none, none, source_stride=512, target_stride=512, size_bytes=512, programs=2
    )
    assert torch.equal(pairs.target.bytes_B, before)


def test_blocks_are_large_unless_much_of_them_would_lie_behind_the_end(kernel: ModuleType) -> None:
    assert [kernel.block_words(words) for words in (4096, 40960, 1024, 36 * 128, 320, 1)] == [4096, 4096, 1024, 256, 64, 64]
