"""SGLang's storage interface as far as a backend meets it, and host pools that say where their pages lie.

For tests without SGLang. `install()` makes it importable under SGLang's names. `make test-sglang` compares every name here
with the real package.
"""

from __future__ import annotations

import sys
from abc import ABC, abstractmethod
from dataclasses import dataclass
from enum import Enum
from types import ModuleType
from typing import Any

import torch

NAMES = (
    "HiCacheStorage", "HiCacheStorageConfig", "HiCacheStorageExtraInfo", "PoolHitPolicy", "PoolTransfer", "PoolTransferResult",
)  # fmt: skip


@dataclass
class HiCacheStorageConfig:
    tp_rank: int
    tp_size: int
    pp_rank: int
    pp_size: int
    attn_cp_rank: int
    attn_cp_size: int
    is_mla_model: bool
    enable_storage_metrics: bool
    is_page_first_layout: bool
    model_name: str | None
    tp_lcm_size: int | None = None
    should_split_heads: bool = False
    dp_rank: int = 0
    extra_config: dict[str, Any] | None = None
    dcp_size: int = 1
    dcp_rank: int = 0
    logical_page_size: int | None = None


@dataclass
class HiCacheStorageExtraInfo:
    prefix_keys: list[str] | None = None
    extra_info: dict[str, Any] | None = None


class PoolHitPolicy(str, Enum):
    ALL_PAGES = "all_pages"
    TRAILING_PAGES = "trailing_pages"
    BLOCK_GROUPS = "block_groups"


@dataclass
class PoolTransfer:
    name: Any
    host_indices: torch.Tensor | None = None
    device_indices: torch.Tensor | None = None
    keys: list[str] | None = None
    hit_policy: PoolHitPolicy = PoolHitPolicy.ALL_PAGES
    nodes_to_load: list[Any] | None = None
    indices_from_pool: Any = None
    block_pages: int = 0
    group_pages: int = 0


@dataclass
class PoolTransferResult:
    kv_hit_pages: int
    extra_pool_hit_pages: dict[str, int]
    restorable_prefix_pages: list[int] | None = None


class HiCacheStorage(ABC):
    def register_mem_pool_host(self, mem_pool_host: Any) -> None:
        self.mem_pool_host = mem_pool_host

    def register_mem_host_pool_v2(self, host_pool: Any, host_pool_name: Any) -> None:
        self.registered_pools = {**getattr(self, "registered_pools", {}), host_pool_name: host_pool}

    def on_host_pools_registered(self) -> None:
        return None

    def batch_exists_v2(self, keys: Any, pool_transfers: Any = None, extra_info: Any = None) -> Any:
        raise NotImplementedError

    def batch_get_v2(self, transfers: Any, extra_info: Any = None) -> Any:
        raise NotImplementedError

    def batch_set_v2(self, transfers: Any, extra_info: Any = None) -> Any:
        raise NotImplementedError

    def batch_get_v1(self, keys: Any, host_indices: Any, extra_info: Any = None) -> Any:
        raise NotImplementedError

    def batch_set_v1(self, keys: Any, host_indices: Any, extra_info: Any = None) -> Any:
        raise NotImplementedError

    @abstractmethod
    def get(self, key: Any, target_location: Any = None, target_sizes: Any = None) -> Any: ...

    @abstractmethod
    def batch_get(self, keys: Any, target_locations: Any = None, target_sizes: Any = None) -> Any: ...

    @abstractmethod
    def set(self, key: Any, value: Any = None, target_location: Any = None, target_sizes: Any = None) -> Any: ...

    @abstractmethod
    def batch_set(self, keys: Any, values: Any = None, target_locations: Any = None, target_sizes: Any = None) -> Any: ...

    @abstractmethod
    def exists(self, key: Any) -> Any: ...

    def batch_exists(self, keys: Any, extra_info: Any = None) -> Any:
        raise NotImplementedError

    def clear(self) -> None:
        return None

    def get_stats(self) -> Any:
        raise NotImplementedError


