"""A stamp says of any bytes whether they are the ones that were sealed under this name."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from stepwell.store.api import STAMP_BYTES
from stepwell.store.seal import Verdict, checksum, seal, verify
from stepwell.testing.store_contract import key, payload, space

HERE = space("here")


@given(st.binary(max_size=200))
def test_what_was_sealed_is_intact(data: bytes) -> None:
    stamp = seal(HERE, key("x"), data)
    assert len(stamp) == STAMP_BYTES and verify(HERE, key("x"), data, stamp) is Verdict.INTACT
    assert stamp[16:32] == checksum(data)


@given(st.binary(max_size=130))
def test_any_bytes_may_be_taken_for_a_stamp(stamp: bytes) -> None:
    assert verify(HERE, key("x"), b"data", stamp) is not Verdict.INTACT


@pytest.mark.parametrize(
    ("where", "name", "data", "verdict"),
    [
        (space("there"), key("x"), payload("v", 100), Verdict.FOREIGN),
        (HERE, key("y"), payload("v", 100), Verdict.SWAPPED),
        (HERE, key("x"), payload("v", 99), Verdict.LENGTH),
        (HERE, key("x"), payload("w", 100), Verdict.DAMAGED),
    ],
)
def test_every_difference_has_a_name(where: object, name: bytes, data: bytes, verdict: Verdict) -> None:
    stamp = seal(HERE, key("x"), payload("v", 100))
    assert verify(where, name, data, stamp) is verdict  # type: ignore[arg-type]


def test_another_version_and_another_magic_are_told_apart() -> None:
    stamp = bytearray(seal(HERE, key("x"), b"data"))
    stamp[4] += 1
    assert verify(HERE, key("x"), b"data", bytes(stamp)) is Verdict.VERSION
    stamp[0] ^= 1
    assert verify(HERE, key("x"), b"data", bytes(stamp)) is Verdict.UNREADABLE
