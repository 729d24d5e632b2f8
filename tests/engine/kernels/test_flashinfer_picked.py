"""The arguments that FlashInfer gets for picked rows, with a stand-in that computes what the library says it does.

Rows are gathered by Triton: on the GPU where there is one, interpreted on the CPU elsewhere.
"""

from __future__ import annotations

import sys
from dataclasses import replace
from random import Random
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch

from engine.kernels.test_triton_rows import scattered
from engine.paged import Scene, Shape
from stepwell.engine.ops.guarded import Guarded, NoKernel, Report
from stepwell.engine.ops.picked import attend_picked
from stepwell.engine.ops.selection import Picked, Selection
from stepwell.engine.passes.paging import Singles
from stepwell.engine.passes.rows import Rows
from stepwell.engine.running.graphs import FixedPaging

pytest.importorskip("triton")
from stepwell.engine.ops.on_flashinfer import attention as flashinfer_attention
from stepwell.engine.ops.on_flashinfer.attention import FlashInferAttention
from stepwell.engine.ops.on_flashinfer.picked import FlashInferPicked

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
SCALE, WIDTH, TOLERANCE = 0.2, 64, 0.06  # plain torch rounds scores to bf16 where there is a cap
BATCHES = [
    ((40, 70, 55, 30), (1, 1, 1, 20)),  # all singles pick, and a prompt is read in the same pass
    ((60, 10, 44), (1, 1, 1)),  # one of them sees no more than it may pick
    ((90, 33, 50, 0), (1, 7, 25, 12)),  # one run picks, the others do not
    ((80, 77), (6, 9)),
    ((50,), (1,)),
]


class Library:
    """In place of the library's wrapper. `buffers` are those of a recorded step, which stay where they are."""

    num_plans = 0

    def __init__(self, workspace: torch.Tensor, layout: str, *, backend: str, **buffers: Any) -> None:
        assert layout == "NHD"
        self.device = workspace.device
        self._recorded = bool(buffers)
        self._paged_kv_last_page_len_buf = buffers.get("paged_kv_last_page_len_buf")

    def plan(
        self, queries: torch.Tensor, starts: torch.Tensor, indices: torch.Tensor, last: torch.Tensor, heads: int, kv_heads: int,
        width: int, page: int, *, causal: bool, sm_scale: float, window_left: int, logits_soft_cap: float | None, **dtypes: Any,
    ) -> None:  # fmt: skip
        assert causal and window_left == -1 and ((last >= 1) & (last <= page)).all()
        assert int(starts[-1]) == len(indices)
        Library.num_plans += 1
        if self._recorded:
            self._paged_kv_last_page_len_buf.copy_(last)
        else:
            self._paged_kv_last_page_len_buf = last.clone()
        self._told = queries.tolist(), starts.tolist(), indices.long(), page, sm_scale, logits_soft_cap

    def run(self, query_NHD: torch.Tensor, pages: tuple[torch.Tensor, torch.Tensor], *, out: torch.Tensor) -> None:
        queries, starts, indices, page, scale, cap = self._told
        for at, last in enumerate(self._paged_kv_last_page_len_buf.tolist()):
            held = indices[starts[at] : starts[at + 1]]
            length = (len(held) - 1) * page + last
            key_TKD, value_TKD = (each[held].flatten(0, 1)[:length].float() for each in pages)
            mine = query_NHD[queries[at] : queries[at + 1]].float().unflatten(1, (key_TKD.shape[1], -1))
            score = torch.einsum("nkgd,tkd->nkgt", mine, key_TKD) * scale
            score = score if cap is None else torch.tanh(score / cap) * cap
            seen_T = torch.arange(length, device=score.device)
            score.masked_fill_(seen_T > seen_T[length - len(mine) :, None, None, None], -torch.inf)
            out[queries[at] : queries[at + 1]] = torch.einsum("nkgt,tkd->nkgd", score.softmax(-1), value_TKD).flatten(1, 2)


