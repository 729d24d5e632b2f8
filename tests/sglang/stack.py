"""SGLang's own tree, controller and host pools on a machine without a GPU. Only the kernels that copy between device and host
are replaced (`benchmarks/peers/sglang_copies.py`); everything that a storage backend meets is SGLang's.
"""

from __future__ import annotations

import json
import sys
import time
import warnings
from array import array
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[2] / "benchmarks" / "peers"))
warnings.filterwarnings("ignore")

import sglang_copies  # noqa: E402, F401  # before anything of SGLang's
import torch  # noqa: E402
from sglang.srt.configs.mamba_utils import Mamba2CacheParams, Mamba2StateShape  # noqa: E402
from sglang.srt.environ import envs  # noqa: E402
from sglang.srt.mem_cache import hicache_storage  # noqa: E402
from sglang.srt.mem_cache.allocator.paged import PagedTokenToKVPoolAllocator  # noqa: E402
from sglang.srt.mem_cache.allocator.swa import SWATokenToKVPoolAllocator  # noqa: E402
from sglang.srt.mem_cache.base_prefix_cache import (  # noqa: E402
    CacheRequestHandle,
    InitLoadBackParams,
    InsertParams,
    MatchPrefixParams,
)
from sglang.srt.mem_cache.cache_init_params import CacheInitParams  # noqa: E402
from sglang.srt.mem_cache.memory_pool import (  # noqa: E402
    DSATokenToKVPool,
    HybridLinearKVPool,
    HybridReqToTokenPool,
    MHATokenToKVPool,
    MLATokenToKVPool,
    ReqToTokenPool,
)
from sglang.srt.mem_cache.radix_cache import RadixKey  # noqa: E402
from sglang.srt.mem_cache.swa_memory_pool import SWAKVPool  # noqa: E402
from sglang.srt.mem_cache.unified_cache.component_type import ComponentType  # noqa: E402
from sglang.srt.mem_cache.unified_radix_cache import UnifiedRadixCache  # noqa: E402
from sglang.srt.mem_cache.utils import get_storage_hash_str  # noqa: E402
from sglang.srt.runtime_context import get_parallel  # noqa: E402
from sglang.srt.server_args import ServerArgs, set_global_server_args_for_scheduler  # noqa: E402

PAGE, CHUNK, TOKENS, WINDOW = 64, 256, 1024, 256  # tokens of a page, of a chunk of prefill, of the prompt, of the window
KINDS = ("full", "mla", "dsa", "swa", "mamba")
PATIENCE_S = 120.0


@dataclass(frozen=True, kw_only=True)
class Backend:
    """Which storage, and how its pages look."""

    name: str
    directory: Path
    layout: str = "page_first_direct"
    dtype: torch.dtype = torch.bfloat16

    def settings(self) -> tuple[str, dict[str, object]]:
        common: dict[str, object] = {"prefetch_threshold": PAGE, "hicache_storage_pass_prefix_keys": True}
        if self.name == "file":
            return "file", {"file_storage_path": str(self.directory), **common}
        return "dynamic", {
            "backend_name": "stepwell", "module_path": "stepwell.connectors.sglang", "class_name": "StepwellHiCache",
            "interface_v1": 1, "store": f"log:{self.directory}", "store_budget": "1GiB", "identity": "tiny", **common,
        }  # fmt: skip


