"""The recurrent ops compared with a loop over tokens in float64, for every cut of a run and any content of a fresh page."""

from __future__ import annotations

from dataclasses import dataclass, replace

import pytest
import torch

from stepwell.base.ids import Kind
from stepwell.base.spec import ModelSpec
from stepwell.base.spec.shapes import Point
from stepwell.base.spec.states import StateSpec
from stepwell.engine.ops.recurrent import CHUNK_TOKENS, Points, convolve, convolve_run, gated_norm, recur_ready, scan, step
from stepwell.engine.ops.recurrent_tokens import Ready
from stepwell.engine.passes.batch import Batch
from stepwell.engine.passes.pages import DevicePages
from stepwell.engine.passes.paging import RequestRows

LENGTHS = [1, 2, 63, 64, 65, 128, 150, 192]
KEYS, HEADS, KEY, VALUE = 2, 6, 16, 24  # key heads, value heads, and their widths
WINDOW = 4


@dataclass(frozen=True, kw_only=True)
class Tokens:
    """Inputs of a run in float64. `beta` for the delta rule only."""

    query: torch.Tensor
    key: torch.Tensor
    value: torch.Tensor
    decay: torch.Tensor
    state: torch.Tensor
    beta: torch.Tensor | None

    def at(self, rows: slice, state: torch.Tensor) -> Tokens:
        beta = None if self.beta is None else self.beta[rows]
        return Tokens(
            query=self.query[rows], key=self.key[rows], value=self.value[rows], decay=self.decay[rows], state=state, beta=beta
        )

    def to(self, dtype: torch.dtype) -> Tokens:
        return replace(self, **{name: None if each is None else each.to(dtype) for name, each in vars(self).items()})

    @property
    def inputs(self) -> tuple[torch.Tensor | None, ...]:
        return self.query, self.key, self.value, self.decay, self.state, self.beta


def drawn(length: int, *, delta: bool, alike: bool = False, channels: bool = False, seed: int = 0) -> Tokens:
    """Keys of length 1, as delta nets have them; `alike` makes them nearly the same, which is hardest for a chunk's system.

    `channels` draws a decay for each channel of a key.
    """
    made = torch.Generator().manual_seed(seed)

    def normal(*shape: int) -> torch.Tensor:
        return torch.randn(shape, generator=made, dtype=torch.float64)

    key = normal(length, KEYS, KEY) * (0.1 if alike else 1.0) + (normal(KEYS, KEY) if alike else 0.0)
    return Tokens(
        query=normal(length, KEYS, KEY) / KEY**0.5,
        key=key / key.norm(dim=-1, keepdim=True),
        value=normal(length, HEADS, VALUE),
        # from heads that decay at once to heads that keep their state
        decay=-(normal(length, HEADS, *[KEY] * channels) - torch.arange(HEADS).view(-1, *[1] * channels)).exp(),
        state=normal(HEADS, KEY, VALUE),
        beta=normal(length, HEADS).sigmoid() if delta else None,
    )


def loop(tokens: Tokens) -> tuple[torch.Tensor, torch.Tensor]:
    """The recurrence as its definition says."""
    state, outs, group = tokens.state, [], HEADS // KEYS
    for at in range(len(tokens.query)):
        query, key = (each[at].repeat_interleave(group, dim=0) for each in (tokens.query, tokens.key))
        state = tokens.decay[at].exp().view(HEADS, -1, 1) * state
        new = tokens.value[at]
        if tokens.beta is not None:
            new = tokens.beta[at][:, None] * (new - torch.einsum("hd,hdv->hv", key, state))
        state = state + torch.einsum("hd,hv->hdv", key, new)
        outs.append(torch.einsum("hd,hdv->hv", query, state))
    return torch.stack(outs), state


def error(ours: tuple[torch.Tensor, torch.Tensor], expected: tuple[torch.Tensor, torch.Tensor]) -> float:
    return max(float((mine - right).abs().max()) for mine, right in zip(ours, expected, strict=True))


# ---- runs and steps -------------------------------------------------------------------------------


