"""What an operator sets in `--hicache-storage-backend-extra-config`, or of the linker in
`--unified-cache-external-linker-config`, checked before anything is opened. Opens nothing.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from difflib import get_close_matches
from math import isfinite

from stepwell.base.errors import ConfigError
from stepwell.base.units import is_none, parse_tier
from stepwell.connectors.sglang.ranks import Ranks

_OF_SGLANG = ("backend_name", "module_path", "class_name", "interface_v1")
_OWN = ("store", "store_budget", "store_options", "store_key_file", "identity", "deadline_s", "readers")
_EXAMPLE = '"store": "log:/var/cache/stepwell", "store_budget": "100GiB"'
_PLACE = "--hicache-storage-backend-extra-config"
_OF_LINKER = ("host_memory", "fetch_wait_s", *_OWN)
_LINKER_PLACE = '"linker_extra_config" in --unified-cache-external-linker-config'
_ONE_PROCESS = "log:"


@dataclass(frozen=True, slots=True, kw_only=True)
class Settings:
    """One backend's settings."""

    store: str
    options: Mapping[str, str] = field(default_factory=dict)
    key_file: str | None = None
    identity: str | None = None  # of the weights, where the served name does not say which they are
    deadline_s: float = 30.0
    readers: int = 2


@dataclass(frozen=True, slots=True, kw_only=True)
class LinkerSettings:
    """What is below SGLang's device pools: host memory, and a store or none."""

    host_bytes: int
    fetch_wait_s: float
    store: Settings | None


def settings_of(given: Mapping[str, object] | None) -> Settings:
    """Raises ConfigError with what to write instead."""
    given = given or {}
    _must_be_known(given, (*_OF_SGLANG, *_OWN), _OWN, _PLACE)
    if not given.get("interface_v1"):
        raise ConfigError(f'add "interface_v1": 1 to {_PLACE}: without it SGLang copies every page twice more')
    return _store_settings(given, _PLACE)


def linker_settings_of(given: Mapping[str, object] | None) -> LinkerSettings:
    """Raises ConfigError with what to write instead."""
    given = given or {}
    _must_be_known(given, _OF_LINKER, _OF_LINKER, _LINKER_PLACE)
    memory = given.get("host_memory")
    if not isinstance(memory, (str, int)) or isinstance(memory, bool):
        raise ConfigError(f'{_LINKER_PLACE} must say how much host memory to use, as "host_memory": "64GiB"; got {memory!r}')
    has_store = not is_none(given.get("store"))
    unused = [name for name in _OWN if name in given and name not in ("identity", "store")]
    if not has_store and unused:
        raise ConfigError(f"{_LINKER_PLACE} has {unused[0]!r}, but no store: add for example {_EXAMPLE}")
    return LinkerSettings(
        host_bytes=_size(memory, _LINKER_PLACE),
        fetch_wait_s=_positive(given, "fetch_wait_s", 2.0, _LINKER_PLACE),
        store=_store_settings(given, _LINKER_PLACE) if has_store else None,
    )


def _must_be_known(given: Mapping[str, object], known: Sequence[str], own: Sequence[str], place: str) -> None:
    for name in given:
        if name not in known:
            near = get_close_matches(str(name), own, 1)
            hint = f"did you mean {near[0]!r}?" if near else f"known are {', '.join(own)}"
            raise ConfigError(f"{place} has {name!r}, which Stepwell does not know: {hint}")


def _store_settings(given: Mapping[str, object], place: str) -> Settings:
    store = given.get("store")
    if not isinstance(store, str) or ":" not in store:
        raise ConfigError(f"{place} must say which store to use, for example {_EXAMPLE}; got {store!r}")
    return Settings(
        store=store,
        options=_options(given),
        key_file=_text(given, "store_key_file", place),
        identity=_text(given, "identity", place),
        deadline_s=_positive(given, "deadline_s", 30.0, place),
        readers=_readers(given, place),
    )


def location(settings: Settings, ranks: Ranks) -> str:
    """The store as this rank opens it. A log is for one process, so that each rank gets a directory of its own in there.

    Raises ConfigError where ranks must share pages and a log cannot be shared.
    """
    if not settings.store.startswith(_ONE_PROCESS):
        return settings.store
    if ranks.replicated and ranks.tp_size > 1:
        raise ConfigError(
            f"this model's ranks share their pages, and {settings.store} can be open in one process only: "
            f'use "store": "shared-{settings.store}", or Mooncake ("mooncake:FILE")'
        )
    return f"{settings.store.rstrip('/')}/{ranks.directory}"


def _options(given: Mapping[str, object]) -> dict[str, str]:
    options = given.get("store_options") or {}
    if not isinstance(options, dict):
        raise ConfigError(f'"store_options" is an object of options and their values, got {options!r}')
    if "store_budget" in given:
        if "budget" in options:
            raise ConfigError('say how large the store may become once: as "store_budget", or as "budget" in "store_options"')
        options = {**options, "budget": given["store_budget"]}
    return {str(name): str(value) for name, value in options.items()}


def _text(given: Mapping[str, object], name: str, place: str) -> str | None:
    value = given.get(name)
    if value is not None and not isinstance(value, str):
        raise ConfigError(f'"{name}" in {place} is a text, got {value!r}')
    return value


def _positive(given: Mapping[str, object], name: str, default: float, place: str) -> float:
    value = given.get(name, default)
    if isinstance(value, bool) or not isinstance(value, (int, float)) or not isfinite(value) or value <= 0:
        raise ConfigError(f'"{name}" in {place} is a positive number, got {value!r}')
    return value


def _readers(given: Mapping[str, object], place: str) -> int:
    readers = _positive(given, "readers", 2, place)
    if readers != int(readers):
        raise ConfigError(f'"readers" in {place} is a whole number of threads, got {readers!r}')
    return int(readers)


def _size(memory: str | int, place: str) -> int:
    size = parse_tier(memory, f'"host_memory" in {place}')
    if size is None:
        raise ConfigError(f'"host_memory" in {place} must be more than 0: the connector keeps its cache there; write "64GiB"')
    return size
