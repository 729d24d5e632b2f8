"""As much of vLLM's interface as the connector touches, for machines without vLLM. `tests/vllm` compares it with the real one.

`install` makes it importable as `vllm`, and refuses where the real one is.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from dataclasses import dataclass, field
from enum import Enum
from importlib.util import find_spec
from math import gcd, lcm
from types import ModuleType, SimpleNamespace
from typing import Any

__version__ = "0.32.0"

# ---- vllm.distributed.kv_transfer.kv_connector.v1.base --------------------------------------------


class KVConnectorRole(Enum):
    SCHEDULER = 0
    WORKER = 1


class KVConnectorMetadata:
    pass


class KVConnectorWorkerMetadata:
    def aggregate(self, other: KVConnectorWorkerMetadata) -> KVConnectorWorkerMetadata:
        raise NotImplementedError


@dataclass
class KVConnectorTransferResults:
    finished_sending: set[str] = field(default_factory=set)
    finished_recving: set[str] = field(default_factory=set)
    failed_recving: set[str] = field(default_factory=set)


class SupportsHMA:
    def request_finished_all_groups(self, request: Any, block_ids: Any) -> Any:
        raise NotImplementedError


class KVConnectorBase_V1:
    def __init__(self, vllm_config: Any, role: Any, kv_cache_config: Any) -> None:
        self._connector_metadata: Any = None
        self._vllm_config = vllm_config
        self._kv_transfer_config = vllm_config.kv_transfer_config
        self._kv_cache_config = kv_cache_config
        self._role = role

    @property
    def requires_kv_delivery(self) -> bool:
        return True

    def bind_connector_metadata(self, connector_metadata: Any) -> None:
        self._connector_metadata = connector_metadata

    def clear_connector_metadata(self) -> None:
        self._connector_metadata = None

    def _get_connector_metadata(self) -> Any:
        assert self._connector_metadata is not None
        return self._connector_metadata

    def register_kv_caches(self, kv_caches: Any) -> Any: ...

    def start_load_kv(self, forward_context: Any, **kwargs: Any) -> Any: ...

    def wait_for_layer_load(self, layer_name: str) -> Any: ...

    def save_kv_layer(self, layer_name: str, kv_layer: Any, attn_metadata: Any, **kwargs: Any) -> Any: ...

    def wait_for_save(self) -> Any: ...

    def get_transfer_results(self, finished_req_ids: set[str]) -> Any: ...

    def build_connector_worker_meta(self) -> Any: ...

    def shutdown(self) -> Any: ...

    def bind_gpu_block_pool(self, gpu_block_pool: Any) -> Any: ...

    def on_new_request(self, request: Any) -> Any: ...

    def get_num_new_matched_tokens(self, request: Any, num_computed_tokens: int) -> Any: ...

    def get_external_cache_hit_sources(self, request: Any, num_external_tokens: int) -> Any: ...

    def update_state_after_alloc(self, request: Any, blocks: Any, num_external_tokens: int) -> Any: ...

    def build_connector_meta(self, scheduler_output: Any) -> Any: ...

    def update_connector_output(self, connector_output: Any) -> Any: ...

    def take_events(self) -> Any: ...

    def get_kv_connector_stats(self) -> Any: ...

    @classmethod
    def build_kv_connector_stats(cls, data: Any = None) -> Any: ...

    @classmethod
    def build_prom_metrics(cls, vllm_config: Any, metric_types: Any, labelnames: Any, per_engine_labelvalues: Any) -> Any: ...

    def has_pending_block_frees(self) -> bool:
        return False

    def has_pending_push_work(self) -> bool:
        return False

    def reset_cache(self) -> Any: ...


# ---- vllm.distributed.kv_transfer.kv_connector.v1.metrics ------------------------------------------


@dataclass
class KVConnectorStats:
    data: dict[str, Any] = field(default_factory=dict)

    def reset(self) -> Any: ...

    def aggregate(self, other: Any) -> Any: ...

    def reduce(self) -> Any: ...

    def is_empty(self) -> Any: ...


class KVConnectorPromMetrics:
    def __init__(self, vllm_config: Any, metric_types: Any, labelnames: Any, per_engine_labelvalues: Any) -> None:
        self._gauge_cls, self._counter_cls = metric_types["gauge"], metric_types["counter"]  # vLLM's are classes by class
        self.per_engine_labelvalues = per_engine_labelvalues

    def observe(self, transfer_stats_data: Any, engine_idx: int = 0) -> Any: ...


# ---- vllm.distributed.kv_events -------------------------------------------------------------------

MEDIUM_CPU, MEDIUM_STORAGE = "CPU", "STORAGE"


class KVCacheEvent:
    pass


class AllBlocksCleared(KVCacheEvent):
    pass


@dataclass
class BlockStored(KVCacheEvent):
    block_hashes: list[bytes]
    parent_block_hash: bytes | None
    token_ids: list[int]
    block_size: int
    lora_id: int | None
    medium: str | None
    lora_name: str | None
    group_idx: int | None = None
    kv_cache_spec_kind: str | None = None
    kv_cache_spec_sliding_window: int | None = None


@dataclass
class BlockRemoved(KVCacheEvent):
    block_hashes: list[bytes]
    medium: str | None
    group_idx: int | None = None


# ---- vllm.v1 --------------------------------------------------------------------------------------


@dataclass(frozen=True)
class _AttentionSpec:
    block_size: int
    num_kv_heads: int
    head_size: int
    dtype: str = "uint8"
    tokens_per_state: int = 1

    @property
    def unpadded_page_size_bytes(self) -> int:
        return self.block_size * self.num_kv_heads * self.head_size


@dataclass(frozen=True)
class FullAttentionSpec(_AttentionSpec):
    attention_chunk_size: int | None = None
    non_causal: bool = False


@dataclass(frozen=True)
class MLAAttentionSpec(FullAttentionSpec):
    pass


@dataclass(frozen=True)
class SlidingWindowSpec(_AttentionSpec):
    sliding_window: int = 0
    extra_retained_tokens: int = 0


@dataclass(frozen=True)
class MambaSpec:
    block_size: int
    shapes: tuple[tuple[int, ...], ...]
    dtypes: tuple[str, ...] = ("uint8",)
    mamba_cache_mode: str = "align"

    @property
    def state_content_size_bytes(self) -> int:
        return sum(shape[0] for shape in self.shapes)


@dataclass
class KVCacheGroupSpec:
    layer_names: list[str]
    kv_cache_spec: Any
    is_eagle_group: bool = False
    host_resident: bool = False
    enable_kv_transfer: bool = True


@dataclass
class KVConnectorBlockState:
    req_ids: set[str]
    resolve_block_ids: Callable[[str], tuple[list[int], ...]]
    boundary_state_offloads: dict[str, list[tuple[int, int, int]]]

    def get_block_ids(self, req_id: str) -> tuple[list[int], ...] | None:
        return self.resolve_block_ids(req_id) if req_id in self.req_ids else None


class CacheHitSource(str, Enum):
    HOST = "host"
    DISK = "disk"


class KVCacheSpecKind(str, Enum):
    FULL_ATTENTION = "full_attention"
    SLIDING_WINDOW = "sliding_window"
    MAMBA = "mamba"


def get_kv_cache_spec_kind(kv_cache_spec: Any) -> KVCacheSpecKind:
    kinds = {"MambaSpec": KVCacheSpecKind.MAMBA, "SlidingWindowSpec": KVCacheSpecKind.SLIDING_WINDOW}
    return kinds.get(type(kv_cache_spec).__name__, KVCacheSpecKind.FULL_ATTENTION)


def get_kv_cache_spec_sliding_window(kv_cache_spec: Any) -> int | None:
    return getattr(kv_cache_spec, "sliding_window", None)


def maybe_convert_block_hash(hash_bytes: bytes) -> bytes:
    return hash_bytes


def group_kernel_blocks(cache: Any, num_blocks: int) -> Any:
    return cache


def resolve_kv_cache_block_sizes(kv_cache_config: Any, vllm_config: Any) -> tuple[int, int]:
    sizes = [group.kv_cache_spec.block_size for group in kv_cache_config.kv_cache_groups]
    return lcm(*sizes), gcd(*sizes)


class current_platform:
    device_type = "cpu"

    @staticmethod
    def is_cpu() -> bool:
        return True


MODULES = {
    "vllm": ("__version__",),
    "vllm.distributed": (),
    "vllm.distributed.kv_events": (
        "MEDIUM_CPU", "MEDIUM_STORAGE", "AllBlocksCleared", "BlockRemoved", "BlockStored", "KVCacheEvent",
    ),
    "vllm.distributed.kv_transfer": (),
    "vllm.distributed.kv_transfer.kv_connector": (),
    "vllm.distributed.kv_transfer.kv_connector.v1": (),
    "vllm.distributed.kv_transfer.kv_connector.v1.base": (
        "KVConnectorBase_V1", "KVConnectorMetadata", "KVConnectorRole", "KVConnectorTransferResults", "KVConnectorWorkerMetadata",
        "SupportsHMA",
    ),
    "vllm.distributed.kv_transfer.kv_connector.v1.metrics": ("KVConnectorPromMetrics", "KVConnectorStats"),
    "vllm.platforms": ("current_platform",),
    "vllm.v1": (),
    "vllm.v1.core": (),
    "vllm.v1.core.sched": (),
    "vllm.v1.core.sched.output": ("KVConnectorBlockState",),
    "vllm.v1.core.kv_cache_utils": ("maybe_convert_block_hash", "resolve_kv_cache_block_sizes"),
    "vllm.v1.kv_cache_interface": (
        "FullAttentionSpec", "KVCacheGroupSpec", "MLAAttentionSpec", "MambaSpec", "SlidingWindowSpec", "get_kv_cache_spec_kind",
        "get_kv_cache_spec_sliding_window", "group_kernel_blocks",
    ),
    "vllm.v1.metrics": (),
    "vllm.v1.metrics.cache_hit_source": ("CacheHitSource",),
}  # fmt: skip


IMPORTED = (*MODULES, *(f"stepwell.connectors.vllm.{name}" for name in ("connector", "block_events", "metrics")))


def is_real_installed() -> bool:
    """Our folder of tests has the same name, but no `__init__`: it is no package that has an origin."""
    if getattr(sys.modules.get("vllm"), "is_stand_in", False):
        return False
    found = find_spec("vllm")
    return found is not None and found.origin is not None


def install() -> None:
    """Makes this file importable as vLLM."""
    assert not is_real_installed(), "the real vLLM is installed here"
    for name, members in MODULES.items():
        module = ModuleType(name)
        module.__path__ = []  # type: ignore[attr-defined]
        module.is_stand_in = True  # type: ignore[attr-defined]
        for member in members:
            setattr(module, member, globals()[member])
        sys.modules[name] = module


def config(
    *, extra: dict[str, Any], ranks: int = 1, rank: int = 0, engine_id: str = "toy", policy: str = "recompute",
    events: bool = False, role: str = "kv_both", layers: dict[str, Any] | None = None,
) -> Any:  # fmt: skip
    """What vLLM's configuration says of a toy model. `layers` are the modules of its layers, by name."""
    hf_config = SimpleNamespace(to_json_string=lambda: "{}", _commit_hash="toy weights")
    return SimpleNamespace(
        kv_transfer_config=SimpleNamespace(
            kv_connector_extra_config=extra, kv_load_failure_policy=policy, engine_id=engine_id, kv_role=role
        ),
        parallel_config=SimpleNamespace(
            tensor_parallel_size=ranks, rank=rank, data_parallel_rank=0, pipeline_parallel_size=1,
            decode_context_parallel_size=1, prefill_context_parallel_size=1,
        ),
        speculative_config=None,
        kv_events_config=SimpleNamespace(enable_kv_cache_events=True) if events else None,
        model_config=SimpleNamespace(
            model="toy", hf_config=hf_config, seed=0, dtype="uint8", quantization=None, get_vocab_size=lambda: 1000,
            multimodal_config=None, max_model_len=1000, original_max_model_len=None, quantization_config=None,
            model_class_overrides={}, override_generation_config={},
        ),
        load_config=SimpleNamespace(load_format="auto"),
        cache_config=SimpleNamespace(cache_dtype="auto"),
        additional_config={},
        compilation_config=SimpleNamespace(static_forward_context=layers or {}),
    )  # fmt: skip
