"""The options with which the owner opened a shared log, as it sends them to clients. Pure; input is checked.

JSON, since it is sent once for each connection.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass

from stepwell.base.units import format_bytes
from stepwell.store.log.opening import LogOptions
from stepwell.store.shared.wire import Malformed


@dataclass(frozen=True, slots=True, kw_only=True)
class Settings:
    budget_bytes: int
    segment_bytes: int
    max_value_bytes: int
    quotas: Mapping[str, int]


def pack_settings(settings: Settings) -> bytes:
    return json.dumps(asdict(settings)).encode()


def parse_settings(body: bytes) -> Settings:
    try:
        settings = Settings(**json.loads(body))
    except (ValueError, TypeError, RecursionError):
        raise Malformed("settings that cannot be read") from None
    sizes = [settings.budget_bytes, settings.segment_bytes, settings.max_value_bytes]
    quotas = list(settings.quotas.values()) if isinstance(settings.quotas, dict) else [None]
    if any(type(size) is not int or size < 0 for size in (*sizes, *quotas)):
        raise Malformed("settings that are not sizes")
    return settings


def differences(options: LogOptions, settings: Settings) -> list[str]:
    """The requested settings that differ from the owner's, in words."""
    asked = {
        "budget": (options.budget_bytes, settings.budget_bytes),
        "segment": (options.segment_bytes, settings.segment_bytes),
    }
    found = [
        f"{name} {format_bytes(there)} there, {format_bytes(here)} here"
        for name, (here, there) in asked.items()
        if here is not None and here != there
    ]
    quotas = {tenant: size for tenant, size in options.quotas.items() if size is not None}
    if options.quotas and quotas != settings.quotas:
        found.append(f"quotas {_words(settings.quotas)} there, {_words(quotas)} here")
    return found


def _words(quotas: Mapping[str, int]) -> str:
    return ", ".join(f"{tenant} {format_bytes(size)}" for tenant, size in sorted(quotas.items())) or "none"