@pytest.mark.parametrize("channels", [True, False])
@pytest.mark.parametrize("delta", [True, False])
@pytest.mark.parametrize("length", LENGTHS)
def test_chunks_equal_the_loop(length: int, delta: bool, channels: bool) -> None:
    tokens = drawn(length, delta=delta, channels=channels)
    assert error(scan(*tokens.inputs), loop(tokens)) < 1e-12
    assert error(scan(*tokens.to(torch.float32).inputs), loop(tokens)) < 5e-6


@pytest.mark.parametrize("channels", [True, False])
@pytest.mark.parametrize("chunk", [1, 7, 16, 200])
def test_chunks_of_any_size_equal_the_loop(chunk: int, channels: bool) -> None:
    tokens = drawn(100, delta=True, channels=channels)
    assert error(scan(*tokens.inputs, chunk=chunk), loop(tokens)) < 1e-12


@pytest.mark.parametrize("channels", [True, False])
def test_chunks_keep_their_accuracy_when_keys_are_nearly_the_same(channels: bool) -> None:
    tokens = drawn(4 * CHUNK_TOKENS, delta=True, alike=True, channels=channels)
    tokens = replace(tokens, decay=tokens.decay * 1e-3, beta=torch.full((4 * CHUNK_TOKENS, HEADS), 0.99, dtype=torch.float64))
    assert error(scan(*tokens.to(torch.float32).inputs), loop(tokens)) < 2e-5


@pytest.mark.parametrize("channels", [True, False])
@pytest.mark.parametrize("delta", [True, False])
def test_weak_decays_stay_sharp_behind_strong_ones(delta: bool, channels: bool) -> None:
    tokens = drawn(CHUNK_TOKENS, delta=delta, channels=channels)
    decay = torch.full_like(tokens.decay, -1e-3)
    decay[:8] = -2000.0
    tokens = replace(tokens, decay=decay.float().double())
    assert error(scan(*tokens.to(torch.float32).inputs), loop(tokens)) < 5e-6


@pytest.mark.parametrize("strength", [1.0, 30.0, 1000.0])
def test_channels_that_fade_apart_neither_overflow_nor_blur(strength: float) -> None:
    """Some channels decay within a token and their neighbours not within the chunk: no common factor fits both."""
    tokens = drawn(3 * CHUNK_TOKENS, delta=True, channels=True)
    decay = torch.full_like(tokens.decay, -1e-4)
    decay[..., ::2] = -strength
    decay[5::7, :, 1::4] = -strength / 3  # and some at times
    tokens = replace(tokens, decay=decay.float().double())
    ours, expected = scan(*tokens.to(torch.float32).inputs), loop(tokens)
    assert all(each.isfinite().all() for each in ours)
    assert error(ours, expected) < 1e-5
    assert error(scan(*tokens.inputs), expected) < 1e-12


@pytest.mark.parametrize("delta", [True, False])
def test_channels_that_fade_alike_are_a_head_that_does(delta: bool) -> None:
    tokens = drawn(150, delta=delta)
    alike = replace(tokens, decay=tokens.decay[..., None].expand(-1, -1, KEY))
    assert error(scan(*alike.inputs), scan(*tokens.inputs)) < 1e-12


@pytest.mark.parametrize("channels", [True, False])
@pytest.mark.parametrize("delta", [True, False])
def test_a_step_equals_the_loop_for_every_segment(delta: bool, channels: bool) -> None:
    batch = [drawn(1, delta=delta, channels=channels, seed=seed) for seed in range(5)]
    joined = [None if parts[0] is None else torch.cat(parts) for parts in zip(*(each.inputs for each in batch), strict=True)]
    joined[4] = torch.stack([each.state for each in batch])
    out, state = step(*joined)
    for at, each in enumerate(batch):
        assert error((out[at : at + 1], state[at]), loop(each)) < 1e-13


