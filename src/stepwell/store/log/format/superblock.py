"""`store.json`: the settings that a directory must be opened with, saved when it is created. One small file.

Holds the secret that seeds the checksums of headers, so payloads cannot be made to look like headers. Accepts any bytes.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

import xxhash

from stepwell.base.errors import ConfigError, StoreError
from stepwell.store.log.disk.files import Disk, replace_file
from stepwell.store.log.format.batch import FORMAT_VERSION

NAME = "store.json"
WHAT = "stepwell log store"
MAX_BYTES = 64 * 1024  # what `Disk.read_file` reads
_REST_BYTES = 1024  # for everything but the quotas
_NO_DISK_BYTES = 2**62  # larger than any disk


@dataclass(frozen=True, slots=True, kw_only=True)
class Superblock:
    budget_bytes: int
    segment_bytes: int
    seed: int
    quotas: Mapping[str, int] = field(default_factory=dict)  # tenant -> bytes


def read(disk: Disk, directory: Path) -> Superblock | None:
    """The saved settings; None if no store was created yet. Raises StoreError for a file that cannot be used."""
    content = disk.read_file(directory / NAME)
    if content is None:
        return None
    try:
        fields = json.loads(content)
        if fields["what"] != WHAT or fields.pop("check") != _check(fields):
            raise ValueError
        version = int(fields["format"])
        quotas = {str(tenant): int(size) for tenant, size in fields["quotas"].items()}
        budget_bytes, segment_bytes, seed = (int(fields[name]) for name in ("budget_bytes", "segment_bytes", "seed"))
        if not all(0 <= size < _NO_DISK_BYTES for size in (budget_bytes, segment_bytes, *quotas.values())):
            raise ValueError
    except (ValueError, KeyError, TypeError, AttributeError, OverflowError, RecursionError):
        raise StoreError(
            f"{directory / NAME} does not belong to a log store, or is damaged; move the directory away and start with a new one"
        ) from None
    if version != FORMAT_VERSION:
        raise StoreError(
            f"{directory} was written in format {version}, this Stepwell reads {FORMAT_VERSION}; use a new directory"
        )
    return Superblock(budget_bytes=budget_bytes, segment_bytes=segment_bytes, seed=seed & (2**64 - 1), quotas=quotas)


def write(disk: Disk, directory: Path, block: Superblock) -> None:
    """Raises ConfigError, and writes nothing, if the quotas do not fit."""
    content = _content(block)
    if len(content) > MAX_BYTES:
        raise ConfigError(f"{len(block.quotas)} quotas are too many for one log store; use separate directories for tenants")
    replace_file(disk, directory / NAME, [memoryview(content)])


def size_of(block: Superblock) -> int:
    """Bytes of the file with these settings."""
    return len(_content(block))


def quotas_fit(quotas: Mapping[str, int]) -> bool:
    """Whether a log store can save these quotas, with the names of their tenants."""
    return len(json.dumps(quotas, indent=2)) + _REST_BYTES <= MAX_BYTES


def _content(block: Superblock) -> bytes:
    fields = {
        "what": WHAT, "format": FORMAT_VERSION, "budget_bytes": block.budget_bytes, "segment_bytes": block.segment_bytes,
        "seed": block.seed, "quotas": dict(block.quotas),
    }  # fmt: skip
    return json.dumps({**fields, "check": _check(fields)}, indent=1).encode() + b"\n"


def _check(fields: Mapping[str, object]) -> str:
    """A checksum against accidental damage: a flipped bit in the secret would silently make every value unreadable."""
    return xxhash.xxh3_64_hexdigest(json.dumps(fields, sort_keys=True).encode())
