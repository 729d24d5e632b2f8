"""Settings that the connectors read from another engine's configuration: values by key, and the verified store below the engine.

Every error is a ConfigError that names the key and says what to write. Opens a store only in `open_verified`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from difflib import get_close_matches
from math import isfinite

from stepwell.base.errors import ConfigError
from stepwell.base.units import is_none, parse_tier
from stepwell.store import registry
from stepwell.store.key_file import read_store_key
from stepwell.verified.store import VerifiedStore

Given = Mapping[str, object]
STORE_KEYS = ("store", "store_budget", "store_options", "store_key_file", "identity", "deadline_s", "readers")
_EXAMPLE = '"store": "log:/var/cache/stepwell"'


@dataclass(frozen=True, slots=True, kw_only=True)
class StoreSettings:
    """A verified store below another engine."""

    store: str
    options: Mapping[str, str] = field(default_factory=dict)
    key_file: str | None = None
    identity: str | None = None  # name of the weights, if their files cannot be read
    deadline_s: float = 30.0
    readers: int = 2


def store_settings(given: Given, place: str) -> StoreSettings:
    store = store_name(given)
    if store is None:
        raise ConfigError(f"{place} must say which store to use, as {_EXAMPLE}")
    return StoreSettings(
        store=store,
        options=store_options(given),
        key_file=text(given, "store_key_file"),
        identity=text(given, "identity"),
        deadline_s=positive(given, "deadline_s", 30.0),
        readers=int(positive(given, "readers", 2, whole=True)),
    )


def open_verified(settings: StoreSettings, store: str) -> VerifiedStore:
    """Opens `store`, which is `settings.store` or a part of it. Raises ConfigError or StoreError."""
    key = read_store_key(settings.key_file) if settings.key_file is not None else None
    opened = registry.open_store(store, options=settings.options)
    return VerifiedStore(opened, key=key, deadline_s=settings.deadline_s, readers=settings.readers)


def must_be_known(given: Given, known: Sequence[str], place: str, *, ignored: Sequence[str] = ()) -> None:
    for key in given:
        if key not in known and key not in ignored:
            near = get_close_matches(str(key), known, 1)
            hint = f"did you mean {near[0]!r}?" if near else f"known are {', '.join(known)}"
            raise ConfigError(f"{place} has an unknown key {key!r}: {hint}")


def store_name(given: Given) -> str | None:
    """The name of the store, checked now because it is opened long after; None without one."""
    store = None if is_none(given.get("store")) else text(given, "store")
    if store is None:
        return None
    name, colon, _ = store.partition(":")
    if not colon:
        raise ConfigError(f"store must say which store to use by kind and place, as {_EXAMPLE}, got {store!r}")
    try:
        registry.find_opener(store)
    except ConfigError as error:
        near = get_close_matches(name, registry.names(), n=1)
        raise ConfigError(f"store {store!r}: {error}{f'; did you mean {near[0]!r}?' if near else ''}") from None
    return store


def store_options(given: Given) -> dict[str, str]:
    options = given.get("store_options") or {}
    if not isinstance(options, Mapping):
        raise ConfigError(f'store_options must be an object of options, as in {{"segment": "64MiB"}}, got {options!r}')
    found = {str(key): str(value) for key, value in options.items()}
    if "store_budget" in given:
        if "budget" in found:
            raise ConfigError('give the size of the store once: as "store_budget", or as "budget" in store_options')
        found["budget"] = str(size(given, "store_budget"))
    if (found or given.get("store_key_file") is not None) and store_name(given) is None:
        raise ConfigError(f'store_budget, store_options and store_key_file need a "store", but there is no store: add {_EXAMPLE}')
    return found


def size(given: Given, key: str) -> int:
    value = given.get(key)
    if not isinstance(value, (str, int)) or isinstance(value, bool):
        raise ConfigError(f'{key} must be a size, as "64GiB", got {value!r}')
    size_bytes = parse_tier(value, key)
    if size_bytes is None:
        raise ConfigError(f'{key} must be more than 0: write a size, as "64GiB"')
    return size_bytes


def text(given: Given, key: str) -> str | None:
    value = given.get(key)
    if value is not None and not isinstance(value, str):
        raise ConfigError(f"{key} must be a text, got {value!r}")
    return value


def positive(given: Given, key: str, default: float, *, whole: bool = False) -> float:
    value = given.get(key, default)
    if isinstance(value, bool) or not isinstance(value, (int, float)) or not isfinite(value) or value <= 0:
        raise ConfigError(f"{key} must be a positive number, got {value!r}")
    if whole and value != int(value):
        raise ConfigError(f"{key} must be a whole number, got {value!r}")
    return value
