"""SGLang's interface for external linkers as far as one meets it, its device pools, and a toy of what its scheduler does.

For tests without SGLang. `install()` makes it importable under SGLang's names. `make test-sglang` compares the interface with
the real package; the real pools are run there too.
"""

from __future__ import annotations

import hashlib
import sys
from abc import ABC, abstractmethod
from collections.abc import Sequence
from types import ModuleType, SimpleNamespace
from typing import Any

import sglang_stand_in
import torch
from sglang_stand_in import PoolHitPolicy, PoolTransfer

NAMES = ("UnifiedCacheLinker",)
PAGE = 4
WINDOW_PAGES = 2


class UnifiedCacheLinker(ABC):
    layer_done_counter: object
    pools: dict[Any, object]
    forward_stream: Any = None

    def record_offload_ready(self) -> list[Any]:
        raise NotImplementedError("on a GPU only")

    @abstractmethod
    def lookup(self, rid: str, transfers: list[PoolTransfer]) -> list[int]: ...

    @abstractmethod
    def load(self, rid: str, transfers: list[PoolTransfer]) -> bool: ...

    @abstractmethod
    def start_layer_wise_loading(self) -> int: ...

    @abstractmethod
    def finish_layer_wise_loading(self, counter_index: int) -> bool: ...

    @abstractmethod
    def cancel_queued_load(self, rid: str) -> bool: ...

    @abstractmethod
    def offload(self, transfers: list[PoolTransfer], session_id: str | None = None) -> bool: ...

    @abstractmethod
    def num_completed_offloads(self) -> int: ...

    @abstractmethod
    def pop_completed_offload(self) -> bool: ...

    @abstractmethod
    def reset(self) -> None: ...

    @abstractmethod
    def close(self) -> None: ...


PARALLEL = SimpleNamespace(tp_size=1, attn_dp_rank=0, attn_dcp_size=1)


def install() -> dict[str, ModuleType]:
    """The modules, by SGLang's names, to be put into `sys.modules`."""
    context = ModuleType("sglang.srt.runtime_context")
    context.get_parallel = lambda: PARALLEL  # type: ignore[attr-defined]
    package = ModuleType("sglang.srt.mem_cache.unified_cache")
    return {
        **sglang_stand_in.install(), context.__name__: context, package.__name__: package,
        f"{package.__name__}.unified_cache_linker": sys.modules[__name__],
    }  # fmt: skip


# ---- device pools, as SGLang calls them -----------------------------------------------------------


class MHATokenToKVPool:
    k_scale_buffer = None

    def __init__(self, pages: int, *, layers: int = 2, heads: int = 2, dim: int = 8, dtype: torch.dtype = torch.bfloat16) -> None:
        shape = (pages * PAGE, heads, dim)
        self.dtype, self.start_layer = dtype, 0
        self.k_buffer, self.v_buffer = ([torch.zeros(shape, dtype=dtype) for _ in range(layers)] for _ in range(2))


class SWAKVPool:
    def __init__(self, pages: int, **shape: Any) -> None:
        self.start_layer = 0
        self.full_kv_pool, self.swa_kv_pool = MHATokenToKVPool(pages, layers=1, **shape), MHATokenToKVPool(pages, **shape)
        self.layers_mapping = {0: (0, True), 1: (0, False), 2: (1, True)}


class HybridLinearKVPool:
    def __init__(self, pages: int, **shape: Any) -> None:
        self.start_layer = 0
        self.full_kv_pool = MHATokenToKVPool(pages, layers=1, **shape)
        self.full_attention_layer_id_mapping = {1: 0}


class MambaPool:
    _slot_siblings = ()

    def __init__(self, slots: int) -> None:
        self.mamba_cache = SimpleNamespace(temporal=torch.zeros(2, slots, 3, 5), conv=[torch.zeros(2, slots, 7)])


class Requests:
    """SGLang's pool of requests, with state of Mamba layers 0 and 2."""

    mamba_ckpt_pool = mamba_v2p_table = None

    def __init__(self, slots: int) -> None:
        self.short_conv_pool = self.ngram_pool = SimpleNamespace(enabled=False)
        self.mamba_pool, self.mamba_map = MambaPool(slots), {0: 0, 2: 1}
        self.counters: list[object] = []

    def register_layer_transfer_counter(self, counter: object) -> None:
        self.counters.append(counter)


COMPONENTS = {"full": ("FULL",), "swa": ("FULL", "SWA"), "mamba": ("FULL", "MAMBA")}
POOLS: dict[str, Any] = {"full": MHATokenToKVPool, "swa": SWAKVPool, "mamba": HybridLinearKVPool}


