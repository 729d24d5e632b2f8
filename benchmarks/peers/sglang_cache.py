"""SGLang's unified prefix tree over CPU pools, behind the few calls a benchmark times.

Never changes how the tree works: pools, allocators and tree are SGLang's own, with
heads of one element, so that only bookkeeping costs anything. Import it after
`sglang_shim.declare_box_operators`.
"""

from __future__ import annotations

from array import array
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import sglang
import torch
from sglang.srt.configs.mamba_utils import Mamba2CacheParams, Mamba2StateShape
from sglang.srt.mem_cache.allocator.base import BaseTokenToKVPoolAllocator
from sglang.srt.mem_cache.allocator.paged import PagedTokenToKVPoolAllocator
from sglang.srt.mem_cache.allocator.swa import SWATokenToKVPoolAllocator
from sglang.srt.mem_cache.base_prefix_cache import EvictParams, InsertParams, InsertResult, MatchPrefixParams, MatchResult
from sglang.srt.mem_cache.cache_init_params import CacheInitParams
from sglang.srt.mem_cache.memory_pool import HybridReqToTokenPool, MHATokenToKVPool, ReqToTokenPool
from sglang.srt.mem_cache.radix_cache import RadixKey
from sglang.srt.mem_cache.swa_memory_pool import SWAKVPool
from sglang.srt.mem_cache.unified_cache.component_type import ComponentType
from sglang.srt.mem_cache.unified_radix_cache import UnifiedRadixCache
from sglang.srt.server_args import ServerArgs, set_global_server_args_for_scheduler

DEVICE = "cpu"
DTYPE = torch.bfloat16
COMPONENTS = {
    "full": (ComponentType.FULL,),
    "window": (ComponentType.FULL, ComponentType.SWA),
    "point": (ComponentType.FULL, ComponentType.MAMBA),
}
CORE_CLASSES = {"rust": "RustUnifiedTreeCore", "python": "UnifiedTreeCore"}

# Free while the pools are crowded, so that another kind of node can replace an evicted one.
SPARE_PAGES = 64
SPARE_STATES = 64


@dataclass(frozen=True, kw_only=True, slots=True)
class CacheShape:
    """Which tree to build, and how many tokens and point states its pools can hold."""

    core: str
    comps: str
    page_tokens: int
    window_tokens: int
    pool_tokens: int
    pool_states: int


