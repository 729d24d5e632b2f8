"""The settings of a Mooncake client: the fields of Mooncake's own JSON file under their own names, and a few of ours.

Reads a file or a mapping, never the environment (`stepwell.cli.engine_options` does) and never the network.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, fields
from enum import Enum
from pathlib import Path
from typing import Any

from stepwell.base.errors import ConfigError
from stepwell.base.units import parse_bytes

P2P = "P2PHANDSHAKE"  # clients find each other through the master alone
MIN_STAGING_BYTES = 64 * 1024
_BINARY_UNIT = re.compile(r"([0-9. ]+)([kmgt])b?\s*", re.ASCII | re.IGNORECASE)


class SoftPin(Enum):
    """Whether newly written values are evicted last, for a while. Mooncake's names."""

    PRESERVE = "preserve"  # the master's default: no pin for a new value
    ENABLE = "enable"
    DISABLE = "disable"


@dataclass(frozen=True, slots=True, kw_only=True)
class MooncakeConfig:
    """One client of one Mooncake cluster. Every client listens for its peers, without passwords: keep it on a private network."""

    master_server_address: str  # host:port, or etcd://... for a cluster with several masters
    local_hostname: str = "localhost"  # where the other clients reach this one
    metadata_server: str = P2P
    protocol: str = "tcp"  # or rdma, or another protocol that the wheel was built with
    device_name: str = ""  # network cards for rdma, separated by commas; empty: Mooncake chooses
    global_segment_size: int = 3_355_443_200  # bytes of memory that this process contributes to the pool; 0 contributes none
    local_buffer_size: int = 16 * 2**20  # for calls of Mooncake that we do not use
    tenant_id: str = "default"  # separates clients only if the master runs with --enable_multi_tenants
    enable_ssd_offload: bool = False
    ssd_offload_path: str = ""
    enable_client_http_server: bool = False
    client_http_port: int = 9300
    replica_num: int = 1  # copies of each value in segments of different clients; fewer where there is no space
    soft_pin: SoftPin = SoftPin.PRESERVE
    soft_pin_ttl_ms: int | None = None  # None: the master's default
    staging_bytes: int = 192 * 2**20  # our own registered memory, for values outside the host arena
    connect_timeout_s: float = 5.0  # for the first contact with the master; Mooncake alone would try for 90 s

    def __post_init__(self) -> None:
        for name in ("master_server_address", "local_hostname", "metadata_server", "protocol", "tenant_id"):
            if not getattr(self, name):
                raise ConfigError(f"Mooncake needs a {name}: set it in the JSON file, as an option or by its MOONCAKE_ variable")
        if self.replica_num < 1:
            raise ConfigError(f"replica_num must be 1 or more, got {self.replica_num}")
        if self.staging_bytes < MIN_STAGING_BYTES:
            raise ConfigError(f"staging_bytes must be {MIN_STAGING_BYTES} or more, got {self.staging_bytes}")
        if not 0 < self.connect_timeout_s <= 3600:
            raise ConfigError(f"connect_timeout_s must be more than 0 and at most an hour, got {self.connect_timeout_s}")
        if self.soft_pin_ttl_ms is not None and self.soft_pin is not SoftPin.ENABLE:
            raise ConfigError("soft_pin_ttl_ms requires soft_pin=enable")


def from_mapping(settings: Mapping[str, Any], *, origin: str) -> MooncakeConfig:
    """A configuration from JSON values or from texts. Raises ConfigError for unknown fields, naming them."""
    unknown = sorted(set(settings) - set(FIELDS))
    if unknown:
        raise ConfigError(f"{origin} has unknown field(s) {', '.join(unknown)}; known: {', '.join(FIELDS)}")
    if not settings.get("master_server_address"):
        raise ConfigError(f"{origin} has no master_server_address: set it to host:port of the Mooncake master")
    return MooncakeConfig(**{name: _reader(name)(name, value) for name, value in settings.items()})


def from_file(path: Path, *, overrides: Mapping[str, Any] | None = None) -> MooncakeConfig:
    """A configuration from a JSON file, as Mooncake's other clients read it. `overrides` take precedence over the file."""
    try:
        settings = json.loads(path.read_text())
    except OSError as error:
        raise ConfigError(f"cannot read the Mooncake configuration {path}: {error.strerror}") from error
    except ValueError as error:
        raise ConfigError(f"the Mooncake configuration {path} is not JSON: {error}") from error
    if not isinstance(settings, dict):
        raise ConfigError(f"the Mooncake configuration {path} must be a JSON object with fields, like {{'protocol': 'tcp'}}")
    return from_mapping({**settings, **(overrides or {})}, origin=str(path))


def _reader(name: str) -> Callable[[str, Any], Any]:
    return _READERS.get(name, _text)


def _text(name: str, value: Any) -> str:
    if isinstance(value, str):
        return value.strip()
    if value is None:
        return ""
    raise ConfigError(f"{name} must be a text, got {value!r:.80}")


def _lower(name: str, value: Any) -> str:
    return _text(name, value).lower()  # Mooncake compares protocols by letter


def _bytes(name: str, value: Any) -> int:
    """An amount of memory. `4gb` and `4g` are binary units, as for all other readers of this file."""
    match = _BINARY_UNIT.fullmatch(value) if isinstance(value, str) else None
    try:
        return parse_bytes(f"{match[1]}{match[2]}iB" if match else value)
    except ConfigError as error:
        raise ConfigError(f"{name}: {error}") from error


def _whole(name: str, value: Any) -> int:
    if isinstance(value, (int, str)) and not isinstance(value, bool) and re.fullmatch(r"\s*[0-9]{1,18}\s*", str(value), re.ASCII):
        return int(value)
    raise ConfigError(f"{name} must be a whole number, got {value!r:.80}")


def _seconds(name: str, value: Any) -> float:
    try:
        return float(_text(name, str(value)))
    except ValueError as error:
        raise ConfigError(f"{name} must be a number of seconds, got {value!r:.80}") from error


def _yes(name: str, value: Any) -> bool:
    answer = {"true": True, "1": True, "yes": True, "on": True, "false": False, "0": False, "no": False, "off": False, "": False}
    found = answer.get(str(value).strip().lower())
    if found is None:
        raise ConfigError(f"{name} must be true or false, got {value!r:.80}")
    return found


def _soft_pin(name: str, value: Any) -> SoftPin:
    try:
        return SoftPin(_lower(name, value))
    except ValueError as error:
        raise ConfigError(f"{name} must be one of {', '.join(pin.value for pin in SoftPin)}, got {value!r:.80}") from error


FIELDS = tuple(field.name for field in fields(MooncakeConfig))
_READERS: dict[str, Callable[[str, Any], Any]] = {
    "protocol": _lower,
    "global_segment_size": _bytes,
    "local_buffer_size": _bytes,
    "staging_bytes": _bytes,
    "enable_ssd_offload": _yes,
    "enable_client_http_server": _yes,
    "client_http_port": _whole,
    "replica_num": _whole,
    "soft_pin": _soft_pin,
    "soft_pin_ttl_ms": _whole,
    "connect_timeout_s": _seconds,
}
