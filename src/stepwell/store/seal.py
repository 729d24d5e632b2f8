"""The stamp that is stored with every value, and shows whether the bytes read are the bytes saved under that name.

    | magic 4 | version 2 | 0 2 | length 8 | checksum 16 (XXH3-128) | space 16 | key 16 |      64 bytes, little-endian

Stamps are made and checked above the store. They detect damage and mix-ups of any origin; they do not prove who wrote a value,
since anyone can compute them. `keyed_seal.py` has stamps that do. Pure.
"""

from __future__ import annotations

import struct
from collections.abc import Sequence
from enum import Enum
from typing import Protocol

import xxhash

from stepwell.store.api import STAMP_BYTES, Space

MAGIC = b"SWv1"
KEYED_MAGIC = b"SWk1"  # of stamps made with a key
VERSION = 1
_STAMP = struct.Struct("<4sHHQ16s16s16s")
_DIGEST_AT = 16
_NAME_BYTES = 16  # of a digest: enough to distinguish any two
CHECKSUM_BYTES = 16

assert _STAMP.size == STAMP_BYTES


class Verdict(Enum):
    """What a stamp says about the bytes read with it; everything but INTACT is a miss, counted by name."""

    INTACT = "intact"
    UNREADABLE = "its stamp is not one of ours"
    VERSION = "it was written in another format version"
    FOREIGN = "it belongs to another namespace"
    SWAPPED = "it is the value of another key"
    LENGTH = "it has another length"
    DAMAGED = "its bytes do not match their checksum"
    OTHER_KEY = "it was not written with the same store key"


class Seals(Protocol):
    """How one side of a store makes and judges stamps: `Unkeyed` here, or `Keyed`."""

    @property
    def digest_bytes(self) -> int:
        """The length of a digest."""
        ...

    @property
    def label(self) -> str:
        """How messages show the key, after a comma; empty without one."""
        ...

    def space(self, namespace: bytes) -> bytes:
        """The name of a namespace's space: values of two keys never mix."""
        ...

    def digest(self, data: memoryview | bytes) -> bytes:
        """The digest of a value's bytes, for its stamp and for manifests."""
        ...

    def stamp_all(self, space: Space, keys: Sequence[bytes], lengths: Sequence[int], digests: Sequence[bytes]) -> list[bytes]:
        """Stamps for many values with known digests. A value is good if it was read with exactly this stamp."""
        ...

    def judge(self, space: Space, key: bytes, stamped: bytes, *, length: int, digest: bytes) -> Verdict:
        """Why a value does not have the expected stamp. Accepts any bytes as a stamp."""
        ...


def checksum(data: memoryview | bytes) -> bytes:
    return xxhash.xxh3_128_digest(data)


def seal(space: Space, key: bytes, data: memoryview | bytes) -> bytes:
    """The stamp for a value, over all of its bytes."""
    return stamp(space, key, length=len(data), digest=checksum(data))


def stamp(space: Space, key: bytes, *, length: int, digest: bytes) -> bytes:
    """Like `seal`, with a known checksum."""
    return _STAMP.pack(MAGIC, VERSION, 0, length, digest, space.digest[:_NAME_BYTES], key[:_NAME_BYTES])


def stamp_all(space: Space, keys: Sequence[bytes], lengths: Sequence[int], digests: Sequence[bytes]) -> list[bytes]:
    """Stamps for many values whose checksums are known: the same bytes as `stamp` makes, in a fraction of the time."""
    heads = {length: _STAMP.pack(MAGIC, VERSION, 0, length, b"", b"", b"")[:_DIGEST_AT] for length in set(lengths)}
    name = space.digest[:_NAME_BYTES]
    return [heads[length] + digest + name + key[:_NAME_BYTES] for key, length, digest in zip(keys, lengths, digests, strict=True)]


def verify(space: Space, key: bytes, data: memoryview | bytes, stamped: bytes) -> Verdict:
    """Whether `data` is the value that was sealed for `key` in `space`. Accepts any bytes as a stamp."""
    return judge(space, key, stamped, length=len(data), digest=checksum(data))


def judge(space: Space, key: bytes, stamped: bytes, *, length: int, digest: bytes) -> Verdict:
    """Like `verify`, with a known checksum."""
    if len(stamped) != STAMP_BYTES:
        return Verdict.UNREADABLE
    magic, version, _, of_length, of_digest, of_space, of_key = _STAMP.unpack(stamped)
    if magic != MAGIC:
        return Verdict.OTHER_KEY if magic == KEYED_MAGIC else Verdict.UNREADABLE
    if version != VERSION:
        return Verdict.VERSION
    if of_space != space.digest[:_NAME_BYTES]:
        return Verdict.FOREIGN
    if of_key != key[:_NAME_BYTES]:
        return Verdict.SWAPPED
    if of_length != length:
        return Verdict.LENGTH
    return Verdict.INTACT if of_digest == digest else Verdict.DAMAGED


class Unkeyed:
    """Stamps that anyone can make: the functions above."""

    digest_bytes, label = CHECKSUM_BYTES, ""

    def space(self, namespace: bytes) -> bytes:
        return namespace

    digest = staticmethod(checksum)
    stamp_all = staticmethod(stamp_all)
    judge = staticmethod(judge)
