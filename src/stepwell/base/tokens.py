"""A prompt as the cache sees it: bytes of little-endian int32, checked once at the door.

Bytes, because comparing two runs of tokens is then one `memcmp` (`bytes.startswith`) without a copy.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TypeAlias

import numpy as np
import numpy.typing as npt

from stepwell.base.errors import BadTokens

TOKEN_BYTES = 4
MAX_TOKEN = 2**31 - 1

Tokens: TypeAlias = Sequence[int] | npt.NDArray[np.integer]


def pack(tokens: Tokens, *, vocab_size: int | None = None) -> bytes:
    """Checks `tokens` and returns them as packed int32. Raises BadTokens; changes nothing."""
    if len(tokens) == 1 and type(tokens[0]) is int and 0 <= tokens[0] < (vocab_size or MAX_TOKEN + 1):
        return tokens[0].to_bytes(TOKEN_BYTES, "little")  # what a decode step adds
    try:
        ids = np.asarray(tokens)
    except (ValueError, OverflowError) as error:
        raise BadTokens(f"a prompt must be a sequence of whole numbers: {error}") from None
    if ids.ndim != 1:
        raise BadTokens(f"a prompt must be one-dimensional, got an array of shape {ids.shape}")
    if ids.size == 0:
        return b""
    if ids.dtype.kind not in "iu":
        raise BadTokens(f"token ids must be whole numbers, got {ids.dtype}")
    limit = MAX_TOKEN if vocab_size is None else vocab_size - 1
    # One pass instead of two: seen as unsigned, a negative id is larger than any limit.
    if int(ids.view(ids.dtype.str.replace("i", "u")).max()) > limit:
        lowest = int(ids.min())
        raise BadTokens(f"token id {lowest if lowest < 0 else int(ids.max())} is out of range 0..{limit}")
    return ids.astype("<i4", copy=False).tobytes()


def unpack(packed: bytes) -> npt.NDArray[np.int32]:
    """The token ids behind packed bytes, as a read-only array."""
    return np.frombuffer(packed, dtype="<i4")


def common_pages(left: bytes, right: bytes, page_bytes: int) -> int:
    """How many whole pages two packed runs share from their start."""
    size = min(len(left), len(right)) // page_bytes * page_bytes
    if left[:size] == right[:size]:
        return size // page_bytes
    pair = np.frombuffer(left, np.uint32, size // TOKEN_BYTES) != np.frombuffer(right, np.uint32, size // TOKEN_BYTES)
    return int(pair.argmax()) * TOKEN_BYTES // page_bytes
