"""Counters of `resolve`, updated on the device and read without waiting.

    resident       references to rows of pages that are on the device
    hits           references to rows that were already in a hot slot
    fetched        rows that got a slot, and are copied into it
    read_through   rows that got no slot, and references of requests without hot pages: read from the host

Each request of a batch has its own counters, so that programs do not wait for each other. Decides nothing. Axes: G groups,
B places in a batch, C kinds of counts.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

RESIDENT, HITS, FETCHED, READ_THROUGH = range(4)
KINDS = 4


@dataclass(frozen=True, slots=True, kw_only=True)
class Found:
    """Sums since the start."""

    resident: int = 0
    hits: int = 0
    fetched: int = 0
    read_through: int = 0
    fetched_bytes: int = 0


class Counts:
    """`resolve` writes `tally_GBC`; the sums may be read at any time."""

    def __init__(self, *, groups: int, requests: int, device: torch.device) -> None:
        self.tally_GBC = torch.zeros(groups, requests, KINDS, dtype=torch.int64, device=device)
        pinned = device.type == "cuda"
        self._sum_GC = torch.zeros(groups, KINDS, dtype=torch.int64, pin_memory=pinned)
        self._copied = torch.cuda.Event() if pinned else None

    def start_reading(self) -> None:
        """Queues a copy of the sums as of this point of the current stream. Does nothing if a copy is in flight."""
        if self._copied is not None and not self._copied.query():
            return
        self._sum_GC.copy_(self.tally_GBC.sum(dim=1), non_blocking=True)
        if self._copied is not None:
            self._copied.record(torch.cuda.current_stream(self.tally_GBC.device))

    def read(self, row_bytes: Sequence[int]) -> Found | None:
        """The sums last requested; None until they arrive. `row_bytes`: of one row, over all layers, by group."""
        if self._copied is not None and not self._copied.query():
            return None
        fetched_bytes = sum(rows * size for rows, size in zip(self._sum_GC[:, FETCHED].tolist(), row_bytes, strict=True))
        resident, hits, fetched, read_through = self._sum_GC.sum(dim=0).tolist()
        return Found(
            resident=resident, hits=hits, fetched=fetched, read_through=read_through, fetched_bytes=fetched_bytes
        )  # fmt: skip
