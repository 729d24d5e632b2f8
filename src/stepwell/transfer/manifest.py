"""A checkpoint's manifest: the members it consists of, each with its key, its digest and its length. Pure.

| magic 4 | version 2 | window pages 2 | point pages 4 | key 32, digest 16 or 48, length 8 | ... |      little-endian
"""

from __future__ import annotations

import struct
from collections.abc import Sequence

_HEAD = struct.Struct("<4sHHI")
_MAGIC, _VERSION = b"SWcp", 1


class ManifestFormat:
    """Packs and parses manifests of members whose digests have one length."""

    def __init__(self, digest_bytes: int) -> None:
        self._member = struct.Struct(f"<32s{digest_bytes}sQ")

    def size(self, members: int) -> int:
        """The size of a manifest with this number of members."""
        return _HEAD.size + members * self._member.size

    def pack(self, windows: int, points: int, listed: Sequence[tuple[bytes, bytes, int]]) -> bytes:
        return _HEAD.pack(_MAGIC, _VERSION, windows, points) + b"".join(self._member.pack(*member) for member in listed)

    def parse(self, manifest: memoryview, windows: int, points: int) -> list[tuple[bytes, bytes]] | None:
        """Keys and digests of the members; None unless it is a manifest of exactly this shape."""
        if len(manifest) != self.size(windows + points):
            return None
        if _HEAD.unpack_from(manifest) != (_MAGIC, _VERSION, windows, points):
            return None
        return [(key, digest) for key, digest, _ in self._member.iter_unpack(manifest[_HEAD.size :])]
