"""One host pool of SGLang's: the memory of its pages, their format, and their keys.

    page   | run | run |             K and V of all layers, or of each layer; one run for latents
    page   | run | run | run | run   cut by heads: two runs for each part, each part a value of its own

Reads the pool's attributes. Never copies, and never touches memory outside the pool's own buffers.
"""

from __future__ import annotations

import hashlib
from bisect import bisect_right
from typing import Any

import torch

from stepwell.base.errors import ConfigError
from stepwell.connectors.sglang.settings import Ranks

_META = "get_page_buffer_meta"
# Attributes in which two pools must agree before one may read the other's pages.
_FACTS = (
    "layout", "dtype", "store_dtype", "page_size", "storage_format_tag", "layer_num", "target_layer_num",
    "start_layer", "end_layer", "head_dim", "v_head_dim", "kv_lora_rank", "qk_rope_head_dim", "kv_cache_dim", "index_head_dim",
    "indexer_dtype",
    "indexer_page_stride_size", "num_mamba_layers", "temporal_dtype", "conv_dtype", "temporal_state_shape", "conv_state_shapes",
    "compress_ratio", "ratio", "item_bytes", "stores_page_envelope", "dcp_size",
)  # fmt: skip
_BY_RANK = ("MHA", "Mamba")  # classes whose pages always differ between ranks
ANCHOR = "kv"


class HostPool:
    """Pages of one pool, as values of several runs. Any thread."""

    def __init__(self, name: str, pool: Any, ranks: Ranks, version: str) -> None:
        self.name, self._pool = name, pool
        self.page_size = int(getattr(pool, "page_size", 1) or 1)
        self._bases, self._views = _memory_of(pool)
        by_heads = bool(ranks.head_parts) and name == ANCHOR
        self._parts = list(ranks.own_parts) if by_heads else [0]
        self.sizes = self._run_sizes()
        self.has_bytes = bool(self.sizes)
        kind = getattr(pool, "pool_class", type(pool).__name__)  # our own memory names its pool's class
        self.by_rank = any(word in kind for word in _BY_RANK)
        self.replicated = ranks.replicated and not self.by_rank
        facts = {fact: str(getattr(pool, fact)) for fact in _FACTS if getattr(pool, fact, None) is not None}
        # With pages cut by heads, a part does not depend on the number of heads of its rank.
        facts |= {} if by_heads else {"head_num": str(getattr(pool, "head_num", ""))}
        self.facts = f"sglang {version} {kind} {sorted(facts.items())} runs {self.sizes}"
        self.shard = ranks.shard(replicated=self.replicated, by_heads=by_heads)
        self._tags = [_tag(f"{name}|{self.facts}|{self.shard}|{part}") for part in self._parts]

    @property
    def values_per_page(self) -> int:
        return len(self._tags) if self.has_bytes else 0

    def keys(self, page: str) -> list[bytes]:
        """The keys of a page's values; each is the parent of the next."""
        return [hashlib.blake2b(page.encode(), digest_size=32, key=tag).digest() for tag in self._tags]

    def last_key(self, page: str) -> bytes:
        return hashlib.blake2b(page.encode(), digest_size=32, key=self._tags[-1]).digest()

    def runs(self, host_indices: torch.Tensor) -> list[list[memoryview]]:
        """The runs of every value of every page, in order, without a copy."""
        pointers, sizes = self._meta(host_indices)
        each = len(self.sizes)
        views = [self._view(pointer, size) for pointer, size in zip(pointers, sizes, strict=True)]
        return [views[at : at + each] for at in range(0, len(views), each)]

    def _meta(self, host_indices: torch.Tensor) -> tuple[list[int], list[int]]:
        if len(self._parts) > 1:
            meta = self._pool.get_split_heads_page_buffer_meta(host_indices, len(self._parts))
        else:
            meta = self._pool.get_page_buffer_meta(host_indices)
        return meta if meta else ([], [])

    def _view(self, pointer: int, size: int) -> memoryview:
        at = bisect_right(self._bases, pointer) - 1
        start = pointer - self._bases[at]
        assert at >= 0 and start + size <= len(self._views[at]), f"{self.name}: {pointer=:#x} {size=} is outside of the pool"
        return self._views[at][start : start + size]

    def _run_sizes(self) -> list[int]:
        """Bytes of each run of one value; empty for an anchor without memory (DeepSeek-V4)."""
        try:
            pointers, sizes = self._meta(torch.arange(self.page_size)) if self._views or hasattr(self._pool, _META) else ([], [])
        except (ValueError, NotImplementedError) as error:
            if not self._views:
                return []
            layout = getattr(self._pool, "layout", "")
            raise ConfigError(
                f"SGLang's pool {self.name!r} cannot locate its pages ({error}): "
                f"use --hicache-mem-layout page_first_direct or page_first in place of {layout}"
            ) from None
        if pointers and not self._views:
            raise ConfigError(
                f"SGLang's pool {self.name!r} ({type(self._pool).__name__}) does not expose the memory of its pages"
            )
        return [int(size) for size in sizes[: len(sizes) // len(self._parts)]]


def _memory_of(pool: Any) -> tuple[list[int], list[memoryview]]:
    """The pool's buffers as bytes, by address."""
    if hasattr(pool, "get_hybrid_pool_buffer"):
        buffers = list(pool.get_hybrid_pool_buffer())
    else:
        buffer = getattr(pool, "kv_buffer", None)
        buffers = list(buffer) if isinstance(buffer, (list, tuple)) else [buffer]
    held = [buffer for buffer in buffers if buffer is not None and buffer.numel()]
    if not all(buffer.is_contiguous() and buffer.device.type == "cpu" for buffer in held):
        raise ConfigError(f"{type(pool).__name__} is not contiguous host memory: use another --hicache-mem-layout")
    flat = [buffer.view(-1).view(torch.uint8) for buffer in held]
    flat.sort(key=lambda buffer: int(buffer.data_ptr()))
    return [int(buffer.data_ptr()) for buffer in flat], [memoryview(buffer.numpy()) for buffer in flat]


def _tag(text: str) -> bytes:
    return hashlib.blake2b(text.encode(), digest_size=32, person=b"stepwell-sglang").digest()
