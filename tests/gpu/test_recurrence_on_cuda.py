"""Recurrences on a GPU, in sixteen bits: near the reference in fp32, never waiting for the device, the same from a CUDA graph.

Near: the difference is less than 1 % of the result, as lengths of all rows together; 2 % for chunks of delta nets, whose inverted
systems are kept in sixteen bits.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import replace

import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("triton")

from torch.nn.functional import silu  # noqa: E402

from engine.families import checkpoint  # noqa: E402
from engine.points import LAYER, Scene, Shape, random_shape  # noqa: E402
from engine.side_by_side import PAGE, logits_on_cuda  # noqa: E402
from not_run import NO_CUDA  # noqa: E402
from stepwell.engine.models.base import Decoder  # noqa: E402
from stepwell.engine.models.registry import build_model  # noqa: E402
from stepwell.engine.ops import recurrent  # noqa: E402
from stepwell.engine.ops.kernels import Kernels, choose_kernels  # noqa: E402
from stepwell.engine.ops.recurrent import Points  # noqa: E402
from stepwell.engine.ops.recurrent_tokens import Tokens  # noqa: E402
from stepwell.engine.running.graphs import Graphs, Still  # noqa: E402

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason=NO_CUDA),
    pytest.mark.filterwarnings("ignore:Synchronization debug mode"),  # it says that it is a prototype
    pytest.mark.filterwarnings("ignore:::fla"),  # a warning of the library would count as its failure
]
NEAR, NEAR_IN_CHUNKS = 0.01, 0.02
RULES = ["head", "channel", "time"]
FAMILIES = ["qwen3_5", "qwen3_next", "kimi_linear", "mamba2", "falcon_h1"]
REAL = {  # one layer of Qwen3-Next, Kimi-Linear and Mamba-2, with fewer heads
    "head": {"keys": 4, "heads": 8, "key_dim": 128, "value_dim": 128},
    "channel": {"keys": 8, "heads": 8, "key_dim": 128, "value_dim": 128},
    "time": {"keys": 1, "heads": 8, "key_dim": 128, "value_dim": 64},
}


@pytest.fixture(scope="module")
def kernels() -> Iterator[Kernels]:
    """All tests run kernels, and none of them fails behind a test's back."""
    made = choose_kernels("auto", "cuda", torch.bfloat16)
    yield made
    assert not made.report.failed


def distance(got: torch.Tensor, expected: torch.Tensor) -> float:
    return float((got.float() - expected.float()).norm() / expected.float().norm())


def in_fp32(tokens: Tokens) -> Tokens:
    """From the same sixteen-bit numbers."""
    changed = {"query_NKD": tokens.query_NKD.float(), "key_NKD": tokens.key_NKD.float(), "value_NHV": tokens.value_NHV.float()}
    return replace(tokens, **changed, steps=replace(tokens.steps, raw=tokens.steps.raw.float()))


def check(kernels: Kernels, shape: Shape, seed: int = 0, *, dtype: torch.dtype = torch.bfloat16, strength: float = 1.0) -> None:
    one, other = (Scene(shape, seed, dtype=dtype, device="cuda") for _ in range(2))
    tokens = one.tokens(strength=strength)
    expected = recurrent.recur(one.points, LAYER, in_fp32(tokens))
    made = kernels.recur(other.points, LAYER, tokens)
    near = NEAR_IN_CHUNKS if max(shape.lengths) > 1 and shape.rule != "time" else NEAR
    assert made.dtype == dtype and made.isfinite().all(), shape
    assert distance(made, expected) < near, shape
    theirs, ours = one.pages.state_PLRE("ssm"), other.pages.state_PLRE("ssm")
    assert torch.equal(theirs.isnan(), ours.isnan()), "unassigned pages, or other layers"
    assert distance(ours[one.ids, LAYER], theirs[one.ids, LAYER]) < near, shape


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("rule", RULES)
@pytest.mark.parametrize("batch", [1, 7, 64])
def test_steps(batch: int, rule: str, dtype: torch.dtype, kernels: Kernels) -> None:
    fresh = tuple(at % 3 == 1 for at in range(batch))
    check(kernels, Shape(rule=rule, lengths=(1,) * batch, fresh=fresh, **REAL[rule]), batch, dtype=dtype)


