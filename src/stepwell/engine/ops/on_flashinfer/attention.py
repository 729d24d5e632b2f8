"""Attention by FlashInfer, over the pages where they lie: nothing is gathered, nothing is masked by hand.

    singles    its decode kernel, all of them at once
    runs       its prefill kernel, all of them at once; on Hopper the one made for it

The pages of a pass are planned once for all layers, and in a captured step again only when a request gets another page. Pieces of
a pass that are computed one after the other have wrappers of their own, up to `MOST_PIECES`. What FlashInfer does not have (odd
widths, eight-bit rows, fp32, rows that may be only on the host) goes to the reference.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from stepwell.engine.ops.guarded import NoKernel
from stepwell.engine.ops.on_flashinfer.modules import attention_module
from stepwell.engine.passes.numbers import Send, copy, on_device, put
from stepwell.engine.passes.paging import Look, Paging
from stepwell.engine.passes.rows import PLAIN, Rows

WORKSPACE_BYTES = 256 << 20  # for partial results of contexts that are cut
MOST_PIECES = 8  # of a pass that are planned once for all layers: a wrapper has 8 MiB of its own on the device
RECORDED_PAGES = 1 << 18  # of all requests of a recorded step
ROW_ALIGNMENT_BYTES = 16
_WIDTHS = (64, 128, 256)
_SINK_WIDTH = 64  # the library names its compiled kernel without the width: only one can be used in a process
_HOPPER = (9, 0)

Ints = npt.NDArray[np.int32]


@dataclass(frozen=True, slots=True)
class Heads:
    """All that a kernel must know of a layer, except its pages."""

    queries: int
    keys: int
    width: int
    scale: float
    cap: float | None
    sinks: bool
    dtype: torch.dtype


@dataclass(frozen=True, slots=True, eq=False)
class PageLists:
    """The pages of some segments back to back: segment s has `indices[starts[s] : starts[s + 1]]`, `last[s]` rows of the last."""

    queries: Ints  # where each segment's tokens begin
    starts: Ints
    indices: Ints
    last: Ints

    @classmethod
    def of(cls, looks: Sequence[Look], page_tokens: int) -> PageLists:
        counts = np.fromiter((len(look.pages) for look in looks), np.int32, len(looks))
        ends = np.fromiter((look.end - look.first for look in looks), np.int32, len(looks))
        lengths = np.fromiter((look.stop - look.start for look in looks), np.int32, len(looks))
        return cls(
            queries=_sums(lengths),
            starts=_sums(counts),
            indices=np.concatenate([look.pages for look in looks]).astype(np.int32, copy=False),
            last=ends - (counts - 1) * page_tokens,
        )


class FlashInferAttention:
    """`attend` for CUDA. Keeps one workspace, and the library's own buffers for each kind of layer."""

    def __init__(
        self, device: torch.device, send: Send = copy, *, need: Callable[[Sequence[str]], None] = lambda names: None
    ) -> None:  # fmt: skip
        """`need` raises NoKernel for modules of the library that passes shall not wait for."""
        import flashinfer

        self._library = flashinfer
        self._device = device
        self.send = send
        self._need = need
        self._hopper = torch.cuda.get_device_capability(device) == _HOPPER
        self._workspace = torch.zeros(WORKSPACE_BYTES, dtype=torch.uint8, device=device)
        self._kept: dict[tuple[Any, ...], Wrapper] = {}  # of passes that are not recorded, used again by every pass

    def __call__(
        self, query_NHD: torch.Tensor, rows: Rows, paging: Paging, *, heads: int, key_dim: int | None, scale: float,
        sinks_H: torch.Tensor | None = None, cap: float | None = None,
    ) -> torch.Tensor:  # fmt: skip
        width = self.check(query_NHD, rows, paging, heads=heads, key_dim=key_dim)
        if sinks_H is not None and (width != _SINK_WIDTH or cap is not None):
            raise NoKernel(f"sinks of heads of {width} channels")
        if rows.places is not None:
            raise NoKernel("rows that may be on the host")
        layer = Heads(query_NHD.shape[1], heads, width, scale, cap, sinks_H is not None, query_NHD.dtype)
        self.must_be_compiled(layer, paging)
        if layer not in paging.plans:
            paging.plans[layer] = self._plans(layer, paging)
        out_NHD = torch.empty_like(query_NHD, memory_format=torch.contiguous_format)
        for span, plan in paging.plans[layer]:
            plan.run(query_NHD[span], keys_and_values(rows, layer), out_NHD[span], sinks_H)
        return out_NHD

    def check(self, query_NHD: torch.Tensor, rows: Rows, paging: Paging, *, heads: int, key_dim: int | None) -> int:
        """Channels of a head. Raises NoKernel where the library would have none, were all rows where pages say."""
        stored = rows.stored_PRE
        if rows.format is not PLAIN or stored.dtype != query_NHD.dtype:
            raise NoKernel(f"rows in {str(stored.dtype).removeprefix('torch.')}")
        if key_dim not in _WIDTHS or stored.shape[2] != 2 * heads * key_dim:
            raise NoKernel(f"heads of {query_NHD.shape[2]} channels")
        if paging.sight.first_seen:
            raise NoKernel("contexts that begin behind their first token")
        if not _aligned(stored):
            raise NoKernel(f"rows that do not begin at multiples of {ROW_ALIGNMENT_BYTES} bytes")
        return key_dim

    def must_be_compiled(self, layer: Heads, paging: Paging) -> None:
        """Raises NoKernel while the modules of a layer are compiled in the background. Both of them: a pass that begins with one
        kernel ends with it, whatever it holds.
        """
        if not layer.sinks:
            window, cap = paging.sight.window is not None, layer.cap is not None
            backends = ("fa3", "fa2") if self._hopper else ("fa2",)
            self._need([attention_module(each, layer.width, layer.dtype, window=window, cap=cap) for each in backends])

    def planned(self, layer: Heads, paging: Paging, page_tokens: int, *, decode: bool, count: int) -> Planned:
        """Something to plan for `count` segments, with pages of `page_tokens` rows. Passes outside CUDA graphs reuse wrappers."""
        sight = paging.sight
        window = -1 if sight.window is None else sight.window - 1  # the library does not count a token itself
        if paging.fixed:
            made = Wrapper(self._wrapper(layer, window, decode, count))
            return Planned(made, layer, window, page_tokens, self.send, recorded=True)
        key = layer, window, decode, page_tokens, next(paging.plan_numbers) % MOST_PIECES
        if key not in self._kept:
            self._kept[key] = Wrapper(self._wrapper(layer, window, decode, None))
        return Planned(self._kept[key], layer, window, page_tokens, self.send)

    # ---- inside -----------------------------------------------------------------------------------

    def _plans(self, layer: Heads, paging: Paging) -> list[tuple[slice, Planned]]:
        """One for singles, one for runs."""
        made, singles = [], paging.num_singles
        for looks, decode in ((paging.looks[:singles], True), (paging.looks[singles:], False)):
            if looks:
                plan = self.planned(layer, paging, paging.sight.page_tokens, decode=decode, count=len(looks))
                plan.load(looks)
                made.append((slice(looks[0].start, looks[-1].stop), plan))
        return made

    def _wrapper(self, layer: Heads, window: int, decode: bool, recorded: int | None) -> Any:
        buffers: dict[str, Any] = {}
        if recorded is not None:

            def ints(size: int) -> torch.Tensor:
                return torch.zeros(size, dtype=torch.int32, device=self._device)

            buffers = {
                "use_cuda_graph": True, "qo_indptr_buf": ints(recorded + 1), "paged_kv_indptr_buf": ints(recorded + 1),
                "paged_kv_indices_buf": ints(RECORDED_PAGES), "paged_kv_last_page_len_buf": ints(recorded),
            }  # fmt: skip
        backend = "fa3" if self._hopper and not decode and not layer.sinks else "fa2"
        if layer.sinks:
            return self._library.attention.BatchAttentionWithAttentionSinkWrapper(
                self._workspace, "NHD", backend=backend, q_data_type=layer.dtype, kv_data_type=layer.dtype,
                head_dim_qk=layer.width, head_dim_vo=layer.width, window_left=window, **buffers,
            )  # fmt: skip
        return self._library.BatchPrefillWithPagedKVCacheWrapper(self._workspace, "NHD", backend=backend, **buffers)