@dataclass
class StorageMetrics:
    prefetch_pgs: list[int]
    backup_pgs: list[int]
    prefetch_bandwidth: list[float]
    backup_bandwidth: list[float]


def install() -> dict[str, ModuleType]:
    """The modules, by SGLang's names, to be put into `sys.modules`."""
    names = ["sglang", "sglang.srt", "sglang.srt.mem_cache", "sglang.srt.observability"]
    modules = {name: ModuleType(name) for name in [*names, f"{names[3]}.metrics_collector"]}
    modules["sglang"].__version__ = "0.5.23"  # type: ignore[attr-defined]
    modules["sglang.srt.observability.metrics_collector"].StorageMetrics = StorageMetrics  # type: ignore[attr-defined]
    return {**modules, "sglang.srt.mem_cache.hicache_storage": sys.modules[__name__]}


# ---- host pools ---------------------------------------------------------------------------------


class MHAPool:
    """Keys and values of some layers, page by page."""

    storage_format_tag = None

    def __init__(
        self, pages: int = 8, *, page_size: int = 4, layers: int = 2, heads: int = 2, dim: int = 8,
        dtype: torch.dtype = torch.bfloat16, layout: str = "page_first_direct",
    ) -> None:  # fmt: skip
        self.page_size, self.layer_num, self.head_num, self.head_dim = page_size, layers, heads, dim
        self.dtype, self.layout, self.pages = dtype, layout, pages
        self.kv_buffer = torch.zeros((2, pages, layers * page_size * heads * dim), dtype=dtype)

    def get_hybrid_pool_buffer(self) -> list[torch.Tensor]:
        return [self.kv_buffer[0], self.kv_buffer[1]]

    def get_page_buffer_meta(self, indices: torch.Tensor) -> tuple[list[int], list[int]]:
        return self._cut(indices, 1)

    def get_split_heads_page_buffer_meta(self, indices: torch.Tensor, split_factor: int) -> tuple[list[int], list[int]]:
        assert self.layout == "page_head"
        return self._cut(indices, split_factor)

    def _cut(self, indices: torch.Tensor, parts: int) -> tuple[list[int], list[int]]:
        size = self.kv_buffer[0, 0].numel() * self.dtype.itemsize // parts
        pages = (indices[:: self.page_size] // self.page_size).tolist()
        pointers = [half[page].data_ptr() + part * size for page in pages for part in range(parts) for half in self.kv_buffer]
        return pointers, [size] * len(pointers)


class OneRunPool:
    """One run a page: latents, an index, a window, or state at a node's end."""

    storage_format_tag = None

    def __init__(self, pages: int = 8, *, page_size: int = 4, size: int = 96, dtype: torch.dtype = torch.uint8) -> None:
        self.page_size, self.dtype, self.layout = page_size, dtype, "page_first"
        self.kv_buffer = torch.zeros((pages, size), dtype=dtype)

    def get_page_buffer_meta(self, indices: torch.Tensor) -> tuple[list[int], list[int]]:
        pages = (indices[:: self.page_size] // self.page_size).tolist()
        return [self.kv_buffer[page].data_ptr() for page in pages], [self.kv_buffer[0].nbytes] * len(pages)


class MambaPool(OneRunPool):
    """State of one slot."""

    def __init__(self, slots: int = 8, *, size: int = 100) -> None:
        super().__init__(slots, page_size=1, size=size)


class LogicalPool:
    """An anchor that only counts pages."""

    page_size, layout, kv_buffer, dtype, storage_format_tag = 4, "page_first", None, torch.uint8, None

    def get_page_buffer_meta(self, indices: torch.Tensor) -> None:
        return None


class LayerFirstState(MambaPool):
    """A pool whose pages are not in few pieces."""

    def get_page_buffer_meta(self, indices: torch.Tensor) -> tuple[list[int], list[int]]:
        raise ValueError("Mamba storage zero-copy requires page_first layout, got layer_first")