@pytest.mark.parametrize("channels", [True, False])
@pytest.mark.parametrize("delta", [True, False])
@pytest.mark.parametrize("cut", [1, 10, 63, 64, 65, 127, 149])
def test_a_run_continues_from_any_cut(cut: int, delta: bool, channels: bool) -> None:
    tokens = drawn(150, delta=delta, channels=channels)
    first, between = scan(*tokens.at(slice(0, cut), tokens.state).inputs)
    second, last = scan(*tokens.at(slice(cut, None), between).inputs)
    assert error((torch.cat([first, second]), last), loop(tokens)) < 1e-12


@pytest.mark.parametrize("cut", [1, 2, 3, 4, 9, 19])
@pytest.mark.parametrize("biased", [True, False])
def test_a_convolution_equals_torchs_and_cutting_it_changes_no_bit(cut: int, biased: bool) -> None:
    made = torch.Generator().manual_seed(0)
    x_STC, weight_WC, bias_C = (torch.randn(shape, generator=made) for shape in ((2, 20, 5), (WINDOW, 5), (5,)))
    bias = bias_C if biased else None
    whole, end = convolve_run(x_STC, torch.zeros(2, WINDOW, 5), weight_WC, bias)
    padded = torch.nn.functional.pad(x_STC.mT, (WINDOW - 1, 0))
    expected = torch.nn.functional.conv1d(padded, weight_WC.T[:, None], bias, groups=5).mT
    torch.testing.assert_close(whole, expected)
    assert end.equal(x_STC[:, -WINDOW:])
    first, between = convolve_run(x_STC[:, :cut], torch.zeros(2, WINDOW, 5), weight_WC, bias)
    second, after = convolve_run(x_STC[:, cut:], between, weight_WC, bias)
    assert torch.cat([first, second], dim=1).equal(whole) and after.equal(end)


def test_a_gated_norm_is_behind_its_gate_or_before_it() -> None:
    x, gate, weight = torch.randn(3, 12), torch.randn(3, 12), torch.rand(12) + 0.5
    opened = gate * gate.sigmoid()

    def normed(value: torch.Tensor) -> torch.Tensor:
        parts = value.view(3, 2, 6)
        return (parts / (parts.square().mean(-1, keepdim=True) + 1e-5).sqrt()).view(3, 12) * weight

    torch.testing.assert_close(gated_norm(x, gate, weight, 1e-5, groups=2), normed(x) * opened)
    torch.testing.assert_close(gated_norm(x, gate, weight, 1e-5, groups=2, gate_first=True), normed(x * opened))
    torch.testing.assert_close(gated_norm(x, gate, None, 1e-5), x * opened)
    torch.testing.assert_close(gated_norm(x, gate, weight, 1e-5, groups=2, act=torch.sigmoid), normed(x) * gate.sigmoid())


# ---- states in pages ------------------------------------------------------------------------------


def memory(ssm: str = "fp32", *, garbage: int = 255) -> DevicePages:
    """Two layers of states for eight segments, all of it NaN unless another byte is given."""
    width = {"fp32": 4, "bf16": 2}[ssm]
    spec = ModelSpec(
        name="points",
        states=(
            StateSpec(name="ssm", shape=Point(), layers=2, row_bytes=HEADS * KEY * VALUE * width, dtype=ssm),
            StateSpec(name="conv", shape=Point(), layers=2, row_bytes=WINDOW * 5 * 4, dtype="fp32"),
        ),
    )
    return DevicePages(spec, {Kind.POINT: torch.full((8, spec.object_bytes(Kind.POINT)), garbage, dtype=torch.uint8)})


def points(pages: DevicePages, *segments: tuple[int, int, int]) -> Points:
    """The points of segments given as page, position and length."""
    made = [
        RequestRows(tokens=[0] * length, position=position, prefix_pages=torch.empty(0).numpy(), point_page=page)
        for page, position, length in segments
    ]
    return Points.of(Batch(made, pages, device="cpu"))


def run(where: Points, tokens: Tokens) -> torch.Tensor:
    query, key, value, decay, _, beta = tokens.to(torch.float32).inputs
    return recur_ready(where, 1, Ready(query_NKD=query, key_NKD=key, value_NHV=value, decay=decay, beta_NH=beta))


