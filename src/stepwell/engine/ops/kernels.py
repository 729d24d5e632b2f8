"""Which implementation runs each operation of a pass: plain torch, or kernels of a library. Chosen once, when a model is built.

    operation      reference              on CUDA, in bf16 or fp16
    attention      ops/attention.py       FlashInfer over the pages
    latents        ops/attention.py       FlashInfer over the pages, or over rows that Triton decodes
    picked rows    ops/selection.py       FlashInfer over rows that Triton gathers: of latents,
                   ops/picked.py          and of keys and values per head
    index          ops/selection.py       Triton: scores and the best of them, the latter with FlashInfer's top-k
    entries        ops/compression.py     Triton: windows, entries and sinks in one
    rows           passes/rows.py         Triton: encoding in eight bits
    hot rows       sparse/resolve.py      Triton: slots for selected rows that are on the host alone, their copies,
                   sparse/places.py       and reading rows wherever they are
    pointwise      ops/pointwise.py       Triton: rotation and rows, gates, sums and norms
    experts        ops/experts.py         Triton, or torch's grouped product
    recurrence     ops/recurrent.py       Triton; runs of delta nets by flash-linear-attention
    drawing        ops/drawing.py         Triton: temperature, top-k and top-p, for all rows at once
    tokens         ops/to_host.py         Triton: into pinned memory, where copy engines may be busy
    numbers        passes/numbers.py      Triton: from pinned memory, for the same reason

An operation whose kernel cannot be built or launched runs in plain torch from then on (`guarded.py`).
"""

from __future__ import annotations

import logging
import shutil
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from importlib.util import find_spec
from typing import Any, Protocol

import torch

from stepwell.base.errors import ConfigError
from stepwell.base.extras import install
from stepwell.engine.ops import pointwise, recurrent
from stepwell.engine.ops.attention import Attend, AttendLatent, attend, attend_latent
from stepwell.engine.ops.compiling import Compiling, nothing
from stepwell.engine.ops.compression import AttendShared, attend_shared
from stepwell.engine.ops.drawing import Pick, pick
from stepwell.engine.ops.experts import RunExperts, run_experts
from stepwell.engine.ops.guarded import Guarded, Report
from stepwell.engine.ops.picked import AttendPicked, attend_picked
from stepwell.engine.ops.pointwise import Activation, Angles, HeadNorms
from stepwell.engine.ops.recurrent import Points
from stepwell.engine.ops.recurrent_tokens import Tokens
from stepwell.engine.ops.selection import AttendSelected, Best, Select, attend_selected, best, select
from stepwell.engine.ops.to_host import ToHost, to_host
from stepwell.engine.passes import numbers
from stepwell.engine.passes.numbers import Send
from stepwell.engine.passes.paging import Paging
from stepwell.engine.passes.rows import Rows
from stepwell.sparse.places import Places, Read
from stepwell.sparse.resolve import Fetch, Resolve, fetch, resolve

KERNELS = ("auto", "torch", "flashinfer")
OPERATIONS = (
    "attention", "latents", "picked rows", "index", "entries", "rows", "hot rows", "pointwise", "experts", "recurrence",
    "delta runs", "drawing", "tokens", "numbers",
)  # fmt: skip
_FAST_DTYPES = (torch.bfloat16, torch.float16)
_INSTALL = f"{install('cuda')}, and have CUDA's compiler (nvcc) on the path"

log = logging.getLogger(__name__)


class WriteKeysValues(Protocol):
    def __call__(
        self, qkv_NX: torch.Tensor, rows: Rows, paging: Paging, *, heads: int, kv_heads: int, norms: HeadNorms | None,
        angles: Angles | None,
    ) -> torch.Tensor: ...  # fmt: skip


class Convolve(Protocol):
    def __call__(
        self, points: Points, layer: int, x_NC: torch.Tensor, weight_WC: torch.Tensor, bias_C: torch.Tensor | None = None, *,
        act: Activation | None = None,
    ) -> torch.Tensor: ...  # fmt: skip


class GatedNorm(Protocol):
    def __call__(
        self, x_NC: torch.Tensor, gate_NC: torch.Tensor, weight_C: torch.Tensor | None, eps: float, *, groups: int = 1,
        gate_first: bool = False, act: Activation = ...,
    ) -> torch.Tensor: ...  # fmt: skip


