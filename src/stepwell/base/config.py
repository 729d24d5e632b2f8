"""The settings of a cache, checked when they are made. Reads no environment and no files."""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import Enum
from math import inf

from stepwell.base.errors import ConfigError
from stepwell.base.store_key import StoreKey

MAX_PRIORITY = 10  # each step doubles what a request's path is worth keeping,
PRIORITY_STEP_S = 600.0  # and one is lost in so much time


class WritePolicy(Enum):
    """When a page on the device is also saved to the host."""

    THROUGH = "through"  # when it is committed
    SELECTIVE = "selective"  # when it is used a second time
    BACK = "back"  # when the device needs its room


class EvictionPolicy(Enum):
    """In which order a tier gives up what it holds."""

    VALUE = "value"  # recompute saved per byte, fading with time since last use
    LRU = "lru"  # time since last use alone


@dataclass(frozen=True, slots=True, kw_only=True)
class PlacementConfig:
    """Which boundaries of a running request get a checkpoint, and how many of a path's checkpoints stay."""

    interval_tokens: int = 8192  # absolute multiples of this, or of what `most_added` makes of it; 0 for none
    most_added: float | None = 0.125  # to the bytes of the pages: the interval is doubled until it adds no more; None: never
    decode_interval_tokens: int = 256  # while an answer grows; only the last one is kept
    at_branch: bool = True  # where a request leaves a path that is already known
    at_prompt_end: bool = True
    path_cap: int = 0  # the most checkpoints of a path when one more is left on it; 0 for no cap
    thinning: float = 0.0  # neighbours of one that goes are less than this part of its distance to the path's end apart; 0: none

    def __post_init__(self) -> None:
        if self.interval_tokens < 0 or self.decode_interval_tokens < 0:
            raise ConfigError("checkpoint intervals must be 0 (none) or a positive number of tokens")
        if self.most_added is not None and not 0 < self.most_added < inf:
            raise ConfigError(f"most_added must be a positive share, got {self.most_added}; leave it None for no limit")
        if self.path_cap < 0:
            raise ConfigError(f"path_cap must be 0 (none) or a positive number of checkpoints, got {self.path_cap}")
        if not 0 <= self.thinning < inf:
            raise ConfigError(f"thinning must be 0 (none) or a positive share, got {self.thinning}")


class PrefetchPolicy(Enum):
    """How long a request waits for what the store has of its prompt."""

    BEST_EFFORT = "best_effort"  # not at all: it uses what has arrived when its turn comes
    WAIT_COMPLETE = "wait_complete"  # until everything is there or has failed
    TIMEOUT = "timeout"  # as long as computing would take at most, and as waiting has paid so far


@dataclass(frozen=True, slots=True, kw_only=True)
class StoreConfig:
    """How the cache uses a store."""

    key: StoreKey | None = None  # what values are stamped with; only what was written with the same one is used
    prefetch: PrefetchPolicy = PrefetchPolicy.TIMEOUT
    timeout_base_s: float = 2.0  # before it is known how long computing takes,
    timeout_per_ki_s: float = 0.5  # and this for every 1,024 tokens of the prompt; then as long as computing would take
    timeout_cap_s: float = 30.0
    wait_credit_s: float = 0.5  # waiting in vain is limited to one such limit and this, and
    wait_share: float = 0.01  # to this share of the time spent computing, and to what fetches have saved
    recompute_tokens_per_s: float | None = None  # measured where None
    host_share: float = 0.5  # of the host tier that fetched pages may hold until their requests begin
    fetch_chunk_bytes: int | None = None  # one reader's turn; what suits the store where None
    fallback_share: float = 0.25  # bytes spent on checkpoints before the deepest one, in case a fetch is stopped early
    errand_timeout_s: float = 30.0
    ticket_hold_s: float = 120.0  # after which a ticket that nobody used is closed, and its pages are let go
    backup_queue: int = 4096  # paths waiting to be backed up
    backup_age_s: float = 60.0  # after which a path that waits is given up
    backup_bytes: int = 256 * 2**20  # on their way down at a time, at most; twice that of what would be lost otherwise
    checkpoint_rest_s: float | None = None  # before a checkpoint is stored; what is superseded by then is not. None: see `rest_s`
    readers: int = 4  # threads of each rank
    writers: int = 1

    def __post_init__(self) -> None:
        for name in (
            "timeout_base_s",
            "timeout_per_ki_s",
            "timeout_cap_s",
            "wait_credit_s",
            "wait_share",
            "fallback_share",
            "checkpoint_rest_s",
        ):
            if (getattr(self, name) or 0) < 0:
                raise ConfigError(f"{name} must be 0 or more, got {getattr(self, name)}")
        if self.fetch_chunk_bytes is not None and self.fetch_chunk_bytes <= 0:
            raise ConfigError(
                f"fetch_chunk_bytes must be positive, got {self.fetch_chunk_bytes}; leave it None for the store's own"
            )
        for name in (
            "errand_timeout_s",
            "ticket_hold_s",
            "backup_queue",
            "backup_age_s",
            "backup_bytes",
            "readers",
            "writers",
        ):
            if getattr(self, name) <= 0:
                raise ConfigError(f"{name} must be positive, got {getattr(self, name)}")
        if not 0 < self.host_share <= 1:
            raise ConfigError(f"host_share must be more than 0 and at most 1, got {self.host_share}")
        if self.recompute_tokens_per_s is not None and self.recompute_tokens_per_s <= 0:
            raise ConfigError("recompute_tokens_per_s must be positive; leave it None to have it measured")

    def rest_s(self, *, shared: bool) -> float:
        """How long checkpoints rest: half a minute, but not where others wait for them."""
        if self.checkpoint_rest_s is not None:
            return self.checkpoint_rest_s
        return 0.0 if shared else 30.0

    def timeout_s(self, prompt_tokens: int, compute_s: float | None = None) -> float:
        """The longest wait under TIMEOUT: what computing would take instead, where that is known."""
        limit_s = self.timeout_base_s + self.timeout_per_ki_s * prompt_tokens / 1024 if compute_s is None else compute_s
        return min(limit_s, self.timeout_cap_s)


@dataclass(frozen=True, slots=True, kw_only=True)
class CacheConfig:
    """Sizes and policies. A tier that is None does not exist."""

    device_bytes: int | None
    host_bytes: int | None = None
    write: WritePolicy = WritePolicy.THROUGH
    eviction: EvictionPolicy = EvictionPolicy.VALUE
    placement: PlacementConfig = field(default_factory=PlacementConfig)
    page_alignment_bytes: int = 4096
    copy_timeout_s: float = 30.0
    vocab_size: int | None = None

    def __post_init__(self) -> None:
        if self.device_bytes is None and self.host_bytes is None:
            raise ConfigError("a cache needs at least one tier: give device_bytes, host_bytes, or both")
        for label, size in (("device_bytes", self.device_bytes), ("host_bytes", self.host_bytes)):
            if size is not None and size <= 0:
                raise ConfigError(f"{label} must be positive, got {size}; leave it None to do without that tier")
        if self.copy_timeout_s <= 0:
            raise ConfigError(f"copy_timeout_s must be positive, got {self.copy_timeout_s}")
        alignment = self.page_alignment_bytes
        if alignment < 1 or alignment & (alignment - 1):
            raise ConfigError(f"page_alignment_bytes must be a power of two, got {alignment}")
        if self.vocab_size is not None and self.vocab_size < 1:
            raise ConfigError(f"vocab_size must be positive, got {self.vocab_size}")
