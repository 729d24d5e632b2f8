"""Names for pages that mean the same everywhere: a hash chain that starts from the namespace.

    key_0 = H(namespace),  key_i = H(key_{i-1} | tokens of page i)

Two configurations that would read each other's bytes wrongly never share a key, because everything that
tells them apart is framed into the seed. Pure; computed only where a store needs it.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator
from dataclasses import dataclass, field
from functools import cached_property
from typing import NewType

FORMAT_VERSION = 1
KEY_BYTES = 32

PageKey = NewType("PageKey", bytes)

# Copies of a state that has taken nothing in are made faster than new states.
_PAGE = hashlib.blake2b(digest_size=KEY_BYTES, person=b"stepwell-page")
_MANIFEST = hashlib.blake2b(digest_size=KEY_BYTES, person=b"stepwell-manif")


@dataclass(frozen=True, kw_only=True)
class Namespace:
    """Everything that must agree before two prompts may share bytes.

    `model` is the identity of the weights (a digest where one is known), `layout` the fingerprint of the
    spec (dtypes, page size, states), `shard` which part of a sharded model these bytes are, `tenant` whose
    quota they count against. Absent and empty differ: `salt=None` is not `salt=""`.
    """

    model: str
    layout: str
    shard: str | None = None
    adapter: str | None = None
    salt: str | None = field(default=None, repr=False)  # a secret of whoever chose it
    tenant: str | None = None

    @cached_property
    def digest(self) -> PageKey:
        """The framed digest that seeds every chain: no two namespaces run together, whatever their texts."""
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
    """The key of the manifest of the checkpoint that stands on the page called `boundary`."""
    state = _MANIFEST.copy()
    state.update(boundary)
    return state.digest()


def member_key(page: PageKey, kind: str, checksum: bytes) -> bytes:
    """The key of one object of a checkpoint: named by what it holds, so that the same name always means the same bytes."""
    state = hashlib.blake2b(page, digest_size=KEY_BYTES, person=b"stepwell-member")
    state.update(_framed(kind))
    state.update(checksum)
    return state.digest()
