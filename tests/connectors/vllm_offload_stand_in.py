"""As much of vLLM's own offloading as `StepwellTier` touches, for machines without vLLM. `tests/vllm` compares it with the real.

`install` makes it importable alongside `vllm_stand_in`.
"""

from __future__ import annotations

import sys
from collections import Counter
from dataclasses import dataclass, field
from enum import Enum, auto
from types import ModuleType, SimpleNamespace
from typing import Any, ClassVar

import numpy as np
import vllm_stand_in

# ---- vllm.v1.kv_offload.base ----------------------------------------------------------------------


class Medium(Enum):
    CPU = "CPU"
    STORAGE = "STORAGE"


class Locality(Enum):
    LOCAL = "LOCAL"
    REMOTE = "REMOTE"


class LookupResult(Enum):
    MISS = auto()
    HIT = auto()
    HIT_PENDING = auto()
    RETRY = auto()


@dataclass
class RequestOffloadingContext:
    policy: str = "chunk_level"


@dataclass(frozen=True)
class OffloadingMetricMetadata:
    documentation: str
    labelnames: tuple[str, ...] = ()


@dataclass(frozen=True)
class OffloadingCounterMetadata(OffloadingMetricMetadata):
    pass


@dataclass
class ReqContext:
    req_id: str
    _offload_key_positions: dict[bytes, int] = field(default_factory=dict, repr=False, init=False)

    def set_offload_key_position(self, key: bytes, end_token: int) -> None:
        self._offload_key_positions[key] = end_token

    def get_offload_key_position(self, key: bytes) -> int | None:
        return self._offload_key_positions.get(key)


# ---- vllm.v1.kv_offload.tiering.base --------------------------------------------------------------


@dataclass
class TransferJob:
    job_id: int
    keys: Any
    chunk_ids: np.ndarray[Any, Any]
    is_promotion: bool
    req_context: ReqContext


@dataclass
class JobResult:
    job_id: int
    success: bool
    successful_keys: Any = None
    transfer_time: float | None = None
    transfer_bytes: int | None = None


class SecondaryTierManager:
    medium: ClassVar[Medium | None] = None

    def __init__(
        self, offloading_spec: Any, primary_kv_view: memoryview, tier_type: str, backpressure_detector: Any = None
    ) -> None:
        self._offloading_spec = offloading_spec
        assert primary_kv_view.strides is not None
        self._block_size_bytes = primary_kv_view.strides[0]
        self.tier_type = tier_type
        self.locality: Locality | None = None

    @property
    def block_size_bytes(self) -> int:
        return self._block_size_bytes

    def lookup(self, key: bytes, req_context: Any) -> Any: ...

    def submit_store(self, job_metadata: Any) -> Any: ...

    def submit_load(self, job_metadata: Any) -> Any: ...

    def get_finished_jobs(self) -> Any: ...

    def touch(self, keys: Any, req_context: Any) -> Any: ...

    def on_new_request(self, req_context: Any) -> Any: ...

    def on_request_finished(self, req_context: Any) -> Any: ...

    def on_schedule_end(self, context: Any) -> Any: ...

    def drain_jobs(self) -> Any: ...

    def shutdown(self) -> Any: ...

    @classmethod
    def build_metric_definitions(cls, extra_config: Any) -> Any: ...

    def get_stats(self) -> Any: ...


# ---- vllm.v1.kv_offload.config --------------------------------------------------------------------


@dataclass(frozen=True)
class OffloadingGroupConfig:
    tokens_per_block: int
    layer_names: tuple[str, ...]
    group_id: int


@dataclass(frozen=True)
class OffloadingModelConfig:
    name: str
    dtype: str


@dataclass(frozen=True)
class OffloadingCacheConfig:
    tokens_per_hash: int
    blocks_per_chunk: int


@dataclass(frozen=True)
class OffloadingParallelConfig:
    world_size: int = 1
    tp_size: int = 1
    pp_size: int = 1
    pcp_size: int = 1
    dcp_size: int = 1


