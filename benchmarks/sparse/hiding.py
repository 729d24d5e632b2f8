"""How much of a fetch hides behind other work of the same pass, of one layer.

    steps      recorded: resolve, the layer's queries (a low-rank product, then one for each head), a copy of all picked rows.
               The fetch is between resolve and queries; or beside them, with the copy in two parts (`engine/passes/beside.py`)
    prompts    rows of a whole context into a scratch, and products as large as those of a chunk, layer by layer; or the next
               layer's rows while one is computed (`EngineConfig.stage_ahead`)

Hidden is what is saved of the time that fetching adds. Attention itself is left out, since nothing hides behind it.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch

from report import Goal, Row
from sparse.rig import REPEATS, STEPS, Rig, Shape, kernels_of
from stepwell.engine.passes.beside import Beside
from stepwell.engine.passes.rows import PLAIN, LayerPlaces, Rows, Tiled
from stepwell.engine.passes.stages import Stages
from stepwell.memory.row_pages import ABSENT

HIDDEN = 0.6
LATENT, ROTATED = 512, 64


@dataclass(frozen=True, slots=True, kw_only=True)
class Work:
    """Products of one layer of DeepSeek-V3.2: of a step's queries, and of a chunk of a prompt."""

    heads: int = 128
    query_rank: int = 1536
    plain: int = 128
    chunk: int = 2048
    hidden: int = 7168


SMALL = Work(heads=2, query_rank=8, plain=4, chunk=4, hidden=8)


def measure_hiding(shape: Shape, batches: Sequence[int]) -> Iterator[Row]:
    """Microseconds of a layer without a fetch, with it, and with it beside the rest."""
    for batch in batches:
        rig = Rig(shape, batch)
        layer = Layer(rig)
        took = {name: layer.seconds(name) for name in ("nothing", "before", "beside")}
        yield _row(f"batch {batch}, one layer of a step", took, shape.tiny, "fetch")
        del rig, layer


def measure_staging(shape: Shape) -> Iterator[Row]:
    """Microseconds of a layer of a prompt behind a context on the host: computed alone, with its rows, and with the next ones."""
    rig = Rig(shape, 1)
    took = {"nothing": Staging(rig, ahead=False).seconds(stage=False)}
    took |= {name: Staging(rig, ahead=name == "beside").seconds(stage=True) for name in ("before", "beside")}
    yield _row(f"a prompt behind {shape.context:,} tokens, one layer", took, shape.tiny, "rows of a layer", goal=False)


def _row(what: str, took: dict[str, float], tiny: bool, copied: str, *, goal: bool = True) -> Row:
    added = took["before"] - took["nothing"]
    hidden = (took["before"] - took["beside"]) / added if added > 0 else 0.0
    names = {"nothing": f"without {copied}", "before": f"with {copied}", "beside": "beside the rest"}
    figures = {f"{name}, us": took[key] * 1e6 for key, name in names.items()} | {"hidden, %": 100 * hidden}
    return Row(what=what, figures=figures, goal=Goal(value=hidden, limit=HIDDEN) if goal and not tiny else None)


class Layer:
    """Steps of a rig, each of another layer."""

    def __init__(self, rig: Rig) -> None:
        shape, device = rig.shape, rig.device
        work = SMALL if shape.tiny else Work()
        self._rig, self._dtype = rig, torch.float32 if shape.tiny else torch.bfloat16
        self._beside = Beside(rig.plan, layers=shape.layers, device=device)

        def made(*sizes: int) -> torch.Tensor:
            return torch.randn(*sizes, device=device, dtype=self._dtype)

        self._source_NQ, self._query_XQ = made(rig.batch, work.query_rank), made(work.heads * work.plain, work.query_rank)
        self._up_HDR = made(work.heads, work.plain, LATENT)

    def seconds(self, how: str) -> float:
        """Of one step. `nothing` is fetched, or it is `before` the rest, or `beside` it."""
        works = [partial(self._step, how, step) for step in range(STEPS)]
        return self._rig.median(("layer", how), works, moves=True)

    def _step(self, how: str, step: int) -> None:
        rig, layer = self._rig, step % self._rig.shape.layers
        rig.tick()
        rig.resolve(rig.wanted[step])
        fetch = partial(kernels_of(rig.shape)[1], rig.places, layer, rig.plan)
        if how == "before":
            fetch()
        elif how == "beside":
            self._beside.start(layer, fetch)
        query_NHD = (self._source_NQ @ self._query_XQ.T).unflatten(1, (len(self._up_HDR), -1))
        torch.bmm(query_NHD.transpose(0, 1), self._up_HDR)
        self._gather(rig.wanted[step], layer, self._beside if how == "beside" else None)
        self._beside.wait(layer)

    def _gather(self, wanted: Any, layer: int, beside: Beside | None) -> None:
        rig, shape = self._rig, self._rig.shape
        stored_PRE = rig.places.rows_PLRE[:, layer]
        places = LayerPlaces(rig.places, layer, 0, beside=beside)
        if shape.tiny:
            page_rows, position_XK = shape.page_rows, wanted.position_XK.long()
            page_XK = wanted.table_BP.long().gather(1, position_XK // page_rows)
            Rows(stored_PRE, PLAIN, self._dtype, places).some(page_XK, position_XK % page_rows)
            return
        from stepwell.engine.ops.on_triton.gather import gather_rows

        rows = Rows(stored_PRE, Tiled(width=LATENT, exact=ROTATED), self._dtype, places)
        gather_rows(rows, wanted.table_BP, wanted.position_XK)


class Staging:
    """Layers of a prompt whose context is on the host, one after the other."""

    def __init__(self, rig: Rig, *, ahead: bool) -> None:
        shape, work = rig.shape, SMALL if rig.shape.tiny else Work()
        self._rig, dtype = rig, torch.float32 if shape.tiny else torch.bfloat16
        self._stages = Stages(rig.places, shape.pages, fetch=kernels_of(shape)[1], ahead=ahead)
        pages, host = np.arange(shape.pages), rig.places.header_P3[: shape.pages, 2].cpu().numpy()
        where: Any = SimpleNamespace(rows=np.full(shape.pages, ABSENT, np.int32), host=host)
        self._staged = self._stages.plan(pages, where)
        self._x_NC = torch.randn(work.chunk, work.hidden, device=rig.device, dtype=dtype)
        self._out_XC = torch.randn(work.heads * work.plain, work.hidden, device=rig.device, dtype=dtype)

    def seconds(self, *, stage: bool) -> float:
        """Of one layer. Passes over prompts are not recorded, so this is not."""
        self._pass(stage)
        return statistics.median(self._timed(stage) for _ in range(REPEATS)) / self._rig.shape.layers

    def _timed(self, stage: bool) -> float:
        self._synchronize()
        began = time.perf_counter()
        self._pass(stage)
        self._synchronize()
        return time.perf_counter() - began

    def _synchronize(self) -> None:
        if self._rig.device.type == "cuda":
            torch.cuda.synchronize()

    def _pass(self, stage: bool) -> None:
        layers = self._rig.shape.layers
        for layer in range(layers):
            if stage:
                self._stages.stage(layer, self._staged, goes_on=layer + 1 < layers)
            torch.mm(self._x_NC, self._out_XC.T)
