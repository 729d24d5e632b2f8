"""The arguments that FlashInfer gets for latents, with a stand-in that computes what the library says it does.

Rows are gathered by Triton: on the GPU where there is one, interpreted on the CPU elsewhere.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from random import Random
from types import ModuleType, SimpleNamespace

import pytest
import torch

from engine.paged import Scene, Shape
from stepwell.engine.ops.attention import attend_latent
from stepwell.engine.ops.guarded import NoKernel
from stepwell.engine.ops.selection import Picked, Selection, attend_selected
from stepwell.engine.passes.rows import PLAIN, Rows, Tiled
from stepwell.engine.running.graphs import FixedPaging

pytest.importorskip("triton")
from stepwell.engine.ops.on_flashinfer import latent as flashinfer_latent
from stepwell.engine.ops.on_flashinfer import latent_plans
from stepwell.engine.ops.on_flashinfer.latent import FlashInferLatent

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
SCALE = 0.05
BATCHES = [((0, 7, 12), (1, 1, 5)), ((30, 3), (1, 1)), ((0, 9), (6, 11)), ((17,), (1,)), ((5,), (23,))]


class Library:
    """In place of the library's wrapper: rows of segment i are numbered from `starts[i]` pages on."""

    def __init__(self, workspace: torch.Tensor) -> None:
        self.device = workspace.device
        self.num_plans = 0

    def plan(
        self, queries: torch.Tensor, starts: torch.Tensor, numbers: torch.Tensor, lengths: torch.Tensor, heads: int, rank: int,
        rotated: int, page: int, causal: bool, scale: float, *dtypes: torch.dtype,
    ) -> None:  # fmt: skip
        assert (rank, rotated) == (512, 64) and numbers.dtype == queries.dtype == torch.int32
        assert len(queries) == len(starts) == len(lengths) + 1
        assert all(int(length) <= (int(stop) - int(start)) * page for length, start, stop in zip(lengths, starts, starts[1:]))  # noqa: B905
        self._told = queries, starts, lengths, page, causal, scale
        self._kv_indices_buf = numbers
        self.num_plans += 1

    def run(
        self, plain: torch.Tensor, turned: torch.Tensor, latent: torch.Tensor, key: torch.Tensor, *, out: torch.Tensor
    ) -> None:
        queries, starts, lengths, page, causal, scale = self._told
        assert self._kv_indices_buf.dtype == torch.int32 and out.is_contiguous()
        for at, length in enumerate(lengths.tolist()):
            mine, seen_T = slice(int(queries[at]), int(queries[at + 1])), torch.arange(length, device=latent.device)
            number = int(starts[at]) * page + seen_T
            where = self._kv_indices_buf[number // page].long(), number % page
            score = (plain[mine].float() @ latent[where].float().T + turned[mine].float() @ key[where].float().T) * scale
            if causal:
                score.masked_fill_(seen_T > seen_T[length - mine.stop + mine.start :, None, None], -torch.inf)
            out[mine] = (score.softmax(-1) @ latent[where].float()).to(out.dtype)


@pytest.fixture
def library(monkeypatch: pytest.MonkeyPatch) -> FlashInferLatent:
    module = ModuleType("flashinfer.mla")
    module.BatchMLAPagedAttentionWrapper = Library  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "flashinfer", ModuleType("flashinfer"))
    monkeypatch.setitem(sys.modules, "flashinfer.mla", module)
    if DEVICE == "cpu":
        event = SimpleNamespace(record=lambda stream: None, synchronize=lambda: None)
        monkeypatch.setattr(torch.cuda, "Event", lambda: event)
        monkeypatch.setattr(torch.cuda, "current_stream", lambda device: None)
        monkeypatch.setattr(torch.Tensor, "pin_memory", lambda self: self)
    monkeypatch.setattr(flashinfer_latent, "WORKSPACE_BYTES", 64)
    return FlashInferLatent(torch.device(DEVICE))


def scene_of(contexts: tuple[int, ...], lengths: tuple[int, ...], seed: int = 0, *, heads: int = 4) -> Scene:
    shape = Shape(heads=heads, kv_heads=1, width=288, page=4, contexts=contexts, lengths=lengths)
    return Scene(shape, seed, dtype=torch.bfloat16, device=DEVICE)