@dataclass(kw_only=True)
class Stack:
    """One model's cache as SGLang builds it."""

    kind: str
    tree: Any
    allocator: Any
    pool: Any
    requests: Any

    @property
    def controller(self) -> Any:
        return self.tree.cache_controller

    @property
    def backend(self) -> Any:
        return self.controller.storage_backend

    def buffers(self) -> Iterator[tuple[str, torch.Tensor, bool]]:
        """Everything that a token has on the device: a name, a layer, and whether it is of the window."""
        if self.kind == "swa":
            yield from _keys_and_values("full", self.pool.full_kv_pool, False)
            yield from _keys_and_values("window", self.pool.swa_kv_pool, True)
        elif self.kind in ("mla", "dsa"):
            yield from ((f"latent {at}", layer, False) for at, layer in enumerate(self.pool.kv_buffer))
        else:
            yield from _keys_and_values("full", self.pool.full_kv_pool if self.kind == "mamba" else self.pool, False)

    def states(self) -> list[tuple[str, torch.Tensor]]:
        if self.kind != "mamba":
            return []
        cache = self.requests.mamba_pool.mamba_cache
        return [("temporal", cache.temporal), *((f"conv {at}", each) for at, each in enumerate(cache.conv))]

    def slots(self, full: torch.Tensor, window: bool) -> torch.Tensor:
        return self.allocator.full_to_swa_index_mapping[full] if window else full

    def settle(self, done: Callable[[], bool]) -> None:
        """Lets SGLang's threads work until something is so."""
        deadline = time.monotonic() + PATIENCE_S
        while not done():
            assert time.monotonic() < deadline, "SGLang's threads did not get there"
            self.tree.check_hicache_events()
            time.sleep(0.002)


def _keys_and_values(name: str, pool: Any, window: bool) -> Iterator[tuple[str, torch.Tensor, bool]]:
    for at, (keys, values) in enumerate(zip(pool.k_buffer, pool.v_buffer, strict=True)):
        yield f"{name} {at} k", keys, window
        yield f"{name} {at} v", values, window


@contextmanager
def stack(kind: str, backend: Backend, ranks: dict[str, int] | None = None) -> Iterator[Stack]:
    """A cache with storage attached, and shut down afterwards."""
    name, extra = backend.settings()
    args = ServerArgs(
        model_path="dummy", served_model_name="tiny", page_size=PAGE, enable_hierarchical_cache=True, hicache_ratio=2.0,
        hicache_io_backend="direct", hicache_mem_layout=backend.layout, hicache_write_policy="write_through",
        hicache_storage_backend=name, hicache_storage_prefetch_policy="wait_complete",
        hicache_storage_backend_extra_config=json.dumps(extra),
    )  # fmt: skip
    with caches(args, kind, backend.dtype, ranks) as (made, params):
        made.tree.init_hicache(args, params)
        yield made


@contextmanager
def caches(
    args: ServerArgs, kind: str, dtype: torch.dtype, ranks: dict[str, int] | None = None, heads: tuple[int, int] = (2, 64)
) -> Iterator[tuple[Stack, CacheInitParams]]:
    """A tree over device pools, with nothing below them yet."""
    args._mamba_cache_chunk_size = PAGE
    set_global_server_args_for_scheduler(args)
    sizes = {"tp": 1, "pp": 1, "attn_tp": 1, "attn_dp": 1, "attn_dcp": 1}
    parallel = {f"{name}_rank": 0 for name in sizes} | {f"{name}_size": size for name, size in sizes.items()} | (ranks or {})
    with ExitStack() as cleanup:
        cleanup.enter_context(get_parallel().override(**parallel))
        made, more = _pools(kind, dtype, heads)
        params = CacheInitParams(
            req_to_token_pool=made.requests, token_to_kv_pool_allocator=made.allocator, page_size=PAGE, disable=False,
            tree_core_backend="rust", **more,
        )  # fmt: skip
        tree = UnifiedRadixCache(params=params)
        cleanup.callback(tree.shutdown)
        yield Stack(kind=kind, tree=tree, allocator=made.allocator, pool=made.pool, requests=made.requests), params


