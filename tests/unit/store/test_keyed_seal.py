"""A keyed stamp is one that only a holder of the key can make; without the key, damage can still be detected."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from stepwell.base.store_key import StoreKey
from stepwell.store.api import STAMP_BYTES, Space
from stepwell.store.keyed_seal import Keyed, is_unkeyed, is_unproven, seals_for, verify_with, verify_without_key
from stepwell.store.seal import Seals, Unkeyed, Verdict, seal, verify
from stepwell.testing.store_contract import key, payload, space

HERE, NAME, DATA = space("here"), key("x"), payload("v", 100)
OURS, THEIRS = StoreKey(bytes(range(32))), StoreKey(bytes(range(1, 33)))


def stamped(seals: Seals, data: bytes = DATA, *, where: Space = HERE, name: bytes = NAME) -> bytes:
    (stamp,) = seals.stamp_all(where, [name], [len(data)], [seals.digest(data)])
    return stamp


def judged(seals: Seals, stamp: bytes, data: bytes = DATA, *, where: Space = HERE, name: bytes = NAME) -> Verdict:
    return seals.judge(where, name, stamp, length=len(data), digest=seals.digest(data))


@given(st.binary(max_size=200))
def test_what_was_sealed_is_intact_and_its_digest_has_the_length_it_says(data: bytes) -> None:
    for seals in (seals_for(None), seals_for(OURS)):
        stamp = stamped(seals, data)
        assert len(stamp) == STAMP_BYTES and judged(seals, stamp, data) is Verdict.INTACT
        assert len(seals.digest(data)) == seals.digest_bytes


@given(st.binary(max_size=130))
def test_any_bytes_may_be_taken_for_a_stamp(stamp: bytes) -> None:
    for start in (b"", b"SWk1", b"SWk1\x01\x00", b"SWv1"):
        assert judged(Keyed(OURS), start + stamp) is not Verdict.INTACT
        assert verify_without_key(HERE, NAME, DATA, start + stamp) is not Verdict.INTACT


def test_every_flipped_bit_of_a_stamp_is_seen() -> None:
    good = stamped(Keyed(OURS))
    for bit in range(8 * STAMP_BYTES):
        bad = bytearray(good)
        bad[bit // 8] ^= 1 << bit % 8
        assert judged(Keyed(OURS), bytes(bad)) is not Verdict.INTACT


@pytest.mark.parametrize(
    ("where", "name", "data", "verdict"),
    [
        (space("there"), NAME, DATA, Verdict.FOREIGN),
        (HERE, key("y"), DATA, Verdict.SWAPPED),
        (HERE, NAME, payload("v", 99), Verdict.LENGTH),
        (HERE, NAME, payload("w", 100), Verdict.DAMAGED),
    ],
)
def test_every_difference_has_a_name_with_the_key_and_without(where: Space, name: bytes, data: bytes, verdict: Verdict) -> None:
    stamp = stamped(Keyed(OURS))
    assert judged(Keyed(OURS), stamp, data, where=where, name=name) is verdict
    assert verify_without_key(where, name, data, stamp) is verdict


def test_names_that_only_begin_alike_are_told_apart_by_the_mac() -> None:
    there = replace(HERE, digest=HERE.digest[:-1] + b"?")
    other = NAME[:-1] + b"?"
    stamp = stamped(Keyed(OURS))
    assert judged(Keyed(OURS), stamp, where=there) is Verdict.OTHER_KEY
    assert judged(Keyed(OURS), stamp, name=other) is Verdict.OTHER_KEY


def test_a_checksum_that_was_made_to_fit_does_not_help() -> None:
    """Without the key, an attacker can make every part of a stamp but one."""
    forged = stamped(Keyed(THEIRS), payload("evil", 100))
    with_our_id = forged[:44] + OURS.id + forged[48:]
    with_our_mac = forged[:44] + stamped(Keyed(OURS))[44:]
    for stamp in (forged, with_our_id, with_our_mac):
        assert verify_without_key(HERE, NAME, payload("evil", 100), stamp) is Verdict.INTACT
        assert judged(Keyed(OURS), stamp, payload("evil", 100)) is Verdict.OTHER_KEY


def test_keyed_and_unkeyed_do_not_take_each_others_values() -> None:
    assert judged(Keyed(OURS), seal(HERE, NAME, DATA)) is Verdict.OTHER_KEY
    assert judged(Unkeyed(), stamped(Keyed(OURS))) is Verdict.OTHER_KEY
    assert verify(HERE, NAME, DATA, stamped(Keyed(OURS))) is Verdict.OTHER_KEY
    assert verify_without_key(HERE, NAME, DATA, seal(HERE, NAME, DATA)) is Verdict.INTACT


def test_spaces_of_two_keys_and_of_none_never_meet() -> None:
    assert len({seals.space(HERE.digest) for seals in (Unkeyed(), Keyed(OURS), Keyed(THEIRS))}) == 3


def test_another_version_is_told() -> None:
    stamp = bytearray(stamped(Keyed(OURS)))
    stamp[4] += 1
    assert judged(Keyed(OURS), bytes(stamp)) is verify_without_key(HERE, NAME, DATA, bytes(stamp)) is Verdict.VERSION


def test_a_check_with_a_key_proves_what_names_it_and_says_what_it_cannot() -> None:
    ours, theirs, plain = stamped(Keyed(OURS)), stamped(Keyed(THEIRS)), seal(HERE, NAME, DATA)
    stamps = np.frombuffer(ours + theirs + plain, np.uint8).reshape(3, STAMP_BYTES)
    assert is_unproven(stamps, None).tolist() == [True, True, False]
    assert is_unproven(stamps, OURS).tolist() == [False, True, True]
    assert is_unkeyed(stamps).tolist() == [False, False, True]
    view = memoryview(DATA)
    assert [verify_with(OURS, HERE, NAME, view, each) for each in (ours, theirs, plain)] == [Verdict.INTACT] * 3
    forged = ours[:-1] + bytes([ours[-1] ^ 1])
    assert verify_with(OURS, HERE, NAME, view, forged) is Verdict.OTHER_KEY
