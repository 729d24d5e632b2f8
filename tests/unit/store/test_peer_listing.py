"""Listings come from other machines: what was packed is parsed again, and nothing else is."""

from __future__ import annotations

from random import Random

import pytest

from stepwell.base.errors import StoreError
from stepwell.store.api import KEY_BYTES, STAMP_BYTES
from stepwell.store.peer.listing import Listing, SmallValue, Value, parse


def some_listing(values: int = 5, small: int = 2) -> Listing:
    random = Random(7)
    return Listing(
        space=random.randbytes(KEY_BYTES),
        session="192.0.2.1:16001",
        values=[Value(random.randbytes(KEY_BYTES), random.randbytes(STAMP_BYTES), 4096 * at, at * 100) for at in range(values)],
        small=[SmallValue(random.randbytes(KEY_BYTES), random.randbytes(STAMP_BYTES), b"x" * at) for at in range(small)],
    )


@pytest.mark.parametrize(("values", "small"), [(0, 0), (5, 0), (0, 2), (5, 2)])
def test_what_was_packed_is_parsed(values: int, small: int) -> None:
    listing = some_listing(values, small)
    assert parse(listing.pack()) == listing


def test_every_cut_and_every_addition_is_refused() -> None:
    raw = some_listing().pack()
    for size in range(len(raw)):
        with pytest.raises(StoreError, match="cannot be read"):
            parse(raw[:size])
    with pytest.raises(StoreError, match="after its end"):
        parse(raw + b"\0")


def test_noise_and_changed_heads_are_refused_or_harmless() -> None:
    random, raw = Random(11), some_listing().pack()
    for _ in range(2000):
        changed = bytearray(raw)
        for _ in range(random.randrange(1, 4)):
            changed[random.randrange(60)] = random.randrange(256)
        for each in (bytes(changed), random.randbytes(random.randrange(400))):
            try:
                parsed = parse(each)
            except StoreError:
                continue
            assert len(parsed.values) == 5 and len(parsed.small) == 2, "only the space or the session is another"


@pytest.mark.parametrize(("address", "length"), [(2**63, 1), (0, 2**49), (2**64 - 1, 2**64 - 1)])
def test_places_that_cannot_be_are_refused(address: int, length: int) -> None:
    listing = some_listing(0, 0)
    raw = Listing(space=listing.space, session="a:1", values=[Value(bytes(32), bytes(64), address, length)]).pack()
    with pytest.raises(StoreError, match="no address"):
        parse(raw)
