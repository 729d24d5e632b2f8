"""Attention over the rows that are there while the missing ones come, then over these, and both merged by their softmax sums:
whether that is faster than to fetch first.

    none      resolve, a copy of all picked rows, attention over it. Nothing is fetched
    before    the fetch is between resolve and the copy
    beside    the fetch is beside the copy of the rows that are there; those that came are copied behind it (`fetch_beside`)
    split     the fetch is beside a copy of the rows that are there and attention over them; then a copy of the others, attention
              over these, and a merge

Latents of DeepSeek-V3.2, 128 heads, selections of the steady trace, steps recorded. A library's attention has to know on the
host how many rows each request looks at, and only the device knows how many are there. So `split` is given what it could not
have: each request misses as many rows as they do on average. That is in its favour: what an engine would have to add is not in
its time.

A merge rounds differently, so answers would not be the bits of an engine that has all rows. Axes: B requests, K rows, H heads,
C channels of a row, R of them values.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import partial
from typing import Any

import torch

from report import Row
from sparse.hiding import LATENT, ROTATED, SMALL, Work
from sparse.rig import STEPS, Rig, Shape, kernels_of
from stepwell.engine.passes.beside import Beside
from stepwell.engine.passes.rows import PLAIN, LayerPlaces, Rows, Tiled
from stepwell.sparse.resolve import Wanted

WAYS = ("none", "before", "beside", "split")
WORKSPACE_BYTES = 64 << 20
SMALL_RANK = 16  # values of a tiny row


def measure_split(shape: Shape, batches: Sequence[int]) -> Iterator[Row]:
    """Microseconds of one layer, each way."""
    for batch in batches:
        rig = Rig(shape, batch)
        missing = max(round(rig.seconds(fetch=True)[1] / batch), 1)
        layer = SplitLayer(rig, missing)
        took = {way: layer.seconds(way) for way in WAYS}
        figures: dict[str, float] = {"rows missing of each": missing} | {f"{way}, us": took[way] * 1e6 for way in WAYS}
        figures["split of before, %"] = 100 * took["split"] / took["before"]
        figures["split of beside, %"] = 100 * took["split"] / took["beside"]
        yield Row(what=f"batch {batch}, one layer", figures=figures)
        del rig, layer


class SplitLayer:
    """Steps of a rig, each of another layer, of whose picked rows the last `missing` ones stand for those that come."""

    def __init__(self, rig: Rig, missing: int) -> None:
        shape, device, tiny = rig.shape, rig.device, rig.shape.tiny
        self._rig, self._there, self._dtype = rig, shape.count - missing, torch.float32 if tiny else torch.bfloat16
        self._beside = Beside(rig.plan, layers=shape.layers, device=device)
        heads, width = (SMALL.heads, shape.row_bytes) if tiny else (Work().heads, LATENT + ROTATED)
        self._query_BHC = torch.randn(rig.batch, heads, width, device=device, dtype=self._dtype)
        make = PlainAttention if tiny else LatentAttention
        self._over = {count: make(rig.batch, count, heads, device) for count in (shape.count, self._there, missing)}

    def seconds(self, way: str) -> float:
        """Of one step."""
        works = [partial(self.step, way, step) for step in range(STEPS)]
        return self._rig.median(("split", way), works, moves=True)

    def step(self, way: str, step: int) -> torch.Tensor:
        rig, layer, wanted = self._rig, step % self._rig.shape.layers, self._rig.wanted[step]
        rig.tick()
        rig.resolve(wanted)
        fetch = partial(kernels_of(rig.shape)[1], rig.places, layer, rig.plan)
        if way == "before":
            fetch()
        elif way != "none":
            self._beside.start(layer, fetch)
        if way == "split":
            return self._split(layer, wanted)
        out_BHR, _ = self._attend(layer, wanted, slice(None), self._beside if way == "beside" else None)
        self._beside.wait(layer)
        return out_BHR

    def _split(self, layer: int, wanted: Wanted) -> torch.Tensor:
        there = self._attend(layer, wanted, slice(0, self._there))
        self._beside.wait(layer)
        came = self._attend(layer, wanted, slice(self._there, None))
        return (merge if self._rig.shape.tiny else _merge_kernel())(*there, *came)

    def _attend(
        self, layer: int, wanted: Wanted, part: slice, beside: Beside | None = None
    ) -> tuple[torch.Tensor, torch.Tensor]:  # fmt: skip
        """What the queries see in some of the picked rows, and the logarithms of their softmax sums."""
        position_BK = wanted.position_XK[:, part]
        copy_BKC = self._copy(layer, wanted, position_BK, beside)
        return self._over[position_BK.shape[1]](self._query_BHC, copy_BKC)

    def _copy(self, layer: int, wanted: Wanted, position_BK: torch.Tensor, beside: Beside | None) -> torch.Tensor:
        rig, shape = self._rig, self._rig.shape
        stored_PRE, places = rig.places.rows_PLRE[:, layer], LayerPlaces(rig.places, layer, 0, beside=beside)
        if shape.tiny:
            at_BK = position_BK.long()
            page_BK = wanted.table_BP.long().gather(1, at_BK // shape.page_rows)
            return Rows(stored_PRE, PLAIN, self._dtype, places).some(page_BK, at_BK % shape.page_rows)
        from stepwell.engine.ops.on_triton.gather import gather_rows

        rows = Rows(stored_PRE, Tiled(width=LATENT, exact=ROTATED), self._dtype, places)
        return gather_rows(rows, wanted.table_BP, position_BK)


# ---- attention that tells its softmax sums ------------------------------------------------------------


class PlainAttention:
    """In plain torch. Logarithms are of base 2, as the library's are."""

    def __init__(self, batch: int, count: int, heads: int, device: torch.device) -> None:
        self._rank = SMALL_RANK

    def __call__(self, query_BHC: torch.Tensor, row_BKC: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        score_BHK = query_BHC @ row_BKC.mT * query_BHC.shape[2] ** -0.5
        seen_BHR = score_BHK.softmax(dim=-1) @ row_BKC[..., : self._rank]
        return seen_BHR, score_BHK.logsumexp(dim=-1) / torch.log(torch.tensor(2.0))


class LatentAttention:
    """FlashInfer's, over copies of `count` rows of each request."""

    def __init__(self, batch: int, count: int, heads: int, device: torch.device) -> None:
        from flashinfer.mla import BatchMLAPagedAttentionWrapper

        self._made: Any = BatchMLAPagedAttentionWrapper(torch.zeros(WORKSPACE_BYTES, dtype=torch.uint8, device=device))
        queries, starts = torch.arange(batch + 1, dtype=torch.int32), torch.arange(batch + 1, dtype=torch.int32) * count
        numbers = torch.arange(batch * count, dtype=torch.int32, device=device)
        lengths, half = torch.full((batch,), count, dtype=torch.int32), torch.bfloat16
        scale = (128 + ROTATED) ** -0.5
        self._made.plan(queries, starts, numbers, lengths, heads, LATENT, ROTATED, 1, False, scale, half, half)

    def __call__(self, query_BHC: torch.Tensor, row_BKC: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        row_M1C = row_BKC.flatten(0, 1)[:, None]
        parts = query_BHC[..., :LATENT], query_BHC[..., LATENT:], row_M1C[..., :LATENT], row_M1C[..., LATENT:]
        seen_BHR, sum_BH = self._made.run(*parts, return_lse=True)
        return seen_BHR, sum_BH


def merge(one_BHR: torch.Tensor, one_BH: torch.Tensor, other_BHR: torch.Tensor, other_BH: torch.Tensor) -> torch.Tensor:
    """What is seen in all rows, of what is seen in some and in the others. Sums are logarithms of base 2."""
    share_BH1 = torch.sigmoid((one_BH - other_BH).float() * torch.log(torch.tensor(2.0)))[..., None]
    return (one_BHR * share_BH1 + other_BHR * (1 - share_BH1)).to(one_BHR.dtype)


def _merge_kernel() -> Any:
    from sparse.merging import merge as by_triton

    return by_triton
