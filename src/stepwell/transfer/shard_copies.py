"""Copies between one rank's device pages and host pages that all ranks share: the host has whole rows, a rank its spans of them.

    host page, one row    |---- head 0 ----|---- head 1 ----|---- latent ----|
    rank 0                |---- head 0 ----|                |---- latent ----|     loads both, saves both
    rank 1                                 |---- head 1 ----|---- latent ----|     loads both, saves its head alone

So a host page holds the same bytes however many ranks there are, and what several ranks keep alike exists in it once: the first
rank that keeps a byte saves it. Imports torch, and is imported when it is used.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise

import torch

from stepwell.base.ids import CACHED_KINDS, Kind, Tier
from stepwell.base.spec import ModelSpec, Part, StateSpec
from stepwell.base.tasks import Copy, PageIds, Plan, Purpose
from stepwell.transfer.copy_engine import Work
from stepwell.transfer.torch_memory import TorchMemory

PIECE_BYTES = 16 << 20  # of pages that are copied in one go, through memory of that size

Pair = tuple[torch.Tensor, torch.Tensor]  # the same bytes of every page, layer and row: on the device, on the host


class ShardCopyEngine:
    """One rank's. `device` is its own memory, laid out for its share; `host` is everybody's, laid out for the whole model."""

    def __init__(self, whole: ModelSpec, device: TorchMemory, host: TorchMemory | None, *, rank: int, ranks: int) -> None:
        self._device = device
        self._loads: dict[Kind, list[Pair]] = {kind: [] for kind in CACHED_KINDS}
        self._saves: dict[Kind, list[Pair]] = {kind: [] for kind in CACHED_KINDS}
        self._streams: dict[bool, torch.cuda.Stream] = {}  # by whether it saves, so that nobody waits for saves to load
        if device.bytes_B.is_cuda:
            self._streams = {saves: torch.cuda.Stream(device.bytes_B.device) for saves in (False, True)}
        for kind in CACHED_KINDS if host is not None else ():
            for part, mine in zip(whole.parts(kind), device.spec.parts(kind), strict=True):
                assert host is not None and part.state == mine.state, f"{part} and {mine} are not of one state"
                theirs_PLRB, ours_PLRB = _rows_of(host, kind, part), _rows_of(device, kind, mine)
                state = whole.state(part.state)
                for saves, start, span in pieces(state, rank, ranks):
                    pair = ours_PLRB[..., start : start + len(span)], theirs_PLRB[..., span.start : span.stop]
                    self._loads[kind].append(pair)
                    if saves:
                        self._saves[kind].append(pair)

    def begin(self, plan: Plan) -> Work:
        """Of pages that no pass is at work on: on a GPU copies are ordered against nothing else. Their end is waited for."""
        return lambda: self._run(plan)

    def _run(self, plan: Plan) -> None:
        stream = self._streams.get(plan.purpose is Purpose.SAVE)
        if stream is None:
            self._copy_all(plan)
            return
        try:
            with torch.cuda.stream(stream):
                self._copy_all(plan)
        finally:  # after a failure too: pages are not used again while a copy that was queued still runs
            stream.synchronize()

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
                return [(host, device) for device, host in self._loads[kind]]
        raise AssertionError(f"no rank copies {copy}")


def pieces(state: StateSpec, rank: int, ranks: int) -> list[tuple[bool, int, range]]:
    """What a rank keeps of a whole row: whether it is the one to save it, from where on it is in its own row, and the bytes."""
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
        found = source_PX[read.to(source_PX.device)].to(target_PX.device)
        target_PX[write.to(target_PX.device)] = found