@pytest.mark.parametrize("rule", RULES)
@pytest.mark.parametrize(
    "lengths",
    [(64,), (65,), (2, 64, 130), (1000, 63, 200), (1, 1, 70), (1, 2, 3, 129)],
    ids=str,
)
def test_runs_from_empty_states_and_from_others(lengths: tuple[int, ...], rule: str, kernels: Kernels) -> None:
    for first_is_fresh in (True, False):
        fresh = tuple((at % 2 == 0) == first_is_fresh for at in range(len(lengths)))
        check(kernels, Shape(rule=rule, lengths=lengths, fresh=fresh, **REAL[rule]), len(lengths))


@pytest.mark.parametrize("seed", range(12))
def test_other_shapes(seed: int, kernels: Kernels) -> None:
    check(kernels, random_shape(seed, widths=(16, 32, 64, 128), most=400), seed)


@pytest.mark.parametrize("rule", RULES)
@pytest.mark.parametrize("strength", [0.0, 1e-3, 100.0])
def test_what_hardly_fades_and_what_fades_at_once(strength: float, rule: str, kernels: Kernels) -> None:
    check(kernels, Shape(rule=rule, lengths=(1, 300), fresh=(False, False), **REAL[rule]), strength=strength)


def test_states_of_256_channels(kernels: Kernels) -> None:
    """Falcon-H1's."""
    for lengths in ((1, 1), (1, 150)):
        check(kernels, Shape(rule="time", keys=1, heads=6, key_dim=256, value_dim=64, lengths=lengths, fresh=(False, True)))


@pytest.mark.parametrize("rule", RULES)
def test_the_same_cuts_give_the_same_bits(rule: str, kernels: Kernels) -> None:
    shape = Shape(rule=rule, lengths=(100, 33), fresh=(False, True), **REAL[rule])
    found = []
    for _ in range(3):
        scene = Scene(shape, dtype=torch.bfloat16, device="cuda")
        tokens = scene.tokens()
        found.append((kernels.recur(scene.points, LAYER, tokens), scene.pages.state_PLRE("ssm")[scene.ids, LAYER]))
    for other in found[1:]:
        assert all(torch.equal(a, b) for a, b in zip(other, found[0], strict=True))


@pytest.mark.parametrize("kept", ["fp32", "bf16"])
@pytest.mark.parametrize("lengths", [(1,) * 9, (1, 1, 2, 3, 400), (5000,)], ids=["singles", "both", "run"])
def test_convolutions(lengths: tuple[int, ...], kept: str, kernels: Kernels) -> None:
    fresh = tuple(at % 2 == 0 for at in range(len(lengths)))
    shape = Shape(lengths=lengths, fresh=fresh, channels=1000, kept=kept)
    one, other = (Scene(shape, dtype=torch.bfloat16, device="cuda") for _ in range(2))
    x_NC, weight_WC, bias_C = one.made(sum(lengths), 1100)[:, :1000], one.made(4, 1000), one.made(1000)
    expected = recurrent.convolve(one.points, LAYER, x_NC, weight_WC, bias_C, act=silu)
    made = kernels.convolve(other.points, LAYER, x_NC, weight_WC, bias_C, act=silu)
    assert made.dtype == torch.bfloat16 and distance(made, expected) < NEAR
    theirs, ours = (each.pages.state_PLRE("conv")[each.ids, LAYER] for each in (one, other))
    assert torch.equal(theirs, ours)


@pytest.mark.parametrize("act", [silu, torch.sigmoid])
@pytest.mark.parametrize(("heads", "width", "groups"), [(32, 128, 1), (1, 8192, 1), (1, 4096, 8), (3, 24, 1)])
def test_gated_norms(heads: int, width: int, groups: int, act: recurrent.Activation, kernels: Kernels) -> None:
    x, gate = (torch.randn(50, heads, width, device="cuda").bfloat16() for _ in range(2))
    weight = torch.randn(width, device="cuda").bfloat16()
    for gate_first in (True, False):
        more = {"groups": groups, "gate_first": gate_first, "act": act}
        made = kernels.gated_norm(x, gate, weight, 1e-5, **more)
        assert distance(made, recurrent.gated_norm(x.float(), gate.float(), weight.float(), 1e-5, **more)) < NEAR


@contextmanager
def without_waiting() -> Iterator[None]:
    torch.cuda.set_sync_debug_mode("error")
    try:
        yield
    finally:
        torch.cuda.set_sync_debug_mode("default")


