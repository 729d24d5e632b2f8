"""Row formats: bytes as the spec counts them, numbers as close as eight bits allow, and nothing broken that looks whole."""

from __future__ import annotations

import pytest
import torch

from stepwell.base.spec.families.dtypes import Dtypes
from stepwell.engine.passes.rows import (
    EIGHT,
    LARGEST,
    NO_POWER,
    PLAIN,
    POWER_BIAS,
    POWER_TILE,
    TILE,
    Powers,
    RowFormat,
    Rows,
    Tiled,
    latent_rows,
    shared_rows,
)

FP8 = Dtypes(kv="fp8", model="bf16")
STEP = 2.0**-4  # half the distance of two neighbours of e4m3, against the lower one
LATENT, INDEX, SHARED = Tiled(width=512, exact=64), Tiled(width=128), Powers(width=448, exact=64)
ODD = [Tiled(width=5, exact=3), Tiled(width=130), Tiled(width=300, exact=1), Powers(width=7, exact=2), Powers(width=513, exact=3)]
FORMATS = [LATENT, INDEX, SHARED, *ODD]


def rows(kept: RowFormat, count: int = 9, *, seed: int = 0) -> torch.Tensor:
    assert isinstance(kept, Tiled | Powers)
    return torch.randn((count, kept.width + kept.exact), generator=torch.Generator().manual_seed(seed))


def again(kept: RowFormat, x_NC: torch.Tensor) -> torch.Tensor:
    """Written and read."""
    return kept.decode(kept.encode(x_NC), torch.float32)


def tile_of(kept: RowFormat) -> int:
    return TILE if isinstance(kept, Tiled) else POWER_TILE


# ---- bytes ----------------------------------------------------------------------------------------


@pytest.mark.parametrize(("kept", "size"), [(LATENT, 656), (INDEX, 132), (SHARED, 584)])
def test_rows_of_real_models_have_the_sizes_that_kernels_read(kept: RowFormat, size: int) -> None:
    stored = kept.encode(rows(kept))
    assert stored.dtype == torch.uint8 and stored.shape == (9, size)


@pytest.mark.parametrize("exact", [0, 1, 8, 64])
@pytest.mark.parametrize("width", [1, 5, 32, 64, 127, 128, 129, 448, 512, 513, 1000])
def test_rows_have_the_bytes_that_the_spec_counts(width: int, exact: int) -> None:
    x_NC = torch.ones(2, width + exact)
    assert latent_rows("fp8", width, exact).encode(x_NC).shape[1] == FP8.latent_row_bytes(width, exact)
    assert latent_rows("fp8", width, 0).encode(x_NC[:, :width]).shape[1] == FP8.index_row_bytes(width)
    assert shared_rows("fp8", width, exact).encode(x_NC).shape[1] == FP8.shared_row_bytes(width + exact, exact)


def test_tiles_then_scales_then_what_is_exact() -> None:
    x_NC = rows(LATENT)
    eight, scale, exact = LATENT.encode(x_NC).split((512, 16, 128), dim=1)
    scale_NT = x_NC[:, :512].unflatten(1, (4, 128)).abs().amax(-1) / LARGEST
    assert scale.contiguous().view(torch.float32).equal(scale_NT)
    assert eight.contiguous().view(EIGHT).float().equal((x_NC[:, :512] / scale_NT.repeat_interleave(128, 1)).to(EIGHT).float())
    assert exact.contiguous().view(torch.bfloat16).equal(x_NC[:, 512:].bfloat16())


def test_what_is_exact_stands_before_powers_of_two() -> None:
    x_NC = rows(SHARED)
    eight, exact, powers = SHARED.encode(x_NC).split((448, 128, 8), dim=1)
    power_NT = torch.log2(x_NC[:, :448].unflatten(1, (7, 64)).abs().amax(-1) / LARGEST).ceil()
    assert (powers[:, :7].float() - POWER_BIAS).equal(power_NT) and not powers[:, 7].any()
    assert (
        eight.contiguous().view(EIGHT).float().equal((x_NC[:, :448] / power_NT.exp2().repeat_interleave(64, 1)).to(EIGHT).float())
    )
    assert exact.contiguous().view(torch.bfloat16).equal(x_NC[:, 448:].bfloat16())


# ---- numbers --------------------------------------------------------------------------------------


