"""What an operator sets in `--hicache-storage-backend-extra-config`, checked before anything is opened. Opens nothing."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from difflib import get_close_matches

from stepwell.base.errors import ConfigError
from stepwell.connectors.sglang.ranks import Ranks

_OF_SGLANG = ("backend_name", "module_path", "class_name", "interface_v1")
_OWN = ("store", "budget", "store_options", "store_key_file", "identity", "deadline_s", "readers")
_EXAMPLE = '"store": "log:/var/cache/stepwell", "budget": "100GiB"'
_PLACE = "--hicache-storage-backend-extra-config"
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


def settings_of(given: Mapping[str, object] | None) -> Settings:
    """Raises ConfigError with what to write instead."""
    given = given or {}
    for name in given:
        if name not in _OF_SGLANG and name not in _OWN:
            near = get_close_matches(str(name), _OWN, 1)
            hint = f"did you mean {near[0]!r}?" if near else f"known are {', '.join(_OWN)}"
            raise ConfigError(f"{_PLACE} has {name!r}, which Stepwell does not know: {hint}")
    if not given.get("interface_v1"):
        raise ConfigError(f'add "interface_v1": 1 to {_PLACE}: without it SGLang copies every page twice more')
    store = given.get("store")
    if not isinstance(store, str) or ":" not in store:
        raise ConfigError(f"{_PLACE} must say which store to use, for example {_EXAMPLE}; got {store!r}")
    return Settings(
        store=store,
        options=_options(given),
        key_file=_text(given, "store_key_file"),
        identity=_text(given, "identity"),
        deadline_s=_positive(given, "deadline_s", 30.0),
        readers=int(_positive(given, "readers", 2)),
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
    if "budget" in given:
        options = {**options, "budget": given["budget"]}
    return {str(name): str(value) for name, value in options.items()}


def _text(given: Mapping[str, object], name: str) -> str | None:
    value = given.get(name)
    if value is not None and not isinstance(value, str):
        raise ConfigError(f'"{name}" in {_PLACE} is a text, got {value!r}')
    return value


def _positive(given: Mapping[str, object], name: str, default: float) -> float:
    value = given.get(name, default)
    if isinstance(value, bool) or not isinstance(value, (int, float)) or value <= 0:
        raise ConfigError(f'"{name}" in {_PLACE} is a positive number, got {value!r}')
    return value
