"""Measures, once at the start, from which size on the device's copy engines are about as fast as the copy kernel.

And with how few programs the kernel fills the bus: what it takes of the device, passes that run beside it lack. Takes some
milliseconds, after the kernel is built. Leaves every byte of the memories as it was. Raises when the kernel does not copy.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from types import ModuleType

import numpy as np
import torch

from stepwell.base.units import format_bytes
from stepwell.transfer.driver_copies import DriverCopies
from stepwell.transfer.page_copier import PageCopier, Route, Routes, StagedIds
from stepwell.transfer.page_tables import PagePairs, PageTable

log = logging.getLogger(__name__)

SAMPLE_BYTES = 16 * 2**20  # 0.3 ms on a bus
PAGES_BYTES = tuple(1 << bits for bits in range(21, 13, -1))  # 2 MiB to 16 KiB: tried, until the copy engines are too slow
SMALL_PAGE_BYTES = 32 << 10
PROGRAMS = (1, 2, 3, 4)  # tried: four fill the bus, and every one takes a multiprocessor from passes
SLACK = 1.05  # this close to the best is as good
ENGINES_SLACK = 1.5  # copy engines that take this much longer are better: they take nothing from passes beside them
CHECKED_BYTES = (32 << 10, 8 << 10, 36 << 10, 2560, 1000)  # a page for each variant of the kernel that is common, and another

DEFAULT_ROUTE = Route(crossover_bytes=512 << 10, programs=4)
DEFAULT_ROUTES = Routes(load=DEFAULT_ROUTE, save=DEFAULT_ROUTE)


def check_kernel(kernel: ModuleType, device: torch.device) -> None:
    """Builds the kernel's common variants, and raises when one of them does not copy what it should."""
    staged = StagedIds(device)
    for page_bytes in CHECKED_BYTES:
        stride = -(-page_bytes // 512) * 512
        host_B = torch.randint(0, 256, (9 * stride,), dtype=torch.uint8).pin_memory()
        there_B, back_B = torch.zeros_like(host_B, device=device), torch.zeros_like(host_B).pin_memory()
        for source_B, target_B in ((host_B, there_B), (there_B, back_B)):
            _by_kernel(kernel, DEFAULT_ROUTE.programs, _pairs(source_B, target_B, page_bytes, stride), staged)
            torch.cuda.synchronize(device)  # before the ids are staged again
        found, expected = (each.view(-1, stride)[:, :page_bytes] for each in (back_B, host_B))
        if not torch.equal(found, expected):
            raise RuntimeError(f"the kernel copied pages of {page_bytes} bytes wrongly")


def check_driver(driver: DriverCopies, device: torch.device) -> None:
    """Raises when a list of copies is refused, or does not copy what it should."""
    host_B = torch.randint(0, 256, (64 * 1000,), dtype=torch.uint8).pin_memory()
    there_B, back_B = torch.zeros_like(host_B, device=device), torch.zeros_like(host_B).pin_memory()
    stream = torch.cuda.Stream(device)
    stream.wait_stream(torch.cuda.current_stream(device))
    for source_B, target_B in ((host_B, there_B), (there_B, back_B)):
        piece = _pairs(source_B, target_B, 1000, 1000).whole()
        driver.queue(*piece.addresses(piece.runs()), stream.cuda_stream)
    stream.synchronize()
    if not torch.equal(back_B, host_B):
        raise RuntimeError("a list of copies was copied wrongly")


def measured_routes(kernel: ModuleType, driver: DriverCopies | None, host_B: torch.Tensor, device: torch.device) -> Routes:
    """The best routes between this memory and the device. The memory must not be in use yet."""
    if len(host_B) < SAMPLE_BYTES:
        return DEFAULT_ROUTES
    host_B = host_B[:SAMPLE_BYTES]
    there_B = host_B.to(device)  # what comes back is what was there
    engines = PageCopier(DEFAULT_ROUTES, driver=driver)
    stream = torch.cuda.Stream(device)
    stream.wait_stream(torch.cuda.current_stream(device))
    with torch.cuda.stream(stream):  # lists of copies are not taken on the default one
        routes = Routes(load=_route(kernel, engines, host_B, there_B), save=_route(kernel, engines, there_B, host_B))
    log.info(
        "pages are copied by the kernel below %s to the device (%d programs), below %s from it (%d programs)",
        format_bytes(routes.load.crossover_bytes), routes.load.programs,
        format_bytes(routes.save.crossover_bytes), routes.save.programs,
    )  # fmt: skip
    return routes


def _route(kernel: ModuleType, engines: PageCopier, source_B: torch.Tensor, target_B: torch.Tensor) -> Route:
    staged = StagedIds(source_B.device if source_B.is_cuda else target_B.device)
    small = _pairs(source_B, target_B, SMALL_PAGE_BYTES, SMALL_PAGE_BYTES)
    taken = {programs: _seconds(lambda: _by_kernel(kernel, programs, small, staged)) for programs in PROGRAMS}  # noqa: B023
    best = min(taken.values())
    programs = next(each for each in PROGRAMS if taken[each] <= best * SLACK)
    crossover = 2 * PAGES_BYTES[0]
    for page_bytes in PAGES_BYTES:
        pages = _pairs(source_B, target_B, page_bytes, page_bytes).whole()
        if _seconds(lambda: engines.queue(engines.routed(pages))) > taken[programs] * ENGINES_SLACK:  # noqa: B023
            break
        crossover = page_bytes
    return Route(crossover_bytes=crossover, programs=programs)


def _by_kernel(kernel: ModuleType, programs: int, pairs: PagePairs, staged: StagedIds) -> None:
    staged.stage([pairs])
    source_ids, target_ids = staged.of(pairs)
    kernel.copy_pages(
        pairs.source.bytes_B, pairs.target.bytes_B, source_ids, target_ids,
        source_stride=pairs.source.stride, target_stride=pairs.target.stride, size_bytes=pairs.page_bytes, programs=programs,
    )  # fmt: skip


def _pairs(source_B: torch.Tensor, target_B: torch.Tensor, page_bytes: int, stride: int) -> PagePairs:
    """All pages of two tensors, the last first: no two of them are neighbours to a copy engine."""
    source, target = (PageTable.of(each.view(-1, stride)[:, :page_bytes]) for each in (source_B, target_B))
    ids = np.arange(source.num_pages, dtype=np.int32)[::-1]
    return PagePairs(source=source, target=target, source_ids=ids, target_ids=ids)


def _seconds(work: Callable[[], None], repeats: int = 3) -> float:
    """The least time from the call until the device has done it."""
    samples = []
    for _ in range(repeats + 1):
        torch.cuda.synchronize()
        start = time.perf_counter()
        work()
        torch.cuda.synchronize()
        samples.append(time.perf_counter() - start)
    return min(samples[1:])
