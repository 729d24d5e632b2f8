"""Latents, picked rows, rows in eight bits and DeepSeek-V4's entries on a GPU, compared with plain torch; then whole models.

The tests of Triton's kernels in `tests/engine/kernels` run on the GPU too where there is one, in fp32.
"""

from __future__ import annotations

from random import Random
from typing import Any

import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("triton")

from engine.families import COMPRESSED, INDEX, LATENT, draw_choices  # noqa: E402
from engine.kernels.test_triton_shared import Compressed, kept_as  # noqa: E402
from engine.paged import Scene, Shape  # noqa: E402
from engine.side_by_side import Held, Memory, draw  # noqa: E402
from not_run import NO_CUDA  # noqa: E402
from stepwell.engine.loading.weights import HeldTensors  # noqa: E402
from stepwell.engine.models.base import Decoder  # noqa: E402
from stepwell.engine.models.registry import build_model  # noqa: E402
from stepwell.engine.ops import selection  # noqa: E402
from stepwell.engine.ops.attention import attend_latent  # noqa: E402
from stepwell.engine.ops.compression import attend_shared  # noqa: E402
from stepwell.engine.ops.selection import Picked, Selection, attend_selected  # noqa: E402
from stepwell.engine.passes.rows import PLAIN, Powers, RowFormat, Rows, Tiled  # noqa: E402
from stepwell.engine.running.graphs import FixedPaging, Graphs  # noqa: E402

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason=NO_CUDA)]
TOLERANCE = 0.03  # bf16 has 8 bits; values are near 1
LATENT_ROWS, SHARED_ROWS = Tiled(width=512, exact=64), Powers(width=448, exact=64)
SCALE = 0.04


@pytest.fixture(scope="module")
def library():
    pytest.importorskip("flashinfer")
    from stepwell.engine.ops.on_flashinfer.latent import FlashInferLatent

    return FlashInferLatent(torch.device("cuda"))


def scene_of(seed: int, *, heads: int, **more: Any) -> Scene:
    draws = Random(seed)
    lengths = [1] * draws.randrange(4) + [draws.randrange(2, 200) for _ in range(draws.randrange(3))] or [1]
    contexts = [draws.randrange(700) for _ in lengths]
    fixed = {"page": draws.choice([4, 16, 64]), "contexts": contexts, "lengths": lengths, **more}
    scene = Scene(Shape(heads=heads, kv_heads=1, width=288, **fixed), seed, dtype=torch.bfloat16, device="cuda")
    scene.clear_unwritten()
    return scene


def in_eight_bits(rows: Rows, kept: RowFormat) -> Rows:
    stored = kept.encode(rows.stored_PRE.flatten(0, 1).float()).unflatten(0, rows.stored_PRE.shape[:2])
    return Rows(stored, kept, torch.bfloat16)


def expected(scene: Scene, query_NHC: torch.Tensor, rows: Rows, picked: Selection | None = None) -> torch.Tensor:
    rows, paging = Rows(rows.stored_PRE, rows.format, torch.float32), Scene(scene.shape, scene.seed, device="cuda").paging
    if picked is None:
        return attend_latent(query_NHC.float(), rows, paging, rank=512, scale=SCALE)
    return attend_selected(query_NHC.float(), rows, paging, picked, rank=512, scale=SCALE)


def picks(scene: Scene, count: int) -> Selection:
    made: list[Picked | None] = []
    for part in scene.paging.parts:
        mask_XT = (part.mask_BT if hasattr(part, "mask_BT") else part.mask_NT).float()
        noise = torch.rand(mask_XT.shape, generator=scene.random).cuda()
        made.append(Picked(position_XK=selection.best(noise + mask_XT, count)) if mask_XT.shape[1] > count else None)
    return tuple(made)


# ---- operations -------------------------------------------------------------------------------------


@pytest.mark.parametrize("heads", [4, 64, 128])
@pytest.mark.parametrize("seed", range(6))
def test_latents_in_pages(seed: int, heads: int, library) -> None:
    scene = scene_of(seed, heads=heads)
    query_NHC = scene.made(scene.num_tokens, heads, 576)
    made = library(query_NHC, scene.rows, scene.paging, rank=512, scale=SCALE)
    assert (made.float() - expected(scene, query_NHC, scene.rows)).abs().max() < TOLERANCE, scene.shape


