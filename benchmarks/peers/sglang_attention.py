"""SGLang's attention on CPUs without its own kernels (`torch_native`), for new tokens only.

As it comes, `torch_native` attends for all tokens of a prompt again, those that are cached too, and throws that away: a resumed
prompt would cost almost what computing it costs, whatever brought it back. Kernels of GPUs do not. Changes this process only.
"""

from __future__ import annotations

from typing import Any

import torch
from sglang.srt.layers.attention.torch_native_backend import TorchNativeAttnBackend

CHUNK = 512  # queries at a time, to bound the mask


def extend(
    self: Any, query_THD: torch.Tensor, output_THD: torch.Tensor, k_cache: torch.Tensor, v_cache: torch.Tensor,
    req_to_token: torch.Tensor, req_pool_indices: torch.Tensor, seq_lens: torch.Tensor, extend_prefix_lens: torch.Tensor,
    extend_seq_lens: torch.Tensor, encoder_lens: Any = None, scaling: float | None = None, enable_gqa: bool = False,
    causal: bool = False, is_cross_attn: bool = False, sliding_window_size: int | None = None,
) -> torch.Tensor:  # fmt: skip
    assert encoder_lens is None and not is_cross_attn and causal
    first = 0
    window = sliding_window_size if sliding_window_size is not None and sliding_window_size > 0 else None
    lengths = zip(
        req_pool_indices.tolist(), seq_lens.tolist(), extend_prefix_lens.tolist(), extend_seq_lens.tolist(), strict=True
    )
    for request, total, prefix, new in lengths:
        rows = req_to_token[request, :total]
        for start in range(0, new, CHUNK):
            end = min(new, start + CHUNK)
            places_Q1 = torch.arange(prefix + start, prefix + end)[:, None]
            seen = prefix + end
            columns_K = torch.arange(seen)
            mask_QK = columns_K <= places_Q1
            if window is not None:
                mask_QK &= columns_K >= places_Q1 - window
            attended_1HQD = torch.nn.functional.scaled_dot_product_attention(
                query_THD[first + start : first + end].movedim(0, 1)[None],
                k_cache[rows[:seen]].movedim(0, 1)[None], v_cache[rows[:seen]].movedim(0, 1)[None],
                attn_mask=mask_QK, scale=scaling, enable_gqa=enable_gqa,
            )  # fmt: skip
            output_THD[first + start : first + end] = attended_1HQD[0].movedim(1, 0)
        first += new
    return output_THD


def install() -> None:
    TorchNativeAttnBackend._run_sdpa_forward_extend = extend
