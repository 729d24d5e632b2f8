"""SGLang's device pools as pages of bytes: the buffers and layers of a page, the meaning of its bytes, and copies to and from the
host.

    page of "kv"   | k of layer 0 | k of layer 1 | v of layer 0 | v of layer 1 |     on the device: a piece in each buffer
                                                                                     on the host: one run, in this order

Reads the pools' attributes, and knows their classes by name. A pool whose pages cannot be restored completely is refused. Copies
are plain torch, on the calling thread; on a GPU they use a stream of their own and are complete when the call returns. Imports
nothing of SGLang.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch

from stepwell.base.errors import ConfigError

KV, SWA, MAMBA = "kv", "swa", "mamba"  # as SGLang calls them
_MHA, _MLA, _DSA = "MHATokenToKVPool", "MLATokenToKVPool", "DSATokenToKVPool"
_REPLICATED = (_MLA, _DSA)  # the same on every rank of tensor parallelism
_INSTEAD = "start SGLang without --enable-unified-cache-external-linker, with --enable-hierarchical-cache and StepwellHiCache"


@dataclass(frozen=True, slots=True, kw_only=True)
class Buffer:
    """One layer of a pool, or a part of it."""

    layer: int  # within this process, as SGLang counts it
    pages: torch.Tensor  # [page, byte], over the pool's own memory

    @property
    def page_bytes(self) -> int:
        return int(self.pages.shape[1])


@dataclass(frozen=True, slots=True, kw_only=True)
class DevicePool:
    """The buffers that share SGLang's indices, as pages."""

    name: str
    page_slots: int  # SGLang indices per page
    buffers: tuple[Buffer, ...]
    pool_class: str
    meaning: str  # two pools must agree in it before one may read the other's pages

    @property
    def page_bytes(self) -> int:
        return sum(buffer.page_bytes for buffer in self.buffers)

    @property
    def num_pages(self) -> int:
        return min(len(buffer.pages) for buffer in self.buffers)

    def page_ids(self, slots: torch.Tensor) -> torch.Tensor:
        """The pages of SGLang's indices; on a GPU this synchronizes. Raises ValueError if they are not whole pages."""
        starts = slots.detach().to(device="cpu", dtype=torch.int64).reshape(-1, self.page_slots)
        first = starts[:, :1]
        if bool((first % self.page_slots).any()) or not torch.equal(starts, first + torch.arange(self.page_slots)):
            raise ValueError(f"indices of pool {self.name!r} are not of whole pages of {self.page_slots}")
        ids = first[:, 0] // self.page_slots
        if len(ids) and not 0 <= int(ids.min()) <= int(ids.max()) < self.num_pages:
            raise ValueError(f"indices of pool {self.name!r} are outside of its {self.num_pages} pages")
        return ids


def device_pools(kvcache: Any, requests: Any, *, page_tokens: int, states: bool) -> list[DevicePool]:
    """The pools of a model; `states` if it has Mamba state. Raises ConfigError for pools that cannot be resumed exactly."""
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
    """Whether all ranks of tensor parallelism hold the same keys and values."""
    return pools[0].pool_class in _REPLICATED


def num_layers(pools: Sequence[DevicePool]) -> int:
    return 1 + max(buffer.layer for pool in pools for buffer in pool.buffers)


def _attention(name: str, pool: Any, layers: Mapping[int, int] | None, page_tokens: int) -> DevicePool:
    """`layers` maps buffers to layers; None if they are in order."""
    kind = type(pool).__name__
    if kind == _MHA:
        if pool.k_scale_buffer is not None or getattr(pool, "native_k_scale_buffer", None) is not None:
            raise ConfigError(f"Stepwell's linker does not support the scales of a quantized {kind}: {_INSTEAD}")
        stacks = [pool.k_buffer, pool.v_buffer]
    elif kind in _REPLICATED:
        stacks = [pool.kv_buffer]
    else:
        raise ConfigError(f"Stepwell's linker does not support pools of class {kind}: {_INSTEAD}")
    found = [_buffer(pool, at, each, layers, page_tokens) for stack in stacks for at, each in enumerate(stack)]
    if kind == _DSA:  # index keys, one row per page
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
        raise ConfigError(f"Stepwell's linker does not support state that this model has in addition to Mamba's: {_INSTEAD}")
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
    """A buffer with `rows` rows per page, and the meaning of its bytes."""
    if not isinstance(buffer, torch.Tensor) or not buffer.is_contiguous():
        raise ConfigError(f"{type(pool).__name__} has a layer layout that Stepwell's linker does not support: {_INSTEAD}")
    whole = buffer.shape[0] // rows * rows
    pages = buffer[:whole].view(torch.uint8).reshape(whole // rows, -1)
    assert pages.data_ptr() == buffer.data_ptr(), "a copy of the pool's memory"
    layer = at if layers is None else layers[at]
    logical = getattr(pool, "dtype", buffer.dtype)  # 8-bit floats are stored as bytes
    return Buffer(layer=layer, pages=pages), f"{layer} {buffer.dtype} {logical} {tuple(buffer.shape[1:])} {rows}"


Barrier = Callable[[], None]


class DeviceCopies:
    """Copies of one device. One object per thread."""

    def __init__(self, device: torch.device) -> None:
        self._stream: Any = torch.cuda.Stream(device) if device.type == "cuda" else None

    def to_host(self, pool: DevicePool, ids: torch.Tensor, rows: torch.Tensor, at: Sequence[int]) -> None:
        """Copies device pages `ids` to the rows `at`."""
        places, start = torch.tensor(at, dtype=torch.int64), 0
        with self._running():
            for buffer in pool.buffers:
                pages = buffer.pages.index_select(0, ids.to(buffer.pages.device))
                rows[places, start : start + buffer.page_bytes] = pages.to("cpu")
                start += buffer.page_bytes

    def to_device(self, pool: DevicePool, layer: int, ids: torch.Tensor, rows: torch.Tensor, at: Sequence[int]) -> None:
        """Copies one layer's part of the rows `at` to device pages `ids`."""
        places, start = torch.tensor(at, dtype=torch.int64), 0
        with self._running():
            for buffer in pool.buffers:
                if buffer.layer == layer:
                    pages = rows[places, start : start + buffer.page_bytes]
                    device = buffer.pages.device
                    buffer.pages.index_copy_(0, ids.to(device), pages.to(device))
                start += buffer.page_bytes

    @contextmanager
    def _running(self) -> Iterator[None]:
        with torch.inference_mode():
            if self._stream is None:
                yield
                return
            with torch.cuda.stream(self._stream):
                yield
            self._stream.synchronize()
