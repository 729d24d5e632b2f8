"""What a trace is replayed on: a model, tiers, policies and a machine. Checked at construction."""

from __future__ import annotations

from dataclasses import dataclass, field

from stepwell.base.config import CacheConfig
from stepwell.base.errors import ConfigError
from stepwell.base.spec import ModelSpec
from stepwell.cache.build import CacheTuning
from stepwell.sim.hardware import Hardware


@dataclass(frozen=True, slots=True, kw_only=True)
class Setup:
    """`whole_blocks`: a last block that is not full is cached too, as simulators of blocks do."""

    spec: ModelSpec
    config: CacheConfig
    tuning: CacheTuning = field(default_factory=CacheTuning)  # the policy to replay
    store_bytes: int | None = None
    hardware: Hardware = field(default_factory=Hardware)
    whole_blocks: bool = False

    def __post_init__(self) -> None:
        if self.config.device_bytes is None:
            raise ConfigError("device_memory must be more than 0: requests compute into the device tier")
        if self.store_bytes is not None and self.config.host_bytes is None:
            raise ConfigError("a store needs a host tier above it: give host_memory, or set store_budget to none")
