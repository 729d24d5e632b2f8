"""What SGLang's HiCache needs a GPU for, in plain torch: copies between device and host, and registered memory.

Importing this makes SGLang importable with a CPU build of torch. `install` changes its modules in this process only.
"""

from __future__ import annotations

from typing import Any

from sglang_shim import declare_box_operators

_operators = declare_box_operators()

import sglang.srt.mem_cache.pool_host.base as host_base  # noqa: E402
import sglang.srt.mem_cache.pool_host.common as host_common  # noqa: E402
import sglang.srt.utils as sglang_utils  # noqa: E402
import sglang.srt.utils.common as sglang_common  # noqa: E402
import torch  # noqa: E402
from sglang.srt.mem_cache.pool_host import dsa, mamba, mha, mla  # noqa: E402


def to_host(src_ptrs: Any, dst_ptrs: Any, src_indices: torch.Tensor, dst_indices: torch.Tensor, page_size: int) -> None:
    """Device layers to host pages of [page, layer, token, ...]; the layers of one host buffer follow each other in `src_ptrs`."""
    layers = len(src_ptrs) // len(dst_ptrs)
    tokens, pages = src_indices.long(), dst_indices[::page_size].long() // page_size
    for part, host in enumerate(dst_ptrs):
        for layer in range(layers):
            rows = src_ptrs[part * layers + layer][tokens]
            host[pages, layer] = rows.reshape(len(pages), *host.shape[2:])


def to_device(
    src_ptrs: Any, dst_ptrs: Any, src_indices: torch.Tensor, dst_indices: torch.Tensor, layer_id: int, page_size: int
) -> None:
    pages, tokens = src_indices[::page_size].long() // page_size, dst_indices.long()
    for host, device in zip(src_ptrs, dst_ptrs, strict=True):
        device[tokens] = host[pages, layer_id].reshape(len(tokens), *device.shape[1:])


def install() -> None:
    """Takes the place of what needs a GPU. Before any pool is made."""
    sglang_common.get_device = sglang_utils.get_device = lambda device_id=None: "cpu"
    host_common._cuda_host_register = lambda *_, **__: None
    host_base.HICACHE_HOST_MEMORY_RESERVE_BYTES = 1 << 28
    for module in (mha, mla, dsa, mamba):
        module.transfer_kv_all_layer_direct_lf_pf = to_host
        module.transfer_kv_per_layer_direct_pf_lf = to_device
    for pool in (host_base.HostKVCache, mamba.MambaPoolHost):
        pool.__init__ = _unpinned(pool.__init__)


def _unpinned(make: Any) -> Any:
    """SGLang's files ask for buffers that are pinned like the pool, and there is nothing to pin them with."""

    def init(self: Any, *args: Any, **kwargs: Any) -> None:
        make(self, *args, **kwargs)
        self.pin_memory = False

    return init
