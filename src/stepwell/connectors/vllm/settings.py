"""What `kv_connector_extra_config` may say, checked at the start: what cannot work is refused with what would.

`Settings` are those of `StepwellConnector`, `TierSettings` those of one entry `StepwellTier` in vLLM's `secondary_tiers`.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from difflib import get_close_matches
from math import isfinite

from stepwell.base.config import PlacementConfig, PrefetchPolicy, StoreConfig
from stepwell.base.errors import ConfigError
from stepwell.base.units import is_none, parse_tier
from stepwell.store.registry import names

KNOWN = (
    "host_memory", "store", "store_budget", "store_options", "store_key_file", "identity", "prefetch", "prefetch_timeout_s",
    "checkpoint_interval_tokens", "answer_interval_tokens", "explain", "audit",
)  # fmt: skip
KNOWN_OF_TIER = ("store", "store_budget", "store_options", "store_key_file", "identity", "deadline_s", "readers")
NEEDED_POLICY = "recompute"
ANSWER_INTERVAL_TOKENS = 256  # of a growing answer: every checkpoint of one is copied to the host, and all are kept
_PLACEMENT = PlacementConfig(decode_interval_tokens=ANSWER_INTERVAL_TOKENS)


@dataclass(frozen=True, slots=True, kw_only=True)
class Settings:
    """What an operator sets."""

    host_bytes: int  # of all ranks together
    store: str | None = None
    store_options: Mapping[str, str] = field(default_factory=dict)
    store_key_file: str | None = None
    identity: str | None = None  # of the weights, where their files do not tell
    prefetch: PrefetchPolicy = PrefetchPolicy.TIMEOUT
    prefetch_timeout_s: float = 30.0
    placement: PlacementConfig = _PLACEMENT
    explain: bool = False  # requests may ask why they resume where they do: whoever may send one learns what others have sent
    audit: bool = False  # the whole cache after every step: for tests, and for doubts

    @property
    def store_config(self) -> StoreConfig:
        """Checkpoints are stored without delay: an engine that is idle makes no steps in which they could be later."""
        return StoreConfig(prefetch=self.prefetch, prefetch_timeout_s=self.prefetch_timeout_s, checkpoint_delay_s=0.0)


@dataclass(frozen=True, slots=True, kw_only=True)
class TierSettings:
    """What an operator sets for the store below vLLM's own host tier."""

    store: str
    store_options: Mapping[str, str] = field(default_factory=dict)
    store_key_file: str | None = None
    identity: str | None = None  # of the weights, where their files do not tell
    deadline_s: float = 30.0
    readers: int = 2


def read_settings(extra: Mapping[str, object], *, failure_policy: str) -> Settings:
    """Reads the extra config. Raises ConfigError that names the key and says what to write."""
    if failure_policy != NEEDED_POLICY:
        raise ConfigError(
            f'kv_load_failure_policy is {failure_policy!r}: with Stepwell set it to "recompute" in --kv-transfer-config, so that '
            "a load that fails is computed instead of ending its request with an error"
        )
    _must_be_known(extra, KNOWN, "kv_connector_extra_config")
    if "host_memory" not in extra:
        raise ConfigError('kv_connector_extra_config lacks "host_memory": say how much, for example {"host_memory": "64GiB"}')
    return Settings(
        host_bytes=_bytes(extra, "host_memory"),
        store=_store(extra),
        store_options=_store_options(extra),
        store_key_file=_text(extra, "store_key_file"),
        identity=_text(extra, "identity"),
        prefetch=_prefetch(extra),
        prefetch_timeout_s=_number(extra, "prefetch_timeout_s", 30.0),
        placement=PlacementConfig(
            interval_tokens=_whole(extra, "checkpoint_interval_tokens", None),
            decode_interval_tokens=_whole(extra, "answer_interval_tokens", ANSWER_INTERVAL_TOKENS) or 0,
        ),
        explain=_flag(extra, "explain"),
        audit=_flag(extra, "audit"),
    )