@dataclass(slots=True, eq=False)
class Wrapper:
    """One of the library's wrappers, and the lists that it was last planned for."""

    made: Any
    holds: PageLists | None = None
    uploaded: torch.cuda.Event | None = None


class Planned:
    """What some segments look at, and the wrapper that is planned for it."""

    def __init__(
        self, wrapper: Wrapper, layer: Heads, window: int, page_tokens: int, send: Send, *, recorded: bool = False
    ) -> None:
        self._wrapper = wrapper
        self._send = send
        self._layer = layer
        self._window = window
        self._page_tokens = page_tokens
        self._recorded = recorded
        self._lists: PageLists | None = None

    def load(self, looks: Sequence[Look]) -> None:
        """Plans for these segments. In a recorded step that is the whole change from one replay to the next."""
        lists = PageLists.of(looks, self._page_tokens)
        if self._recorded and self._lists is not None and _same_pages(self._lists, lists):
            put(self._wrapper.made._paged_kv_last_page_len_buf, lists.last, self._send)
            self._wrapper.holds = lists
        else:
            self._plan(lists)
        self._lists = lists

    def run(
        self, query_NHD: torch.Tensor, pages: tuple[torch.Tensor, torch.Tensor], out_NHD: torch.Tensor,
        sinks_H: torch.Tensor | None,
    ) -> None:  # fmt: skip
        assert self._lists is not None, "it is loaded before it runs"
        if self._wrapper.holds is not self._lists:  # another piece of the pass has used the wrapper meanwhile
            self._plan(self._lists)
        if sinks_H is None:
            self._wrapper.made.run(query_NHD, pages, out=out_NHD)
        else:
            self._wrapper.made.run(query_NHD, pages, sinks_H.float(), self._layer.scale, out=out_NHD)

    def _plan(self, lists: PageLists) -> None:
        """The library copies from its own pinned buffer: nothing may be written there before the last copy is done."""
        wrapper, library = self._wrapper, self._wrapper.made
        if wrapper.uploaded is not None:
            wrapper.uploaded.synchronize()
        layer, indices = self._layer, on_device(lists.indices, library.device, self._send)
        queries, starts, last = (torch.from_numpy(each) for each in (lists.queries, lists.starts, lists.last))
        library.plan(
            queries, starts, indices, last, layer.queries, layer.keys, layer.width, self._page_tokens, causal=True,
            sm_scale=layer.scale, window_left=self._window, logits_soft_cap=layer.cap, q_data_type=layer.dtype,
            kv_data_type=layer.dtype,
        )  # fmt: skip
        wrapper.holds, wrapper.uploaded = lists, torch.cuda.Event()
        wrapper.uploaded.record(torch.cuda.current_stream(library.device))


def keys_and_values(rows: Rows, layer: Heads) -> tuple[torch.Tensor, torch.Tensor]:
    """Keys and values of all pages, `[P, R, K, D]` each."""
    row_PRKX = rows.stored_PRE.unflatten(2, (layer.keys, 2 * layer.width))
    return row_PRKX[..., : layer.width], row_PRKX[..., layer.width :]


def _aligned(stored_PRE: torch.Tensor) -> bool:
    """Whether every row begins where 16 bytes can be read at once."""
    strides = (stride * stored_PRE.element_size() for stride in stored_PRE.stride()[:2])
    return not any(each % ROW_ALIGNMENT_BYTES for each in (stored_PRE.data_ptr(), *strides))


def _same_pages(one: PageLists, other: PageLists) -> bool:
    return np.array_equal(one.starts, other.starts) and np.array_equal(one.indices, other.indices)


def _sums(counts: Ints) -> Ints:
    return np.concatenate([np.zeros(1, np.int32), np.cumsum(counts, dtype=np.int32)])