def _pools(kind: str, dtype: torch.dtype, of_heads: tuple[int, int]) -> tuple[SimpleNamespace, dict[str, Any]]:
    """The pools of a kind of model, on the device."""
    size = 4 * TOKENS
    shape: dict[str, Any] = {"size": size, "page_size": PAGE, "dtype": dtype, "device": "cpu"}
    heads, full = {"head_num": of_heads[0], "head_dim": of_heads[1]}, ComponentType.FULL
    requests: Any = None
    more: dict[str, Any] = {"tree_components": (full,)}
    if kind == "mamba":
        requests = _state_pool(size)
        pool = HybridLinearKVPool(
            **shape,
            **heads,
            full_attention_layer_ids=[1, 3],
            mamba_pool=requests.mamba_pool,
            enable_memory_saver=False,
            use_mla=False,
        )
        more = {"tree_components": (full, ComponentType.MAMBA), "enable_mamba_extra_buffer": True}
    elif kind == "swa":
        pool = SWAKVPool(**shape, **heads, size_swa=size, swa_attention_layer_ids=[0, 1], full_attention_layer_ids=[2])
        more = {"tree_components": (full, ComponentType.SWA), "sliding_window_size": WINDOW}
    elif kind == "full":
        pool = MHATokenToKVPool(**shape, **heads, layer_num=2, enable_memory_saver=False)
    else:
        latent = {"kv_lora_rank": 512, "qk_rope_head_dim": 64, "layer_num": 2, "enable_memory_saver": False}
        index = {"index_head_dim": 128, "kv_cache_dim": 576}
        pool = MLATokenToKVPool(**shape, **latent) if kind == "mla" else DSATokenToKVPool(**shape, **latent, **index)
    allocating = {**shape, "kvcache": pool, "need_sort": False}
    if kind == "swa":
        allocator = SWATokenToKVPoolAllocator(**allocating, size_swa=size)
    else:
        allocator = PagedTokenToKVPoolAllocator(**allocating)
    requests = requests or ReqToTokenPool(size=8, max_context_len=size, device="cpu", enable_memory_saver=False)
    return SimpleNamespace(pool=pool, allocator=allocator, requests=requests), more


def _state_pool(size: int) -> Any:
    with envs.SGLANG_MAMBA_SSM_DTYPE.override("bfloat16"):
        shape = Mamba2StateShape.create(
            tp_world_size=1, intermediate_size=128, n_groups=1, num_heads=2, head_dim=64, state_size=16, conv_kernel=4
        )
        return HybridReqToTokenPool(
            size=8, mamba_size=32, mamba_spec_state_size=8, max_context_len=size, device="cpu", enable_memory_saver=False,
            cache_params=Mamba2CacheParams(shape=shape, layers=[0, 2]), mamba_layer_ids=[0, 2], enable_mamba_extra_buffer=True,
            speculative_num_draft_tokens=None,
        )  # fmt: skip


# ---- a prompt, saved and resumed ----------------------------------------------------------------


def tokens_of(seed: int, count: int = TOKENS) -> array[int]:
    return array("q", torch.randint(0, 1 << 17, (count,), generator=torch.Generator().manual_seed(seed)).tolist())


def rows_of(name: str, like: torch.Tensor) -> torch.Tensor:
    """What the prompt's tokens have in one layer: numbers that follow from its name."""
    generator = torch.Generator().manual_seed(int.from_bytes(name.encode()[:7].ljust(7), "little") + len(name))
    return torch.randn((TOKENS, *like.shape[1:]), generator=generator).to(like.dtype)