class SglangCache:
    """One tree with its pools. Slots and states are reserved first, then inserted."""

    version: str = sglang.__version__

    def __init__(self, shape: CacheShape) -> None:
        self.shape = shape
        self.has_window = shape.comps == "window"
        self.has_point = shape.comps == "point"
        _publish_settings(shape.page_tokens)
        self.requests = _request_pool(shape)
        self.allocator = _token_allocator(shape)
        self.tree = UnifiedRadixCache(CacheInitParams(
            disable=False, req_to_token_pool=self.requests, token_to_kv_pool_allocator=self.allocator,
            page_size=shape.page_tokens,
            sliding_window_size=shape.window_tokens if self.has_window else None, enable_mamba_extra_buffer=self.has_point,
            tree_components=COMPONENTS[shape.comps], tree_core_backend=shape.core,
        ))  # fmt: skip
        # SGLang quietly falls back to Python where it cannot load the Rust core.
        built = type(self.tree.tree_core).__name__
        if built != CORE_CLASSES[shape.core]:
            raise RuntimeError(f"asked for the {shape.core} core, SGLang built {built}")

    def reserve_slots(self, num_tokens: int) -> torch.Tensor:
        """Take one slot per token from the pool (and its partner in the window pool)."""
        if not self.has_window:
            return _granted(self.allocator.alloc(num_tokens))
        full = _granted(self.allocator.full_attn_allocator.alloc(num_tokens))
        window = _granted(self.allocator.swa_attn_allocator.alloc(num_tokens))
        self.allocator.set_full_to_swa_mapping(full, window)
        return full

    def reserve_state(self) -> torch.Tensor | None:
        """Take one point state, or nothing where the model has none."""
        return _granted(self.requests.mamba_allocator.alloc(1)) if self.has_point else None

    def release_unused_state(self, state: torch.Tensor | None, outcome: InsertResult) -> None:
        """Free the state of an insert whose end already had one."""
        if state is not None and outcome.mamba_exist:
            self.requests.mamba_allocator.free(state)

    def insert(self, tokens: array[int], slots: torch.Tensor, state: torch.Tensor | None, known_tokens: int = 0) -> InsertResult:
        """Store `tokens`; the slots of the first `known_tokens` are the tree's own."""
        return self.tree.insert(InsertParams(key=RadixKey(tokens), value=slots, mamba_value=state, prev_prefix_len=known_tokens))

    def lookup(self, tokens: array[int]) -> MatchResult:
        """Match the longest cached prefix; SGLang also marks it as recently used."""
        return self.tree.match_prefix(MatchPrefixParams(key=RadixKey(tokens)))

    def lookup_indices(self, tokens: array[int]) -> torch.Tensor:
        """Match, and collect the device slots of the match, which is a second call in SGLang."""
        return self.tree.path_device_indices(self.lookup(tokens).last_device_node)

    def evict(self, num_tokens: int) -> int:
        """Evict at least `num_tokens`, oldest leaves first, and free their slots.

        Window and point state of a leaf go with it. Returns the tokens evicted.
        """
        return self.tree.evict(EvictParams(num_tokens=num_tokens)).num_tokens_evicted

    @contextmanager
    def crowded(self) -> Iterator[None]:
        """Hold all free memory but a little, as in an engine that has to evict.

        A free costs SGLang a copy of the whole free list: on a pool that is mostly
        empty, which never evicts in practice, eviction would look slower than it is.
        """
        spare_tokens = SPARE_PAGES * self.shape.page_tokens
        slots = self.reserve_slots(self.allocator.available_size() - spare_tokens)
        states = self._reserve_all_states_but(SPARE_STATES)
        yield
        self.allocator.free_segment(slots, start_pos=0)
        if states is not None:
            self.requests.mamba_allocator.free(states)

    def _reserve_all_states_but(self, num_spare: int) -> torch.Tensor | None:
        if not self.has_point:
            return None
        states = self.requests.mamba_allocator
        return _granted(states.alloc(states.available_size() - num_spare))


def _granted(indices: torch.Tensor | None) -> torch.Tensor:
    assert indices is not None, "the benchmark sized an SGLang pool too small"
    return indices


def _publish_settings(page_tokens: int) -> None:
    settings = ServerArgs(model_path="none", page_size=page_tokens, device=DEVICE)
    # SGLang's own tests preset this, so that it does not look for a model's config.
    settings._mamba_cache_chunk_size = max(64, page_tokens)
    set_global_server_args_for_scheduler(settings)


def _request_pool(shape: CacheShape) -> ReqToTokenPool:
    rows = {"size": 8, "max_context_len": 64, "device": DEVICE, "enable_memory_saver": False}
    if shape.comps != "point":
        return ReqToTokenPool(**rows)
    tiny_state = Mamba2StateShape.create(
        tp_world_size=1, intermediate_size=16, n_groups=1, num_heads=1, head_dim=16, state_size=4, conv_kernel=2
    )
    return HybridReqToTokenPool(
        **rows, mamba_size=shape.pool_states, mamba_spec_state_size=8, mamba_layer_ids=[0], enable_mamba_extra_buffer=True,
        cache_params=Mamba2CacheParams(shape=tiny_state, layers=[0]),
    )  # fmt: skip


def _token_allocator(shape: CacheShape) -> BaseTokenToKVPoolAllocator:
    paging = {"page_size": shape.page_tokens, "dtype": DTYPE, "device": DEVICE}
    tiny_head = {"head_num": 1, "head_dim": 1}
    if shape.comps != "window":
        pool = MHATokenToKVPool(size=shape.pool_tokens, layer_num=1, enable_memory_saver=False, **tiny_head, **paging)
        return PagedTokenToKVPoolAllocator(size=shape.pool_tokens, kvcache=pool, need_sort=False, **paging)
    sizes = {"size": shape.pool_tokens, "size_swa": shape.pool_tokens}
    pool = SWAKVPool(swa_attention_layer_ids=[0], full_attention_layer_ids=[1], **sizes, **tiny_head, **paging)
    return SWATokenToKVPoolAllocator(kvcache=pool, need_sort=False, **sizes, **paging)
