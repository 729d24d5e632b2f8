"""Stamps that only a holder of the store's key can make: other writers to the store can cause misses, and nothing more.

    | magic 4 | version 2 | 0 2 | length 8 | checksum 16 (XXH3-128) | space 6 | key 6 | key id 4 | MAC 16 |      64 bytes

    MAC = keyed BLAKE2b of: everything before it | space 32 | SHA-256 of the value 32 | key 32

The MAC decides. The fields before it let readers without the key detect damage and mix-ups (`verify_without_key`), and name the
reason of a failure. The hash is SHA-256 because server processors have instructions for it. Pure.
"""

from __future__ import annotations

import hashlib
import struct
from collections.abc import Sequence
from hmac import compare_digest

import numpy as np
import numpy.typing as npt

from stepwell.base.store_key import ID_BYTES, MAC_BYTES, StoreKey
from stepwell.store.api import STAMP_BYTES, Space
from stepwell.store.seal import CHECKSUM_BYTES, KEYED_MAGIC, MAGIC, Seals, Unkeyed, Verdict, checksum, verify

VERSION = 1
_NAME_BYTES = 6  # of a digest: enough to distinguish any two that were not forged to look alike
_STAMP = struct.Struct(f"<4sHHQ{CHECKSUM_BYTES}s{_NAME_BYTES}s{_NAME_BYTES}s{ID_BYTES}s{MAC_BYTES}s")
_ID_AT = STAMP_BYTES - MAC_BYTES - ID_BYTES

assert _STAMP.size == STAMP_BYTES


class Keyed:
    """Makes and judges stamps with a key. Any thread."""

    digest_bytes = CHECKSUM_BYTES + hashlib.sha256().digest_size

    def __init__(self, key: StoreKey) -> None:
        self._key = key

    @property
    def label(self) -> str:
        return f", key {self._key.id.hex()}"

    def space(self, namespace: bytes) -> bytes:
        return self._key.space(namespace)

    def digest(self, data: memoryview | bytes) -> bytes:
        """Both hashes: one without known collisions, and the checksum for readers without the key."""
        return checksum(data) + hashlib.sha256(data).digest()

    def stamp_all(self, space: Space, keys: Sequence[bytes], lengths: Sequence[int], digests: Sequence[bytes]) -> list[bytes]:
        return [self._stamp(space, *each) for each in zip(keys, lengths, digests, strict=True)]

    def judge(self, space: Space, key: bytes, stamped: bytes, *, length: int, digest: bytes) -> Verdict:
        if not _is_keyed(stamped):
            return Verdict.OTHER_KEY if stamped[: len(MAGIC)] == MAGIC else Verdict.UNREADABLE
        verdict = _judge_without_key(space, key, stamped, length=length, digest=digest[:CHECKSUM_BYTES])
        if verdict is not Verdict.INTACT:
            return verdict
        return verdict if compare_digest(stamped, self._stamp(space, key, length, digest)) else Verdict.OTHER_KEY

    def _stamp(self, space: Space, key: bytes, length: int, digest: bytes) -> bytes:
        names = space.digest[:_NAME_BYTES], key[:_NAME_BYTES], self._key.id
        head = _STAMP.pack(KEYED_MAGIC, VERSION, 0, length, digest[:CHECKSUM_BYTES], *names, b"")[:-MAC_BYTES]
        # All parts but the last have fixed sizes: no two lists of parts make the same message.
        return head + self._key.mac(b"".join((head, space.digest, digest[CHECKSUM_BYTES:], key)))


def seals_for(key: StoreKey | None) -> Seals:
    """The object that makes and judges stamps with this key, or without one."""
    return Unkeyed() if key is None else Keyed(key)


def verify_without_key(space: Space, key: bytes, data: memoryview | bytes, stamped: bytes) -> Verdict:
    """Whether these are the bytes that were stamped under this name, as far as one can verify without a key.

    For tools that maintain stored values. Says nothing about the writer: to serve values, use `Seals.judge`.
    """
    if not _is_keyed(stamped):
        return verify(space, key, data, stamped)
    return _judge_without_key(space, key, stamped, length=len(data), digest=checksum(data))


def verify_with(key: StoreKey, space: Space, name: bytes, data: memoryview, stamped: bytes) -> Verdict:
    """Like `verify_without_key`; for values that name this key, also verifies that a holder of the key wrote them."""
    if not names(key, stamped):
        return verify_without_key(space, name, data, stamped)
    keyed = Keyed(key)
    return keyed.judge(space, name, stamped, length=len(data), digest=keyed.digest(data))


def names(key: StoreKey, stamped: bytes) -> bool:
    """Whether a stamp claims to be made with this key."""
    return _is_keyed(stamped) and stamped[_ID_AT : _ID_AT + ID_BYTES] == key.id


def is_unproven(stamps: npt.NDArray[np.uint8], key: StoreKey | None) -> npt.NDArray[np.bool_]:
    """Which stamps (64 bytes each) do not prove their writer: with a key, those that do not name it; without, those of any key.

    A reader without a key does not check the writer of values that carry no key.
    """
    keyed = _begins(stamps, KEYED_MAGIC)
    if key is None:
        return keyed
    names_it: npt.NDArray[np.bool_] = (stamps[..., _ID_AT : _ID_AT + ID_BYTES] == np.frombuffer(key.id, np.uint8)).all(-1)
    return ~(keyed & names_it)


def is_unkeyed(stamps: npt.NDArray[np.uint8]) -> npt.NDArray[np.bool_]:
    """Which stamps (64 bytes each) could have been made by anyone."""
    return _begins(stamps, MAGIC)


def _begins(stamps: npt.NDArray[np.uint8], magic: bytes) -> npt.NDArray[np.bool_]:
    same: npt.NDArray[np.bool_] = (stamps[..., : len(magic)] == np.frombuffer(magic, np.uint8)).all(-1)
    return same


def _is_keyed(stamped: bytes) -> bool:
    return stamped[: len(KEYED_MAGIC)] == KEYED_MAGIC


def _judge_without_key(space: Space, key: bytes, stamped: bytes, *, length: int, digest: bytes) -> Verdict:
    if len(stamped) != STAMP_BYTES:
        return Verdict.UNREADABLE
    _, version, _, of_length, of_digest, of_space, of_key, _, _ = _STAMP.unpack(stamped)
    if version != VERSION:
        return Verdict.VERSION
    if of_space != space.digest[:_NAME_BYTES]:
        return Verdict.FOREIGN
    if of_key != key[:_NAME_BYTES]:
        return Verdict.SWAPPED
    if of_length != length:
        return Verdict.LENGTH
    return Verdict.INTACT if of_digest == digest else Verdict.DAMAGED
