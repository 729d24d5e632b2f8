"""Queues copies of pages on a stream: the device's copy engines copy most of them, the copy kernel many very small pieces.

    between host and device    runs of neighbouring pages, as a list that the driver takes in one call
    runs below the crossover   one kernel: a few programs read or write pinned memory over the bus
    all others                 one asynchronous copy for each run

If the first two are unavailable or fail, everything uses the third: a warning, a count, and the same bytes. `checked_copier`
tests both before they are used. Does not know plans, orders nothing with respect to other streams and waits for nothing.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from functools import partial
from threading import Lock
from types import ModuleType
from typing import NamedTuple

import numpy as np
import torch

from stepwell.base.meters import Counters
from stepwell.transfer.driver_copies import DriverCopies
from stepwell.transfer.page_tables import PagePairs, PageTable, Piece, Runs

log = logging.getLogger(__name__)

IDS_STEP = 16  # lists of ids begin at multiples of 64 bytes: one variant of the kernel for all
CHECKED_BYTES = (32 << 10, 8 << 10, 36 << 10, 2560, 1000)  # a page for each common variant of the kernel, and another


@dataclass(frozen=True, slots=True, kw_only=True)
class Route:
    """What the kernel copies: at least `least_runs` runs of pages that are shorter than `crossover_bytes` on average."""

    crossover_bytes: int
    programs: int = 4  # enough to saturate the bus of an H200; each takes a multiprocessor from passes
    least_runs: int = 4  # fewer copies are queued faster than a kernel


# From measurements on one H200, whose bus reaches 54 GB/s each way. A batched call costs the host 0.46 us for each copy: with
# copies of 16 KiB it takes one and a half times as long as the bus needs, and does not slow passes down. The kernel made large
# matrix products take 1.5 to 1.8 times as long. Without batched calls a copy costs the host 10 us. Other devices were not
# measured and use the same values: on a slower bus, batched calls would suit smaller copies too. The bytes are the same.
WITH_LISTS, WITHOUT_LISTS = Route(crossover_bytes=16 << 10), Route(crossover_bytes=512 << 10)


class Routed(NamedTuple):
    """A piece, its runs, and how the kernel copies it; None if the copy engines do."""

    piece: Piece
    runs: Runs
    route: Route | None


class StagedIds:
    """Page ids in pinned memory, where the kernel reads them. One plan at a time, until the device has used them."""

    def __init__(self, device: torch.device, capacity: int = 1 << 14) -> None:
        self._pinned = device.type == "cuda"
        self._ids: dict[PagePairs, tuple[torch.Tensor, torch.Tensor]] = {}
        self._allocate(capacity)

    def stage(self, pairs: Sequence[PagePairs]) -> None:
        """Writes all their ids, replacing those staged before."""
        lists = [ids for each in pairs for ids in (each.source_ids, each.target_ids)]
        starts = [0]
        for ids in lists:
            starts.append(starts[-1] + -(-len(ids) // IDS_STEP) * IDS_STEP)
        if starts[-1] > len(self._staged):
            self._allocate(1 << (starts[-1] - 1).bit_length())
        numbers = self._staged.numpy()
        for start, ids in zip(starts, lists, strict=False):
            numbers[start : start + len(ids)] = ids
        staged = [self._staged[start : start + len(ids)] for start, ids in zip(starts, lists, strict=False)]
        self._ids = dict(zip(pairs, zip(staged[::2], staged[1::2], strict=True), strict=True))

    def of(self, pairs: PagePairs) -> tuple[torch.Tensor, torch.Tensor]:
        """Ids in the source, ids in the target."""
        return self._ids[pairs]

    def clear(self) -> None:
        """Drops the pairs; the memory is kept for the next plan."""
        self._ids = {}

    def _allocate(self, capacity: int) -> None:
        self._staged = torch.empty(capacity, dtype=torch.int32, pin_memory=self._pinned)


class PageCopier:
    """Copies pieces of pages. From any thread; without a stream, on that thread's current one."""

    def __init__(
        self, route: Route | None = None, *, kernel: ModuleType | None = None, driver: DriverCopies | None = None,
        on_fallback: Callable[[], None] = lambda: None,
    ) -> None:  # fmt: skip
        """`route` None: chosen by whether the driver has batched copies."""
        self._route = route
        self._kernel = kernel
        self._driver = driver
        self._on_fallback = on_fallback
        self._lock = Lock()  # Triton builds and launches for one thread at a time

    @property
    def takes_small_pieces(self) -> bool:
        """Whether many small pieces are copied as fast as few large ones."""
        return self._kernel is not None or self._driver is not None

    def routed(self, piece: Piece) -> Routed:
        """How a piece will be copied."""
        runs = piece.runs()
        count, to_device = len(runs.pages), piece.pairs.target.on_device
        route = self._route or (WITHOUT_LISTS if self._driver is None else WITH_LISTS)
        by_kernel = (
            self._kernel is not None
            and to_device != piece.pairs.source.on_device
            and count >= max(route.least_runs, 1)
            and piece.total_bytes < count * route.crossover_bytes
        )
        return Routed(piece, runs, route if by_kernel else None)

    def queue(self, routed: Routed, staged: StagedIds | None = None, stream: torch.cuda.Stream | None = None) -> None:
        """Queues the copy of one piece. For the kernel, its ids must be staged. Raises if the piece cannot be queued."""
        piece, runs, route = routed
        if route is None and self._list(piece, runs, stream):
            return
        with nullcontext() if stream is None else torch.cuda.stream(stream):
            if route is not None and staged is not None and self._launch(piece, route, *staged.of(piece.pairs)):
                return
            for source_B, target_B in piece.slices(runs):
                target_B.copy_(source_B, non_blocking=True)

    def _list(self, piece: Piece, runs: Runs, stream: torch.cuda.Stream | None) -> bool:
        """Whether the driver accepted the runs as a batch. A driver that refuses is not asked again."""
        driver = self._driver
        if driver is None or piece.pairs.source.on_device == piece.pairs.target.on_device:
            return False
        try:
            driver.queue(*piece.addresses(runs), (stream or torch.cuda.current_stream()).cuda_stream)
        except Exception as error:  # boundary to a driver: what it queued is copied once more
            self._driver = None
            fall_back("the driver's batched copies", error, self._on_fallback)
            return False
        return True

    def _launch(self, piece: Piece, route: Route, source_ids: torch.Tensor, target_ids: torch.Tensor) -> bool:
        """Whether the kernel was queued. If not, it is not tried again."""
        pairs = piece.pairs
        with self._lock:
            if self._kernel is None:
                return False
            try:
                self._kernel.copy_pages(
                    pairs.source.bytes_B[piece.start :],
                    pairs.target.bytes_B[piece.start :],
                    source_ids,
                    target_ids,
                    source_stride=pairs.source.stride,
                    target_stride=pairs.target.stride,
                    size_bytes=piece.size_bytes,
                    programs=route.programs,
                )
            except Exception as error:  # boundary to a compiler: after any exception, the plain way still works
                self._kernel = None
                fall_back("the copy kernel", error, self._on_fallback)
                return False
        return True


