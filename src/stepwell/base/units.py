"""Amounts of memory as people write them: `8GiB`, `1.5 TB`, `4096`.

Parsing is exact: no value passes through a float.
"""

from __future__ import annotations

import re
from fractions import Fraction
from math import ceil

from stepwell.base.errors import ConfigError

_BINARY = ("B", "KiB", "MiB", "GiB", "TiB", "PiB")
_DECIMAL = ("B", "kB", "MB", "GB", "TB", "PB")
_SCALE = {unit.lower(): base**power for units, base in ((_BINARY, 1024), (_DECIMAL, 1000)) for power, unit in enumerate(units)}
_AMOUNT = re.compile(r"\s*([0-9]{1,20}(?:\.[0-9]{1,12})?)\s*([A-Za-z]*)\s*", re.ASCII)


def parse_bytes(amount: str | int) -> int:
    """The number of bytes in `8GiB`, `500 MB`, `1.5TiB` or a plain integer; fractions of a byte are cut off.

    The case of units does not matter; KiB means 1024 bytes, kB 1000. Raises ConfigError for anything else.
    """
    if isinstance(amount, int) and not isinstance(amount, bool):
        if amount < 0:
            raise ConfigError(f"an amount of memory cannot be negative, got {amount}")
        return amount
    if isinstance(amount, str) and amount.strip().startswith("-"):
        raise ConfigError(f"an amount of memory cannot be negative, got {amount!r:.80}")
    match = _AMOUNT.fullmatch(amount) if isinstance(amount, str) else None
    if match is None:
        raise ConfigError(f"not an amount of memory: {amount!r:.80}; write for example 8GiB, 500MB or 4096")
    number, unit = match.groups()
    scale = _SCALE.get(unit.lower() or "b")
    if scale is None:
        raise ConfigError(f"unknown unit {unit!r:.40}; use one of: {', '.join((*_BINARY, *_DECIMAL[1:]))}")
    size = Fraction(number) * scale
    if scale == 1 and size.denominator != 1:
        raise ConfigError(f"{amount!r:.80} is not a whole number of bytes")
    return int(size)


def parse_tier(amount: str | int, setting: str) -> int | None:
    """The bytes of a tier, or None for `0` or `none`. Raises ConfigError that names the setting."""
    if isinstance(amount, str) and is_none(amount):
        return None
    try:
        return parse_bytes(amount) or None
    except ConfigError as error:
        raise ConfigError(f"{setting}: {error}") from None


def is_none(setting: object) -> bool:
    """Whether a setting means no tier: it is missing, `0` or `none`."""
    return setting is None or setting == 0 or (isinstance(setting, str) and setting.strip().lower() in ("0", "none"))


def counted(count: int, noun: str) -> str:
    """`1 value`, `2,000 values`."""
    return f"{count:,} {noun}{'' if count == 1 else 's'}"


def at_least(size_bytes: int) -> str:
    """A required size for people: not less than `size_bytes`, in the form of `format_bytes`."""
    power = min(max(size_bytes.bit_length() - 1, 0) // 10, len(_BINARY) - 1)
    tenth = Fraction(1024**power, 10)
    return format_bytes(ceil(ceil(size_bytes / tenth) * tenth)) if power else format_bytes(size_bytes)


def format_bytes(size_bytes: int) -> str:
    """A size for people, in the largest binary unit that keeps it at 1 or above: `74.2 MiB`, `48 B`."""
    if size_bytes < 0:
        raise ConfigError(f"an amount of memory cannot be negative, got {size_bytes}")
    power = min(max(size_bytes.bit_length() - 1, 0) // 10, len(_BINARY) - 1)
    if power == 0:
        return f"{size_bytes} B"
    if round(size_bytes / 1024**power, 1) >= 1024 and power < len(_BINARY) - 1:
        power += 1  # 1023.96 KiB is shown as 1.0 MiB
    return f"{size_bytes / 1024**power:.1f} {_BINARY[power]}"
