"""Queues copies of pages on the current stream: many small pieces by the copy kernel, large ones by the device's copy engines.

    saves and loads of pieces below the crossover    one kernel: a few programs read or write pinned memory over the bus
    all others                                       one asynchronous copy for each run of neighbouring pages

Where the kernel cannot be had or fails, everything goes the second way: a warning, a count, and the same bytes. Knows no plans,
orders nothing against other streams and waits for nothing.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from threading import Lock
from types import ModuleType
from typing import NamedTuple

import torch

from stepwell.transfer.page_tables import PagePairs, Piece

log = logging.getLogger(__name__)

LEAST_RUNS = 4  # fewer copies than that are queued sooner than a kernel
IDS_STEP = 16  # ids on the device begin at multiples of 64 bytes: one variant of the kernel for all


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
    """A piece, and how the kernel copies it; None when the copy engines do."""

    piece: Piece
    route: Route | None


class StagedIds:
    """Page ids on the device, through pinned memory of its own. One plan at a time, until the device has used them."""

    def __init__(self, device: torch.device, capacity: int = 1 << 14) -> None:
        self._device = device
        self._ids: dict[PagePairs, tuple[torch.Tensor, torch.Tensor]] = {}
        self._allocate(capacity)

    def stage(self, pairs: Sequence[PagePairs]) -> None:
        """Queues one copy of all their ids on the current stream. What was staged before is forgotten."""
        if not pairs:
            return
        lists = [ids for each in pairs for ids in (each.source_ids, each.target_ids)]
        starts = [0]
        for ids in lists:
            starts.append(starts[-1] + -(-len(ids) // IDS_STEP) * IDS_STEP)
        if starts[-1] > len(self._pinned):
            self._allocate(1 << (starts[-1] - 1).bit_length())
        host = self._pinned.numpy()
        for start, ids in zip(starts, lists, strict=False):
            host[start : start + len(ids)] = ids
        self._there[: starts[-1]].copy_(self._pinned[: starts[-1]], non_blocking=True)
        there = [self._there[start : start + len(ids)] for start, ids in zip(starts, lists, strict=False)]
        self._ids = dict(zip(pairs, zip(there[::2], there[1::2], strict=True), strict=True))

    def of(self, pairs: PagePairs) -> tuple[torch.Tensor, torch.Tensor]:
        """Ids in the source, ids in the target."""
        return self._ids[pairs]

    def forget(self) -> None:
        """Lets go of the pairs; the memory is kept for the next plan."""
        self._ids = {}

    def _allocate(self, capacity: int) -> None:
        self._pinned = torch.empty(capacity, dtype=torch.int32, pin_memory=self._device.type == "cuda")
        self._there = torch.empty(capacity, dtype=torch.int32, device=self._device)


class PageCopier:
    """Copies pieces of pages. From any thread, on that thread's current stream."""

    def __init__(self, routes: Routes, kernel: ModuleType | None, *, on_fallback: Callable[[], None] = lambda: None) -> None:
        self._routes = routes
        self._kernel = kernel
        self._on_fallback = on_fallback
        self._lock = Lock()  # Triton builds and launches for one thread at a time

    @property
    def has_kernel(self) -> bool:
        """Whether many small pieces are copied as fast as few large ones."""
        return self._kernel is not None

    def routed(self, piece: Piece) -> Routed:
        """Which way a piece will go."""
        to_device = piece.pairs.target.on_device
        if self._kernel is None or to_device == piece.pairs.source.on_device:
            return Routed(piece, None)
        route = self._routes.load if to_device else self._routes.save
        runs = piece.num_runs
        by_kernel = runs >= max(self._routes.least_runs, 1) and piece.total_bytes < runs * route.crossover_bytes
        return Routed(piece, route if by_kernel else None)

    def queue(self, routed: Routed, staged: StagedIds | None = None) -> None:
        """Queues the copy of one piece. Of those that go by kernel the ids were staged. Raises when it cannot be queued."""
        piece, route = routed
        if route is None or staged is None or not self._launch(piece, route, *staged.of(piece.pairs)):
            for source_B, target_B in piece.slices(piece.runs()):
                target_B.copy_(source_B, non_blocking=True)

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
                fall_back(error, self._on_fallback)
                return False
        return True


def fall_back(error: Exception, counted: Callable[[], None]) -> None:
    """Says and counts that the kernel is not used."""
    reason = (str(error).splitlines() or [""])[0]
    log.warning(
        "the copy kernel cannot be used, so pages are copied one by one, which is slow where they are small (%s: %.200s)",
        type(error).__name__,
        reason,
    )
    counted()