def fall_back(what: str, error: Exception, counted: Callable[[], None]) -> None:
    """Logs and counts that a fast way is not used."""
    reason = (str(error).splitlines() or [""])[0]
    log.warning("%s cannot be used, so small pages are copied more slowly (%s: %.200s)", what, type(error).__name__, reason)
    counted()


# ---- fast ways, tested before they are used -------------------------------------------------------------


def checked_copier(device: torch.device, counters: Counters, route: Route | None = None) -> PageCopier:
    """Uses batched calls and the kernel where they are available and copy correctly."""
    count = partial(counters.add, "copy_fallbacks")
    driver, kernel = None, None
    try:
        driver = checked_driver(device)
    except Exception as error:  # boundary to a driver, and below to a compiler: pages can still be copied after any exception
        fall_back("the driver's batched copies", error, count)
    try:
        kernel = checked_kernel(device)
    except Exception as error:
        fall_back("the copy kernel", error, count)
    return PageCopier(route, kernel=kernel, driver=driver, on_fallback=count)


def checked_driver(device: torch.device) -> DriverCopies:
    """Raises if a batch of copies is refused, or has a wrong result."""
    torch.zeros(1, device=device)  # makes the device's context current
    driver = DriverCopies()
    host_B = torch.randint(0, 256, (64 * 1000,), dtype=torch.uint8).pin_memory()
    there_B, back_B = torch.zeros_like(host_B, device=device), torch.zeros_like(host_B).pin_memory()
    stream = torch.cuda.Stream(device)
    stream.wait_stream(torch.cuda.current_stream(device))
    for source_B, target_B in ((host_B, there_B), (there_B, back_B)):
        piece = _pairs(source_B, target_B, 1000, 1000).whole()
        driver.queue(*piece.addresses(piece.runs()), stream.cuda_stream)
    stream.synchronize()
    if not torch.equal(back_B, host_B):
        raise RuntimeError("a batch of copies had a wrong result")
    return driver


def checked_kernel(device: torch.device) -> ModuleType:
    """Builds the kernel's common variants. Raises ImportError without Triton, and if a variant has a wrong result."""
    from stepwell.transfer import copy_kernel

    staged = StagedIds(device)
    for page_bytes in CHECKED_BYTES:
        stride = -(-page_bytes // 512) * 512
        host_B = torch.randint(0, 256, (9 * stride,), dtype=torch.uint8).pin_memory()
        there_B, back_B = torch.zeros_like(host_B, device=device), torch.zeros_like(host_B).pin_memory()
        for source_B, target_B in ((host_B, there_B), (there_B, back_B)):
            pairs = _pairs(source_B, target_B, page_bytes, stride)
            staged.stage([pairs])
            copy_kernel.copy_pages(
                source_B, target_B, *staged.of(pairs), source_stride=stride, target_stride=stride, size_bytes=page_bytes,
                programs=WITH_LISTS.programs,
            )  # fmt: skip
            torch.cuda.synchronize(device)  # before the ids are staged again
        found, expected = (each.view(-1, stride)[:, :page_bytes] for each in (back_B, host_B))
        if not torch.equal(found, expected):
            raise RuntimeError(f"the kernel copied pages of {page_bytes} bytes wrongly")
    return copy_kernel


def _pairs(source_B: torch.Tensor, target_B: torch.Tensor, page_bytes: int, stride: int) -> PagePairs:
    """All pages of two tensors, the last first, so that no two of them are adjacent for a copy engine."""
    source, target = (PageTable.of(each.view(-1, stride)[:, :page_bytes]) for each in (source_B, target_B))
    ids = np.arange(source.num_pages, dtype=np.int32)[::-1]
    return PagePairs(source=source, target=target, source_ids=ids, target_ids=ids)
