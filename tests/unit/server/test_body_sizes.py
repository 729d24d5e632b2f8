"""What is counted in a large body before it is parsed is what the parser would make of it."""

from __future__ import annotations

import json
import re
from contextlib import suppress
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from stepwell.server.api import requests
from stepwell.server.api.requests import _check_size
from stepwell.server.errors import ApiError

SCALARS = (
    st.none()
    | st.booleans()
    | st.integers(-(10**9), 10**9)
    | st.floats(allow_nan=False)
    | st.text('a"\\{}[]:,\n\u00e9', max_size=9)
)
VALUES = st.recursive(
    SCALARS, lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text('a"\\:{', max_size=3), inner, max_size=4)
)
BODIES = st.dictionaries(st.text('b"\\[', max_size=3), VALUES, max_size=4)


def counts(value: Any) -> tuple[int, int]:
    """Numbers, strings and words, names of fields among them; and lists and objects."""
    match value:
        case dict():
            inner = [counts(each) for each in value.values()]
            return len(value) + sum(one for one, _ in inner), 1 + sum(two for _, two in inner)
        case list():
            inner = [counts(each) for each in value]
            return sum(one for one, _ in inner), 1 + sum(two for _, two in inner)
    return 1, 0


@pytest.mark.parametrize("indent", [None, 1])
@given(body=BODIES, ascii=st.booleans())
def test_a_body_is_refused_for_one_more_than_allowed_and_for_nothing_less(body: Any, ascii: bool, indent: int | None) -> None:
    raw = json.dumps(body, ensure_ascii=ascii, indent=indent).encode()
    values, nested = counts(body)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(requests, "MAX_NESTED", nested)
        _check_size(raw, most_values=values, most_fields=len(body))
        patch.setattr(requests, "MAX_NESTED", nested - 1)
        with pytest.raises(ApiError, match=f"more than {nested - 1} lists and objects"):
            _check_size(raw, most_values=values, most_fields=len(body))
    if body:
        with pytest.raises(ApiError, match=f"more than {values - 1} numbers and strings"):
            _check_size(raw, most_values=values - 1, most_fields=len(body))
        with pytest.raises(ApiError, match="unknown fields"):
            _check_size(raw, most_values=values, most_fields=len(body) - 1)


@pytest.mark.parametrize("raw", [b'"', b'{"a', b'{"a\\', b'"' + b'\\"' * 5000, b"]" * 10, b"{" + b'"a":1,' * 3, b"\xff\xfe"])
def test_what_is_no_json_is_left_to_the_parser(raw: bytes) -> None:
    _check_size(raw, most_values=10, most_fields=10)


def test_long_strings_count_once() -> None:
    raw = json.dumps({"a": 'x\\"' * 100_000, "b": "y" * 10_000_000}).encode()
    _check_size(raw, most_values=4, most_fields=2)


@pytest.mark.parametrize("filler", [b" ", b",", b" ,\n", b'"a",', b"1,", b"\\"])
def test_no_match_takes_long_whatever_a_body_is_filled_with(filler: bytes, monkeypatch: pytest.MonkeyPatch) -> None:
    """A regular expression holds the interpreter lock, and with it every stream, until it has matched."""
    lengths: list[int] = []

    class Watched:
        def __init__(self, pattern: re.Pattern[bytes]) -> None:
            self._pattern = pattern

        def match(self, raw: bytes, at: int) -> re.Match[bytes] | None:
            found = self._pattern.match(raw, at)
            lengths.append(len(found[0]) if found is not None else 0)
            return found

    monkeypatch.setattr(requests, "_TOKEN", Watched(requests._TOKEN))
    body = b"{" + filler * (100_000 // len(filler)) + b"}"
    with suppress(ApiError):
        _check_size(body, most_values=10**9, most_fields=10**9)
    assert lengths and max(lengths) <= 4096 + requests.MAX_NUMBER + 1


@pytest.mark.parametrize("digits", [64, 65, 4300])
def test_long_numbers_are_refused_before_they_are_converted(digits: int) -> None:
    body = b'{"a": [1, ' + b"7" * digits + b"]}"
    if digits <= requests.MAX_NUMBER:
        _check_size(body, most_values=3, most_fields=1)
    else:
        with pytest.raises(ApiError, match="more than 64 characters"):
            _check_size(body, most_values=3, most_fields=1)
