"""Queues copies of pages on a stream: by the device's copy engines, many very small pieces by the copy kernel.

    between host and device    runs of neighbouring pages, as a list that the driver takes in one call
    runs below the crossover   one kernel: a few programs read or write pinned memory over the bus
    all others                 one asynchronous copy for each run

Where the first two cannot be had or fail, everything goes the third way: a warning, a count, and the same bytes. Knows no
plans, orders nothing against other streams and waits for nothing.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from threading import Lock
from types import ModuleType
from typing import NamedTuple

import torch

from stepwell.transfer.driver_copies import DriverCopies
from stepwell.transfer.page_tables import PagePairs, Piece, Runs

log = logging.getLogger(__name__)

LEAST_RUNS = 4  # fewer copies than that are queued sooner than a kernel
IDS_STEP = 16  # lists of ids begin at multiples of 64 bytes: one variant of the kernel for all


@dataclass(frozen=True, slots=True, kw_only=True)
class Route:
    """How one direction is copied: runs of pages shorter than `crossover_bytes` by so many programs of the kernel."""

    crossover_bytes: int
    programs: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Routes:
    """Both directions. Measured at the start (`copy_speeds.measured_routes`), or given."""

    load: Route
    save: Route
    least_runs: int = LEAST_RUNS


class Routed(NamedTuple):
    """A piece, its runs, and how the kernel copies it; None when the copy engines do."""

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
        """Writes down all their ids. What was staged before is forgotten."""
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

    def forget(self) -> None:
        """Lets go of the pairs; the memory is kept for the next plan."""
        self._ids = {}

    def _allocate(self, capacity: int) -> None:
        self._staged = torch.empty(capacity, dtype=torch.int32, pin_memory=self._pinned)


class PageCopier:
    """Copies pieces of pages. From any thread; without a stream, on that thread's current one."""

    def __init__(
        self, routes: Routes, *, kernel: ModuleType | None = None, driver: DriverCopies | None = None,
        on_fallback: Callable[[], None] = lambda: None,
    ) -> None:  # fmt: skip
        self._routes = routes
        self._kernel = kernel
        self._driver = driver
        self._on_fallback = on_fallback
        self._lock = Lock()  # Triton builds and launches for one thread at a time

    @property
    def takes_small_pieces(self) -> bool:
        """Whether many small pieces are copied as fast as few large ones."""
        return self._kernel is not None or self._driver is not None

    def routed(self, piece: Piece) -> Routed:
        """Which way a piece will go."""
        runs = piece.runs()
        count, to_device = len(runs.pages), piece.pairs.target.on_device
        route = self._routes.load if to_device else self._routes.save
        by_kernel = (
            self._kernel is not None
            and to_device != piece.pairs.source.on_device
            and count >= max(self._routes.least_runs, 1)
            and piece.total_bytes < count * route.crossover_bytes
        )
        return Routed(piece, runs, route if by_kernel else None)

    def queue(self, routed: Routed, staged: StagedIds | None = None, stream: torch.cuda.Stream | None = None) -> None:
        """Queues the copy of one piece. Of those that go by kernel the ids were staged. Raises when it cannot be queued."""
        piece, runs, route = routed
        if route is None and self._list(piece, runs, stream):
            return
        with nullcontext() if stream is None else torch.cuda.stream(stream):
            if route is not None and staged is not None and self._launch(piece, route, *staged.of(piece.pairs)):
                return
            for source_B, target_B in piece.slices(runs):
                target_B.copy_(source_B, non_blocking=True)

    def _list(self, piece: Piece, runs: Runs, stream: torch.cuda.Stream | None) -> bool:
        """Whether the driver took the runs as a list. One that refuses is not asked again."""
        driver = self._driver
        if driver is None or piece.pairs.source.on_device == piece.pairs.target.on_device:
            return False
        try:
            driver.queue(*piece.addresses(runs), (stream or torch.cuda.current_stream()).cuda_stream)
        except Exception as error:  # the edge to a driver: what it queued is copied once more
            self._driver = None
            fall_back("the driver's copies of lists", error, self._on_fallback)
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
            except Exception as error:  # the edge to a compiler: whatever it raises, the plain way is still there
                self._kernel = None
                fall_back("the copy kernel", error, self._on_fallback)
                return False
        return True


def fall_back(what: str, error: Exception, counted: Callable[[], None]) -> None:
    """Says and counts that a fast way is not used."""
    reason = (str(error).splitlines() or [""])[0]
    log.warning("%s cannot be used, so small pages are copied more slowly (%s: %.200s)", what, type(error).__name__, reason)
    counted()
