"""Triton's recurrences compared with plain torch: on the CPU in Triton's interpreter."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from torch.nn.functional import gelu, silu

from engine.points import LAYER, Scene, Shape, random_shape
from stepwell.engine.ops import recurrent

pytest.importorskip("triton")
from stepwell.engine.ops.guarded import NoKernel
from stepwell.engine.ops.on_triton import convolution as triton_convolution
from stepwell.engine.ops.on_triton import recurrent as triton_recurrent
from stepwell.engine.ops.on_triton import ssd as triton_ssd
from stepwell.engine.ops.on_triton.fla_recurrent import unit
from stepwell.engine.ops.on_triton.recurrent import Recurrence

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
CLOSE = {"rtol": 2e-5, "atol": 2e-5}
ROUNDED = {"rtol": 1e-2, "atol": 1e-2}  # of states that are kept in sixteen bits

recur = Recurrence(recurrent.recur_runs, triton_ssd.recur_runs)


def same_pages(one: Scene, other: Scene, name: str) -> None:
    """Every page: unassigned pages and other layers are as they were."""
    ours, theirs = other.pages.state_PLRE(name), one.pages.state_PLRE(name)
    torch.testing.assert_close(ours, theirs, equal_nan=True, **(CLOSE if one.shape.kept == "fp32" else ROUNDED))


@pytest.mark.parametrize("seed", range(30))
def test_a_recurrence_is_that_of_plain_torch(seed: int) -> None:
    shape = random_shape(seed, most=100)
    one, other = (Scene(shape, seed, device=DEVICE) for _ in range(2))
    tokens = one.tokens()
    torch.testing.assert_close(recur(other.points, LAYER, tokens), recurrent.recur(one.points, LAYER, tokens), **CLOSE)
    same_pages(one, other, "ssm")


@pytest.mark.parametrize("rule", ["head", "channel", "time"])
@pytest.mark.parametrize(("key_dim", "value_dim"), [(128, 64), (256, 8), (20, 70)])
def test_a_step_of_states_that_take_several_programs(rule: str, key_dim: int, value_dim: int) -> None:
    shape = Shape(rule=rule, lengths=(1, 1), fresh=(False, True), key_dim=key_dim, value_dim=value_dim)
    one, other = (Scene(shape, device=DEVICE) for _ in range(2))
    tokens = one.tokens()
    torch.testing.assert_close(recur(other.points, LAYER, tokens), recurrent.recur(one.points, LAYER, tokens), **CLOSE)
    same_pages(one, other, "ssm")


@pytest.mark.parametrize(("key_dim", "value_dim"), [(80, 70), (130, 16)])
def test_chunks_of_states_that_take_several_programs(key_dim: int, value_dim: int) -> None:
    shape = Shape(rule="time", lengths=(65, 130), fresh=(False, True), key_dim=key_dim, value_dim=value_dim, keys=1, heads=2)
    one, other = (Scene(shape, device=DEVICE) for _ in range(2))
    tokens = one.tokens()
    close = {"rtol": 1e-4, "atol": 1e-4}
    torch.testing.assert_close(recur(other.points, LAYER, tokens), recurrent.recur(one.points, LAYER, tokens), **close)
    torch.testing.assert_close(other.pages.state_PLRE("ssm"), one.pages.state_PLRE("ssm"), equal_nan=True, **close)


@pytest.mark.parametrize("strength", [0.0, 1e3])
@pytest.mark.parametrize("rule", ["head", "channel", "time"])
def test_what_never_fades_and_what_fades_at_once(rule: str, strength: float) -> None:
    shape = Shape(rule=rule, lengths=(1, 70), fresh=(False, False))
    one, other = (Scene(shape, device=DEVICE) for _ in range(2))
    tokens = one.tokens(strength=strength)
    torch.testing.assert_close(recur(other.points, LAYER, tokens), recurrent.recur(one.points, LAYER, tokens), **CLOSE)
    same_pages(one, other, "ssm")


def test_very_long_and_very_short_steps() -> None:
    shape = Shape(rule="head", lengths=(1,), fresh=(False,))
    for step in (-60.0, -12.0, -4.0, 0.0, 19.0, 21.0, 60.0):
        one, other = (Scene(shape, device=DEVICE) for _ in range(2))
        tokens = one.tokens()
        steps = replace(tokens.steps, raw=torch.full_like(tokens.steps.raw, step))
        tokens = replace(tokens, steps=steps)
        torch.testing.assert_close(recur(other.points, LAYER, tokens), recurrent.recur(one.points, LAYER, tokens), **CLOSE)


@pytest.mark.parametrize("biased", [True, False])
@pytest.mark.parametrize("act", [None, silu])
@pytest.mark.parametrize("seed", range(8))
def test_a_convolution_is_that_of_plain_torch(seed: int, act: recurrent.Activation | None, biased: bool) -> None:
    shape = random_shape(seed, most=40)
    one, other = (Scene(shape, seed, device=DEVICE) for _ in range(2))
    x_NC = one.made(sum(shape.lengths), shape.channels + 7)[:, : shape.channels]  # a part of a row
    weight_WC, bias_C = one.made(shape.window, shape.channels), one.made(shape.channels) if biased else None
    expected = recurrent.convolve(one.points, LAYER, x_NC, weight_WC, bias_C, act=act)
    made = triton_convolution.convolve(other.points, LAYER, x_NC, weight_WC, bias_C, act=act)
    torch.testing.assert_close(made, expected, **CLOSE)
    same_pages(one, other, "conv")


@pytest.mark.parametrize("act", [silu, torch.sigmoid])
@pytest.mark.parametrize("gate_first", [True, False])
@pytest.mark.parametrize("weighed", [True, False])
def test_gated_norms_are_those_of_plain_torch(weighed: bool, gate_first: bool, act: recurrent.Activation) -> None:
    more = {"gate_first": gate_first, "act": act}
    for tokens, heads, width in ((1, 3, 24), (50, 2, 128), (3, 1, 1500)):
        x, gate = torch.randn(tokens, heads, width), torch.randn(tokens, heads * width + 9)[:, : heads * width]
        x, gate, weight, weights = (each.to(DEVICE) for each in (x, gate, torch.randn(width), torch.randn(heads * width)))
        by_head = (x, gate.unflatten(1, (heads, width)), weight if weighed else None, 1e-5)
        torch.testing.assert_close(triton_recurrent.gated_norm(*by_head, **more), recurrent.gated_norm(*by_head, **more), **CLOSE)
        grouped = (x.flatten(1), gate, weights if weighed else None, 1e-5)
        more_grouped = {"groups": heads, **more}
        made = triton_recurrent.gated_norm(*grouped, **more_grouped)
        torch.testing.assert_close(made, recurrent.gated_norm(*grouped, **more_grouped), **CLOSE)


def test_other_activations_are_left_to_plain_torch() -> None:
    x, weight = torch.randn(2, 24, device=DEVICE), torch.randn(24, device=DEVICE)
    with pytest.raises(NoKernel, match="activation"):
        triton_recurrent.gated_norm(x, x, weight, 1e-5, act=gelu)
    shape = random_shape(0, most=40)
    scene = Scene(shape, device=DEVICE)
    x_NC, weight_WC = scene.made(sum(shape.lengths), shape.channels), scene.made(shape.window, shape.channels)
    with pytest.raises(NoKernel, match="activation"):
        triton_convolution.convolve(scene.points, LAYER, x_NC, weight_WC, act=gelu)


def test_heads_of_length_one() -> None:
    x_NKD = torch.randn(7, 100, device=DEVICE)[:, :72].unflatten(1, (3, 24))
    made = unit(x_NKD, 0.5)
    torch.testing.assert_close(made.norm(dim=-1), torch.full((7, 3), 0.5, device=DEVICE), **CLOSE)
    torch.testing.assert_close(made / made.norm(dim=-1, keepdim=True), x_NKD / x_NKD.norm(dim=-1, keepdim=True), **CLOSE)
