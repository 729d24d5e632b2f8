"""Copies between a device and a host that keeps checkpoints in eight bits: converts numbers during the copy, and nowhere else.

    save    device page --> narrow page on the device --> host page
    load    device page <-- numbers <-- narrow page on the device <-- host page

Stores and other servers read host pages as they are. The copy engine below carries out the rest of a plan after the narrow
pages, so passes that wait for layers of a load (`TorchCopyEngine.events_for`) find those complete. Imports torch, and is
imported when it is used.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import replace
from typing import NamedTuple

import torch

from stepwell.base.ids import CACHED_KINDS, Kind, Tier
from stepwell.base.spec import ModelSpec, Part
from stepwell.base.tasks import Copy, PageIds, Plan, Purpose
from stepwell.transfer.copy_engine import CopyEngine, PageMemory, Work
from stepwell.transfer.narrow_rows import RowCode
from stepwell.transfer.torch_memory import TorchMemory

STAGED_BYTES = 64 << 20  # of narrow pages in staging buffers outside the tiers at a time, or one page
PIECE_BYTES = 16 << 20  # of numbers converted at a time: temporary tensors take a few times as much


class _Piece(NamedTuple):
    """Some layers of a state: where they lie in a device page, where in a narrow one, and how their rows are converted.

    Without a code the bytes are the same in both.
    """

    wide: slice
    narrow: slice
    wide_row_bytes: int
    narrow_row_bytes: int
    code: RowCode | None


class NarrowCopyEngine:
    """The engine of one rank, over another copy engine. It uses that engine's memories; `spec.narrow` gives the host's format.

    A save of state that is not finite fails, and so does the checkpoint's copy on the host.
    """

    def __init__(self, below: CopyEngine, spec: ModelSpec, memories: Mapping[Tier, PageMemory | TorchMemory]) -> None:
        self._below, self._spec = below, spec
        self._pieces = {kind: list(_pieces(spec, kind)) for kind in CACHED_KINDS if spec.is_narrow(kind)}
        self._pages = {tier: {kind: as_tensor(memory, kind) for kind in self._pieces} for tier, memory in memories.items()}
        device = next(iter(self._pages[Tier.DEVICE].values())).device
        self._device = device if device.type == "cuda" else None
        self._streams = {}
        if self._device is not None:
            self._streams = {saves: torch.cuda.Stream(self._device) for saves in (False, True)}

    def begin(self, plan: Plan) -> Work:
        mine = tuple(copy for copy in plan.copies if copy.turns(self._spec))
        if not mine:
            return self._below.begin(plan)
        others = tuple(copy for copy in plan.copies if not copy.turns(self._spec))
        below = self._below.begin(replace(plan, copies=others)) if others else None
        before = None
        if self._device is not None:
            before = torch.cuda.Event(blocking=True)
            before.record(torch.cuda.current_stream(self._device))

        def work() -> None:
            self._run(mine, before, saves=plan.purpose is Purpose.SAVE)
            if below is not None:
                below()

        return work

    # ---- on a worker thread -----------------------------------------------------------------------

    def _run(self, copies: tuple[Copy, ...], before: torch.cuda.Event | None, *, saves: bool) -> None:
        if before is None:
            self._copy_all(copies)
            return
        stream = self._streams[saves]
        before.synchronize()
        try:
            with torch.cuda.stream(stream):
                self._copy_all(copies)
        finally:  # after a failure too: pages must not be reused while a queued copy still runs
            stream.synchronize()

    def _copy_all(self, copies: tuple[Copy, ...]) -> None:
        for copy in copies:
            kind = copy.source.kind
            source_PB, target_PB = (self._pages[span.tier][kind] for span in (copy.source, copy.target))
            narrow_bytes = self._pages[Tier.HOST][kind].shape[1]
            step = max(STAGED_BYTES // narrow_bytes, 1)
            move = self._save if copy.target.tier is Tier.HOST else self._load
            for start in range(0, len(copy.source.ids), step):
                some = slice(start, start + step)
                move(kind, source_PB, copy.source.ids[some], target_PB, copy.target.ids[some])

    def _save(
        self, kind: Kind, device_PB: torch.Tensor, sources: PageIds, host_PB: torch.Tensor, targets: PageIds
    ) -> None:  # fmt: skip
        """Saves all of these pages, or raises NotFinite and saves none of them."""
        staged_PB = torch.empty((len(sources), host_PB.shape[1]), dtype=torch.uint8, device=device_PB.device)
        for page, source in enumerate(sources.tolist()):
            for piece in self._pieces[kind]:
                wide_B = device_PB[source, piece.wide]
                if piece.code is not None:
                    wide_B = piece.code.encode(wide_B.view(-1, piece.wide_row_bytes)).flatten()
                staged_PB[page, piece.narrow] = wide_B
        for page, target in enumerate(targets.tolist()):
            host_PB[target].copy_(staged_PB[page], non_blocking=True)
        self._wait()

    def _load(
        self, kind: Kind, host_PB: torch.Tensor, sources: PageIds, device_PB: torch.Tensor, targets: PageIds
    ) -> None:  # fmt: skip
        staged_PB = torch.empty((len(sources), host_PB.shape[1]), dtype=torch.uint8, device=device_PB.device)
        for page, source in enumerate(sources.tolist()):
            staged_PB[page].copy_(host_PB[source], non_blocking=True)
        for page, target in enumerate(targets.tolist()):
            for piece in self._pieces[kind]:
                narrow_B = staged_PB[page, piece.narrow]
                if piece.code is not None:
                    narrow_B = piece.code.decode(narrow_B.view(-1, piece.narrow_row_bytes)).flatten()
                device_PB[target, piece.wide] = narrow_B
        self._wait()

    def _wait(self) -> None:
        """Waits until everything queued here is done: the staging buffers are then free for the next pages."""
        if self._device is not None:
            torch.cuda.current_stream(self._device).synchronize()


def as_tensor(memory: PageMemory | TorchMemory, kind: Kind) -> torch.Tensor:
    """All pages of a kind, `[page id][byte]`, without a copy."""
    rows = memory.rows(kind)
    return rows if isinstance(rows, torch.Tensor) else torch.from_numpy(rows)


def _pieces(spec: ModelSpec, kind: Kind) -> Iterator[_Piece]:
    """An object of `kind`, divided into pieces of limited size."""
    assert spec.narrow is not None, f"checkpoints of {spec.name!r} are the same on the host"
    for wide, narrow in zip(spec.device_parts(kind), spec.parts(kind), strict=True):
        state = spec.state(wide.state)
        code = RowCode(spec.narrow.dtype, state.dtype) if spec.narrow.takes(state) else None
        step = max(PIECE_BYTES // wide.layer_stride, 1)
        for first in range(0, wide.layers, step):
            end = min(first + step, wide.layers)
            yield _Piece(_layers(wide, first, end), _layers(narrow, first, end), wide.row_bytes, narrow.row_bytes, code)


def _layers(part: Part, first: int, end: int) -> slice:
    return slice(part.offset + first * part.layer_stride, part.offset + end * part.layer_stride)