@pytest.mark.parametrize("size", [1.0, 1e-30, 1e30, 1e-3])
@pytest.mark.parametrize("kept", FORMATS, ids=str)
def test_what_is_read_is_what_was_written_within_a_step(kept: RowFormat, size: float) -> None:
    assert isinstance(kept, Tiled | Powers)
    x_NC = rows(kept) * size
    x_NC[0] *= torch.logspace(-6, 0, x_NC.shape[1])  # a row of numbers of all sizes
    found = again(kept, x_NC)
    assert found.shape == x_NC.shape
    assert found[:, kept.width :].equal(x_NC[:, kept.width :].bfloat16().float())
    for start in range(0, kept.width, tile_of(kept)):
        right, mine = (each[:, start : min(start + tile_of(kept), kept.width)].double() for each in (x_NC, found))
        least = right.abs().amax(-1, keepdim=True) / LARGEST * 2**-6  # below it, steps are of one size
        assert ((mine - right).abs() <= STEP * torch.maximum(right.abs(), 2 * least)).all()


@pytest.mark.parametrize("kept", FORMATS, ids=str)
def test_writing_what_was_read_changes_nothing(kept: RowFormat) -> None:
    found = again(kept, rows(kept))
    torch.testing.assert_close(again(kept, found), found, rtol=1e-6, atol=0)
    if isinstance(kept, Powers):
        assert again(kept, found).equal(found)


@pytest.mark.parametrize("kept", FORMATS, ids=str)
def test_the_largest_number_of_a_tile_is_kept_whole(kept: RowFormat) -> None:
    assert isinstance(kept, Tiled | Powers)
    x_NC = torch.full((1, kept.width + kept.exact), 0.125)
    x_NC[0, 0] = -7.0
    assert again(kept, x_NC)[0, 0] == pytest.approx(-7.0, rel=1e-6)


@pytest.mark.parametrize("kept", FORMATS, ids=str)
def test_zeros_stay_zeros_whether_written_or_never_written(kept: RowFormat) -> None:
    assert isinstance(kept, Tiled | Powers)
    stored = kept.encode(torch.zeros(2, kept.width + kept.exact))
    assert not kept.decode(stored, torch.float32).any()
    assert not kept.decode(torch.zeros_like(stored), torch.float32).any()  # a page that was cleared


@pytest.mark.parametrize("size", [1e-38, 1e-42, 1e-45])
@pytest.mark.parametrize("kept", FORMATS, ids=str)
def test_numbers_next_to_nothing_come_near_it(kept: RowFormat, size: float) -> None:
    assert isinstance(kept, Tiled | Powers)
    found = again(kept, torch.full((2, kept.width + kept.exact), size))
    assert found.isfinite().all() and (found - size).abs().max() <= 1.01e-38


@pytest.mark.parametrize("kept", FORMATS, ids=str)
def test_very_large_numbers_are_kept(kept: RowFormat) -> None:
    assert isinstance(kept, Tiled | Powers)
    found = again(kept, torch.full((2, kept.width + kept.exact), 3e38))  # the largest of all may be rounded up, to infinity
    assert ((found / 3e38 - 1).abs() <= STEP).all()


@pytest.mark.parametrize("broken", [torch.nan, torch.inf, -torch.inf])
@pytest.mark.parametrize("kept", FORMATS, ids=str)
def test_what_is_not_finite_is_read_as_a_tile_of_nan(kept: RowFormat, broken: float) -> None:
    assert isinstance(kept, Tiled | Powers)
    x_NC = rows(kept)
    x_NC[3, 0] = broken
    found, tile = again(kept, x_NC), min(tile_of(kept), kept.width)
    assert found[3, :tile].isnan().all()
    found[3, :tile] = 0.0
    assert found.isfinite().all(), "no other tile and no other row is touched"


@pytest.mark.parametrize("kept", [LATENT, SHARED, ODD[0], ODD[3]], ids=str)
def test_what_is_not_finite_among_exact_channels_stays_itself(kept: RowFormat) -> None:
    assert isinstance(kept, Tiled | Powers)
    x_NC = rows(kept)
    x_NC[0, kept.width], x_NC[1, -1] = torch.nan, torch.inf
    found = again(kept, x_NC)
    assert found[0, kept.width].isnan() and found[1, -1] == torch.inf
    assert found[2:].isfinite().all() and found[:, : kept.width].isfinite().all()