@dataclass(frozen=True)
class OffloadingConfig:
    groups: tuple[OffloadingGroupConfig, ...] = (
        OffloadingGroupConfig(4, ("full.0",), 0),
        OffloadingGroupConfig(4, ("swa.0",), 1),
    )
    worker_kv_bytes_per_block: int = 256
    extra_config: dict[str, Any] = field(default_factory=dict)
    model: OffloadingModelConfig = OffloadingModelConfig("toy", "uint8")
    cache: OffloadingCacheConfig = OffloadingCacheConfig(4, 1)
    parallel: OffloadingParallelConfig = OffloadingParallelConfig()
    replicated_layout: bool = False
    canonical_layout: bool = False
    kv_cache_layout: str | None = "LBHNC"


# ---- the connector --------------------------------------------------------------------------------


@dataclass
class OffloadingConnectorStats:
    data: dict[Any, Any] = field(default_factory=Counter)

    def increase_counter(self, counter_name: str, counter_increase_value: int = 1, labelvalues: tuple[str, ...] = ()) -> None:
        self.data[counter_name, labelvalues] += counter_increase_value


class OffloadingConnector:
    """With a manager that has nothing but its tiers, which are made as vLLM makes them."""

    def __init__(self, vllm_config: Any, role: Any, kv_cache_config: Any) -> None:
        extra = vllm_config.kv_transfer_config.kv_connector_extra_config
        self.rows = np.zeros((16, 256), np.int8)
        tiers = []
        for each in extra["secondary_tiers"] if role is vllm_stand_in.KVConnectorRole.SCHEDULER else ():
            given = {key: value for key, value in each.items() if key not in ("type", "module_path")}
            cls = getattr(sys.modules["stepwell.connectors.vllm.secondary_tier"], each["type"])
            spec = SimpleNamespace(config=OffloadingConfig(extra_config=extra))
            tiers.append(cls(spec, memoryview(self.rows), tier_type=each["type"], backpressure_detector=None, **given))
        self.connector_scheduler = SimpleNamespace(manager=SimpleNamespace(secondary_tiers=tiers))

    @property
    def scheduler(self) -> Any:
        return self.connector_scheduler

    def on_new_request(self, request: Any) -> None: ...

    def reset_cache(self) -> bool | None:
        for tier in self.scheduler.manager.secondary_tiers:
            tier.drain_jobs()
        return True


MODULES = {
    "vllm.distributed.kv_transfer.kv_connector.v1.offloading": (),
    "vllm.distributed.kv_transfer.kv_connector.v1.offloading.metrics": ("OffloadingConnectorStats",),
    "vllm.distributed.kv_transfer.kv_connector.v1.offloading_connector": ("OffloadingConnector",),
    "vllm.v1.kv_offload": (),
    "vllm.v1.kv_offload.base": (
        "Locality", "LookupResult", "Medium", "OffloadingCounterMetadata", "OffloadingMetricMetadata", "ReqContext",
        "RequestOffloadingContext",
    ),
    "vllm.v1.kv_offload.config": (
        "OffloadingCacheConfig", "OffloadingConfig", "OffloadingGroupConfig", "OffloadingModelConfig", "OffloadingParallelConfig",
    ),
    "vllm.v1.kv_offload.tiering": (),
    "vllm.v1.kv_offload.tiering.base": ("JobResult", "SecondaryTierManager", "TransferJob"),
}  # fmt: skip

IMPORTED = (*vllm_stand_in.IMPORTED, *MODULES, "stepwell.connectors.vllm.secondary_tier")


def install() -> None:
    """Makes this file and `vllm_stand_in` importable as vLLM."""
    vllm_stand_in.install()
    for name, members in MODULES.items():
        module = ModuleType(name)
        module.__path__ = []  # type: ignore[attr-defined]
        module.is_stand_in = True  # type: ignore[attr-defined]
        for member in members:
            setattr(module, member, globals()[member])
        sys.modules[name] = module
