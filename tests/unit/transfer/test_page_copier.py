"""Which way pages are copied, and that every way copies the same bytes, also when the kernel fails."""

from __future__ import annotations

import ctypes
import logging
from types import SimpleNamespace

import numpy as np
import pytest

torch = pytest.importorskip("torch", reason="torch is not installed")

from stepwell.transfer.page_copier import PageCopier, Route, StagedIds  # noqa: E402
from stepwell.transfer.page_tables import PagePairs, PageTable, Piece  # noqa: E402

ROUTE = Route(crossover_bytes=250, programs=8, least_runs=2)


class Kernel:
    """Notes what it is asked for, and copies nothing or fails."""

    def __init__(self, error: Exception | None = None) -> None:
        self.error = error
        self.calls: list[SimpleNamespace] = []

    def copy_pages(self, source_B: object, target_B: object, source_ids: object, target_ids: object, **sizes: int) -> None:
        self.calls.append(SimpleNamespace(source_ids=source_ids, target_ids=target_ids, **sizes))
        if self.error is not None:
            raise self.error


def table(pages: int = 10, *, page_bytes: int = 200, stride: int = 256, on_device: bool = False) -> PageTable:
    rows = torch.randint(0, 256, (pages, stride), dtype=torch.uint8)[:, :page_bytes]
    whole = PageTable.of(rows)
    return PageTable(
        bytes_B=whole.bytes_B, num_pages=pages, page_bytes=page_bytes, stride=whole.stride, on_device=on_device
    )  # fmt: skip


def pairs(source: PageTable, target: PageTable, read: list[int], write: list[int]) -> PagePairs:
    return PagePairs(source=source, target=target, source_ids=np.array(read, np.int32), target_ids=np.array(write, np.int32))


def page(of: PageTable, number: int) -> torch.Tensor:
    return of.bytes_B[number * of.stride : number * of.stride + of.page_bytes]


def queue(copier: PageCopier, piece: Piece) -> None:
    staged = StagedIds(torch.device("cpu"))
    staged.stage([piece.pairs])
    copier.queue(copier.routed(piece), staged)


def test_neighbours_on_both_sides_are_one_copy() -> None:
    piece = pairs(table(), table(), [3, 4, 5, 7, 8, 1], [0, 1, 2, 3, 5, 6]).whole()
    assert [each.tolist() for each in piece.runs()] == [[3, 7, 8, 1], [0, 3, 5, 6], [3, 1, 1, 1]]
    apart = pairs(table(), table(stride=512), [3, 4], [0, 1]).whole()
    assert apart.runs().pages.tolist() == [1, 1], "strides differ"
    part = Piece(pairs=piece.pairs, start=0, size_bytes=100)
    assert part.runs().pages.tolist() == [1] * 6, "parts of pages are never neighbours"
    assert not len(pairs(table(), table(), [], []).whole().runs().pages)


def test_runs_copy_every_page_and_nothing_but_what_lies_between_them() -> None:
    source, target = table(), table()
    before = target.bytes_B.clone()
    queue(PageCopier(ROUTE), pairs(source, target, [3, 4, 5, 0], [6, 7, 8, 1]).whole())
    for read, write in ((3, 6), (4, 7), (5, 8), (0, 1)):
        assert torch.equal(page(source, read), page(target, write))
    for untouched in (0, 2, 3, 4, 5, 9):
        assert torch.equal(page(target, untouched), before[untouched * 256 : untouched * 256 + 200])


@pytest.mark.parametrize("ids", [[10], [-1], [0, 99]])
def test_pages_that_are_not_there_are_refused_before_anything_is_copied(ids: list[int]) -> None:
    some = list(range(len(ids)))
    with pytest.raises(IndexError):
        pairs(table(), table(), ids, some)
    with pytest.raises(IndexError):
        pairs(table(), table(), some, ids)


def test_small_pages_between_host_and_device_go_by_kernel() -> None:
    host, device = table(), table(on_device=True)
    kernel = Kernel()
    copier = PageCopier(ROUTE, kernel=kernel)  # type: ignore[arg-type]
    queue(copier, pairs(host, device, [1, 3], [2, 4]).whole())
    assert kernel.calls[0].programs == 8 and kernel.calls[0].size_bytes == 200
    assert kernel.calls[0].source_ids.tolist() == [1, 3] and kernel.calls[0].target_ids.tolist() == [2, 4]
    large = table(page_bytes=300, stride=512)
    queue(copier, pairs(large, table(page_bytes=300, stride=512, on_device=True), [1, 3], [2, 4]).whole())
    assert len(kernel.calls) == 1, "pages of 300 bytes are large"
    queue(copier, Piece(pairs=pairs(device, host, [1, 3], [2, 4]), start=8, size_bytes=64))
    assert kernel.calls[1].size_bytes == 64
    queue(copier, pairs(host, device, [1], [2]).whole())
    queue(copier, pairs(host, device, [1, 2, 3, 4], [2, 3, 4, 5]).whole())
    queue(copier, pairs(device, table(on_device=True), [1, 3], [2, 4]).whole())
    assert len(kernel.calls) == 2, "one copy, and copies inside the device, need no kernel"


