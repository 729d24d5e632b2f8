"""Rows of checkpoints in eight bits: how far off they are, that saving them again changes nothing, and what is refused."""

from __future__ import annotations

import math

import pytest

from stepwell.base.spec.narrow import CHECKPOINT_DTYPES, GROUP, Narrow
from stepwell.base.spec.shapes import Point
from stepwell.base.spec.states import StateSpec

torch = pytest.importorskip("torch", reason="torch is not installed")

from stepwell.transfer.narrow_rows import NARROWED, NotFinite, RowCode  # noqa: E402

WIDE = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}
LENGTHS = (1, 3, GROUP - 1, GROUP, GROUP + 1, 5 * GROUP + 7)
SPAN = 2.0**18  # from the smallest number of fp8 to its largest
ROUNDING = {"fp32": 2.0**-23, "bf16": 2.0**-8, "fp16": 2.0**-10}


def rows_of(dtype: str, count: int, numbers: int, seed: int = 0) -> torch.Tensor:
    """Rows of very different sizes, with a few numbers far above the others."""
    generator = torch.Generator().manual_seed(seed)
    x_RN = torch.randn(count, numbers, generator=generator)
    x_RN *= torch.logspace(-3, 3, count).unsqueeze(1)
    x_RN[:, :: GROUP // 2] *= 8
    return x_RN.to(WIDE[dtype])


def saved(code: RowCode, x_RN: torch.Tensor) -> torch.Tensor:
    return code.encode(x_RN.view(torch.uint8))


def restored(code: RowCode, rows_RB: torch.Tensor, dtype: str) -> torch.Tensor:
    return code.decode(rows_RB).view(WIDE[dtype])


@pytest.mark.parametrize("dtype", WIDE)
@pytest.mark.parametrize("narrow", CHECKPOINT_DTYPES)
@pytest.mark.parametrize("numbers", LENGTHS)
def test_a_row_has_as_many_bytes_as_the_spec_says(dtype: str, narrow: str, numbers: int) -> None:
    width = WIDE[dtype].itemsize
    state = StateSpec(name="ssm", shape=Point(), layers=1, row_bytes=numbers * width, dtype=dtype)
    rows_RB = saved(RowCode(narrow, dtype), rows_of(dtype, 3, numbers))
    assert rows_RB.dtype is torch.uint8
    assert rows_RB.shape[1] == Narrow(dtype=narrow).row_bytes(state) or numbers < 4
    assert rows_RB.shape[1] == numbers + width * math.ceil(numbers / GROUP)


@pytest.mark.parametrize("dtype", WIDE)
@pytest.mark.parametrize("numbers", LENGTHS)
def test_int8_is_off_by_half_a_step_of_its_group_at_most(dtype: str, numbers: int) -> None:
    x_RN = rows_of(dtype, 40, numbers)
    code = RowCode("int8", dtype)
    found_RN = restored(code, saved(code, x_RN), dtype)
    for start in range(0, numbers, GROUP):
        right, mine = (each[:, start : start + GROUP].double() for each in (x_RN, found_RN))
        largest = right.abs().amax(1, keepdim=True)
        assert ((mine - right).abs() <= largest / 127 * 0.501 + largest * ROUNDING[dtype]).all()


@pytest.mark.parametrize("dtype", WIDE)
def test_fp8_is_off_by_a_sixteenth_of_each_number_at_most(dtype: str) -> None:
    x_RN = rows_of(dtype, 40, 3 * GROUP)
    code = RowCode("fp8", dtype)
    error = (restored(code, saved(code, x_RN), dtype).double() - x_RN.double()).abs()
    largest = x_RN.double().abs().unflatten(1, (3, GROUP)).amax(2).repeat_interleave(GROUP, 1)
    assert (error <= x_RN.double().abs() * (2**-4 + ROUNDING[dtype]) + largest * 2.0**-9 / 448).all()


@pytest.mark.parametrize("dtype", WIDE)
@pytest.mark.parametrize("narrow", CHECKPOINT_DTYPES)
@pytest.mark.parametrize("numbers", LENGTHS)
def test_what_was_restored_is_saved_as_the_same_bytes(dtype: str, narrow: str, numbers: int) -> None:
    code = RowCode(narrow, dtype)
    for seed in range(20):
        first = saved(code, rows_of(dtype, 64, numbers, seed))
        again = saved(code, restored(code, first, dtype))
        assert torch.equal(first, again)


@pytest.mark.parametrize("narrow", CHECKPOINT_DTYPES)
def test_every_largest_number_of_bf16_comes_back_as_it_was(narrow: str) -> None:
    """All of them, also the smallest and the largest, in rows with fractions of them. Those are the same bytes again too, in fp8
    as long as bf16 has as many digits for them.
    """
    largest_R = torch.arange(1, 0x7F80, dtype=torch.int32).to(torch.int16).view(torch.bfloat16)
    x_RN = (largest_R.float().unsqueeze(1) * torch.linspace(-1, 1, GROUP)).to(torch.bfloat16)
    code = RowCode(narrow, "bf16")
    first = saved(code, x_RN)
    found_RN = restored(code, first, "bf16")
    assert torch.equal(found_RN[:, -1], largest_R) and torch.equal(found_RN[:, 0], -largest_R)
    enough = largest_R >= (0 if narrow == "int8" else torch.finfo(torch.bfloat16).smallest_normal * SPAN)
    assert enough.sum() > 20_000 and torch.equal(saved(code, found_RN)[enough], first[enough])


@pytest.mark.parametrize("narrow", CHECKPOINT_DTYPES)
@pytest.mark.parametrize("dtype", WIDE)
def test_the_ends_of_the_numbers_survive(narrow: str, dtype: str) -> None:
    info = torch.finfo(WIDE[dtype])
    smallest = info.smallest_normal * info.eps  # below which there is only zero
    code = RowCode(narrow, dtype)
    for ends in ([info.max, -info.max], [info.tiny, -info.tiny], [smallest, 0.0], [0.0, -0.0], [smallest * 100, -smallest * 7]):
        x_RN = torch.zeros(1, GROUP, dtype=WIDE[dtype])
        x_RN[0, : len(ends)] = torch.tensor(ends, dtype=torch.float64).to(WIDE[dtype])
        first = saved(code, x_RN)
        found_RN = restored(code, first, dtype)
        assert found_RN.isfinite().all() and found_RN.abs().max() == x_RN.abs().max()
        assert narrow == "fp8" or torch.equal(saved(code, found_RN), first)


@pytest.mark.parametrize("narrow", CHECKPOINT_DTYPES)
def test_zeros_stay_zeros(narrow: str) -> None:
    code = RowCode(narrow, "fp32")
    rows_RB = saved(code, torch.zeros(2, GROUP + 1))
    assert not rows_RB.any() and not restored(code, rows_RB, "fp32").any()


@pytest.mark.parametrize("narrow", CHECKPOINT_DTYPES)
@pytest.mark.parametrize("dtype", WIDE)
@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
def test_what_is_no_number_is_refused(narrow: str, dtype: str, bad: float) -> None:
    x_RN = rows_of(dtype, 4, 2 * GROUP + 1)
    x_RN[2, 2 * GROUP] = bad
    with pytest.raises(NotFinite, match="not finite"):
        saved(RowCode(narrow, dtype), x_RN)


def test_bytes_do_not_depend_on_the_rows_beside() -> None:
    x_RN = rows_of("fp32", 9, 100)
    code = RowCode("int8", "fp32")
    assert torch.equal(torch.cat([saved(code, row.unsqueeze(0)) for row in x_RN]), saved(code, x_RN))


@pytest.mark.parametrize("dtype", WIDE)
@pytest.mark.parametrize("numbers", LENGTHS)
@pytest.mark.parametrize("before", [0, 1, 2])
def test_one_row_alone_is_read_wherever_it_lies(dtype: str, numbers: int, before: int) -> None:
    """A state of one layer, or the last layer of many: bytes of narrow rows begin at any address."""
    code, x_RN = RowCode("int8", dtype), rows_of(dtype, 2, numbers)
    both = saved(code, x_RN)
    alone = torch.zeros(before + both.shape[1], dtype=torch.uint8)
    alone[before:] = both[1]
    found = restored(code, alone[before:].view(1, -1), dtype)
    assert torch.equal(found, restored(code, both, dtype)[1:])


def test_every_format_of_the_spec_has_a_code() -> None:
    assert set(NARROWED) == set(CHECKPOINT_DTYPES)