def read_tier_settings(given: Mapping[str, object]) -> TierSettings:
    """Reads one entry of `secondary_tiers`, less what is vLLM's in it. Raises ConfigError like `read_settings`."""
    _must_be_known(given, KNOWN_OF_TIER, "the secondary tier StepwellTier")
    store = _store(given)
    if store is None:
        raise ConfigError('StepwellTier must say which store to use, as "store": "log:/var/cache/stepwell"')
    deadline_s, readers = _number(given, "deadline_s", 30.0), given.get("readers", 2)
    if not deadline_s or isinstance(readers, bool) or not isinstance(readers, int) or readers <= 0:
        raise ConfigError(f"deadline_s and readers must be positive, readers a whole number, got {deadline_s} and {readers!r}")
    return TierSettings(
        store=store, store_options=_store_options(given), store_key_file=_text(given, "store_key_file"),
        identity=_text(given, "identity"), deadline_s=deadline_s, readers=readers,
    )  # fmt: skip


def _must_be_known(given: Mapping[str, object], known: tuple[str, ...], place: str) -> None:
    for key in given:
        if key not in known:
            near = get_close_matches(key, known, n=1)
            hint = f"did you mean {near[0]!r}?" if near else f"known are {', '.join(known)}"
            raise ConfigError(f"{place} has an unknown key {key!r}: {hint}")


def _store(extra: Mapping[str, object]) -> str | None:
    """A store by name, which is looked at now: it is opened long after the model has been loaded."""
    store = None if is_none(extra.get("store")) else _text(extra, "store")
    if store is None:
        return None
    name, colon, _ = store.partition(":")
    if not colon:
        raise ConfigError(f'store must name a kind and a place, as "log:/var/cache/stepwell", got {store!r}')
    if name not in names():
        near = get_close_matches(name, names(), n=1)
        hint = f"did you mean {near[0]!r}?" if near else f"there are {', '.join(names())}"
        raise ConfigError(f"store {store!r}: no store is called {name!r}: {hint}")
    return store


def _store_options(extra: Mapping[str, object]) -> dict[str, str]:
    given = extra.get("store_options", {})
    if not isinstance(given, Mapping):
        raise ConfigError('store_options must be a table of texts, as in {"segment": "64MiB"}')
    options = {str(key): str(value) for key, value in given.items()}
    if "store_budget" in extra:
        if "budget" in options:
            raise ConfigError('say how large the store may become once: as "store_budget", or as "budget" in store_options')
        options["budget"] = str(_bytes(extra, "store_budget"))
    if (options or extra.get("store_key_file") is not None) and _store(extra) is None:
        raise ConfigError('store_budget, store_options and store_key_file need a "store", as "log:/var/cache/stepwell"')
    return options


def _bytes(extra: Mapping[str, object], key: str) -> int:
    value = extra[key]
    if not isinstance(value, (str, int)) or isinstance(value, bool):
        raise ConfigError(f'{key} must be a size, as "64GiB", got {value!r}')
    size = parse_tier(value, key)
    if size is None:
        raise ConfigError(f'{key} must be more than 0: write a size, as "64GiB"')
    return size


def _text(extra: Mapping[str, object], key: str) -> str | None:
    value = extra.get(key)
    if value is not None and not isinstance(value, str):
        raise ConfigError(f"{key} must be a text, got {value!r}")
    return value


def _flag(extra: Mapping[str, object], key: str) -> bool:
    value = extra.get(key, False)
    if not isinstance(value, bool):
        raise ConfigError(f"{key} must be true or false, without quotes, got {value!r}")
    return value


def _number(extra: Mapping[str, object], key: str, default: float) -> float:
    value = extra.get(key, default)
    if isinstance(value, bool) or not isinstance(value, (int, float)) or not isfinite(value) or value < 0:
        raise ConfigError(f"{key} must be 0 or more seconds, got {value!r}")
    return float(value)


def _whole(extra: Mapping[str, object], key: str, default: int | None) -> int | None:
    value = extra.get(key, default)
    if value is None:
        return None
    if isinstance(value, bool) or not isinstance(value, int):
        raise ConfigError(f"{key} must be a whole number of tokens, 0 for none, got {value!r}")
    return value


def _prefetch(extra: Mapping[str, object]) -> PrefetchPolicy:
    value = extra.get("prefetch", PrefetchPolicy.TIMEOUT.value)
    known = [each.value for each in PrefetchPolicy]
    if value not in known:
        raise ConfigError(f"prefetch must be one of {', '.join(known)}, got {value!r}")
    return PrefetchPolicy(value)
