"""The tensors of a model's cache object, the spec that follows from them, and packing and unpacking of pages.

The layout is read from a cache that the model has filled, so no model family is known by name. An unknown layer class is refused,
because it may have state beyond its tensors. Decides nothing.

Axes of tensors: B prompts of a batch, N pages, L layers, R rows of a page, T tokens; rows have axes of their own.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from math import prod
from typing import Any

import torch

from stepwell.base.errors import ConfigError
from stepwell.base.ids import Kind
from stepwell.base.spec import ModelSpec, Part, Point, Prefix, StateSpec, Window

try:
    from transformers.cache_utils import (
        DynamicIndexedLayer,
        DynamicLayer,
        DynamicSlidingWindowLayer,
        LinearAttentionAndFullAttentionLayer,
        LinearAttentionAndSlidingWindowAttentionLayer,
        LinearAttentionLayer,
    )
except ImportError as error:
    raise ImportError(f"{error}: the prompt cache needs the cache layers of Transformers 5.22: install that version") from None

ROW_ORDER = "transformers cache layers, 1"  # change the number when rows are packed differently
HEADS_FIRST = 2  # the axis of tokens in keys and values, `[B, heads, T, width]`,
TOKENS_FIRST = 1  # and in keys of an indexer, `[B, T, width]`

_KNOWN = (
    DynamicLayer, DynamicSlidingWindowLayer, DynamicIndexedLayer, LinearAttentionLayer, LinearAttentionAndFullAttentionLayer,
    LinearAttentionAndSlidingWindowAttentionLayer,
)  # fmt: skip


@dataclass(frozen=True, slots=True, kw_only=True)
class CacheTensor:
    """One tensor of one layer's cache: its place and the format of its rows."""

    layer: int
    field: str  # attribute of the layer
    index: int | None  # within the field, for recurrent layers, which may have several states
    token_axis: int | None  # None for state of all tokens together
    window: int | None  # number of last tokens kept; None for all
    row_shape: tuple[int, ...]
    dtype: torch.dtype
    device: torch.device

    def read(self, past: Any) -> torch.Tensor:
        """A view as `[B, T, row]`, or `[B, row]` without tokens."""
        kept: torch.Tensor = getattr(past.layers[self.layer], self.field)
        if self.index is not None:
            kept = kept[self.index]
        return kept if self.token_axis is None else kept.movedim(self.token_axis, 1)

    def write(self, past: Any, rows: torch.Tensor, *, tokens: int) -> None:
        """Writes rows in the format of `read` into an empty layer, which then covers `tokens`."""
        layer = past.layers[self.layer]
        value = rows.to(self.device)
        if self.token_axis is None:
            assert self.index is not None, self
            layer.lazy_initialization(**{self.field: value}, state_idx=self.index)
            getattr(layer, self.field)[self.index].copy_(value)
            if self.field == "conv_states":
                layer.has_previous_state[self.index] = True  # as an update would
            return
        value = value.movedim(1, self.token_axis).contiguous()
        if self.field == "indexer_keys":
            layer.lazy_initialization_indexer(value)
        elif not layer.is_initialized:
            layer.lazy_initialization(value, value)
        setattr(layer, self.field, value)
        if self.window is not None:
            layer.cumulative_length = tokens

    @property
    def shape(self) -> Prefix | Window | Point:
        if self.token_axis is None:
            return Point()
        return Prefix() if self.window is None else Window(tokens=self.window)


def tensors_of(past: Any) -> tuple[CacheTensor, ...]:
    """All tensors in a model's cache, layer by layer. Raises ConfigError for unknown layers."""
    found = [tensor for at, layer in enumerate(past.layers) for tensor in _tensors_of_layer(at, layer)]
    if not found:
        raise ConfigError("this model does not fill its cache object, so there is nothing to resume from")
    return tuple(found)


