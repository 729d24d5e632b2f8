"""Bearer tokens, as the bytes that clients sent."""

from __future__ import annotations

import pytest

pytest.importorskip("fastapi")

from fastapi import Request

from stepwell.server.access.door import _bearer


@pytest.mark.parametrize("key", ["a plain key", "ein Schlüssel", "voilà", "Å"])  # the last two end in what Latin-1 calls blank
def test_a_key_is_taken_as_its_bytes(key: str) -> None:
    for given in (b"Bearer " + key.encode(), b"bearer \t " + key.encode() + b" \t"):
        assert _bearer(Request({"type": "http", "headers": [(b"authorization", given)]})) == key.encode()
