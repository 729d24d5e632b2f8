"""Amounts of memory, in both directions."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from stepwell.base.errors import ConfigError
from stepwell.base.units import format_bytes, parse_bytes


@pytest.mark.parametrize(
    ("amount", "size_bytes"),
    [
        ("8GiB", 8 << 30),
        ("1.5 TiB", 3 << 39),
        ("64kib", 65_536),
        ("2MiB", 2 << 20),
        ("500MB", 500_000_000),
        ("1kB", 1000),
        ("1KB", 1000),
        ("2 GB", 2_000_000_000),
        ("0.5TB", 500_000_000_000),
        (" 4096 ", 4096),
        ("17B", 17),
        ("0", 0),
        ("0.1GiB", 107_374_182),
        (4096, 4096),
        (0, 0),
    ],
)
def test_parse(amount: str | int, size_bytes: int) -> None:
    assert parse_bytes(amount) == size_bytes


@pytest.mark.parametrize(
    "amount",
    [
        "",
        "GiB",
        "8 GiBs",
        "8G",
        "-1GiB",
        "+1GiB",
        "1e9",
        "nan",
        "inf",
        "1,000",
        "0x10",
        "1.5",
        "1.2.3GB",
        "8 GiB 2",
        "9" * 5000,
        "\u0661GiB",
    ],
)
def test_nonsense_is_refused(amount: str) -> None:
    with pytest.raises(ConfigError):
        parse_bytes(amount)


@pytest.mark.parametrize("amount", [-1, True, 1.5, None, b"8GiB"])
def test_what_is_no_amount_is_refused(amount: object) -> None:
    with pytest.raises(ConfigError):
        parse_bytes(amount)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("size_bytes", "text"),
    [
        (0, "0 B"),
        (1023, "1023 B"),
        (1024, "1.0 KiB"),
        (36 * (64 * 1024 + (2 << 20)), "74.2 MiB"),
        ((1 << 20) - 1, "1.0 MiB"),
        (3 << 39, "1.5 TiB"),
        (1 << 70, "1048576.0 PiB"),
    ],
)
def test_format(size_bytes: int, text: str) -> None:
    assert format_bytes(size_bytes) == text


def test_a_negative_size_has_no_name() -> None:
    with pytest.raises(ConfigError):
        format_bytes(-1)


@given(st.integers(min_value=0, max_value=1 << 59))
def test_a_formatted_size_reads_back_within_its_rounding(size_bytes: int) -> None:
    assert abs(parse_bytes(format_bytes(size_bytes)) - size_bytes) <= max(size_bytes * 0.06, 0)