def state_of(name: str, like: torch.Tensor, end: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(len(name) * 100_003 + end)
    return torch.randn(like[:, :1].shape, generator=generator).to(like.dtype)


def index_of(layer: int, like: torch.Tensor) -> torch.Tensor:
    generator = torch.Generator().manual_seed(layer)
    return torch.randint(0, 256, (TOKENS // PAGE, *like.shape[1:]), dtype=torch.uint8, generator=generator)


def insert(made: Stack, tokens: array[int]) -> None:
    """A prompt, computed in chunks, into the tree."""
    slots = _allocate(made)
    for name, layer, window in made.buffers():
        layer[made.slots(slots, window)] = rows_of(name, layer)
    if made.kind == "dsa":
        for at, layer in enumerate(made.pool.index_k_with_scale_buffer):
            layer[slots[::PAGE] // PAGE] = index_of(at, layer)
    before = 0
    for end in range(CHUNK, TOKENS + 1, CHUNK):
        state = None
        if made.kind == "mamba":
            state = made.requests.mamba_allocator.alloc(1)
            for name, tensor in made.states():
                tensor[:, state] = state_of(name, tensor, end)
        params = InsertParams(key=RadixKey(tokens[:end]), value=slots[:end], prev_prefix_len=before, mamba_value=state)
        made.tree.insert(params)
        before = end


def save(made: Stack, tokens: array[int]) -> None:
    """A prompt, down to storage."""
    insert(made, tokens)
    queues, tree = made.controller, made.tree
    made.settle(
        lambda: (
            not queues.ack_write_queue and not queues.write_queue and queues.backup_queue.empty()
            and not tree.ongoing_backup and not tree.ongoing_write_through
        )
    )  # fmt: skip


def resume(made: Stack, tokens: array[int]) -> tuple[int, bool]:
    """How many tokens storage brings back to the device, and whether every byte of them is the one that was saved."""
    handle = CacheRequestHandle("request", 0)
    tree, key = made.tree, RadixKey(tokens)
    start = tree.match_prefix(MatchPrefixParams(key=key))
    assert start.device_prefix_len == 0 and start.host_hit_length == 0
    last = tree.get_last_hash_value(start.last_host_node)
    tree.prefetch_from_storage(handle, start.last_host_node, tokens, last, [], matched_prefix_tokens=[])
    made.settle(lambda: tree.check_prefetch_progress(handle))
    tree.pop_prefetch_loaded_tokens(handle)
    match = tree.match_prefix(MatchPrefixParams(key=key))
    if not match.host_hit_length:
        return 0, True
    request = SimpleNamespace(
        rid="request", last_node=match.last_device_node, swa_host_hit_length=match.swa_host_hit_length,
        mamba_host_hit_length=match.mamba_host_hit_length, host_hit_length=match.host_hit_length,
        kv=SimpleNamespace(mamba_pool_idx=None, holds_mamba=False), mamba_pool_idx=None, cache_request_handle=handle,
    )  # fmt: skip
    hit = match.host_hit_length
    tree.init_load_back(InitLoadBackParams(best_match_node=match.best_match_node, host_hit_length=hit, req=request))
    tree.ready_to_load_host_cache()
    tree.check_hicache_events()
    slots = tree.path_device_indices(tree.match_prefix(MatchPrefixParams(key=key)).last_device_node)
    return len(slots), is_same(made, slots)


def is_same(made: Stack, slots: torch.Tensor) -> bool:
    """Whether every byte of these slots is the one that the prompt's beginning has."""
    end = len(slots)
    for name, layer, window in made.buffers():
        first = max(0, end - WINDOW) if window else 0
        if not torch.equal(layer[made.slots(slots, window)][first:], rows_of(name, layer)[first:end]):
            return False
    if made.kind == "dsa":
        for at, layer in enumerate(made.pool.index_k_with_scale_buffer):
            if not torch.equal(layer[slots[::PAGE] // PAGE], index_of(at, layer)[: end // PAGE]):
                return False
    for name, tensor in made.states():
        wanted = state_of(name, tensor, end)
        if not any(torch.equal(tensor[:, slot : slot + 1], wanted) for slot in range(tensor.shape[1])):
            return False
    return True


def _allocate(made: Stack) -> torch.Tensor:
    if made.kind != "swa":
        return made.allocator.alloc(TOKENS)
    full = made.allocator.full_attn_allocator.alloc(TOKENS)
    made.allocator.full_to_swa_index_mapping[full] = made.allocator.swa_attn_allocator.alloc(TOKENS)
    return full


def some_bytes(page: int) -> bytes:
    """A piece of a page of the prompt as it lies in storage, of full attention in bf16: where a test flips a bit."""
    like = torch.empty((1, 2, 64), dtype=torch.bfloat16)
    rows = rows_of("full 0 k", like)[page * PAGE : page * PAGE + 4]
    return bytes(rows.contiguous().view(torch.uint8).numpy().tobytes())


def page_keys(tokens: array[int]) -> list[str]:
    """What SGLang calls the pages of a prompt in storage."""
    return get_storage_hash_str(tokens, None, page_size=PAGE)


STORAGE = hicache_storage  # SGLang's interface, imported behind what it needs
