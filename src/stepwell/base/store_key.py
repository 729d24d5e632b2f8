"""The secret that all permitted writers of a store share. It stamps their values, so that readers reject any others.

Pure: takes bytes and reads no file (`store/key_file.py` does). Its public id reveals nothing about it.
"""

from __future__ import annotations

import hashlib

from stepwell.base.errors import ConfigError

MIN_SECRET_BYTES = 32
MAC_BYTES = 16
ID_BYTES = 4
_LEAST_VARIETY = 8  # distinct bytes: random secrets always have more, a file of zeros or of one repeated word has fewer


class StoreKey:
    """A key made from a secret. Raises ConfigError for a secret that can be guessed."""

    __slots__ = ("_root", "id")

    def __init__(self, secret: bytes) -> None:
        if len(secret) < MIN_SECRET_BYTES:
            raise ConfigError(f"a store key needs at least {MIN_SECRET_BYTES} random bytes, got {len(secret)}")
        if len(set(secret)) < _LEAST_VARIETY:
            raise ConfigError(f"a store key must be random: this one has only {len(set(secret))} different bytes")
        self._root = hashlib.blake2b(secret, digest_size=64, person=b"stepwell-root").digest()
        self.id = self._keyed(b"", b"stepwell-keyid", ID_BYTES)

    def __repr__(self) -> str:
        return f"StoreKey({self.id.hex()})"

    def space(self, namespace: bytes) -> bytes:
        """The name of a namespace under this key: 32 bytes that differ from its digest and from its name under any other key."""
        return self._keyed(namespace, b"stepwell-space", 32)

    def mac(self, message: bytes) -> bytes:
        """A message authentication code, which only holders of the key can compute. Compare it with `hmac.compare_digest`."""
        return self._keyed(message, b"stepwell-stamp", MAC_BYTES)

    def _keyed(self, message: bytes, purpose: bytes, size: int) -> bytes:
        return hashlib.blake2b(message, key=self._root, digest_size=size, person=purpose).digest()