@pytest.mark.parametrize("channels", [True, False])
@pytest.mark.parametrize("delta", [True, False])
def test_singles_and_runs_of_one_pass_each_have_their_own_state(delta: bool, channels: bool) -> None:
    pages, zeros = memory(), torch.zeros(HEADS, KEY, VALUE, dtype=torch.float64)
    every = [drawn(90, delta=delta, channels=channels, seed=seed) for seed in range(4)]
    every = [each.at(slice(0, 90), zeros) for each in every]
    expected = [loop(each) for each in every]
    # page 6 begins with 80 tokens, 3 with 1; then both go on one by one while 0 and 5 begin with runs
    before = {6: 80, 3: 1}
    for (page, length), each in zip(before.items(), every, strict=False):
        run(points(pages, (page, 0, length)), each.at(slice(0, length), zeros))
    now = [
        every[0].at(slice(80, 81), zeros),
        every[1].at(slice(1, 2), zeros),
        *(each.at(slice(0, 70), zeros) for each in every[2:]),
    ]
    joined = [None if parts[0] is None else torch.cat(parts) for parts in zip(*(each.inputs for each in now), strict=True)]
    packed = Tokens(**dict(zip(("query", "key", "value", "decay", "state", "beta"), joined, strict=True)))
    out = run(points(pages, (6, 80, 1), (3, 1, 1), (0, 0, 70), (5, 0, 70)), packed)
    right = torch.cat([expected[0][0][80:81], expected[1][0][1:2], expected[2][0][:70], expected[3][0][:70]])
    assert (out - right).abs().max() < 5e-6
    assert pages.state_PLRE("ssm")[:, 0].isnan().all(), "the other layer was touched"
    assert pages.state_PLRE("ssm")[[1, 2, 4, 7]].isnan().all(), "an unassigned page was touched"


def test_a_convolution_of_a_pass_keeps_the_inputs_of_each_segment() -> None:
    pages = memory()
    x_NC, weight_WC = torch.randn(9, 5), torch.randn(WINDOW, 5)
    whole = convolve(points(pages, (1, 0, 9)), 0, x_NC, weight_WC)
    convolve(points(pages, (2, 0, 1), (4, 0, 6)), 0, torch.cat([x_NC[:1], x_NC[:6]]), weight_WC)
    out = convolve(points(pages, (4, 6, 1), (2, 1, 5)), 0, torch.cat([x_NC[6:7], x_NC[1:6]]), weight_WC)
    assert out.equal(torch.cat([whole[6:7], whole[1:6]]))
    assert pages.state_PLRE("conv")[4, 0, 0].view(WINDOW, 5).equal(x_NC[3:7])


@pytest.mark.parametrize("length", [1, 2, 70])
def test_what_a_fresh_page_holds_does_not_matter(length: int) -> None:
    tokens, weight_WC, x_NC = drawn(length, delta=True), torch.randn(WINDOW, 5), torch.randn(length, 5)
    found = []
    for garbage in (0, 255, 127, 200):
        pages = memory(garbage=garbage)
        where = points(pages, (3, 0, length))
        outs = run(where, tokens), convolve(where, 1, x_NC, weight_WC)
        found.append((*outs, pages.state_PLRE("ssm")[3, 1], pages.state_PLRE("conv")[3, 1]))
    for other in found[1:]:
        assert all(mine.equal(first) for mine, first in zip(other, found[0], strict=True))


def test_a_state_kept_in_sixteen_bits_is_computed_in_thirty_two() -> None:
    pages, tokens = memory("bf16"), drawn(70, delta=True)
    tokens = tokens.at(slice(0, 70), torch.zeros_like(tokens.state))
    out, state = loop(tokens)
    assert (run(points(pages, (2, 0, 70)), tokens) - out).abs().max() < 5e-6
    kept = pages.state_PLRE("ssm")[2, 1, 0].view(HEADS, KEY, VALUE)
    torch.testing.assert_close(kept, state.bfloat16())
