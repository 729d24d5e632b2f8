"""Settings in `kv_connector_extra_config`, checked at start-up.

`Settings` are those of `StepwellConnector`, `StoreSettings` those of an entry `StepwellTier` in vLLM's `secondary_tiers`.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from math import isfinite

from stepwell.base.config import PlacementConfig, PrefetchPolicy, StoreConfig
from stepwell.base.errors import ConfigError
from stepwell.connectors.store_settings import (
    STORE_KEYS,
    StoreSettings,
    must_be_known,
    size,
    store_name,
    store_options,
    store_settings,
    text,
)

KNOWN = (
    "host_memory", "store", "store_budget", "store_options", "store_key_file", "identity", "prefetch", "prefetch_timeout_s",
    "checkpoint_interval_tokens", "answer_interval_tokens", "explain", "audit",
)  # fmt: skip
NEEDED_POLICY = "recompute"
ANSWER_INTERVAL_TOKENS = 256  # within an answer: all its checkpoints are copied to the host and kept
_PLACEMENT = PlacementConfig(decode_interval_tokens=ANSWER_INTERVAL_TOKENS)


@dataclass(frozen=True, slots=True, kw_only=True)
class Settings:
    """Settings of `StepwellConnector`."""

    host_bytes: int  # of all ranks together
    store: str | None = None
    store_options: Mapping[str, str] = field(default_factory=dict)
    store_key_file: str | None = None
    identity: str | None = None  # name of the weights, if their files cannot be read
    prefetch: PrefetchPolicy = PrefetchPolicy.TIMEOUT
    prefetch_timeout_s: float = 30.0
    placement: PlacementConfig = _PLACEMENT
    explain: bool = False  # permits explanations, which reveal to a sender what others have sent
    audit: bool = False  # audit the cache after every step: for tests and debugging

    @property
    def store_config(self) -> StoreConfig:
        """Checkpoints are stored without delay, because an idle engine makes no steps in which to store them later."""
        return StoreConfig(prefetch=self.prefetch, prefetch_timeout_s=self.prefetch_timeout_s, checkpoint_delay_s=0.0)


def read_settings(extra: Mapping[str, object], *, failure_policy: str) -> Settings:
    """Reads the extra config. Raises ConfigError that names the key and says what to write."""
    if failure_policy != NEEDED_POLICY:
        raise ConfigError(
            f'kv_load_failure_policy is {failure_policy!r}: with Stepwell set it to "recompute" in --kv-transfer-config, so that '
            "a load that fails is computed instead of ending its request with an error"
        )
    must_be_known(extra, KNOWN, "kv_connector_extra_config")
    if "host_memory" not in extra:
        raise ConfigError('kv_connector_extra_config lacks "host_memory": add a size, for example {"host_memory": "64GiB"}')
    return Settings(
        host_bytes=size(extra, "host_memory"),
        store=store_name(extra),
        store_options=store_options(extra),
        store_key_file=text(extra, "store_key_file"),
        identity=text(extra, "identity"),
        prefetch=_prefetch(extra),
        prefetch_timeout_s=_number(extra, "prefetch_timeout_s", 30.0),
        placement=PlacementConfig(
            interval_tokens=_whole(extra, "checkpoint_interval_tokens", None),
            decode_interval_tokens=_whole(extra, "answer_interval_tokens", ANSWER_INTERVAL_TOKENS) or 0,
        ),
        explain=_flag(extra, "explain"),
        audit=_flag(extra, "audit"),
    )


def read_tier_settings(given: Mapping[str, object]) -> StoreSettings:
    """Reads the Stepwell keys of one entry of `secondary_tiers`. Raises ConfigError like `read_settings`."""
    must_be_known(given, STORE_KEYS, "the secondary tier StepwellTier")
    return store_settings(given, "StepwellTier")


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