@pytest.fixture
def library(monkeypatch: pytest.MonkeyPatch) -> FlashInferPicked:
    module = ModuleType("flashinfer")
    module.BatchPrefillWithPagedKVCacheWrapper = Library  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "flashinfer", module)
    if DEVICE == "cpu":
        event = SimpleNamespace(record=lambda stream: None, synchronize=lambda: None)
        monkeypatch.setattr(torch.cuda, "Event", lambda: event)
        monkeypatch.setattr(torch.cuda, "current_stream", lambda device: None)
        monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (9, 0))
        monkeypatch.setattr(torch.Tensor, "pin_memory", lambda self: self)
    monkeypatch.setattr(flashinfer_attention, "WORKSPACE_BYTES", 64)
    monkeypatch.setattr(flashinfer_attention, "RECORDED_PAGES", 1024)
    return FlashInferPicked(FlashInferAttention(torch.device(DEVICE)))


def scene_of(contexts: tuple[int, ...], lengths: tuple[int, ...], seed: int = 0) -> Scene:
    shape = Shape(heads=6, kv_heads=2, width=WIDTH, page=8, contexts=contexts, lengths=lengths)
    scene = Scene(shape, seed, dtype=torch.bfloat16, device=DEVICE)
    scene.clear_unwritten()
    return scene


def picks(scene: Scene, count: int, seed: int = 0, *, runs: bool = True) -> Selection:
    """Random ones; all that can be seen where there are fewer, and some that cannot behind them. Every second run picks."""
    random, made = Random(seed), []
    for number, part in enumerate(scene.paging.parts):
        single = isinstance(part, Singles)
        pages = part.table_BP.shape[1] if isinstance(part, Singles) else len(part.pages_P)
        if pages * 8 <= count or (not single and (number % 2 == 0 or not runs)):
            made.append(None)
            continue
        position_X = part.position_B if isinstance(part, Singles) else part.position_N
        rows = [
            sorted(random.sample(range(here + 1), count)) if here >= count else list(range(count)) for here in position_X.tolist()
        ]
        made.append(Picked(position_XK=torch.tensor(rows, device=scene.device)))
    return tuple(made)


def expected(scene: Scene, query_NHD: torch.Tensor, selection: Selection, cap: float | None) -> torch.Tensor:
    rows = Rows(scene.rows.stored_PRE, scene.rows.format, torch.float32)
    paging = Scene(scene.shape, scene.seed, device=DEVICE).paging
    return attend_picked(query_NHD.float(), rows, paging, selection, heads=2, key_dim=WIDTH, scale=SCALE, cap=cap)


@pytest.mark.parametrize("cap", [None, 20.0])
@pytest.mark.parametrize("count", [16, 24, 33])
@pytest.mark.parametrize(("contexts", "lengths"), BATCHES)
def test_picked_rows_are_seen_as_by_plain_torch(
    contexts: tuple[int, ...], lengths: tuple[int, ...], count: int, cap: float | None, library: FlashInferPicked
) -> None:
    scene = scene_of(contexts, lengths)
    query_NHD, selection = scene.made(scene.num_tokens, 6, WIDTH), picks(scene, count)
    for layer in range(2):  # the second layer has its plans already, and picks others
        selection = picks(scene, count, layer)
        made = library(query_NHD, scene.rows, scene.paging, selection, heads=2, key_dim=WIDTH, scale=SCALE, cap=cap)
        assert (made.float() - expected(scene, query_NHD, selection, cap)).abs().max() < TOLERANCE


def test_single_tokens_of_prompts_look_at_everything(library: FlashInferPicked) -> None:
    scene = scene_of((60, 70, 50), (1, 1, 1))
    scene.paging._together = lambda: [range(2), range(2, 3)]
    query_NHD = scene.made(3, 6, WIDTH)
    selection = (picks(scene, 24)[0], None)  # the last is of a prompt
    made = library(query_NHD, scene.rows, scene.paging, selection, heads=2, key_dim=WIDTH, scale=SCALE)
    fresh = Scene(scene.shape, scene.seed, device=DEVICE).paging
    fresh._together = lambda: [range(2), range(2, 3)]
    rows = Rows(scene.rows.stored_PRE, scene.rows.format, torch.float32)
    right = attend_picked(query_NHD.float(), rows, fresh, selection, heads=2, key_dim=WIDTH, scale=SCALE)
    assert (made.float() - right).abs().max() < TOLERANCE


