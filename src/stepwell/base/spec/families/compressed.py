"""DeepSeek-V4: a short window in every layer, and rows compressed 4 or 128 to one.

    layer       keeps, in addition to its window
    sliding     nothing
    C4          one row and one index key per 4 tokens; groups overlap, so half of the last group stays open
    C128        one row per 128 tokens; groups do not overlap

A compressor in the middle of a group also keeps the tokens of that group. That is a `Point` with a period:
nothing at all at boundaries the period divides. Key and value are one row for all heads, so nothing is sharded.
Says which layer keeps what, and yields states; builds no ModelSpec.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace

from stepwell.base.errors import SpecError
from stepwell.base.spec.families.dtypes import WIDTH_BYTES, Dtypes
from stepwell.base.spec.families.fields import Fields
from stepwell.base.spec.schedule import Schedule, count
from stepwell.base.spec.shapes import Point, Prefix, Shape, Window
from stepwell.base.spec.states import StateSpec

SLIDING, SPARSE, HEAVY = "sliding_attention", "compressed_sparse_attention", "heavily_compressed_attention"
_BY_RATIO: dict[str | int, str] = {0: SLIDING, 4: SPARSE, 128: HEAVY}
_BY_NAME: dict[str | int, str] = {name: name for name in (SLIDING, SPARSE, HEAVY)}
_GATE_WIDTH_BYTES = WIDTH_BYTES["fp32"]  # gates of the overlap already carry their bias, and keep its precision


@dataclass(frozen=True, slots=True, kw_only=True)
class Sizes:
    """The sizes of rows and index keys, and of groups by kind of layer."""

    row: int
    rope: int  # channels of a row that are turned: the last ones
    index: int
    ratios: Mapping[str, int]

    @classmethod
    def read(cls, config: Fields) -> Sizes:
        row, rates = config.size("head_dim"), config.section("compress_rates")
        older = {SPARSE: "compress_rate_csa", HEAVY: "compress_rate_hca"}  # where a config has these, they count
        usual = {kind: rates.size(kind, default, least=2) for kind, default in ((SPARSE, 4), (HEAVY, 128))}
        return cls(
            row=row,
            rope=_rope(config, row),
            index=config.size("index_head_dim", 128),
            ratios={kind: config.size(older[kind], ratio, least=2) for kind, ratio in usual.items()},
        )


def compressed_schedule(config: Fields) -> Schedule:
    """The window in every layer, and the states of its kind of compression."""
    ratios = Sizes.read(config).ratios
    sparse, heavy = f"c{ratios[SPARSE]}", f"c{ratios[HEAVY]}"
    kept = {
        SLIDING: ("swa",),
        SPARSE: ("swa", sparse, f"{sparse}_index", f"{sparse}_overlap", f"{sparse}_buffer"),
        HEAVY: ("swa", heavy, f"{heavy}_buffer"),
    }
    return tuple(kept[kind] for kind in _kinds(config))


def compressed_states(config: Fields, dtypes: Dtypes, schedule: Schedule) -> Iterator[StateSpec]:
    """All states of a DeepSeek-V4 model, in the order window, C4, C128."""
    sizes = Sizes.read(config)
    window = Window(tokens=config.size("sliding_window", 128))
    yield _state("swa", window, len(schedule), dtypes.shared_row_bytes(sizes.row, sizes.rope), dtypes.kv)
    if layers := count(schedule, f"c{sizes.ratios[SPARSE]}"):
        yield from _overlapping(sizes.ratios[SPARSE], layers, sizes, dtypes)
    if layers := count(schedule, f"c{sizes.ratios[HEAVY]}"):
        yield from _separate(sizes.ratios[HEAVY], layers, sizes, dtypes)


def _overlapping(ratio: int, layers: int, sizes: Sizes, dtypes: Dtypes) -> Iterator[StateSpec]:
    """C4: a group mixes half of its own channels with the other half of the group before, for rows and for index keys."""
    name = f"c{ratio}"
    channels = sizes.row + sizes.index
    yield _state(name, Prefix(ratio=ratio), layers, dtypes.shared_row_bytes(sizes.row, sizes.rope), dtypes.kv)
    yield _state(f"{name}_index", Prefix(ratio=ratio), layers, dtypes.index_row_bytes(sizes.index), dtypes.kv)
    overlap = ratio * channels * (dtypes.model_width + _GATE_WIDTH_BYTES)
    # written when the first group closes
    kept_in = dtypes.model if dtypes.model == "fp32" else f"{dtypes.model}+fp32"
    yield replace(_state(f"{name}_overlap", Point(), layers, overlap, kept_in), may_be_unwritten=True)
    # both halves of every open token, values and gates
    yield _state(f"{name}_buffer", Point(period=ratio), layers, 2 * 2 * channels * dtypes.model_width, dtypes.model)


def _separate(ratio: int, layers: int, sizes: Sizes, dtypes: Dtypes) -> Iterator[StateSpec]:
    """C128: a group stands alone, so only an unfinished one leaves anything open."""
    name = f"c{ratio}"
    yield _state(name, Prefix(ratio=ratio), layers, dtypes.shared_row_bytes(sizes.row, sizes.rope), dtypes.kv)
    yield _state(f"{name}_buffer", Point(period=ratio), layers, 2 * sizes.row * dtypes.model_width, dtypes.model)


def _kinds(config: Fields) -> list[str]:
    """SLIDING, SPARSE or HEAVY, layer by layer. One more entry may follow, for the draft layer."""
    num_layers = config.num_layers()
    if config.has("layer_types"):
        return config.per_layer("layer_types", _BY_NAME, num_layers=num_layers, longer=True)
    if config.has("compress_ratios"):
        return config.per_layer("compress_ratios", _BY_RATIO, num_layers=num_layers, longer=True)
    raise SpecError("config field compress_ratios is missing; it must list 0, 4 or 128 for each layer")


def _rope(config: Fields, row: int) -> int:
    """Channels of a row that are turned: a share of it, as transformers writes, or a number of them."""
    share = config.values.get("partial_rotary_factor")
    if share is None:
        return config.size("qk_rope_head_dim", min(64, row), most=row)
    if isinstance(share, bool) or not isinstance(share, int | float) or not 1 <= row * share <= row:
        raise SpecError(f"config field {config.path}partial_rotary_factor must be a share of {row} channels, got {share!r:.60}")
    return int(row * share)


def _state(name: str, shape: Shape, layers: int, row_bytes: int, dtype: str) -> StateSpec:
    return StateSpec(name=name, shape=shape, layers=layers, row_bytes=row_bytes, dtype=dtype)