def expected(scene: Scene, query_NHC: torch.Tensor, rows: Rows, selection: Selection | None = None) -> torch.Tensor:
    """By plain torch in fp32, from the same numbers."""
    rows, paging = Rows(rows.stored_PRE, rows.format, torch.float32), Scene(scene.shape, scene.seed, device=DEVICE).paging
    if selection is None:
        return attend_latent(query_NHC.float(), rows, paging, rank=512, scale=SCALE)
    return attend_selected(query_NHC.float(), rows, paging, selection, rank=512, scale=SCALE)


def in_eight_bits(scene: Scene) -> Rows:
    kept = Tiled(width=512, exact=64)
    scene.clear_unwritten()
    stored = kept.encode(scene.rows.stored_PRE.flatten(0, 1).float())
    return Rows(stored.unflatten(0, scene.rows.stored_PRE.shape[:2]), kept, torch.bfloat16)


def picks(scene: Scene, count: int, seed: int) -> Selection:
    """Random rows, some of them beyond what may be seen; None where there are no more than that."""
    random, made = Random(seed), []
    for part in scene.paging.parts:
        mask_XT = part.mask_BT if hasattr(part, "mask_BT") else part.mask_NT
        if mask_XT.shape[1] <= count:
            made.append(None)
            continue
        rows = []
        for mask_T in mask_XT:
            seen = int((mask_T == 0).sum())
            rows.append(sorted(random.sample(range(seen), count)) if seen > count else list(range(count)))
        made.append(Picked(position_XK=torch.tensor(rows, device=scene.device)))
    return tuple(made)


@pytest.mark.parametrize(("contexts", "lengths"), BATCHES)
def test_pages_are_read_where_they_lie(contexts: tuple[int, ...], lengths: tuple[int, ...], library: FlashInferLatent) -> None:
    scene = scene_of(contexts, lengths)
    query_NHC = scene.made(scene.num_tokens, 4, 576)
    for _ in range(2):  # the second layer has its plans already
        made = library(query_NHC, scene.rows, scene.paging, rank=512, scale=SCALE)
    scene.clear_unwritten()
    assert (made.float() - expected(scene, query_NHC, scene.rows)).abs().max() < 0.02


