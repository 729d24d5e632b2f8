"""Triton's kernels between products, compared with plain torch: on the CPU in Triton's interpreter."""

from __future__ import annotations

from random import Random

import pytest
import torch
from torch.nn.functional import gelu, silu

from engine.paged import Scene, Shape, random_shape
from stepwell.engine.ops import pointwise
from stepwell.engine.ops.guarded import NoKernel
from stepwell.engine.ops.pointwise import HeadNorms

pytest.importorskip("triton")
from stepwell.engine.ops.on_triton import pointwise as fast

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
CLOSE = {"rtol": 1e-5, "atol": 1e-5}


@pytest.mark.parametrize("seed", range(12))
def test_keys_and_values_land_where_plain_torch_puts_them(seed: int) -> None:
    draw = Random(seed)
    shape = random_shape(seed, widths=(8, 16, 24, 64), pages=(1, 4, 7))
    one, other = (Scene(shape, seed, device=DEVICE) for _ in range(2))
    qkv_NX = one.made(one.num_tokens, (shape.heads + 2 * shape.kv_heads) * shape.width)
    turned = draw.choice([None, shape.width, shape.width // 2])
    angles = None if turned is None else (one.made(one.num_tokens, 1, turned), one.made(one.num_tokens, 1, turned))
    norms = HeadNorms(one.made(shape.width), one.made(shape.width), 1e-6) if draw.random() < 0.5 else None
    sizes = {"heads": shape.heads, "kv_heads": shape.kv_heads, "norms": norms, "angles": angles}
    expected = pointwise.write_keys_values(qkv_NX, one.rows, one.paging, **sizes)
    made = fast.write_keys_values(qkv_NX, other.rows, other.paging, **sizes)
    torch.testing.assert_close(made, expected, **CLOSE)
    torch.testing.assert_close(other.rows.stored_PRE, one.rows.stored_PRE, equal_nan=True, **CLOSE)


@pytest.mark.parametrize("act", [silu, pointwise.gelu_tanh])
@pytest.mark.parametrize(("tokens", "inner"), [(1, 5), (3, 1024), (7, 1500)])
def test_gates_are_those_of_plain_torch(act: pointwise.Activation, tokens: int, inner: int) -> None:
    x = torch.randn(tokens, 2 * inner, device=DEVICE)
    torch.testing.assert_close(fast.gate(x, act), pointwise.gate(x.clone(), act), **CLOSE)


def test_gates_of_other_activations_are_left_to_plain_torch() -> None:
    with pytest.raises(NoKernel, match="activation"):
        fast.gate(torch.randn(2, 8, device=DEVICE), gelu)


@pytest.mark.parametrize(("tokens", "channels"), [(1, 8), (5, 96), (3, 1027)])
def test_sums_and_norms_are_those_of_plain_torch(tokens: int, channels: int) -> None:
    x, more, weight = torch.randn(tokens, channels), torch.randn(tokens, channels), torch.randn(channels)
    x, more, weight = (each.to(DEVICE) for each in (x, more, weight))
    for made, expected in zip(fast.add_norm(x, more, weight, 1e-6), pointwise.add_norm(x, more, weight, 1e-6), strict=True):
        torch.testing.assert_close(made, expected, **CLOSE)


@pytest.mark.parametrize("half", [3, 32, 64])
def test_angles_are_those_of_plain_torch_however_far_a_token_stands(half: int) -> None:
    positions = torch.tensor([0, 1, 17, 4095, 131_071, 1_000_000], device=DEVICE)
    frequencies = 1.0 / 10_000 ** (torch.arange(half, device=DEVICE) / half)
    made = fast.angles(positions, frequencies, 1.2, torch.float32)
    for one, other in zip(made, pointwise.angles(positions, frequencies, 1.2, torch.float32), strict=True):
        torch.testing.assert_close(one, other, rtol=1e-5, atol=1e-5)


def test_a_key_rotated_by_no_angle_stays_as_it_is() -> None:
    """The reference and the kernel could agree on something wrong: this is computed by hand."""
    scene = Scene(Shape(contexts=(0,), lengths=(3,)), device=DEVICE)
    qkv_NX = scene.made(3, (4 + 2 * 2) * 16)
    angles = torch.ones(3, 1, 16, device=DEVICE), torch.zeros(3, 1, 16, device=DEVICE)
    query = fast.write_keys_values(qkv_NX, scene.rows, scene.paging, heads=4, kv_heads=2, norms=None, angles=angles)
    assert torch.equal(query, qkv_NX[:, : 4 * 16].unflatten(1, (4, 16)))
    row_N2X = scene.rows.stored_PRE[scene.paging.page_N, scene.paging.row_N].unflatten(1, (2, 32))
    assert torch.equal(row_N2X[..., :16].flatten(1), qkv_NX[:, 4 * 16 : 6 * 16])
    assert torch.equal(row_N2X[..., 16:].flatten(1), qkv_NX[:, 6 * 16 :])
