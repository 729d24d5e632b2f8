"""The settings of a cache, checked when they are made. Reads no environment and no files."""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import Enum

from stepwell.base.errors import ConfigError


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
    """Which boundaries of a running request get a checkpoint."""

    interval_tokens: int = 8192  # absolute multiples of this; 0 for none
    decode_interval_tokens: int = 256  # while an answer grows; only the last one is kept
    at_branch: bool = True  # where a request leaves a path that is already known
    at_prompt_end: bool = True

    def __post_init__(self) -> None:
        if self.interval_tokens < 0 or self.decode_interval_tokens < 0:
            raise ConfigError("checkpoint intervals must be 0 (none) or a positive number of tokens")


@dataclass(frozen=True, slots=True, kw_only=True)
class CacheConfig:
    """Sizes and policies. A tier that is None does not exist."""

    device_bytes: int | None
    host_bytes: int | None = None
    write: WritePolicy = WritePolicy.THROUGH
    eviction: EvictionPolicy = EvictionPolicy.VALUE
    half_life_s: float = 600.0  # after which the chance that something is used again counts half
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
        if self.half_life_s <= 0 or self.copy_timeout_s <= 0:
            raise ConfigError(
                f"half_life_s and copy_timeout_s must be positive, got {self.half_life_s} and {self.copy_timeout_s}"
            )
        alignment = self.page_alignment_bytes
        if alignment < 1 or alignment & (alignment - 1):
            raise ConfigError(f"page_alignment_bytes must be a power of two, got {alignment}")
        if self.vocab_size is not None and self.vocab_size < 1:
            raise ConfigError(f"vocab_size must be positive, got {self.vocab_size}")
