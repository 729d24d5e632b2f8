"""FlashInfer's attention compared with plain torch, over scattered pages: ragged batches, page edges, windows, sinks."""

from __future__ import annotations

from dataclasses import replace
from random import Random

import pytest

torch = pytest.importorskip("torch")

from engine.paged import Scene, Shape, random_shape  # noqa: E402
from not_run import NO_CUDA  # noqa: E402
from stepwell.engine.ops.attention import attend  # noqa: E402
from stepwell.engine.ops.kernels import choose_kernels  # noqa: E402
from stepwell.engine.passes.rows import PLAIN, Rows  # noqa: E402
from stepwell.engine.running.graphs import FixedPaging  # noqa: E402

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason=NO_CUDA)]
TOLERANCE = 0.02  # bf16 has 8 bits; values are near 1


@pytest.fixture(scope="module")
def flashinfer():
    pytest.importorskip("flashinfer")
    from stepwell.engine.ops.on_flashinfer.attention import FlashInferAttention

    return FlashInferAttention(torch.device("cuda"))


def expected(scene: Scene, query_NHD: torch.Tensor, **more: object) -> torch.Tensor:
    """By plain torch in fp32, from the same numbers."""
    scene.clear_unwritten()
    rows = Rows(scene.rows.stored_PRE.float(), PLAIN, torch.float32)
    paging = Scene(scene.shape, scene.seed, device="cuda").paging  # with masks in fp32
    return attend(query_NHD.float(), rows, paging, heads=scene.shape.kv_heads, key_dim=scene.shape.width, **more)


@pytest.mark.parametrize("dtype", ["bf16", "fp16"])
@pytest.mark.parametrize("seed", range(20))
def test_flashinfer_sees_what_plain_torch_sees(seed: int, dtype: str, flashinfer) -> None:
    kind = {"bf16": torch.bfloat16, "fp16": torch.float16}[dtype]
    shape = random_shape(seed, widths=(64, 128, 256) if dtype == "bf16" else (128,))
    scene = Scene(shape, seed, dtype=kind, device="cuda")
    query_NHD = scene.made(scene.num_tokens, shape.heads, shape.width)
    scale = shape.width**-0.5
    made = flashinfer(query_NHD, scene.rows, scene.paging, heads=shape.kv_heads, key_dim=shape.width, scale=scale)
    assert (made.float() - expected(scene, query_NHD, scale=scale)).abs().max() < TOLERANCE, shape


@pytest.mark.parametrize("seed", range(4))
def test_sinks_take_weight_and_give_nothing(seed: int, flashinfer) -> None:
    shape = random_shape(seed, widths=(64,))
    scene = Scene(shape, seed, dtype=torch.bfloat16, device="cuda")
    query_NHD = scene.made(scene.num_tokens, shape.heads, 64)
    sinks_H = scene.numbers(shape.heads).cuda()
    made = flashinfer(
        query_NHD, scene.rows, scene.paging, heads=shape.kv_heads, key_dim=64, scale=0.125, sinks_H=sinks_H.bfloat16()
    )
    assert (made.float() - expected(scene, query_NHD, scale=0.125, sinks_H=sinks_H)).abs().max() < TOLERANCE, shape


def test_a_recorded_step_follows_its_requests_as_they_grow(flashinfer) -> None:
    """Replayed over other lengths, over new pages, and over other requests of the same number."""
    random, made = Random(1), None
    base = Shape(heads=8, kv_heads=2, width=128, page=16, contexts=(3, 100, 31), lengths=(1, 1, 1))
    scene = Scene(base, dtype=torch.bfloat16, device="cuda")
    fixed = FixedPaging(scene.paging, None)
    query = scene.made(3, 8, 128)
    rows_in, graph = scene.rows.stored_PRE.new_empty(400, *scene.rows.stored_PRE.shape[1:]), torch.cuda.CUDAGraph()

    def step() -> torch.Tensor:
        return flashinfer(query, Rows(rows_in, PLAIN, torch.bfloat16), fixed, heads=2, key_dim=128, scale=0.1)

    rows_in[: len(scene.rows.stored_PRE)] = scene.rows.stored_PRE
    step()
    with torch.cuda.graph(graph):
        made = step()
    contexts = [3, 100, 31]
    for turn in range(40):
        contexts = [at + 1 for at in contexts] if turn % 10 else [random.randrange(200) for _ in contexts]
        other = Scene(replace(base, contexts=contexts), turn, dtype=torch.bfloat16, device="cuda")
        rows_in[: len(other.rows.stored_PRE)] = other.rows.stored_PRE
        fixed.load(other.paging)
        graph.replay()
        assert (made.float() - expected(other, query, scale=0.1)).abs().max() < TOLERANCE, f"{turn=} {contexts=}"


def test_kernels_are_chosen_and_named() -> None:
    lines = choose_kernels("auto", "cuda", torch.bfloat16).report.lines()
    assert lines["pointwise"] == "triton" and lines["attention"] in ("flashinfer", "torch")
    assert set(choose_kernels("auto", "cuda", torch.float32).report.lines().values()) == {"torch"}