@pytest.mark.parametrize("kind", ["out of reach", "eight bits"])
@pytest.mark.parametrize("seed", range(4))
def test_latents_that_are_copied_first(seed: int, kind: str, library, monkeypatch: pytest.MonkeyPatch) -> None:
    from stepwell.engine.ops.on_flashinfer import latent as flashinfer_latent

    monkeypatch.setattr(flashinfer_latent, "REACH", 1)
    scene = scene_of(seed, heads=64)
    rows = in_eight_bits(scene.rows, LATENT_ROWS) if kind == "eight bits" else scene.rows
    query_NHC = scene.made(scene.num_tokens, 64, 576)
    made = library(query_NHC, rows, scene.paging, rank=512, scale=SCALE)
    assert (made.float() - expected(scene, query_NHC, rows)).abs().max() < TOLERANCE, scene.shape


@pytest.mark.parametrize("kind", ["plain", "eight bits"])
@pytest.mark.parametrize("heads", [16, 128])
@pytest.mark.parametrize("seed", range(5))
def test_picked_latents(seed: int, heads: int, kind: str, library) -> None:
    scene = scene_of(seed, heads=heads)
    rows = in_eight_bits(scene.rows, LATENT_ROWS) if kind == "eight bits" else scene.rows
    query_NHC, picked = scene.made(scene.num_tokens, heads, 576), picks(scene, 100)
    for _ in range(2):
        made = library.attend_selected(query_NHC, rows, scene.paging, picked, rank=512, scale=SCALE)
    assert (made.float() - expected(scene, query_NHC, rows, picked)).abs().max() < TOLERANCE, scene.shape


@pytest.mark.parametrize("how", ["pages", "picked", "eight bits"])
def test_a_recorded_step_follows_its_requests(how: str, library) -> None:
    """Replayed over other lengths, over new pages, and over other requests of the same number."""
    random, contexts, graph = Random(1), [3, 100, 31], torch.cuda.CUDAGraph()

    def step_of(contexts: list[int], seed: int) -> Scene:
        return scene_of(seed, heads=16, page=16, contexts=tuple(contexts), lengths=(1, 1, 1))

    scene = step_of(contexts, 0)
    fixed, query_NHC = FixedPaging(scene.paging, 32), scene.made(3, 16, 576)
    stored = scene.rows.stored_PRE.new_zeros(100, 16, 576)
    stored = in_eight_bits(Rows(stored, PLAIN, torch.bfloat16), LATENT_ROWS).stored_PRE if how == "eight bits" else stored
    rows = Rows(stored, LATENT_ROWS if how == "eight bits" else PLAIN, torch.bfloat16)
    position_XK = torch.zeros(3, 20, dtype=torch.int32, device="cuda")

    def load(now: Scene) -> None:
        theirs = in_eight_bits(now.rows, LATENT_ROWS) if how == "eight bits" else now.rows
        stored[: len(theirs.stored_PRE)] = theirs.stored_PRE
        for row, context in enumerate(now.shape.contexts):
            seen = sorted(random.sample(range(context + 1), min(context + 1, 20)))
            position_XK[row] = torch.tensor([*seen, *range(context + 1, context + 21 - len(seen))])
        fixed.load(now.paging)

    def look() -> torch.Tensor:
        if how == "picked":
            more = (Picked(position_XK=position_XK),)
            return library.attend_selected(query_NHC, rows, fixed, more, rank=512, scale=SCALE)
        return library(query_NHC, rows, fixed, rank=512, scale=SCALE)

    load(scene)
    look()
    with torch.cuda.graph(graph):
        made = look()
    for turn in range(30):
        contexts = [at + 1 for at in contexts] if turn % 10 else [random.randrange(200) for _ in contexts]
        now = step_of(contexts, turn)
        load(now)
        graph.replay()
        if how == "picked":
            whole = Rows(stored, PLAIN, torch.float32)
            paging = FixedPaging(Scene(now.shape, now.seed, device="cuda").paging, 32)  # some picks lie behind its own pages
            wanted = attend_selected(query_NHC.float(), whole, paging, (Picked(position_XK=position_XK),), rank=512, scale=SCALE)
        else:
            wanted = expected(now, query_NHC, rows)
        assert (made.float() - wanted).abs().max() < TOLERANCE, f"{turn=} {contexts=}"


