"""What one server offers another for a prompt: its values, where they lie in the server's host memory, and their stamps. Pure.

| magic 4 | version 2 | session 2 | values 4 | small 4 | space 32 | session ... |
| key 32, stamp 64, address 8, length 8 | ...        values that are read from the other server's memory
| key 32, stamp 64, length 4, bytes ... | ...        small ones, sent with the listing          little-endian

A listing comes from another machine, so it is parsed as untrusted input. The reader of the values verifies their stamps.
"""

from __future__ import annotations

import struct
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from stepwell.base.errors import StoreError
from stepwell.store.api import KEY_BYTES, STAMP_BYTES

MAX_VALUES = 1 << 20
MAX_SMALL = 4096
MAX_SMALL_BYTES = 1 << 20
MAX_SESSION = 255
_HEAD = struct.Struct(f"<4sHHII{KEY_BYTES}s")
_VALUE = struct.Struct(f"<{KEY_BYTES}s{STAMP_BYTES}sQQ")
_SMALL = struct.Struct(f"<{KEY_BYTES}s{STAMP_BYTES}sI")
_MAGIC, _VERSION = b"SWho", 1
MAX_BYTES = _HEAD.size + MAX_SESSION + MAX_VALUES * _VALUE.size  # of any listing


class Value(NamedTuple):
    key: bytes
    stamp: bytes
    address: int
    length: int


class SmallValue(NamedTuple):
    key: bytes
    stamp: bytes
    data: bytes


@dataclass(frozen=True, slots=True, kw_only=True)
class Listing:
    """The values of one prompt in one space."""

    space: bytes
    session: str  # of the engine that shows the memory
    values: Sequence[Value]
    small: Sequence[SmallValue] = ()

    def __iter__(self) -> Iterator[Value | SmallValue]:
        yield from self.values
        yield from self.small

    def pack(self) -> bytes:
        session = self.session.encode()
        head = _HEAD.pack(_MAGIC, _VERSION, len(session), len(self.values), len(self.small), self.space)
        values = [_VALUE.pack(*value) for value in self.values]
        small = [_SMALL.pack(key, stamp, len(data)) + data for key, stamp, data in self.small]
        return b"".join([head, session, *values, *small])


def parse(raw: bytes) -> Listing:
    """Raises StoreError for bytes that `Listing.pack` does not produce."""
    try:
        magic, version, named, values, small, space = _HEAD.unpack_from(raw)
        if magic != _MAGIC or version != _VERSION or not 0 < named <= MAX_SESSION or values > MAX_VALUES or small > MAX_SMALL:
            raise ValueError("its beginning is not one of ours")
        at = _HEAD.size + named
        session = raw[_HEAD.size : at].decode("ascii")
        end = at + values * _VALUE.size
        if end > len(raw) or not session.isprintable() or " " in session:
            raise ValueError("it is cut short, or names no session")
        found = [Value(*each) for each in _VALUE.iter_unpack(raw[at:end])]
        if any(each.length > 2**48 or each.address >= 2**63 for each in found):
            raise ValueError("a value has no address")
        return Listing(space=space, session=session, values=found, small=_small(raw, end, small))
    except (struct.error, ValueError) as error:
        raise StoreError(f"another server's listing cannot be read: {error}") from None


def _small(raw: bytes, at: int, count: int) -> list[SmallValue]:
    found = []
    for _ in range(count):
        key, stamp, length = _SMALL.unpack_from(raw, at)
        at += _SMALL.size
        if length > MAX_SMALL_BYTES or at + length > len(raw):
            raise ValueError("a small value is cut short")
        found.append(SmallValue(key, stamp, raw[at : at + length]))
        at += length
    if at != len(raw):
        raise ValueError("there are bytes after its end")
    return found