def test_no_power_of_two_of_a_finite_row_is_taken_for_a_broken_one() -> None:
    x_NC = torch.full((1, SHARED.width + SHARED.exact), torch.finfo(torch.float32).max)
    assert SHARED.encode(x_NC)[0, -8:-1].max() < NO_POWER + POWER_BIAS


# ---- tensors --------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("kept", FORMATS, ids=str)
def test_rows_are_read_in_the_type_that_is_computed_in(kept: RowFormat, dtype: torch.dtype) -> None:
    x_NC = rows(kept).to(dtype)
    found = kept.decode(kept.encode(x_NC), dtype)
    assert found.dtype == dtype
    assert found.equal(again(kept, x_NC).to(dtype))


@pytest.mark.parametrize("kept", FORMATS, ids=str)
def test_strides_do_not_matter(kept: RowFormat) -> None:
    x_NC = rows(kept)
    stored = kept.encode(x_NC)
    apart = torch.stack([x_NC, x_NC + 1], dim=-1)[..., 0]
    assert not apart.is_contiguous() and kept.encode(apart).equal(stored)
    assert kept.encode(x_NC.T.contiguous().T).equal(stored)
    wide = torch.empty(9, 2 * stored.shape[1] + 1, dtype=torch.uint8)[:, 1 : 1 + stored.shape[1]].copy_(stored)
    assert not wide.is_contiguous()
    assert kept.decode(wide, torch.float32).equal(kept.decode(stored, torch.float32))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("start", [0, 1, 2, 3])
def test_a_single_row_may_lie_anywhere(start: int, dtype: torch.dtype) -> None:
    for kept in (Tiled(width=1, exact=1), Tiled(width=3, exact=1), Powers(width=1, exact=1), Powers(width=5, exact=3)):
        x_NC = rows(kept, 1).to(dtype)
        stored = kept.encode(x_NC)
        column = torch.cat([x_NC.new_zeros(start), *(torch.stack([each, each]) for each in x_NC[0])])[start::2]
        assert column[None].shape == x_NC.shape and kept.encode(column[None]).equal(stored)
        moved = torch.cat([stored.new_zeros(start), stored[0]])[start:][None]
        assert kept.decode(moved, dtype).equal(kept.decode(stored, dtype))


@pytest.mark.parametrize("kept", FORMATS, ids=str)
def test_a_row_does_not_depend_on_its_neighbours_nor_on_how_rows_are_shaped(kept: RowFormat) -> None:
    x_NC = rows(kept, 12)
    stored = kept.encode(x_NC)
    assert all(kept.encode(x_NC[at : at + 1]).equal(stored[at : at + 1]) for at in range(12))
    assert kept.decode(stored.view(3, 4, -1), torch.float32).equal(again(kept, x_NC).view(3, 4, -1))
    assert kept.encode(x_NC[:0]).shape == (0, stored.shape[1])


@pytest.mark.parametrize("kept", [PLAIN, LATENT, SHARED], ids=str)
def test_a_layer_is_written_row_by_row_and_read_page_by_page(kept: RowFormat) -> None:
    x_NC = rows(LATENT)[:, : 512 if kept is SHARED else 576]
    stored_NE = kept.encode(x_NC)
    pages_PLRE = torch.zeros(6, 2, 4, stored_NE.shape[1], dtype=stored_NE.dtype)
    layer = Rows(pages_PLRE[:, 1], kept, torch.float32)
    page_N, row_N = torch.tensor([5, 5, 5, 5, 2, 2, 2, 2, 3]), torch.tensor([0, 1, 2, 3, 0, 1, 2, 3, 0])
    layer.write(page_N, row_N, x_NC)
    expected = kept.decode(stored_NE, torch.float32)
    assert layer.some(page_N, row_N).equal(expected)
    assert layer.whole(torch.tensor([5, 2, 3])).flatten(0, 1)[:9].equal(expected)
    assert layer.whole(torch.tensor([[5], [2]])).shape == (2, 1, 4, x_NC.shape[1])
    assert not pages_PLRE[:, 0].any() and not pages_PLRE[[0, 1, 4]].any()


def test_other_dtypes_than_eight_bits_are_plain() -> None:
    assert latent_rows("bf16", 512, 64) is PLAIN and shared_rows("fp32", 448, 64) is PLAIN
    x_NC = torch.randn(2, 5)
    assert PLAIN.decode(PLAIN.encode(x_NC), torch.bfloat16).equal(x_NC.bfloat16())
