"""Attention over pages, in plain torch: runs everywhere, and is the reference of faster kernels.

A row of `kv` holds one token's keys and values, head by head: `[head][key | value]`; or it is key and value in one, as a
latent is. Axes: N tokens, H query heads, K key heads, G query heads per key head, D width of a key, V of a value, B singles,
T tokens of context.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Protocol

import torch
from torch.nn.functional import scaled_dot_product_attention

from stepwell.engine.passes.paging import Paging, Run, Singles
from stepwell.engine.passes.rows import Rows

READ_AT_ONCE_BYTES = 256 << 20  # of rows that may be on the host, for single tokens: copies of them are in no budget


class Attend(Protocol):
    def __call__(
        self, query_NHD: torch.Tensor, rows: Rows, paging: Paging, *, heads: int, key_dim: int | None, scale: float,
        sinks_H: torch.Tensor | None = None, cap: float | None = None,
    ) -> torch.Tensor: ...  # fmt: skip


class AttendLatent(Protocol):
    def __call__(self, query_NHC: torch.Tensor, rows: Rows, paging: Paging, *, rank: int, scale: float) -> torch.Tensor: ...


def attend(
    query_NHD: torch.Tensor, rows: Rows, paging: Paging, *, heads: int, key_dim: int | None, scale: float,
    sinks_H: torch.Tensor | None = None, cap: float | None = None,
) -> torch.Tensor:  # fmt: skip
    """The attention of each query over its pages: `[N, H, V]`.

    `key_dim` None: the whole row is its key, and its value too. `sinks_H` are scores that take weight and have no value. `cap`
    bounds the other scores, by tanh.
    """
    parts = [
        attend_part(
            query_NHD[part.start : part.stop], rows, part, heads=heads, key_dim=key_dim, scale=scale, sinks_H=sinks_H, cap=cap
        )
        for part in paging.parts
    ]
    return parts[0] if len(parts) == 1 else torch.cat(parts)


def attend_latent(query_NHC: torch.Tensor, rows: Rows, paging: Paging, *, rank: int, scale: float) -> torch.Tensor:
    """The same over latents, the first `rank` channels of rows that are key and value in one: `[N, H, R]`."""
    return attend(query_NHC, rows, paging, heads=1, key_dim=None, scale=scale)[..., :rank]


def attend_part(
    query_NHD: torch.Tensor, rows: Rows, part: Singles | Run, *, heads: int, key_dim: int | None, scale: float,
    sinks_H: torch.Tensor | None = None, cap: float | None = None,
) -> torch.Tensor:  # fmt: skip
    """The same for one part of a batch, given its own queries."""
    if isinstance(part, Singles):
        query_BKGD, seen = query_NHD.unflatten(1, (heads, -1)), []
        for some in _blocks(rows, part):
            key, value = _gather(rows, part.table_BP[some], heads, key_dim)
            seen.append(weigh(query_BKGD[some], key, value, part.mask_BT[some, None, None, :], scale, sinks_H, cap).flatten(1, 2))
        return seen[0] if len(seen) == 1 else torch.cat(seen)
    key, value = _gather(rows, part.pages_P[None], heads, key_dim)
    query_KGND = query_NHD.unflatten(1, (heads, -1)).permute(1, 2, 0, 3)
    if key_dim is None and sinks_H is None:
        return _broadcast_kv_head(query_KGND[0], key, value, part, scale, cap)
    group, length = query_KGND.shape[1:3]
    sinks = None if sinks_H is None else sinks_H.repeat_interleave(length)
    out_KXV = weigh(query_KGND.flatten(1, 2)[None], key, value, part.mask_for(group), scale, sinks, cap)[0]
    out_NHV: torch.Tensor = out_KXV.unflatten(1, (group, length)).permute(2, 0, 1, 3).flatten(1, 2)
    return out_NHV


def _blocks(rows: Rows, singles: Singles) -> Iterator[slice]:
    """Singles that are computed together: all of them, unless their rows must be copied from the host."""
    count, pages = singles.table_BP.shape
    page_bytes = rows.stored_PRE.shape[1] * rows.stored_PRE.shape[2] * rows.stored_PRE.element_size()
    size = count if rows.places is None else max(READ_AT_ONCE_BYTES // (pages * page_bytes), 1)
    yield from (slice(start, start + size) for start in range(0, count, size))


def _broadcast_kv_head(
    query_HND: torch.Tensor, key_11TD: torch.Tensor, value_11TV: torch.Tensor, run: Run, scale: float, cap: float | None
) -> torch.Tensor:
    """MQA: expands the one KV head instead of tiling the mask per query head. Latents have a hundred query heads.

    Heads are the batch. As heads over keys with a stride of 0 they would meet a bug of torch's memory-efficient kernel on CUDA:
    if a last block has a single query (65, 97, 129 of them), its output is another query's.
    """
    key_H1TD, value_H1TV = (each.expand(len(query_HND), 1, -1, -1) for each in (key_11TD, value_11TV))
    return weigh(query_HND[:, None], key_H1TD, value_H1TV, run.mask_NT, scale, cap=cap)[:, 0].transpose(0, 1)


def _gather(rows: Rows, table_BP: torch.Tensor, heads: int, key_dim: int | None) -> tuple[torch.Tensor, torch.Tensor]:
    """Keys and values `[B, K, T, .]` of whole pages, in their order."""
    rows_BKTE = rows.whole(table_BP).flatten(1, 2).unflatten(2, (heads, -1)).transpose(1, 2)
    return rows_BKTE[..., :key_dim], rows_BKTE if key_dim is None else rows_BKTE[..., key_dim:]


def weigh(
    query_BKXD: torch.Tensor, key_BKTD: torch.Tensor, value_BKTV: torch.Tensor, mask: torch.Tensor, scale: float,
    sinks_H: torch.Tensor | None = None, cap: float | None = None,
) -> torch.Tensor:  # fmt: skip
    """Softmax attention of X queries a key head. `sinks_H` has one score for each of the K * X queries."""
    if sinks_H is None and cap is None:
        return scaled_dot_product_attention(query_BKXD, key_BKTD, value_BKTV, attn_mask=mask, scale=scale)
    scores_BKXT = query_BKXD @ key_BKTD.mT * scale
    scores_BKXT = (scores_BKXT if cap is None else torch.tanh(scores_BKXT / cap) * cap) + mask
    if sinks_H is None:
        return scores_BKXT.softmax(dim=-1, dtype=torch.float32).to(value_BKTV.dtype) @ value_BKTV
    sinks_BKX1 = sinks_H.view(1, query_BKXD.shape[1], -1, 1).expand(query_BKXD.shape[0], -1, -1, 1)
    weights = torch.cat([scores_BKXT, sinks_BKX1], dim=-1).softmax(dim=-1, dtype=torch.float32)
    return weights[..., :-1].to(value_BKTV.dtype) @ value_BKTV
