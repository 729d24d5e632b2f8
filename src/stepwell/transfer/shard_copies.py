"""Copies between one rank's device pages and host pages that all ranks share: the host has whole rows, a rank parts of them.

    host page, one row    |---- head 0 ----|---- head 1 ----|---- latent ----|
    rank 0                |---- head 0 ----|                |---- latent ----|     loads both, saves both
    rank 1                                 |---- head 1 ----|---- latent ----|     loads both, saves its head alone

So a host page holds the same bytes for any number of ranks, and what several ranks hold alike exists in it once: the first
rank that has a byte saves it. On a GPU the host's memory is pinned and copied directly (`shard_tables.py`); on a CPU pages
go through a buffer. Imports torch, and is imported when it is used.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from itertools import pairwise

import torch

from stepwell.base.ids import CACHED_KINDS, Kind, Tier
from stepwell.base.spec import ModelSpec, Part, StateSpec
from stepwell.base.tasks import Copy, PageIds, Plan
from stepwell.transfer.copy_engine import Work
from stepwell.transfer.page_tables import PagePairs
from stepwell.transfer.shard_tables import Pair, pairs_for
from stepwell.transfer.torch_copy_engine import TorchCopyEngine
from stepwell.transfer.torch_memory import TorchMemory

PIECE_BYTES = 16 << 20  # of pages that are copied at once, through a buffer of that size


class ShardCopyEngine:
    """The engine of one rank. `device` is its own memory, laid out for its share; `host` is shared, with whole rows."""

    def __init__(self, whole: ModelSpec, device: TorchMemory, host: TorchMemory | None, *, rank: int, ranks: int) -> None:
        self._device = device
        self._loads: dict[Kind, list[Pair]] = {kind: [] for kind in CACHED_KINDS}  # from the host, to the device
        self._saves: dict[Kind, list[Pair]] = {kind: [] for kind in CACHED_KINDS}
        for kind in CACHED_KINDS if host is not None else ():
            for part, mine in zip(whole.parts(kind), device.spec.parts(kind), strict=True):
                assert host is not None and part.state == mine.state, f"{part} and {mine} are not of one state"
                theirs_PLRB, ours_PLRB = _rows_of(host, kind, part), _rows_of(device, kind, mine)
                state = whole.state(part.state)
                for saves, start, span in pieces(state, rank, ranks):
                    here, there = ours_PLRB[..., start : start + len(span)], theirs_PLRB[..., span.start : span.stop]
                    self._loads[kind].append((there, here))
                    if saves:
                        self._saves[kind].append((here, there))
        self._on_gpu = self._gpu_engine(device, host) if device.bytes_B.is_cuda else None

    def _gpu_engine(self, device: TorchMemory, host: TorchMemory | None) -> TorchCopyEngine:
        """Its copies need not wait for the device: no pass uses the pages that are copied."""
        memories = {Tier.DEVICE: device} | ({} if host is None else {Tier.HOST: host})
        idle = torch.cuda.Stream(device.bytes_B.device)
        return TorchCopyEngine(memories, engine_stream=idle, shards=self.pairs)

    def begin(self, plan: Plan) -> Work:
        """Accepts a plan for pages that no pass is using. The work waits until they are copied."""
        return partial(self._copy_all, plan) if self._on_gpu is None else self._on_gpu.begin(plan)

    def pairs(self, copy: Copy) -> list[PagePairs]:
        """What is copied between the host and this rank's device. Raises IndexError for pages that do not exist."""
        return [pair for sides in self._sides(copy) for pair in pairs_for(sides, copy.source.ids, copy.target.ids)]

    def _copy_all(self, plan: Plan) -> None:
        for copy in plan.copies:
            for source_PX, target_PX in self._sides(copy):
                _copy_pages(source_PX, copy.source.ids, target_PX, copy.target.ids)

    def _sides(self, copy: Copy) -> Sequence[Pair]:
        kind = copy.source.kind
        match copy.source.tier, copy.target.tier:
            case Tier.DEVICE, Tier.DEVICE:
                return [(self._device.rows(kind), self._device.rows(kind))]
            case Tier.DEVICE, Tier.HOST:
                return self._saves[kind]
            case Tier.HOST, Tier.DEVICE:
                return self._loads[kind]
        raise AssertionError(f"no rank copies {copy}")


def pieces(state: StateSpec, rank: int, ranks: int) -> list[tuple[bool, int, range]]:
    """What a rank holds of a whole row: whether it is the rank that saves it, its offset in the rank's row, and the bytes."""
    before = [span for earlier in range(rank) for span in state.spans_of(earlier, ranks)]
    found, start = [], 0
    for span in state.spans_of(rank, ranks):
        edges = {edge for each in before for edge in (each.start, each.stop) if span.start < edge < span.stop}
        cuts = [span.start, *sorted(edges), span.stop]
        for first, stop in pairwise(cuts):
            saved_before = any(each.start <= first < each.stop for each in before)
            found.append((not saved_before, start, range(first, stop)))
            start += stop - first
    return found


def _rows_of(memory: TorchMemory, kind: Kind, part: Part) -> torch.Tensor:
    """A part of all pages as `[page, layer, row, byte]`; writing through it writes the memory."""
    part_PB = memory.rows(kind)[:, part.offset : part.offset + part.size_bytes]
    part_PLRB: torch.Tensor = part_PB.unflatten(1, (part.layers, part.rows, part.row_bytes))
    return part_PLRB


def _copy_pages(source_PX: torch.Tensor, sources: PageIds, target_PX: torch.Tensor, targets: PageIds) -> None:
    each_bytes = max(source_PX[:1].numel(), 1)
    count = max(PIECE_BYTES // each_bytes, 1)
    read_P, write_P = torch.from_numpy(sources.astype("int64")), torch.from_numpy(targets.astype("int64"))
    for read, write in zip(read_P.split(count), write_P.split(count), strict=True):
        target_PX[write] = source_PX[read]