class Engine:
    """A model's device pools with a linker below, asked as SGLang's tree asks it. Bytes follow from the names of pages."""

    def __init__(
        self, make: Any, kind: str = "full", *, pages: int = 64, extra: dict[str, Any] | None = None, **shape: Any
    ) -> None:
        self.kind, self.pages = kind, pages
        self.kvcache, self.requests = POOLS[kind](pages, **shape), Requests(pages)
        self.params = SimpleNamespace(
            token_to_kv_pool_allocator=SimpleNamespace(get_kvcache=lambda: self.kvcache), req_to_token_pool=self.requests,
            page_size=PAGE, mtp_draft_device_pools=(), sidecar_draft_device_pools=(), pp_size=1, attn_cp_rank=0, attn_cp_size=1,
            tp_cache_group=None, attn_tp_cache_group=None, attn_cp_cache_group=None,
        )  # fmt: skip
        components = {Component(name) for name in COMPONENTS[kind]}
        args = SimpleNamespace(served_model_name="tiny", model_path="nowhere")
        config = {"host_memory": "1MiB", "fetch_wait_s": 60.0, **(extra or {})}
        self.linker = make(args, self.params, components=components, extra_config=config, forward_stream=None)

    def tensors(self) -> dict[str, list[torch.Tensor]]:
        """What a pool keeps, with a row for each of its indices."""
        if self.kind == "full":
            return {"kv": [*self.kvcache.k_buffer, *self.kvcache.v_buffer]}
        full = self.kvcache.full_kv_pool
        out = {"kv": [*full.k_buffer, *full.v_buffer]}
        if self.kind == "swa":
            window = self.kvcache.swa_kv_pool
            return {**out, "swa": [*window.k_buffer, *window.v_buffer]}
        cache = self.requests.mamba_pool.mamba_cache
        return {**out, "mamba": [each[layer] for each in (cache.temporal, *cache.conv) for layer in range(2)]}

    def compute(self, keys: Sequence[str], first: int = 0) -> None:
        """Fills pages from `first` on, and the state behind the last of them."""
        for pool, tensors in self.tensors().items():
            for page, key in enumerate(keys, first):
                for number, tensor in enumerate(tensors):
                    rows = _rows(pool, page)
                    tensor[rows] = bytes_of(f"{key} {pool} {number}", tensor[rows])

    def save(self, keys: Sequence[str], first: int = 0) -> None:
        """Offers a node of the tree: pages that lie from `first` on."""
        self.compute(keys, first)
        transfers = []
        for pool in self.tensors():
            pages = range(first, first + len(keys))
            names, at = (keys, pages) if pool != "mamba" else (keys[-1:], pages[-1:])
            transfers.append(PoolTransfer(name=pool, keys=list(names), device_indices=_indices(pool, at)))
        assert self.linker.offload(transfers, session_id=None)

    def lookup(self, keys: Sequence[str], rid: str = "r") -> list[int]:
        return list(self.linker.lookup(rid, [self._wanted(pool, keys) for pool in self.tensors()]))

    def queue(self, keys: Sequence[str], rid: str = "r", first: int = 32) -> bool:
        """Asks for a prefix to be loaded into pages from `first` on."""
        transfers = []
        for pool in self.tensors():
            transfer = self._wanted(pool, keys)
            count = len(transfer.keys or ())
            transfer.device_indices = _indices(pool, range(first + len(keys) - count, first + len(keys)))
            transfers.append(transfer)
        return bool(self.linker.load(rid, transfers))

    def run(self) -> bool:
        """A pass that waits for each layer; whether its batch was loaded."""
        index, counter = self.linker.start_layer_wise_loading(), self.linker.layer_done_counter
        counter.set_consumer(index)
        for layer in range(counter.num_layers):
            counter.wait_until(layer)
        return index < 0 or bool(self.linker.finish_layer_wise_loading(index))

    def is_exact(self, keys: Sequence[str], first: int = 32) -> bool:
        """Whether every byte of a loaded prefix is the one that was computed for it."""
        for pool, tensors in self.tensors().items():
            needed = len(self._wanted(pool, keys).keys or ())
            for page, key in list(enumerate(keys, first))[len(keys) - needed :]:
                for number, tensor in enumerate(tensors):
                    rows = _rows(pool, page)
                    if not torch.equal(tensor[rows], bytes_of(f"{key} {pool} {number}", tensor[rows])):
                        return False
        return True

    def wipe(self) -> None:
        for tensors in self.tensors().values():
            for tensor in tensors:
                tensor.zero_()

    def _wanted(self, pool: str, keys: Sequence[str]) -> PoolTransfer:
        if pool == "kv":
            return PoolTransfer(name=pool, keys=list(keys))
        last = {"swa": WINDOW_PAGES, "mamba": 1}[pool]
        return PoolTransfer(name=pool, keys=list(keys[-last:]), hit_policy=PoolHitPolicy.TRAILING_PAGES)


class Component:
    """One of SGLang's components of a tree."""

    def __init__(self, name: str) -> None:
        self.name = name


def _rows(pool: str, page: int) -> slice:
    size = 1 if pool == "mamba" else PAGE
    return slice(page * size, (page + 1) * size)


def _indices(pool: str, pages: Sequence[int]) -> torch.Tensor:
    size = 1 if pool == "mamba" else PAGE
    return torch.tensor([page * size + at for page in pages for at in range(size)], dtype=torch.int64)


def bytes_of(name: str, like: torch.Tensor) -> torch.Tensor:
    seed = int.from_bytes(hashlib.blake2b(name.encode(), digest_size=7).digest(), "little")
    return torch.randn(like.shape, generator=torch.Generator().manual_seed(seed)).to(like.dtype)


def page_keys(count: int, prompt: str = "a") -> list[str]:
    return [hashlib.sha256(f"{prompt}{page}".encode()).hexdigest() for page in range(count)]