@pytest.mark.parametrize("why", ["reach", "eight bits"])
@pytest.mark.parametrize(("contexts", "lengths"), BATCHES)
def test_rows_it_cannot_read_are_copied_first(
    contexts: tuple[int, ...], lengths: tuple[int, ...], why: str, library: FlashInferLatent, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(flashinfer_latent, "REACH", 1)
    scene = scene_of(contexts, lengths)
    query_NHC = scene.made(scene.num_tokens, 4, 576)
    rows = in_eight_bits(scene) if why == "eight bits" else scene.rows
    scene.clear_unwritten()
    made = library(query_NHC, rows, scene.paging, rank=512, scale=SCALE)
    assert (made.float() - expected(scene, query_NHC, rows)).abs().max() < 0.03


@pytest.mark.parametrize("kind", ["plain", "eight bits"])
@pytest.mark.parametrize(("contexts", "lengths"), BATCHES)
def test_picked_rows_and_no_others_are_looked_at(
    contexts: tuple[int, ...], lengths: tuple[int, ...], kind: str, library: FlashInferLatent
) -> None:
    scene = scene_of(contexts, lengths, 3)
    scene.clear_unwritten()
    query_NHC = scene.made(scene.num_tokens, 4, 576)
    rows, selection = in_eight_bits(scene) if kind == "eight bits" else scene.rows, picks(scene, 9, 1)
    for _ in range(2):
        made = library.attend_selected(query_NHC, rows, scene.paging, selection, rank=512, scale=SCALE)
    assert (made.float() - expected(scene, query_NHC, rows, selection)).abs().max() < 0.03


def test_a_run_too_long_for_one_plan_is_cut(library: FlashInferLatent, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(latent_plans, "MOST_TILES", 7)
    scene = scene_of((2, 0, 5), (1, 16, 9))
    query_NHC = scene.made(scene.num_tokens, 4, 576)
    made = library(query_NHC, scene.rows, scene.paging, rank=512, scale=SCALE)
    scene.clear_unwritten()
    assert (made.float() - expected(scene, query_NHC, scene.rows)).abs().max() < 0.02
    selection = picks(scene, 5, 2)
    made = library.attend_selected(query_NHC, scene.rows, scene.paging, selection, rank=512, scale=SCALE)
    assert (made.float() - expected(scene, query_NHC, scene.rows, selection)).abs().max() < 0.02


def test_passes_that_use_the_same_wrapper_in_turns_do_not_mix(library: FlashInferLatent) -> None:
    one, other = scene_of((9, 2), (1, 1), 1), scene_of((3, 14), (1, 1), 2)
    query_NHC = one.made(2, 4, 576)
    first = library(query_NHC, one.rows, one.paging, rank=512, scale=SCALE)
    library(query_NHC, other.rows, other.paging, rank=512, scale=SCALE)
    assert torch.equal(library(query_NHC, one.rows, one.paging, rank=512, scale=SCALE), first)


def test_pieces_of_a_pass_are_planned_once_for_all_layers(library: FlashInferLatent) -> None:
    """Pieces take turns in every layer, and the next pass uses the same wrappers."""
    for seed in range(2):
        scene = scene_of((9, 2, 14, 30), (1, 1, 5, 7), seed)
        scene.clear_unwritten()
        query_NHC = scene.made(scene.num_tokens, 4, 576)
        spans = ((0, 2), (2, 3), (3, 4))
        pieces = [(scene.paging.cut(*span), query_NHC[scene.paging.looks[span[0]].start :]) for span in spans]
        for _ in range(3):
            seen = [library(query[: cut.looks[-1].stop], scene.rows, cut, rank=512, scale=SCALE) for cut, query in pieces]
        assert (torch.cat(seen).float() - expected(scene, query_NHC, scene.rows)).abs().max() < 0.02
        assert [kept._made.num_plans for kept in library._kept] == [seed + 1] * 3


@pytest.mark.parametrize("picked", [False, True])
def test_a_recorded_step_is_loaded_with_what_its_requests_look_at_now(picked: bool, library: FlashInferLatent) -> None:
    shape = {"lengths": (1, 1, 1)}
    scene = scene_of((3, 30, 12), **shape)
    fixed, query_NHC = FixedPaging(scene.paging, 16), scene.made(3, 4, 576)

    def look(now: Scene, run: Callable[..., torch.Tensor]) -> None:
        selection = picks(now, 9, 1)
        now.clear_unwritten()
        more = {"rank": 512, "scale": SCALE}
        if picked:
            made = run.attend_selected(query_NHC, now.rows, fixed, selection, **more)  # type: ignore[attr-defined]
        else:
            made, selection = run(query_NHC, now.rows, fixed, **more), None
        assert (made.float() - expected(now, query_NHC, now.rows, selection)).abs().max() < 0.02

    look(scene, library)
    plans = {plan for parts in fixed.plans.values() for _, plan in parts}
    for contexts in ((4, 31, 13), (5, 32, 14), (40, 3, 3)):
        other = scene_of(contexts, **shape, seed=7)
        fixed.load(other.paging)
        look(other, library)
    assert {plan for parts in fixed.plans.values() for _, plan in parts} == plans


def test_widths_it_does_not_have_go_to_plain_torch(library: FlashInferLatent) -> None:
    scene = Scene(Shape(kv_heads=1, width=20, contexts=(3,), lengths=(1,)), dtype=torch.bfloat16, device=DEVICE)
    with pytest.raises(NoKernel, match="latents"):
        library(scene.made(1, 4, 40), scene.rows, scene.paging, rank=32, scale=SCALE)
    wide = Scene(Shape(kv_heads=1, width=288, contexts=(3,), lengths=(1,)), device=DEVICE)
    with pytest.raises(NoKernel, match="latents"):
        library(wide.made(1, 4, 576), Rows(wide.rows.stored_PRE, PLAIN, torch.float32), wide.paging, rank=512, scale=SCALE)