def _tensors_of_layer(at: int, layer: Any) -> list[CacheTensor]:
    if type(layer) not in _KNOWN:
        raise ConfigError(
            f"layer {at} of this model keeps a {type(layer).__name__}, which the prompt cache does not know: "
            "run this model without it"
        )
    found = []
    if isinstance(layer, LinearAttentionLayer):
        found += [
            _tensor(at, field, index, kept, None, None)
            for field in ("conv_states", "recurrent_states")
            for index, kept in getattr(layer, field).items()
            if kept is not None
        ]
    if isinstance(layer, DynamicLayer) and layer.is_initialized and layer.keys is not None:
        window = _window_of(at, layer)
        kept = [(field, getattr(layer, field)) for field in ("keys", "values")]
        found += [_tensor(at, field, None, each, HEADS_FIRST, window) for field, each in kept if each.numel()]
    if isinstance(layer, DynamicIndexedLayer) and layer.indexer_keys is not None:
        if getattr(layer, "indexer_position_ids", None) is not None:
            raise ConfigError(f"layer {at} of this model keeps positions for its index: run this model without a prompt cache")
        found.append(_tensor(at, "indexer_keys", None, layer.indexer_keys, TOKENS_FIRST, None))
    return found


def _window_of(at: int, layer: Any) -> int | None:
    if not isinstance(layer, DynamicSlidingWindowLayer):
        return None
    if layer.sliding_window < 2:
        raise ConfigError(f"layer {at} of this model has a window of {layer.sliding_window} token(s), which cannot be cached")
    return int(layer.sliding_window) - 1  # the computed token is the last of the window


def _tensor(at: int, field: str, index: int | None, kept: torch.Tensor, axis: int | None, window: int | None) -> CacheTensor:
    row = [size for number, size in enumerate(kept.shape) if number not in (0, axis)]
    return CacheTensor(
        layer=at, field=field, index=index, token_axis=axis, window=window, row_shape=tuple(row), dtype=kept.dtype,
        device=kept.device,
    )  # fmt: skip