@pytest.mark.parametrize("by", ["torch", "flashinfer"])
def test_the_best_are_the_earliest_of_equal_ones_on_a_gpu(by: str) -> None:
    from stepwell.engine.ops.on_triton import selection as fast

    top_k = fast.highest
    if by == "flashinfer":
        pytest.importorskip("flashinfer")
        from stepwell.engine.ops.on_flashinfer.latent import highest as top_k
    for length, count, levels in ((3000, 2048, 3), (70_000, 2048, 50), (5000, 512, 1), (40_000, 2048, 10**9)):
        score_XT = (torch.randn(37, length, device="cuda") * 100).clamp(max=levels).round()
        score_XT[::3, length // 2 :] = -torch.inf
        assert torch.equal(fast.best(score_XT.clone(), count, top_k).long(), selection.best(score_XT, count)), (length, count)


@pytest.mark.parametrize("kind", ["plain", "eight bits"])
def test_index_scores_in_sixteen_bits(kind: str) -> None:
    from stepwell.engine.ops.on_triton import selection as fast

    scene = Scene(
        Shape(kv_heads=1, width=64, page=64, contexts=(900, 5000, 60), lengths=(1, 1, 700)), dtype=torch.bfloat16, device="cuda"
    )
    scene.clear_unwritten()
    rows = scene.rows if kind == "plain" else in_eight_bits(scene.rows, Tiled(width=128))
    query_NHD, weight_NH = scene.made(scene.num_tokens, 64, 128), scene.made(scene.num_tokens, 64).float() / 64
    for part, table, last in (
        (scene.paging.singles[0], scene.paging.singles[0].table_BP, scene.paging.singles[0].position_B),
        (scene.paging.runs[0], scene.paging.runs[0].pages_P[None], scene.paging.runs[0].position_N),
    ):
        mine = slice(part.start, part.stop)
        made = fast.scores(query_NHD[mine], weight_NH[mine], rows, table, last)
        key_STD = rows.whole(table).flatten(1, 2).float()
        likeness = (query_NHD[mine].float() @ key_STD.mT).relu()
        wanted = (weight_NH[mine, :, None] * likeness).sum(1)
        seen = torch.arange(wanted.shape[1], device="cuda") <= last[:, None]
        assert torch.equal(made.isfinite(), seen) and (made - wanted)[seen].abs().max() < 1e-2


@pytest.mark.parametrize("kept", [PLAIN, SHARED_ROWS], ids=str)
@pytest.mark.parametrize("heads", [64, 128])
def test_windows_and_entries_in_sixteen_bits(heads: int, kept: RowFormat, monkeypatch: pytest.MonkeyPatch) -> None:
    from engine.kernels import test_triton_shared as wide
    from stepwell.engine.ops.on_triton.selection import TritonSelect
    from stepwell.engine.ops.on_triton.shared import TritonShared

    monkeypatch.setattr(wide, "WIDTH", 512)
    shape = Shape(kv_heads=1, width=256, page=64, window=128, contexts=(200, 3, 0, 310), lengths=(1, 1, 40, 33))
    scene = Compressed(shape, 3, device="cuda")
    scene.clear_unwritten()
    entries = scene.entries(kept, indexed=None)
    query_NHD, sinks_H = scene.made(scene.num_tokens, heads, 512), scene.made(heads)
    rows = kept_as(scene.rows.stored_PRE, kept)
    wanted = attend_shared(query_NHD, rows, scene.paging, entries, scale=SCALE, sinks_H=sinks_H)
    short = [
        Rows(each.stored_PRE if kept is not PLAIN else each.stored_PRE.bfloat16(), kept, torch.bfloat16)
        for each in (rows, entries.rows)
    ]
    entries = wide.Entries(groups=entries.groups, rows=short[1], index=None)
    made = TritonShared(TritonSelect())(query_NHD.bfloat16(), short[0], scene.paging, entries, scale=SCALE, sinks_H=sinks_H)
    assert (made.float() - wanted).abs().max() < TOLERANCE


# ---- whole models -----------------------------------------------------------------------------------

REAL = {"kv_lora_rank": 512, "qk_rope_head_dim": 64, "num_attention_heads": 16, "num_key_value_heads": 16, "hidden_size": 256}
FAMILIES = {
    "deepseek_v3": ("DeepseekV3", {**LATENT, **REAL, "num_hidden_layers": 3}),
    "deepseek_v32": ("DeepseekV32", {**LATENT, **REAL, **INDEX, "index_head_dim": 128, "num_hidden_layers": 3, "index_topk": 64}),
    "deepseek_v4": (
        "DeepseekV4",
        {**COMPRESSED, "head_dim": 512, "partial_rotary_factor": 1 / 8, "index_head_dim": 128, "num_attention_heads": 16,
         "hidden_size": 256, "attn_implementation": "eager"},
    ),
}  # fmt: skip


def built(family: str, **more: Any) -> Decoder:
    hf = pytest.importorskip("transformers")
    name, sizes = FAMILIES[family]
    torch.manual_seed(0)
    model = getattr(hf, f"{name}ForCausalLM")(getattr(hf, f"{name}Config")(**sizes))
    draw(model)
    draw_choices(model)
    return build_model(model.config.to_dict(), HeldTensors(dict(model.state_dict())), device="cuda", page_tokens=64, **more)


def played(model: Decoder, forward: Any = None, steps: int = 40) -> torch.Tensor:
    """Three prompts of different lengths in one pass, then steps with tokens that are said, all logits in their order."""
    memory, lengths = Memory(model.spec, 64, device="cuda"), (3, 170, 333)
    random = Random(1)
    prompts = [[random.randrange(model.vocab_size) for _ in range(length + steps)] for length in lengths]
    held, made = [Held(memory, length + steps) for length in lengths], []
    for at in range(steps):
        parts = [
            tokens[:length] if not at else tokens[length + at - 1 :][:1] for tokens, length in zip(prompts, lengths, strict=True)
        ]
        batch = memory.batch([one.segment(part) for one, part in zip(held, parts, strict=True)], dtype=model.dtype)
        made.append((forward or model.forward)(batch).float().cpu())
    return torch.stack(made)


@pytest.mark.parametrize("kv_dtype", ["bf16", "fp8"])
@pytest.mark.parametrize("family", FAMILIES)
def test_a_model_with_fast_kernels_is_as_near_to_fp32_as_plain_torch_in_sixteen_bits(family: str, kv_dtype: str) -> None:
    exact = played(built(family, dtype="fp32", kv_dtype="fp8" if kv_dtype == "fp8" else None))
    plain = built(family, dtype="bf16", kv_dtype=kv_dtype, kernels="torch")
    fast = built(family, dtype="bf16", kv_dtype=kv_dtype)
    near, made = (played(plain) - exact).abs() / exact.std(), (played(fast) - exact).abs() / exact.std()
    assert not fast.kernels.report.failed, fast.kernels.report.lines()
    assert made.mean() <= 1.3 * near.mean() + 0.005, (made.mean(), near.mean())


@pytest.mark.parametrize("kv_dtype", ["bf16", "fp8"])
@pytest.mark.parametrize("family", FAMILIES)
def test_recorded_steps_answer_as_computed_ones(family: str, kv_dtype: str) -> None:
    model = built(family, dtype="bf16", kv_dtype=kv_dtype)
    assert model.graph_windows, "its steps must be recorded"
    graphs = Graphs(model)
    computed, recorded = played(model), played(model, graphs.forward)
    assert graphs._recordings and not graphs._refused and not model.kernels.report.failed, model.kernels.report.lines()
    assert ((recorded - computed).abs() / computed.std()).mean() < 0.01
