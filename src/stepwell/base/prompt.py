"""The cache's form of a prompt: bytes of little-endian int32, checked once on entry, and the keys of its pages.

Tokens are bytes because comparing two sequences is then one `memcmp` (`bytes.startswith`) without a copy.

A page's key means the same everywhere. It is a link of a hash chain that starts from the namespace:

    key_0 = H(namespace),  key_i = H(key_{i-1} | tokens of page i)

Two configurations that would misread each other's bytes never share a key, because everything that distinguishes them is framed
into the seed. Pure; keys are computed only where a store or a listener needs them.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import NewType, TypeAlias

import numpy as np
import numpy.typing as npt

from stepwell.base.errors import BadTokens, ConfigError

TOKEN_BYTES = 4
MAX_TOKEN = 2**31 - 1
FORMAT_VERSION = 1  # of keys
KEY_BYTES = 32

Tokens: TypeAlias = Sequence[int] | npt.NDArray[np.integer]
PageKey = NewType("PageKey", bytes)

# Copying an empty hash state is faster than making a new one.
_PAGE = hashlib.blake2b(digest_size=KEY_BYTES, person=b"stepwell-page")
_MANIFEST = hashlib.blake2b(digest_size=KEY_BYTES, person=b"stepwell-manif")


def pack(tokens: Tokens, *, vocab_size: int | None = None) -> bytes:
    """Checks `tokens` and returns them as packed int32. Raises BadTokens; changes nothing."""
    if type(tokens) is list and len(tokens) == 1 and type(tokens[0]) is int and 0 <= tokens[0] < (vocab_size or MAX_TOKEN + 1):
        return tokens[0].to_bytes(TOKEN_BYTES, "little")  # the usual case in decode steps
    try:
        ids = np.asarray(tokens)
    except (ValueError, OverflowError) as error:
        raise BadTokens(f"a prompt must be a sequence of whole numbers: {error}") from None
    if ids.ndim != 1:
        raise BadTokens(f"a prompt must be one-dimensional, got an array of shape {ids.shape}")
    if ids.size == 0:
        return b""
    limit = MAX_TOKEN if vocab_size is None else vocab_size - 1
    if ids.dtype.kind not in "iu":
        if all(type(each) is int for each in tokens):  # too large for any integer type of NumPy
            raise BadTokens(f"a token id is out of range 0..{limit}, by far")
        raise BadTokens(f"token ids must be whole numbers, got {ids.dtype}")
    # One pass instead of two: viewed as unsigned, a negative id is larger than any limit.
    if int(ids.view(ids.dtype.str.replace("i", "u")).max()) > limit:
        lowest = int(ids.min())
        raise BadTokens(f"token id {lowest if lowest < 0 else int(ids.max())} is out of range 0..{limit}")
    return ids.astype("<i4", copy=False).tobytes()


def unpack(packed: bytes) -> npt.NDArray[np.int32]:
    """The token ids behind packed bytes, as a read-only array."""
    return np.frombuffer(packed, dtype="<i4")


def common_pages(left: bytes, right: bytes, page_bytes: int) -> int:
    """The number of whole pages that two packed sequences share from their start."""
    size = min(len(left), len(right)) // page_bytes * page_bytes
    if left[:size] == right[:size]:
        return size // page_bytes
    pair = np.frombuffer(left, np.uint32, size // TOKEN_BYTES) != np.frombuffer(right, np.uint32, size // TOKEN_BYTES)
    return int(pair.argmax()) * TOKEN_BYTES // page_bytes


@dataclass(frozen=True, kw_only=True)
class Namespace:
    """Everything that must be equal for two prompts to share bytes.

    `model` is the identity of the weights (a digest if known), `layout` the fingerprint of the spec (dtypes, page size, states),
    `shard` the part of a sharded model, and `tenant` the account of the bytes. None and empty differ: `salt=None` is not
    `salt=""`. `name` is the model's name for people, and need not be equal.
    """

    model: str
    layout: str
    shard: str | None = None
    adapter: str | None = None
    salt: str | None = field(default=None, repr=False)  # a secret of the client that chose it
    tenant: str | None = None
    name: str = field(default="", compare=False)

    def __post_init__(self) -> None:
        """Raises ConfigError for text that has no digest: half of a surrogate pair."""
        for name in ("model", "layout", "shard", "adapter", "salt", "tenant"):
            text = getattr(self, name)
            if text is not None and not text.isascii():
                try:
                    text.encode()
                except UnicodeEncodeError:  # a salt is a secret, so the text is not shown
                    raise ConfigError(f"the {name} of a namespace has half of a surrogate pair: no valid Unicode") from None

    @cached_property
    def digest(self) -> PageKey:
        """The framed digest that seeds every chain: it differs for any two namespaces, whatever their texts."""
        state = hashlib.blake2b(digest_size=KEY_BYTES, person=b"stepwell-ns")
        state.update(FORMAT_VERSION.to_bytes(4, "little"))
        for part in (self.model, self.layout, self.shard, self.adapter, self.salt, self.tenant):
            state.update(_framed(part))
        return PageKey(state.digest())


def _framed(part: str | None) -> bytes:
    if part is None:
        return b"\x00"
    text = part.encode()
    return b"\x01" + len(text).to_bytes(8, "little") + text


def page_keys(parent: PageKey, packed: bytes, page_bytes: int) -> Iterator[PageKey]:
    """The keys of the whole pages in `packed`, chained on `parent` (the namespace digest before page 0)."""
    key = parent
    for start in range(0, len(packed) - page_bytes + 1, page_bytes):
        state = _PAGE.copy()
        state.update(key)
        state.update(packed[start : start + page_bytes])
        key = PageKey(state.digest())
        yield key


def manifest_key(boundary: PageKey) -> bytes:
    """The key of the manifest of the checkpoint at the end of the page with key `boundary`."""
    state = _MANIFEST.copy()
    state.update(boundary)
    return state.digest()


def member_key(page: PageKey, kind: str, checksum: bytes) -> bytes:
    """The key of one object of a checkpoint. It contains the checksum, so the same key always means the same bytes."""
    state = hashlib.blake2b(page, digest_size=KEY_BYTES, person=b"stepwell-member")
    state.update(_framed(kind))
    state.update(checksum)
    return state.digest()
