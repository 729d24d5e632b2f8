"""The operator's settings of a cache, checked on construction. Reads no environment and no files.

Values that no operator needs to change are constants next to their users, or in `policy/store_use.py`.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import Enum

from stepwell.base.errors import ConfigError
from stepwell.base.store_key import StoreKey

MAX_PRIORITY = 10  # each step doubles the worth of a request's path
PRIORITY_STEP_S = 600.0  # a step is lost after this time
HOT_ROWS = 4096  # twice what a model with sparse attention reads in a step
DELAY_S = (
    30.0  # that checkpoints wait on the host before they are stored: the next turn of a conversation supersedes most by then
)


class WritePolicy(Enum):
    """When a page on the device is saved to the host. Inclusive policies also save pages that stay on the device, once they were
    used often enough. The exclusive policy saves pages that are evicted from the device, and earlier while the host has free
    memory.

    `WRITE_NAMES` has other names for them.
    """

    THROUGH = "through"  # inclusive: saved on commit
    SELECTIVE = "selective"  # inclusive: saved on the second use
    EXCLUSIVE = "exclusive"

    @classmethod
    def _missing_(cls, value: object) -> WritePolicy | None:
        return WRITE_NAMES.get(value) if isinstance(value, str) else None

    @property
    def is_exclusive(self) -> bool:
        """Whether the host may evict what the device has too. It is saved again when the device evicts it."""
        return self is WritePolicy.EXCLUSIVE

    @property
    def saves_on_commit(self) -> bool:
        return self.saves_on_use(1)

    def saves_on_use(self, uses: int) -> bool:
        """Whether the `uses`-th use of something cached saves it."""
        return not self.is_exclusive and uses >= _USES_BEFORE_SAVE[self]


_USES_BEFORE_SAVE = {WritePolicy.THROUGH: 1, WritePolicy.SELECTIVE: 2}
WRITE_NAMES = {each.value: each for each in WritePolicy} | {
    "inclusive": WritePolicy.THROUGH,
    "write_through": WritePolicy.THROUGH,  # as SGLang calls it; so are `write_through_selective` and `write_back`
    "write_through_selective": WritePolicy.SELECTIVE,
    "write_back": WritePolicy.EXCLUSIVE,
    "back": WritePolicy.EXCLUSIVE,
    "adaptive": WritePolicy.EXCLUSIVE,
}


@dataclass(frozen=True, slots=True, kw_only=True)
class PlacementConfig:
    """How far apart the checkpoints of a running request are. There are always some at the prompt's end and at a branch."""

    interval_tokens: int | None = None  # at exact multiples of this; 0 for none; None for 8,192, or more if the model requires it
    decode_interval_tokens: int = 1  # while an answer grows, rounded up to whole boundaries; only the last is kept; 0 for none

    def __post_init__(self) -> None:
        if (self.interval_tokens or 0) < 0 or self.decode_interval_tokens < 0:
            raise ConfigError("checkpoint intervals must be 0 (none) or a positive number of tokens")


class PrefetchPolicy(Enum):
    """How long a request waits for the parts of its prompt that the store has."""

    BEST_EFFORT = "best_effort"  # not at all: it uses what has arrived when it is scheduled
    WAIT_COMPLETE = "wait_complete"  # until everything has arrived or failed
    TIMEOUT = "timeout"  # as long as computing is expected to take, if fetching is expected to be faster


@dataclass(frozen=True, slots=True, kw_only=True)
class StoreConfig:
    """How the cache uses a store."""

    key: StoreKey | None = None  # stamps values; only values written with the same key are used
    prefetch: PrefetchPolicy = PrefetchPolicy.TIMEOUT
    prefetch_timeout_s: float = 30.0  # the longest that a request waits under TIMEOUT
    recompute_tokens_per_s: float | None = None  # the speed of computing prompts; None to measure it
    checkpoint_delay_s: float | None = (
        None  # before a checkpoint is stored; what is superseded by then is not. None: see `delay_s`
    )
    readers: int = 4  # threads of each rank
    writers: int = 1

    def __post_init__(self) -> None:
        for name in ("prefetch_timeout_s", "checkpoint_delay_s"):
            if not (getattr(self, name) or 0) >= 0:  # nor NaN
                raise ConfigError(f"{name} must be 0 or more, got {getattr(self, name)}")
        for name in ("readers", "writers"):
            if getattr(self, name) <= 0:
                raise ConfigError(f"{name} must be positive, got {getattr(self, name)}")
        if self.recompute_tokens_per_s is not None and not self.recompute_tokens_per_s > 0:
            raise ConfigError("recompute_tokens_per_s must be positive; leave it None to have it measured")

    def delay_s(self, *, shared: bool) -> float:
        """How long checkpoints wait on the host before they are stored: half a minute, or 0 for a shared store."""
        if self.checkpoint_delay_s is not None:
            return self.checkpoint_delay_s
        return 0.0 if shared else DELAY_S


@dataclass(frozen=True, slots=True, kw_only=True)
class CacheConfig:
    """Sizes and policies. A tier whose size is None does not exist."""

    device_bytes: int | None
    host_bytes: int | None = None
    write: WritePolicy = WritePolicy.THROUGH
    durable: bool = True  # committed state is written soon to a store that outlives the process, under every `write` policy
    placement: PlacementConfig = field(default_factory=PlacementConfig)
    vocab_size: int | None = None  # higher token ids are refused
    hot_rows: int = HOT_ROWS  # of each layer, that a request keeps on the device while some of its rows are only on the host
    memory_quotas: Mapping[str, float] = field(default_factory=dict, hash=False)  # shares of each tier, by tenant

    def __post_init__(self) -> None:
        if self.device_bytes is None and self.host_bytes is None:
            raise ConfigError("a cache needs at least one tier: give device_bytes, host_bytes, or both")
        for label, size in (("device_bytes", self.device_bytes), ("host_bytes", self.host_bytes)):
            if size is not None and size <= 0:
                raise ConfigError(f"{label} must be positive, got {size}; leave it None for no such tier")
        if self.hot_rows < 0:
            raise ConfigError(f"hot_rows must be 0 or more, got {self.hot_rows}")
        for tenant, share in self.memory_quotas.items():
            if not 0 < share <= 1:
                raise ConfigError(f"the memory quota of {tenant} must be a share above 0 and at most 1, got {share}")
        if self.vocab_size is not None and self.vocab_size < 1:
            raise ConfigError(f"vocab_size must be positive, got {self.vocab_size}")