class PastLayout:
    """A model's cache tensors as a spec: equal tensors of several layers are one state."""

    def __init__(self, tensors: Sequence[CacheTensor], *, name: str, page_tokens: int) -> None:
        self.tensors = tuple(tensors)
        groups: dict[tuple[object, ...], list[CacheTensor]] = {}
        for each in tensors:
            groups.setdefault((each.field, each.index, each.shape, each.row_shape, each.dtype), []).append(each)
        self._members = {_state_name(number, group[0]): tuple(group) for number, group in enumerate(groups.values())}
        states = tuple(_state(title, members) for title, members in self._members.items())
        self.spec = ModelSpec(name=name, states=states, page_tokens=page_tokens, row_order=ROW_ORDER)

    # ---- from a cache to pages ----------------------------------------------------------------------

    def pack_prefix(self, past: Any, pages: range) -> torch.Tensor:
        """The prefix pages of all prompts, `[B, N, byte]`."""
        size = self.spec.page_tokens
        return self._pack(past, Kind.PREFIX, len(pages), lambda rows: rows[:, pages.start * size : pages.stop * size])

    def pack_windows(self, past: Any, boundary: int) -> torch.Tensor:
        """The window pages of a checkpoint at `boundary`, the end of the cache. Tokens older than the window are 0."""
        span = self.spec.window_span(boundary)
        tokens = len(span) * self.spec.window_page_tokens
        return self._pack(past, Kind.WINDOW, len(span), lambda rows: _last(rows, tokens))

    def pack_points(self, past: Any) -> torch.Tensor:
        return self._pack(past, Kind.POINT, 1, lambda rows: rows.unsqueeze(1))

    def pack_checkpoint(self, past: Any, boundary: int) -> dict[Kind, torch.Tensor]:
        """All pages of a checkpoint at `boundary`, the end of the cache."""
        packed = {Kind.WINDOW: self.pack_windows(past, boundary), Kind.POINT: self.pack_points(past)}
        return {kind: pages for kind, pages in packed.items() if self.spec.parts(kind)}

    def _pack(self, past: Any, kind: Kind, pages: int, cut: Callable[[torch.Tensor], torch.Tensor]) -> torch.Tensor:
        prompts, device = len(self.tensors[0].read(past)), self.tensors[0].device
        packed_BNX = torch.empty(prompts, pages, self.spec.object_bytes(kind), dtype=torch.uint8, device=device)
        for part in self.spec.parts(kind):
            rows = [cut(each.read(past)).to(device) for each in self._members[part.state]]
            rows_BNLR = torch.stack([each.reshape(prompts, pages, part.rows, *each.shape[2:]) for each in rows], 2)
            bytes_BNX = rows_BNLR.view(torch.uint8).reshape(prompts, pages, part.size_bytes)
            packed_BNX[:, :, part.offset : part.offset + part.size_bytes] = bytes_BNX
        return packed_BNX

    def empty_pages(self, prompts: int, boundary: int) -> dict[Kind, torch.Tensor]:
        """Uninitialized pages for resuming prompts at `boundary`, each kind `[B, N, byte]`."""
        spec, device = self.spec, self.tensors[0].device
        counts = {Kind.PREFIX: boundary // spec.page_tokens, Kind.WINDOW: len(spec.window_span(boundary)), Kind.POINT: 1}
        return {
            kind: torch.empty(prompts, count, spec.object_bytes(kind), dtype=torch.uint8, device=device)
            for kind, count in counts.items()
            if kind is Kind.PREFIX or spec.parts(kind)
        }

    # ---- from pages to a cache ----------------------------------------------------------------------

    def unpack(self, past: Any, boundary: int, packed: Mapping[Kind, torch.Tensor]) -> None:
        """Fills an empty cache from pages, each kind `[B, N, byte]`; it then covers `boundary` tokens."""
        for kind, bytes_BNX in packed.items():
            for part in self.spec.parts(kind):
                for at, tensor in enumerate(self._members[part.state]):
                    tensor.write(past, _rows(bytes_BNX, part, at, tensor, boundary), tokens=boundary)

    def repeat(self, past: Any, into: Any, times: int, *, tokens: int) -> None:
        """Fills an empty cache with each prompt of another one repeated `times` times."""
        for tensor in self.tensors:
            tensor.write(into, tensor.read(past).repeat_interleave(times, 0), tokens=tokens)


def _rows(bytes_BNX: torch.Tensor, part: Part, at: int, tensor: CacheTensor, boundary: int) -> torch.Tensor:
    """One layer of a part, as `CacheTensor.write` takes it."""
    start = part.offset + at * part.layer_stride
    mine = bytes_BNX[:, :, start : start + part.rows * part.row_bytes].contiguous().view(tensor.dtype)
    rows = mine.view(len(mine), -1, *tensor.row_shape)
    if tensor.token_axis is None:
        return rows[:, 0]
    return rows if tensor.window is None else _last(rows, min(tensor.window, boundary))


def _last(rows: torch.Tensor, tokens: int) -> torch.Tensor:
    """The last rows, with zeros before them where there are fewer."""
    missing = tokens - rows.shape[1]
    if missing <= 0:
        return rows[:, -missing:]
    return torch.cat([rows.new_zeros(len(rows), missing, *rows.shape[2:]), rows], 1)


def _state_name(number: int, tensor: CacheTensor) -> str:
    window = "" if tensor.window is None else f" of the last {tensor.window}"
    return f"{tensor.field.replace('_', ' ')}{window} #{number}"


def _state(name: str, members: Sequence[CacheTensor]) -> StateSpec:
    first = members[0]
    return StateSpec(
        name=name,
        shape=first.shape,
        layers=len(members),
        row_bytes=prod(first.row_shape) * first.dtype.itemsize,
        dtype=str(first.dtype).removeprefix("torch."),
    )
