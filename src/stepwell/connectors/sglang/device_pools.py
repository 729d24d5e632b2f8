"""SGLang's device pools as pages of bytes: which buffers a page lies in, in which layer each is needed, what the bytes mean.

    page of "kv"   | k of layer 0 | k of layer 1 | v of layer 0 | v of layer 1 |     on the device: a piece in each buffer
                                                                                     on the host: one run, in this order

Reads what the pools say of themselves, and knows their classes by name. Copies nothing, imports nothing of SGLang. A pool whose
pages would not come back whole is refused.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from stepwell.base.errors import ConfigError

KV, SWA, MAMBA = "kv", "swa", "mamba"  # as SGLang calls them
_MHA, _MLA, _DSA = "MHATokenToKVPool", "MLATokenToKVPool", "DSATokenToKVPool"
_REPLICATED = (_MLA, _DSA)  # every rank of tensor parallelism holds the same
_INSTEAD = "start SGLang without --enable-unified-cache-external-linker, with --enable-hierarchical-cache and StepwellHiCache"


@dataclass(frozen=True, slots=True, kw_only=True)
class Buffer:
    """One layer of a pool, or a part of it."""

    layer: int  # among those of this process, as SGLang waits for them
    pages: torch.Tensor  # [page, byte], over the pool's own memory

    @property
    def page_bytes(self) -> int:
        return int(self.pages.shape[1])


@dataclass(frozen=True, slots=True, kw_only=True)
class DevicePool:
    """Pages that SGLang names together: all buffers that one of its indices stands for."""

    name: str
    page_slots: int  # of SGLang's indices, for one page
    buffers: tuple[Buffer, ...]
    pool_class: str
    meaning: str  # what two pools must agree in before one may read the other's pages

    @property
    def page_bytes(self) -> int:
        return sum(buffer.page_bytes for buffer in self.buffers)

    @property
    def num_pages(self) -> int:
        return min(len(buffer.pages) for buffer in self.buffers)

    def page_ids(self, slots: torch.Tensor) -> torch.Tensor:
        """The pages that SGLang's indices are of; on a GPU it waits for them. Raises ValueError where they are no whole pages."""
        starts = slots.detach().to(device="cpu", dtype=torch.int64).reshape(-1, self.page_slots)
        first = starts[:, :1]
        if bool((first % self.page_slots).any()) or not torch.equal(starts, first + torch.arange(self.page_slots)):
            raise ValueError(f"indices of pool {self.name!r} are not of whole pages of {self.page_slots}")
        ids = first[:, 0] // self.page_slots
        if len(ids) and not 0 <= int(ids.min()) <= int(ids.max()) < self.num_pages:
            raise ValueError(f"indices of pool {self.name!r} are outside of its {self.num_pages} pages")
        return ids


def device_pools(kvcache: Any, requests: Any, *, page_tokens: int, states: bool) -> list[DevicePool]:
    """The pools of a model; `states` says whether it has Mamba state. Raises ConfigError for what cannot be resumed exactly."""
    kind = type(kvcache).__name__
    start = int(kvcache.start_layer or 0)
    if kind == "SWAKVPool":
        layers = kvcache.layers_mapping.items()
        full, window = ({at: layer - start for layer, (at, of_window) in layers if of_window is which} for which in (False, True))
        pools = [
            _attention(KV, kvcache.full_kv_pool, full, page_tokens),
            _attention(SWA, kvcache.swa_kv_pool, window, page_tokens),
        ]
    elif kind == "HybridLinearKVPool":
        full = {at: layer - start for layer, at in kvcache.full_attention_layer_id_mapping.items()}
        pools = [_attention(KV, kvcache.full_kv_pool, full, page_tokens)]
    else:
        pools = [_attention(KV, kvcache, None, page_tokens)]
    return [*pools, _states(requests, start)] if states else pools


def is_replicated(pools: Sequence[DevicePool]) -> bool:
    """Whether keys and values are the same on all ranks of tensor parallelism."""
    return pools[0].pool_class in _REPLICATED


def num_layers(pools: Sequence[DevicePool]) -> int:
    return 1 + max(buffer.layer for pool in pools for buffer in pool.buffers)


def _attention(name: str, pool: Any, layers: Mapping[int, int] | None, page_tokens: int) -> DevicePool:
    """`layers` says which layer a buffer is of; None where they are in order."""
    kind = type(pool).__name__
    if kind == _MHA:
        if pool.k_scale_buffer is not None or getattr(pool, "native_k_scale_buffer", None) is not None:
            raise ConfigError(f"Stepwell's linker does not know the scales of a quantized {kind}: {_INSTEAD}")
        stacks = [pool.k_buffer, pool.v_buffer]
    elif kind in _REPLICATED:
        stacks = [pool.kv_buffer]
    else:
        raise ConfigError(f"Stepwell's linker does not know pools of class {kind}: {_INSTEAD}")
    found = [_buffer(pool, at, each, layers, page_tokens) for stack in stacks for at, each in enumerate(stack)]
    if kind == _DSA:  # keys of its index, in rows of a page each
        found += [_buffer(pool, at, each, layers, 1) for at, each in enumerate(pool.index_k_with_scale_buffer)]
    return _pool(name, page_tokens, kind, found)


def _states(requests: Any, start: int) -> DevicePool:
    if (
        getattr(requests, "mamba_ckpt_pool", None) is not None
        or requests.short_conv_pool.enabled
        or requests.ngram_pool.enabled
        or requests.mamba_pool._slot_siblings
        or requests.mamba_v2p_table is not None
    ):
        raise ConfigError(f"Stepwell's linker does not know all of the state that this model keeps beside Mamba's: {_INSTEAD}")
    cache = requests.mamba_pool.mamba_cache
    layers = {at: layer - start for layer, at in requests.mamba_map.items()}
    found = [
        _buffer(requests.mamba_pool, at, tensor[at], layers, 1)
        for tensor in (cache.temporal, *cache.conv)
        if tensor.numel()
        for at in range(tensor.shape[0])
    ]
    return _pool(MAMBA, 1, type(requests.mamba_pool).__name__, found)


def _pool(name: str, page_slots: int, kind: str, found: Sequence[tuple[Buffer, str]]) -> DevicePool:
    meaning = f"{kind} {page_slots} {[text for _, text in found]}"
    return DevicePool(
        name=name, page_slots=page_slots, buffers=tuple(buffer for buffer, _ in found), pool_class=kind, meaning=meaning
    )


def _buffer(pool: Any, at: int, buffer: Any, layers: Mapping[int, int] | None, rows: int) -> tuple[Buffer, str]:
    """A buffer with so many rows to a page, and what its bytes mean."""
    if not isinstance(buffer, torch.Tensor) or not buffer.is_contiguous():
        raise ConfigError(f"{type(pool).__name__} keeps a layer in another way than Stepwell's linker knows: {_INSTEAD}")
    whole = buffer.shape[0] // rows * rows
    pages = buffer[:whole].view(torch.uint8).reshape(whole // rows, -1)
    assert pages.data_ptr() == buffer.data_ptr(), "a copy of the pool's memory"
    layer = at if layers is None else layers[at]
    logical = getattr(pool, "dtype", buffer.dtype)  # 8-bit floats are kept as plain bytes
    return Buffer(layer=layer, pages=pages), f"{layer} {buffer.dtype} {logical} {tuple(buffer.shape[1:])} {rows}"