def test_where_the_driver_takes_lists_the_kernel_copies_smaller_pages_alone() -> None:
    kernel, small, medium, large = Kernel(), 8 << 10, 64 << 10, 1 << 20
    for driver, taken in ((None, [small, medium]), (Driver(), [small])):
        copier = PageCopier(kernel=kernel, driver=driver)  # type: ignore[arg-type]
        for size in (small, medium, large):
            host, device = (table(8, page_bytes=size, stride=size, on_device=there) for there in (False, True))
            piece = pairs(host, device, [1, 3, 5, 7], [6, 4, 2, 0]).whole()
            assert (copier.routed(piece).route is not None) == (size in taken)


def test_a_kernel_that_fails_is_said_and_counted_once_and_the_bytes_are_right(caplog: pytest.LogCaptureFixture) -> None:
    host, device = table(), table(on_device=True)
    kernel, fallbacks = Kernel(RuntimeError("ptxas is missing\nand a long story")), []
    copier = PageCopier(ROUTE, kernel=kernel, on_fallback=lambda: fallbacks.append(1))  # type: ignore[arg-type]
    with caplog.at_level(logging.WARNING):
        for _ in range(3):
            queue(copier, pairs(host, device, [1, 3], [2, 4]).whole())
    assert torch.equal(page(host, 1), page(device, 2)) and torch.equal(page(host, 3), page(device, 4))
    assert len(kernel.calls) == 1 and fallbacks == [1]
    (warning,) = caplog.messages
    assert "ptxas is missing" in warning and "long story" not in warning


class Driver:
    """Copies between addresses, or refuses after `lists` lists."""

    def __init__(self, lists: int = 1 << 30) -> None:
        self.lists = lists
        self.sizes: list[list[int]] = []

    def queue(self, sources: np.ndarray, targets: np.ndarray, sizes: np.ndarray, stream: int) -> None:
        assert stream == 77 and {each.dtype for each in (sources, targets, sizes)} == {np.dtype(np.uint64)}
        if len(self.sizes) == self.lists:
            raise RuntimeError("cuMemcpyBatchAsync: error 1")
        self.sizes.append(sizes.tolist())
        for source, target, size in zip(sources.tolist(), targets.tolist(), sizes.tolist(), strict=True):
            ctypes.memmove(target, source, size)


@pytest.fixture
def stream(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("torch.cuda.current_stream", lambda: SimpleNamespace(cuda_stream=77))


@pytest.mark.usefixtures("stream")
def test_large_pages_between_host_and_device_go_as_lists_of_runs() -> None:
    host, device, driver = table(page_bytes=300, stride=512), table(page_bytes=300, stride=512, on_device=True), Driver()
    copier = PageCopier(ROUTE, driver=driver)  # type: ignore[arg-type]
    before = device.bytes_B.clone()
    queue(copier, pairs(host, device, [3, 4, 5, 0], [6, 7, 8, 1]).whole())
    assert driver.sizes == [[2 * 512 + 300, 300]]
    queue(copier, Piece(pairs=pairs(host, device, [2, 1], [3, 4]), start=100, size_bytes=8))
    assert driver.sizes[1:] == [[8, 8]]
    for read, write in ((3, 6), (4, 7), (5, 8), (0, 1)):
        assert torch.equal(page(host, read), page(device, write))
    for read, write in ((2, 3), (1, 4)):
        wanted = before[write * 512 : write * 512 + 300].clone()
        wanted[100:108] = page(host, read)[100:108]
        assert torch.equal(page(device, write), wanted)
    queue(copier, pairs(device, table(page_bytes=300, stride=512, on_device=True), [1, 3], [2, 4]).whole())
    assert len(driver.sizes) == 2, "copies inside the device are torch's"


@pytest.mark.usefixtures("stream")
def test_a_driver_that_refuses_a_list_is_said_and_counted_once_and_the_bytes_are_right(caplog: pytest.LogCaptureFixture) -> None:
    host, device = table(), table(on_device=True)
    driver, fallbacks = Driver(lists=1), []
    copier = PageCopier(ROUTE, driver=driver, on_fallback=lambda: fallbacks.append(1))  # type: ignore[arg-type]
    with caplog.at_level(logging.WARNING):
        for write in (2, 4, 6):
            queue(copier, pairs(host, device, [1, 3], [write, write + 1]).whole())
    for write in (2, 4, 6):
        assert torch.equal(page(host, 1), page(device, write)) and torch.equal(page(host, 3), page(device, write + 1))
    assert len(driver.sizes) == 1 and fallbacks == [1]
    (warning,) = caplog.messages
    assert "error 1" in warning


def test_staged_ids_of_several_copies_lie_apart_and_grow() -> None:
    staged = StagedIds(torch.device("cpu"), capacity=16)
    big = table(pages=100)
    several = [pairs(big, big, list(range(n)), list(range(99, 99 - n, -1))) for n in (1, 17, 0, 100)]
    staged.stage(several)
    for each in several:
        source_ids, target_ids = staged.of(each)
        assert source_ids.tolist() == each.source_ids.tolist() and target_ids.tolist() == each.target_ids.tolist()
        assert source_ids.data_ptr() % 16 == 0 and target_ids.data_ptr() % 16 == 0
