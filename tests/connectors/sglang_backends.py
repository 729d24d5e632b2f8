"""Backends for SGLang over the stand-in: what they are started with, pools with bytes of their own, and names of pages."""

from __future__ import annotations

import hashlib
from typing import Any

import sglang_stand_in as sglang
import torch

ALL, TRAILING = sglang.PoolHitPolicy.ALL_PAGES, sglang.PoolHitPolicy.TRAILING_PAGES


def config(**changes: Any) -> Any:
    extra = {"backend_name": "stepwell", "module_path": "m", "class_name": "c", "interface_v1": 1, **changes.pop("extra", {})}
    extra.setdefault("store", "memory:")
    if str(extra["store"]).startswith(("log:", "shared-log:")):
        extra.setdefault("identity", "tiny weights")
    fields: dict[str, Any] = {
        "tp_rank": 0, "tp_size": 1, "pp_rank": 0, "pp_size": 1, "attn_cp_rank": 0, "attn_cp_size": 1, "is_mla_model": False,
        "enable_storage_metrics": False, "is_page_first_layout": False, "model_name": "tiny", "extra_config": extra,
    }  # fmt: skip
    return sglang.HiCacheStorageConfig(**{**fields, **changes})


def attach(hicache: Any, anchor: Any, pools: dict[str, Any] | None = None, **changes: Any) -> Any:
    """A backend with its pools, as SGLang registers them."""
    backend = hicache(config(**changes), {})
    backend.register_mem_pool_host(anchor)
    for name, pool in {"kv": anchor, **(pools or {})}.items():
        backend.register_mem_host_pool_v2(pool, name)
    backend.on_host_pools_registered()
    return backend


def keys(count: int, prompt: str = "a") -> list[str]:
    return [hashlib.sha256(f"{prompt}{page}".encode()).hexdigest() for page in range(count)]


def fill(pool: Any, seed: int = 0) -> torch.Tensor:
    """Gives a pool's pages bytes of their own, and returns them."""
    raw = pool.kv_buffer.view(-1).view(torch.uint8)
    raw.copy_(torch.randint(0, 256, raw.shape, dtype=torch.uint8, generator=torch.Generator().manual_seed(seed)))
    return pool.kv_buffer.clone()


def same(left: torch.Tensor, right: torch.Tensor) -> bool:
    return torch.equal(left.view(torch.uint8), right.view(torch.uint8))


def slots(*pages: int, size: int = 4) -> torch.Tensor:
    return torch.cat([torch.arange(page * size, (page + 1) * size) for page in pages])


def info(before: list[str]) -> Any:
    return sglang.HiCacheStorageExtraInfo(prefix_keys=before)


def hybrid(hicache: Any, **changes: Any) -> Any:
    pools = {"indexer": sglang.OneRunPool(), "swa": sglang.OneRunPool(), "mamba": sglang.MambaPool(), "draft": sglang.MHAPool()}
    return attach(hicache, sglang.MHAPool(), pools, **changes)


def transfer(name: str, names: list[str], *pages: int, policy: Any = ALL, size: int = 4) -> Any:
    indices = slots(*pages, size=size) if pages else None
    return sglang.PoolTransfer(name=name, keys=names, host_indices=indices, hit_policy=policy)