Recur = Callable[[Points, int, Tokens], torch.Tensor]
MakeAngles = Callable[[torch.Tensor, torch.Tensor, float, torch.dtype], Angles]
AddNorm = Callable[[torch.Tensor, torch.Tensor, torch.Tensor, float], tuple[torch.Tensor, torch.Tensor]]
Gate = Callable[[torch.Tensor, Activation], torch.Tensor]
WriteRows = Callable[[Rows, torch.Tensor, torch.Tensor, torch.Tensor], None]


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Kernels:
    """One implementation of each operation. Without arguments: plain torch throughout."""

    attend: Attend = attend
    attend_latent: AttendLatent = attend_latent
    attend_selected: AttendSelected = attend_selected
    attend_picked: AttendPicked = attend_picked
    attend_shared: AttendShared = attend_shared
    select: Select = select
    resolve: Resolve = resolve
    fetch: Fetch = fetch
    read_spilled: Read = Places.read
    best: Best = best
    write_rows: WriteRows = Rows.write
    write_keys_values: WriteKeysValues = pointwise.write_keys_values
    angles: MakeAngles = pointwise.angles
    add_norm: AddNorm = pointwise.add_norm
    gate: Gate = pointwise.gate
    pick: Pick = pick
    to_host: ToHost = to_host
    send: Send = numbers.copy  # of numbers too large for the driver to send among a stream's commands
    experts: RunExperts = run_experts
    convolve: Convolve = recurrent.convolve
    recur: Recur = recurrent.recur
    gated_norm: GatedNorm = recurrent.gated_norm
    report: Report = field(default_factory=Report)
    compiling: Compiling | None = None  # in the background; None: passes wait for their kernels

    def settle(self) -> bool:
        """Between passes: whether operations run by other kernels from now on."""
        if self.compiling is None or not self.compiling.settle():
            return False
        self.report.awaited.clear()
        self.report.changes += 1
        return True

    @property
    def experts_stay_on_device(self) -> bool:
        """Whether a step with experts can be recorded: plain torch asks the device how many tokens each expert has."""
        return self.experts is not run_experts

    @property
    def spilled_stay_on_device(self) -> bool:
        """Whether a step over rows on the host can be recorded: plain torch asks the device which rows are where."""
        return self.read_spilled is not Places.read and "hot rows" not in self.report.failed


TORCH = Kernels()


def check_kernels(name: str, device: torch.device | str, dtype: torch.dtype) -> None:
    """Raises ConfigError for kernels that are not known, or that cannot run here."""
    if name not in KERNELS:
        raise ConfigError(f"`kernels` must be one of {', '.join(KERNELS)}, got {name!r}")
    if name == "flashinfer" and not _fast(device, dtype):
        raise ConfigError("kernels of FlashInfer need CUDA, and a `dtype` of bf16 or fp16; use `kernels=auto`")
    if name == "flashinfer" and not _has_flashinfer():
        raise ConfigError(f"FlashInfer is not there: {_INSTALL}; or use `kernels=auto`")


def choose_kernels(name: str, device: torch.device | str, dtype: torch.dtype, *, background: bool = False) -> Kernels:
    """The fastest there are for a device and a number format, or those that were asked for. Raises ConfigError.

    With `background`, what is not compiled yet runs in plain torch while other processes compile it. Else passes wait for that.
    """
    check_kernels(name, device, dtype)
    report = Report(chosen=dict.fromkeys(OPERATIONS, "torch"))
    if name == "torch" or not _fast(device, dtype):
        return Kernels(report=report)
    fast: dict[str, Any] = {}
    compiling = None
    if find_spec("triton") is not None:
        fast |= _triton(report) | _recurrence(report)
    else:
        log.warning("Triton is not there, so most of a pass runs in plain torch, which is slow on a GPU: %s", _INSTALL)
    if _has_flashinfer():
        compiling = _compiling() if background and name == "auto" else None
        fast |= _flashinfer(report, torch.device(device), fast.get("send", numbers.copy), compiling)
    else:
        log.warning("attention runs in plain torch, which is slow on a GPU: %s", _INSTALL)
    return Kernels(report=report, compiling=compiling, **fast)


def _fast(device: torch.device | str, dtype: torch.dtype) -> bool:
    return torch.device(device).type == "cuda" and dtype in _FAST_DTYPES


def _has_flashinfer() -> bool:
    return find_spec("flashinfer") is not None and (
        shutil.which("nvcc") is not None or find_spec("flashinfer_jit_cache") is not None
    )


