"""Prompts at the door: what is let in, how it is packed and compared."""

from __future__ import annotations

import random

import numpy as np
import pytest

from stepwell import BadTokens
from stepwell.base.tokens import MAX_TOKEN, common_pages, pack, unpack


@pytest.mark.parametrize(
    "tokens",
    [
        [5, 0, MAX_TOKEN],
        (5, 0, MAX_TOKEN),
        np.array([5, 0, MAX_TOKEN], np.int64),
        np.array([5, 0, MAX_TOKEN], np.uint32),
        np.array([5, 0, MAX_TOKEN], ">i4"),
        np.array([5, 9, 0, 9, MAX_TOKEN], np.int32)[::2],
        np.array([[5, 0, MAX_TOKEN]] * 2, np.int32)[0],
    ],
)
def test_pack_and_unpack_are_inverse_for_every_kind_of_array(tokens: object) -> None:
    packed = pack(tokens)  # type: ignore[arg-type]
    assert packed == bytes([5, 0, 0, 0, 0, 0, 0, 0, 255, 255, 255, 127])
    assert unpack(packed).tolist() == [5, 0, MAX_TOKEN]


@pytest.mark.parametrize("dtype", [np.int8, np.uint8, np.int16, np.uint16])
def test_narrow_types_are_widened(dtype: type) -> None:
    assert unpack(pack(np.array([0, 1, 127], dtype))).tolist() == [0, 1, 127]


@pytest.mark.parametrize(
    ("tokens", "says"),
    [
        ([1, -1], "token id -1 is out of range"),
        ([2**31], "token id 2147483648 is out of range"),
        ([2**70], "whole numbers"),
        (np.array([2**63], np.uint64), "out of range"),
        (np.array([2**32 + 1], np.int64), "out of range"),
        (np.array([0xFFFFFF00], ">u4"), "out of range"),
        ([1.0, 2.0], "whole numbers"),
        ([True, False], "whole numbers"),
        (["a"], "whole numbers"),
        ([[1, 2], [3, 4]], "one-dimensional"),
        ([[1, 2], [3]], "sequence of whole numbers"),
        (7, "one-dimensional"),
        (None, "one-dimensional"),
        ([None], "whole numbers"),
    ],
)
def test_pack_refuses_what_is_not_a_row_of_token_ids(tokens: object, says: str) -> None:
    with pytest.raises(BadTokens, match=says):
        pack(tokens)  # type: ignore[arg-type]


def test_the_vocabulary_is_the_limit_when_it_is_known() -> None:
    assert pack([99], vocab_size=100)
    with pytest.raises(BadTokens, match=r"token id 100 is out of range 0\.\.99"):
        pack([3, 100], vocab_size=100)


def test_an_empty_prompt_packs_to_nothing() -> None:
    assert pack([]) == b"" and pack(np.empty(0, np.int32)) == b""


def test_pack_does_not_change_what_it_was_given() -> None:
    tokens = np.array([3, 2, 1], np.int64)
    pack(tokens)
    assert tokens.tolist() == [3, 2, 1] and tokens.dtype == np.int64


@pytest.mark.parametrize("page", [1, 3, 4])
def test_common_pages_counts_whole_pages_only(page: int) -> None:
    random_ = random.Random(page)
    for _ in range(300):
        left = [random_.randrange(2) for _ in range(random_.randrange(14))]
        right = left[: random_.randrange(15)] + [random_.randrange(2) for _ in range(random_.randrange(6))]
        expected = 0
        while (
            left[: (expected + 1) * page] == right[: (expected + 1) * page]
            and min(len(left), len(right)) >= (expected + 1) * page
        ):
            expected += 1
        assert common_pages(pack(left), pack(right), page * 4) == expected
