"""Latents in plain torch compared with the same sums in 64 bits, at lengths around the blocks of torch's own kernels."""

from __future__ import annotations

from typing import Any

import pytest

torch = pytest.importorskip("torch")

from engine.paged import Scene, Shape  # noqa: E402
from stepwell.engine.ops import attention  # noqa: E402
from stepwell.engine.ops.attention import attend_latent  # noqa: E402

DEVICES = ["cpu", pytest.param("cuda", marks=pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA"))]
LENGTHS = (2, 31, 33, 64, 65, 66, 97, 129, 130)
HEADS, WIDTH, RANK, PAGE, SCALE = 16, 576, 512, 16, 0.05


def scene(length: int, before: int, device: str) -> Scene:
    shape = Shape(heads=HEADS, kv_heads=1, width=WIDTH // 2, page=PAGE, contexts=(before,), lengths=(length,))
    made = Scene(shape, seed=length, device=device)
    made.clear_unwritten()
    return made


def in_64_bits(made: Scene, query_NHC: torch.Tensor) -> torch.Tensor:
    (look,) = made.paging.looks
    row_TC = made.rows.stored_PRE[torch.from_numpy(look.pages).long()].flatten(0, 1)[: look.end].double()
    score_HNT = torch.einsum("nhc,tc->hnt", query_NHC.double(), row_TC) * SCALE
    token_T = torch.arange(look.end, device=row_TC.device)
    unseen_NT = token_T > token_T[look.position :, None]
    return (score_HNT.masked_fill(unseen_NT, -torch.inf).softmax(-1) @ row_TC[:, :RANK]).transpose(0, 1)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("before", [0, 40])
@pytest.mark.parametrize("length", LENGTHS)
def test_every_token_sees_what_is_before_it(length: int, before: int, device: str) -> None:
    made = scene(length, before, device)
    query_NHC = torch.randn(length, HEADS, WIDTH, generator=torch.Generator().manual_seed(1)).to(device)
    out_NHR = attend_latent(query_NHC, made.rows, made.paging, rank=RANK, scale=SCALE)
    torch.testing.assert_close(out_NHR, in_64_bits(made, query_NHC).float(), rtol=1e-3, atol=1e-3)


def test_keys_are_not_lent_from_head_to_head(monkeypatch: pytest.MonkeyPatch) -> None:
    """Torch's kernel for CUDA answers wrongly where keys do not move from one head to the next and a block has one query."""
    plain, strides = attention.scaled_dot_product_attention, []

    def watched(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, **more: Any) -> torch.Tensor:
        strides.extend(each.stride(1) for each in (key, value))
        return plain(query, key, value, **more)

    monkeypatch.setattr(attention, "scaled_dot_product_attention", watched)
    made = scene(65, 0, "cpu")
    attend_latent(torch.randn(65, HEADS, WIDTH), made.rows, made.paging, rank=RANK, scale=SCALE)
    assert strides and all(strides)