def _triton(report: Report) -> dict[str, Any]:
    from stepwell.engine.ops.on_triton import pointwise as fast
    from stepwell.engine.ops.on_triton.drawing import pick as fast_pick
    from stepwell.engine.ops.on_triton.experts import run_experts_grouped
    from stepwell.engine.ops.on_triton.host_copies import TritonFromHost, TritonToHost
    from stepwell.engine.ops.on_triton.rows import write_rows
    from stepwell.engine.ops.on_triton.selection import TritonSelect
    from stepwell.engine.ops.on_triton.selection import best as fast_best
    from stepwell.engine.ops.on_triton.shared import TritonShared
    from stepwell.sparse.triton_fetch import fetch as fast_fetch
    from stepwell.sparse.triton_read import read as fast_read
    from stepwell.sparse.triton_resolve import resolve as fast_resolve

    report.chosen |= dict.fromkeys(
        ("index", "entries", "rows", "hot rows", "pointwise", "experts", "drawing", "tokens", "numbers"), "triton"
    )
    send = Guarded("numbers", TritonFromHost(), numbers.copy, report)
    names = ("write_keys_values", "angles", "add_norm", "gate")
    made = {name: Guarded("pointwise", getattr(fast, name), getattr(pointwise, name), report) for name in names}
    return made | {
        "send": send,
        "pick": Guarded("drawing", partial(fast_pick, send=send), pick, report),
        "to_host": Guarded("tokens", TritonToHost(), to_host, report),
        "experts": Guarded("experts", run_experts_grouped, run_experts, report),
        "select": Guarded("index", TritonSelect(), select, report),
        "best": Guarded("index", fast_best, best, report),
        "attend_shared": Guarded("entries", TritonShared(TritonSelect()), attend_shared, report),
        "write_rows": Guarded("rows", write_rows, Rows.write, report),
        "resolve": Guarded("hot rows", fast_resolve, resolve, report),
        "fetch": Guarded("hot rows", fast_fetch, fetch, report),
        "read_spilled": Guarded("hot rows", fast_read, Places.read, report),
    }


def _recurrence(report: Report) -> dict[str, Any]:
    """Runs of delta nets have a line of their own in the report: without flash-linear-attention they run in plain torch."""
    from stepwell.engine.ops.on_triton import recurrent as fast
    from stepwell.engine.ops.on_triton.convolution import convolve
    from stepwell.engine.ops.on_triton.ssd import recur_runs as ssd_runs

    report.chosen["recurrence"] = "triton"
    delta_runs: Callable[..., Any] = recurrent.recur_runs
    if find_spec("fla") is not None:
        from stepwell.engine.ops.on_triton.fla_recurrent import recur_runs as fla_runs

        report.chosen["delta runs"] = "fla"
        delta_runs = Guarded("delta runs", fla_runs, recurrent.recur_runs, report)
    return {
        "convolve": Guarded("recurrence", convolve, recurrent.convolve, report),
        "recur": Guarded("recurrence", fast.Recurrence(delta_runs, ssd_runs), recurrent.recur, report),
        "gated_norm": Guarded("recurrence", fast.gated_norm, recurrent.gated_norm, report),
    }


def _compiling() -> Compiling:
    from stepwell.engine.ops.on_flashinfer.modules import in_background

    return Compiling(in_background())


def _flashinfer(report: Report, device: torch.device, send: Send, compiling: Compiling | None) -> dict[str, Any]:
    from stepwell.engine.ops.on_flashinfer.attention import FlashInferAttention

    report.chosen["attention"] = "flashinfer"
    attention = FlashInferAttention(device, send, need=nothing if compiling is None else compiling.need)
    made = {"attend": Guarded("attention", attention, attend, report)}
    if find_spec("triton") is None:
        return made
    from stepwell.engine.ops.on_flashinfer.picked import FlashInferPicked

    made["attend_picked"] = Guarded("picked rows", FlashInferPicked(attention), attend_picked, report)
    return made | _flashinfer_latent(report, device, send)


def _flashinfer_latent(report: Report, device: torch.device, send: Send) -> dict[str, Any]:
    """Over latents. Rows in eight bits, and picked ones, are gathered by Triton before FlashInfer reads them."""
    from stepwell.engine.ops.on_flashinfer.latent import FlashInferLatent, highest
    from stepwell.engine.ops.on_triton.selection import TritonSelect
    from stepwell.engine.ops.on_triton.selection import best as fast_best
    from stepwell.engine.ops.on_triton.shared import TritonShared

    report.chosen |= {"latents": "flashinfer", "picked rows": "flashinfer", "index": "triton and flashinfer"}
    latent = FlashInferLatent(device, send)
    fast_select = TritonSelect(highest)
    return {
        "attend_latent": Guarded("latents", latent, attend_latent, report),
        "attend_selected": Guarded("picked rows", latent.attend_selected, attend_selected, report),
        "select": Guarded("index", fast_select, select, report),
        "best": Guarded("index", partial(fast_best, top_k=highest), best, report),
        "attend_shared": Guarded("entries", TritonShared(fast_select), attend_shared, report),
    }
