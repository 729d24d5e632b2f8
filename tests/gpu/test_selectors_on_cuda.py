"""Quest and ClusterKV on a GPU: summaries have the same bits in every batch, FlashInfer sees what plain torch does,
and steps are recorded.
"""

from __future__ import annotations

from pathlib import Path
from random import Random
from typing import Any

import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("triton")
pytest.importorskip("transformers")

from engine.families import SMALL  # noqa: E402
from engine.kernels.test_flashinfer_picked import BATCHES, picks  # noqa: E402
from engine.paged import Scene, Shape  # noqa: E402
from engine.side_by_side import Held, Memory, draw  # noqa: E402
from not_run import NO_CUDA  # noqa: E402
from parity.recorded import Recorded, distance, same_bits, script, store_at  # noqa: E402
from parity.test_exact_resumption import WAIT  # noqa: E402
from stepwell.engine.approximate.clusterkv import ClusterKV  # noqa: E402
from stepwell.engine.approximate.quest import Quest  # noqa: E402
from stepwell.engine.approximate.selectors import Sparse  # noqa: E402
from stepwell.engine.loading.weights import HeldTensors  # noqa: E402
from stepwell.engine.models.base import Decoder  # noqa: E402
from stepwell.engine.models.registry import build_model  # noqa: E402
from stepwell.engine.ops import selection  # noqa: E402
from stepwell.engine.ops.picked import attend_picked  # noqa: E402
from stepwell.engine.ops.selection import Picked  # noqa: E402
from stepwell.engine.passes.rows import PLAIN, Rows  # noqa: E402
from stepwell.engine.running.graphs import FixedPaging, Graphs  # noqa: E402

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason=NO_CUDA)]
SCALE, WIDTH, TOLERANCE = 0.2, 64, 0.06
SELECTORS = ("quest", "clusterkv")
BUDGET = 160


@pytest.fixture(scope="module")
def library():
    pytest.importorskip("flashinfer")
    from stepwell.engine.ops.on_flashinfer.attention import FlashInferAttention
    from stepwell.engine.ops.on_flashinfer.picked import FlashInferPicked

    return FlashInferPicked(FlashInferAttention(torch.device("cuda")))


# ---- operations -------------------------------------------------------------------------------------