@pytest.mark.parametrize("rule", RULES)
def test_a_step_never_waits_for_the_device_nor_do_most_runs(rule: str, kernels: Kernels) -> None:
    """The library waits once a pass for runs of channels, with a list of its chunks."""
    for lengths in ((1, 1, 1), (1, 70, 200)):
        if rule == "channel" and max(lengths) > 1:
            continue
        scene = Scene(Shape(rule=rule, lengths=lengths, **REAL[rule]), dtype=torch.bfloat16, device="cuda")
        tokens, x_NC, weight_WC = scene.tokens(), scene.made(sum(lengths), 40), scene.made(4, 40)
        for waits in (True, False):  # compiles at first
            with nullcontext() if waits else without_waiting():
                points = scene.points
                kernels.convolve(points, LAYER, x_NC, weight_WC, act=silu)
                kernels.recur(points, LAYER, tokens)


@pytest.mark.parametrize("rule", RULES)
def test_a_recorded_step_moves_every_state_on_once(rule: str, kernels: Kernels) -> None:
    """Played over other tokens, and over requests that have just begun."""
    shape = Shape(rule=rule, lengths=(1, 1, 1), fresh=(False, True, False), **REAL[rule])
    one, other = (Scene(shape, dtype=torch.bfloat16, device="cuda") for _ in range(2))
    tokens, x_NC, weight_WC = one.tokens(), one.made(3, 40), one.made(4, 40)
    still, graph = Still(other.batch, {}), torch.cuda.CUDAGraph()

    def step(points: Points) -> tuple[torch.Tensor, torch.Tensor]:
        return kernels.recur(points, LAYER, tokens), kernels.convolve(points, LAYER, x_NC, weight_WC, act=silu)

    step(Scene(shape, 5, dtype=torch.bfloat16, device="cuda").points)  # compiles, on pages of its own
    with torch.cuda.graph(graph):
        made = step(Points.of(still))
    for turn in range(5):
        fresh = tuple(turn == 0 and each for each in shape.fresh) if turn < 3 else (True, False, turn == 4)
        still.load(other.batch_of(fresh))
        for numbers in (tokens.query_NKD, tokens.key_NKD, tokens.value_NHV, tokens.steps.raw, x_NC):
            numbers.copy_(one.made(*numbers.shape))
        graph.replay()
        expected = step(Points.of(one.batch_of(fresh)))
        assert all(torch.equal(a, b) for a, b in zip(made, expected, strict=True)), turn
        for name in ("ssm", "conv"):
            theirs, ours = (each.pages.state_PLRE(name)[each.ids, LAYER] for each in (one, other))
            assert torch.equal(theirs, ours), (turn, name)


# ---- whole models -----------------------------------------------------------------------------------


@pytest.mark.parametrize("family", FAMILIES)
def test_a_model_is_as_near_as_plain_torch_in_sixteen_bits(family: str) -> None:
    """Most rows agree: an expert that is chosen by a hair moves a few far away, whatever runs it."""
    made = checkpoint(family)

    def built(dtype: str, kernels: str) -> Decoder:
        return build_model(made.config, made.source, dtype=dtype, device="cuda", page_tokens=PAGE, kernels=kernels)

    exact, plain, fast = built("fp32", "torch"), built("bf16", "torch"), built("bf16", "auto")
    expected = logits_on_cuda(exact, exact)
    graphs = Graphs(fast)
    rows = [logits_on_cuda(plain, plain), logits_on_cuda(fast, fast), logits_on_cuda(fast, graphs)]
    assert fast.graph_windows and len(graphs._recordings) == 1 and not graphs._refused
    assert not fast.kernels.report.failed, fast.kernels.report.lines()
    errors = [float(((each - expected).norm(dim=1) / expected.norm(dim=1)).median()) for each in rows]
    assert max(errors[1:]) < 1.5 * errors[0] + 0.005, errors


@pytest.mark.parametrize("family", FAMILIES)
def test_recorded_steps_of_plain_torch_are_those_that_are_computed(family: str) -> None:
    made = checkpoint(family)
    model = build_model(made.config, made.source, dtype="fp32", device="cuda", page_tokens=PAGE)
    if not model.graph_windows:
        pytest.skip("experts in plain torch ask the device")
    graphs = Graphs(model)
    assert (logits_on_cuda(model, graphs) - logits_on_cuda(model, model)).abs().max() < 1e-3
    assert graphs._recordings and not graphs._refused
