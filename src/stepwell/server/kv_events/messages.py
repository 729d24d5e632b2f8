"""What routers are told: blocks stored in a medium, blocks removed from one, or to forget all. Plain values; sends nothing."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TypeAlias

from stepwell.base.ids import Tier
from stepwell.base.prompt import PageKey

MEDIA = {Tier.DEVICE: "GPU", Tier.HOST: "CPU", Tier.STORE: "STORAGE"}
_HASH_BYTES = 8


@dataclass(frozen=True, slots=True, kw_only=True)
class BlockStored:
    """A chain of blocks that can be resumed from, or are on the way to where that is possible."""

    hashes: tuple[int, ...]
    parent: int | None  # the hash of the block before them; None at the beginning of a prompt
    tokens: bytes  # of all of them, packed (`base/prompt.py`)
    block_tokens: int
    medium: str
    salt: str | None  # that a request must have to meet these blocks


@dataclass(frozen=True, slots=True, kw_only=True)
class BlockRemoved:
    hashes: tuple[int, ...]
    medium: str


@dataclass(frozen=True, slots=True, kw_only=True)
class AllBlocksCleared:
    """Nothing that was told before holds any more."""


Message: TypeAlias = BlockStored | BlockRemoved | AllBlocksCleared


def block_hash(key: PageKey) -> int:
    """The low 64 bits of a page's key, as vLLM shortens its own."""
    return int.from_bytes(key[-_HASH_BYTES:], "big")
