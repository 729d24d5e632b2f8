"""DeepSeek-V4: a short window in every layer, and rows compressed 4 or 128 to one beside it.

    layer       keeps besides its window
    sliding     nothing
    C4          one row and one index key per 4 tokens; groups overlap, so half of the last group stays open
    C128        one row per 128 tokens; groups do not overlap

A compressor in the middle of a group also keeps the tokens of that group. That is a `Point` with a period:
nothing at all at boundaries the period divides. Key and value are one row for all heads, so nothing is sharded.
Yields states; builds no ModelSpec.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from stepwell.base.errors import SpecError
from stepwell.base.spec.families.dtypes import WIDTH_BYTES, Dtypes
from stepwell.base.spec.families.fields import Fields
from stepwell.base.spec.model import StateSpec
from stepwell.base.spec.shapes import Point, Prefix, Shape, Window

_SLIDING, _SPARSE, _HEAVY = "sliding_attention", "compressed_sparse_attention", "heavily_compressed_attention"
_BY_RATIO: dict[str | int, str] = {0: _SLIDING, 4: _SPARSE, 128: _HEAVY}
_BY_NAME: dict[str | int, str] = {name: name for name in (_SLIDING, _SPARSE, _HEAVY)}
_GATE_WIDTH_BYTES = WIDTH_BYTES["fp32"]  # gates of the overlap already carry their bias, and keep its precision


@dataclass(frozen=True, slots=True, kw_only=True)
class _Widths:
    row: int
    rope: int
    index: int


def compressed_states(config: Fields, dtypes: Dtypes) -> Iterator[StateSpec]:
    """All states of a DeepSeek-V4 model, in the order window, C4, C128."""
    kinds = _kinds(config)
    dim = config.size("head_dim")
    rope = config.size("qk_rope_head_dim", min(64, dim), most=dim)
    widths = _Widths(row=dim, rope=rope, index=config.size("index_head_dim", 128))
    rates = config.section("compress_rates")
    window = Window(tokens=config.size("sliding_window", 128))
    yield _state("swa", window, len(kinds), dtypes.shared_row_bytes(dim, rope), dtypes.kv)
    if layers := kinds.count(_SPARSE):
        yield from _overlapping(rates.size(_SPARSE, 4, least=2), layers, widths, dtypes)
    if layers := kinds.count(_HEAVY):
        yield from _separate(rates.size(_HEAVY, 128, least=2), layers, widths, dtypes)


def _overlapping(ratio: int, layers: int, widths: _Widths, dtypes: Dtypes) -> Iterator[StateSpec]:
    """C4: a group mixes half of its own channels with the other half of the group before, for rows and for index keys."""
    name = f"c{ratio}"
    channels = widths.row + widths.index
    yield _state(name, Prefix(ratio=ratio), layers, dtypes.shared_row_bytes(widths.row, widths.rope), dtypes.kv)
    yield _state(f"{name}_index", Prefix(ratio=ratio), layers, dtypes.index_row_bytes(widths.index), dtypes.kv)
    overlap = ratio * channels * (dtypes.model_width + _GATE_WIDTH_BYTES)
    yield _state(f"{name}_overlap", Point(), layers, overlap, dtypes.model if dtypes.model == "fp32" else f"{dtypes.model}+fp32")
    # both halves of every open token, values and gates
    yield _state(f"{name}_buffer", Point(period=ratio), layers, 2 * 2 * channels * dtypes.model_width, dtypes.model)


def _separate(ratio: int, layers: int, widths: _Widths, dtypes: Dtypes) -> Iterator[StateSpec]:
    """C128: a group stands alone, so only an unfinished one leaves anything open."""
    name = f"c{ratio}"
    yield _state(name, Prefix(ratio=ratio), layers, dtypes.shared_row_bytes(widths.row, widths.rope), dtypes.kv)
    yield _state(f"{name}_buffer", Point(period=ratio), layers, 2 * widths.row * dtypes.model_width, dtypes.model)


def _kinds(config: Fields) -> list[str]:
    num_layers = config.num_layers()
    if config.has("compress_ratios"):  # one more entry may follow, for the draft layer
        return config.per_layer("compress_ratios", _BY_RATIO, num_layers=num_layers, longer=True)
    if config.has("layer_types"):
        return config.per_layer("layer_types", _BY_NAME, num_layers=num_layers)
    raise SpecError("config field compress_ratios is missing; it must list 0, 4 or 128 for each layer")


def _state(name: str, shape: Shape, layers: int, row_bytes: int, dtype: str) -> StateSpec:
    return StateSpec(name=name, shape=shape, layers=layers, row_bytes=row_bytes, dtype=dtype)