@pytest.mark.parametrize("page", [64, 256])
@pytest.mark.parametrize("heads", [1, 8])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_summary_is_the_same_whatever_is_made_beside_it(page: int, heads: int, dtype: torch.dtype) -> None:
    """In its layer with a whole prompt, or alone, or with those of all layers: bit for bit."""
    for summary in (Quest(kv_heads=heads), ClusterKV(kv_heads=heads, unit=page, groups=max(page // 40, 2))):
        key_URKD = torch.randn(70, summary.unit, heads, 128, device="cuda").to(dtype)
        together = summary.make(key_URKD)
        for sizes in ([1] * 70, [2, 3, 65], [32, 32, 6]):
            assert torch.equal(together, torch.cat([summary.make(part) for part in key_URKD.split(sizes)])), (summary, sizes[0])


@pytest.mark.parametrize("count", [16, 24, 33])
@pytest.mark.parametrize(("contexts", "lengths"), BATCHES)
def test_picked_rows_are_seen_as_by_plain_torch(contexts: tuple[int, ...], lengths: tuple[int, ...], count: int, library) -> None:
    shape = Shape(heads=6, kv_heads=2, width=WIDTH, page=8, contexts=contexts, lengths=lengths)
    scene = Scene(shape, dtype=torch.bfloat16, device="cuda")
    scene.clear_unwritten()
    query_NHD = scene.made(scene.num_tokens, 6, WIDTH)
    for layer in range(2):
        picked = picks(scene, count, layer)
        made = library(query_NHD, scene.rows, scene.paging, picked, heads=2, key_dim=WIDTH, scale=SCALE)
        rows, paging = Rows(scene.rows.stored_PRE, PLAIN, torch.float32), Scene(shape, device="cuda").paging
        wanted = attend_picked(query_NHD.float(), rows, paging, picked, heads=2, key_dim=WIDTH, scale=SCALE)
        assert (made.float() - wanted).abs().max() < TOLERANCE


def test_a_recorded_step_follows_its_requests(library) -> None:
    """Replayed over other lengths, other picks, and other requests of the same number."""
    random, contexts, graph, count = Random(1), [3, 100, 31], torch.cuda.CUDAGraph(), 32

    def step_of(contexts: list[int], seed: int) -> Scene:
        shape = Shape(heads=6, kv_heads=2, width=WIDTH, page=16, contexts=tuple(contexts), lengths=(1, 1, 1))
        scene = Scene(shape, seed, dtype=torch.bfloat16, device="cuda")
        scene.clear_unwritten()
        return scene

    scene = step_of(contexts, 0)
    fixed, query_NHD = FixedPaging(scene.paging, 32), scene.made(3, 6, WIDTH)
    rows = Rows(scene.rows.stored_PRE.new_zeros(100, 16, 4 * WIDTH), PLAIN, torch.bfloat16)
    position_XK = torch.zeros(3, count, dtype=torch.int32, device="cuda")

    def load(now: Scene) -> None:
        rows.stored_PRE[: len(now.rows.stored_PRE)] = now.rows.stored_PRE
        for row, context in enumerate(now.shape.contexts):
            seen = sorted(random.sample(range(context + 1), min(context + 1, count)))
            position_XK[row] = torch.tensor([*seen, *range(context + 1, context + 1 + count - len(seen))])
        fixed.load(now.paging)

    def look() -> torch.Tensor:
        return library(
            query_NHD, rows, fixed, (Picked(position_XK=position_XK),), heads=2, key_dim=WIDTH, scale=SCALE
        )  # fmt: skip

    load(scene)
    look()
    with torch.cuda.graph(graph):
        made = look()
    for turn in range(30):
        contexts = [at + 1 for at in contexts] if turn % 10 else [random.randrange(200) for _ in contexts]
        now = step_of(contexts, turn)
        load(now)
        graph.replay()
        paging = FixedPaging(Scene(now.shape, now.seed, device="cuda").paging, 32)  # some picks lie behind its own pages
        wanted = attend_picked(
            query_NHD.float(), Rows(rows.stored_PRE, PLAIN, torch.float32), paging, (Picked(position_XK=position_XK),), heads=2,
            key_dim=WIDTH, scale=SCALE,
        )  # fmt: skip
        assert (made.float() - wanted).abs().max() < TOLERANCE, f"{turn=} {contexts=}"


@pytest.mark.parametrize("by", ["torch", "flashinfer"])
def test_the_best_with_tokens_that_are_always_picked(by: str) -> None:
    from stepwell.engine.ops.on_triton import selection as fast

    top_k = fast.highest
    if by == "flashinfer":
        pytest.importorskip("flashinfer")
        from stepwell.engine.ops.on_flashinfer.latent import highest as top_k
    for length, count in ((3008, 2048), (70_000, 2048), (5008, 512), (40_000, 1023)):
        score_XT = torch.randn(37, length // 16, device="cuda").repeat_interleave(16, dim=1)[:, :length]
        score_XT[:, :16] = torch.inf
        score_XT[:, length // 2 - 70 : length // 2] = torch.inf
        score_XT[::3, length // 2 :] = -torch.inf
        assert torch.equal(fast.best(score_XT.clone(), count, top_k).long(), selection.best(score_XT, count)), (length, count)


# ---- models -----------------------------------------------------------------------------------------


def built(selector: str | None, **more: Any) -> Decoder:
    hf = pytest.importorskip("transformers")
    sizes = SMALL | {"hidden_size": 256, "num_attention_heads": 8, "num_key_value_heads": 2, "head_dim": 64}
    torch.manual_seed(0)
    model = hf.LlamaForCausalLM(hf.LlamaConfig(**sizes))
    draw(model)
    sparse = None if selector is None else Sparse(selector=selector, budget=BUDGET)
    tensors = HeldTensors(dict(model.state_dict()))
    return build_model(model.config.to_dict(), tensors, device="cuda", page_tokens=64, sparse=sparse, **more)


def played(model: Decoder, forward: Any = None, steps: int = 80) -> torch.Tensor:
    """Three prompts of different lengths in one pass, then steps with tokens that are said, all logits in their order."""
    memory, lengths = Memory(model.spec, 64, device="cuda"), (3, 170, 333)
    random = Random(1)
    prompts = [[random.randrange(model.vocab_size) for _ in range(length + steps)] for length in lengths]
    held, made = [Held(memory, length + steps) for length in lengths], []
    for at in range(steps):
        parts = [
            tokens[:length] if not at else tokens[length + at - 1 :][:1] for tokens, length in zip(prompts, lengths, strict=True)
        ]
        segments = [one.segment(part)._replace(picks_from=length) for one, part, length in zip(held, parts, lengths, strict=True)]
        made.append((forward or model.forward)(memory.batch(segments, dtype=model.dtype)).float().cpu())
    return torch.stack(made)


@pytest.mark.parametrize("selector", SELECTORS)
def test_a_model_with_fast_kernels_is_as_near_to_fp32_as_plain_torch_in_sixteen_bits(selector: str) -> None:
    exact = played(built(selector, dtype="fp32"))
    plain, fast = built(selector, dtype="bf16", kernels="torch"), built(selector, dtype="bf16")
    near, made = (played(plain) - exact).abs() / exact.std(), (played(fast) - exact).abs() / exact.std()
    assert not fast.kernels.report.failed, fast.kernels.report.lines()
    assert made.mean() <= 1.3 * near.mean() + 0.005, (made.mean(), near.mean())
    assert (played(built(None, dtype="fp32")) - exact).abs().mean() > 1e-3, "picking was to be seen"


@pytest.mark.parametrize("selector", SELECTORS)
def test_recorded_steps_answer_as_computed_ones(selector: str) -> None:
    model = built(selector, dtype="bf16")
    graphs = Graphs(model)
    computed, recorded = played(model), played(model, graphs.forward)
    assert graphs._recordings and not graphs._refused and not model.kernels.report.failed, model.kernels.report.lines()
    assert ((recorded - computed).abs() / computed.std()).mean() < 0.02


@pytest.mark.parametrize("tier", ["host", "store"])
@pytest.mark.parametrize("selector", SELECTORS)
def test_every_tier_gives_the_bits_of_the_device(selector: str, tier: str, tmp_path: Path) -> None:
    settings = {"device": "cuda", "dtype": "fp32", "sparse": selector, "sparse_budget": 112}
    device = Recorded("llama", **settings)
    resident = script(device, seed=5)
    device.close()
    store = {**store_at(tmp_path / "log"), "store_config": WAIT} if tier == "store" else {}
    recorded = Recorded("llama", **settings, **store)
    for then in resident:
        recorded.evict_to_host() if tier == "host" else recorded.forget_memory()
        now = recorded.play(then.prompt)
        assert (now.resumed, now.chunks) == (then.resumed, then.chunks)
        assert same_bits(now, then), f"differs by {distance(now, then)}"
    recorded.close()