def test_rows_that_may_be_on_the_host_are_looked_up(library: FlashInferPicked) -> None:
    """Singles are gathered from wherever they are. Dense runs, which the library would read in pages, are not given to it."""
    shape, count = Shape(heads=6, kv_heads=2, width=WIDTH, page=8, contexts=(60, 70, 50), lengths=(1, 1, 5)), 24
    scene = Scene(shape, dtype=torch.float16, device=DEVICE)  # Triton's interpreter has no bf16
    scene.clear_unwritten()
    places = scattered(scene.rows, 0)
    query_NHD, selection = scene.made(scene.num_tokens, 6, WIDTH), picks(scene, count, runs=False)
    assert selection[0] is not None and selection[-1] is None
    made = library(query_NHD, places, scene.paging, selection, heads=2, key_dim=WIDTH, scale=SCALE)
    assert (made.float() - expected(scene, query_NHD, selection, None)).abs().max() < TOLERANCE
    with pytest.raises(NoKernel, match="on the host"):  # else pages were read that are not there
        FlashInferAttention(torch.device(DEVICE))(query_NHD, places, scene.paging, heads=2, key_dim=WIDTH, scale=SCALE)


def test_pieces_of_a_pass_that_share_a_wrapper_are_each_planned_for(library: FlashInferPicked) -> None:
    """Layer by layer, one after the other."""
    scenes = [scene_of((60, 30), (1, 1)), scene_of((90, 20), (1, 1), seed=1), scene_of((40,), (30,)), scene_of((15,), (40,))]
    for layer in range(3):
        for scene in scenes:
            query_NHD, selection = scene.made(scene.num_tokens, 6, WIDTH), picks(scene, 24, layer, runs=False)
            made = library(query_NHD, scene.rows, scene.paging, selection, heads=2, key_dim=WIDTH, scale=SCALE)
            assert (made.float() - expected(scene, query_NHD, selection, None)).abs().max() < TOLERANCE


def test_a_recorded_step_is_loaded_with_another_batch(library: FlashInferPicked) -> None:
    """Only how many rows each looks at is part of the plan."""
    first, second = scene_of((20, 60), (1, 1)), scene_of((70, 26), (1, 1), seed=1)
    fixed = FixedPaging(first.paging, 12)
    for scene in (first, second):
        if scene is second:
            fixed.load(second.paging)
        query_NHD = scene.made(2, 6, WIDTH)
        position_X = fixed.singles[0].position_B
        rows = [sorted(Random(0).sample(range(at + 1), 24)) if at >= 24 else list(range(24)) for at in position_X.tolist()]
        selection = (Picked(position_XK=torch.tensor(rows, device=scene.device)),)
        made = library(query_NHD, scene.rows, fixed, selection, heads=2, key_dim=WIDTH, scale=SCALE)
        assert (made.float() - expected(scene, query_NHD, selection, None)).abs().max() < TOLERANCE


def test_what_there_is_no_kernel_for_is_told_with_its_reason(library: FlashInferPicked) -> None:
    report = Report(chosen={"attention": "flashinfer"})
    attention = Guarded("attention", FlashInferAttention(torch.device(DEVICE)), lambda query_NHD, *_, **__: query_NHD, report)
    shape = Shape(heads=4, kv_heads=2, width=WIDTH, page=8, contexts=(3,), lengths=(1,))
    for width, dtype in ((WIDTH, torch.bfloat16), (80, torch.bfloat16), (WIDTH, torch.float32)):
        scene = Scene(replace(shape, width=width), dtype=dtype, device=DEVICE)
        scene.clear_unwritten()
        query_NHD = scene.made(1, 4, width).bfloat16()
        attention(query_NHD, scene.rows, scene.paging, heads=2, key_dim=width, scale=SCALE)
    seen = Scene(shape, dtype=torch.bfloat16, device=DEVICE)
    late = replace(seen.paging.sight, first_seen=1)
    assert report.left["attention"] == ["heads of 80 channels", "rows in float32"]
    seen.paging.sight = late
    attention(seen.made(1, 4, WIDTH), seen.rows, seen.paging, heads=2, key_dim=WIDTH, scale=SCALE)
    assert report.left["attention"][2:] == ["contexts that begin behind their first token"]
    assert not report.failed
