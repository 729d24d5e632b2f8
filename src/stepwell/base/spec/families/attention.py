"""Models that keep keys and values per head: all of the past, a sliding window of it, or both by layer.

Yields states; builds no ModelSpec.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from stepwell.base.errors import SpecError
from stepwell.base.spec.families.dtypes import Dtypes
from stepwell.base.spec.families.fields import Fields
from stepwell.base.spec.families.layers import LAYER_TYPES, Layer, Rule, every, schedule
from stepwell.base.spec.shapes import Prefix, Window
from stepwell.base.spec.states import StateSpec

_MIMO_PATTERN: dict[str | int, Layer] = {0: Layer.FULL, 1: Layer.SLIDING}


@dataclass(frozen=True, slots=True, kw_only=True)
class Heads:
    """The KV heads of one kind of layer."""

    num: int
    key_dim: int
    value_dim: int

    def row_bytes(self, dtypes: Dtypes) -> int:
        return self.num * (self.key_dim + self.value_dim) * dtypes.kv_width


def read_heads(config: Fields, *, num: int | None = None, head_dim: int | None = None) -> Heads:
    """KV heads as most configs write them; `num` and `head_dim` are the family's own defaults."""
    if not config.has("num_key_value_heads") and num is None:
        num = config.size("num_attention_heads")
    if not config.has("head_dim") and head_dim is None:
        hidden, heads = config.size("hidden_size"), config.size("num_attention_heads")
        if hidden % heads:
            raise SpecError(f"config field head_dim is missing, and hidden_size {hidden} is no multiple of {heads} heads")
        head_dim = hidden // heads
    dim = config.size("head_dim", head_dim)
    return Heads(num=config.size("num_key_value_heads", num), key_dim=dim, value_dim=dim)


def kv_state(layers: int, heads: Heads, dtypes: Dtypes) -> StateSpec:
    return StateSpec(
        name="kv", shape=Prefix(), layers=layers, row_bytes=heads.row_bytes(dtypes), dtype=dtypes.kv, shards=heads.num
    )


def swa_state(layers: int, heads: Heads, window: int, dtypes: Dtypes) -> StateSpec:
    return StateSpec(
        name="swa",
        shape=Window(tokens=window),
        layers=layers,
        row_bytes=heads.row_bytes(dtypes),
        dtype=dtypes.kv,
        shards=heads.num,
    )


def full_states(config: Fields, dtypes: Dtypes) -> Iterator[StateSpec]:
    """Llama and its like: full attention in every layer unless the config lists otherwise."""
    return _mixed(config, dtypes, lambda index: Layer.FULL, read_heads(config))


def qwen_states(config: Fields, dtypes: Dtypes) -> Iterator[StateSpec]:
    """Qwen2 and Qwen3 name a window that only counts when switched on, and then from a given layer up."""
    if not config.flag("use_sliding_window", False) or not config.has("sliding_window"):
        yield kv_state(config.num_layers(), read_heads(config), dtypes)
        return
    first = config.size("max_window_layers", 28, least=0)
    yield from _mixed(config, dtypes, lambda index: Layer.SLIDING if index >= first else Layer.FULL, read_heads(config))


def mistral_states(config: Fields, dtypes: Dtypes) -> Iterator[StateSpec]:
    """Mistral: a window in every layer when one is set, else full attention."""
    kind = Layer.SLIDING if config.has("sliding_window") else Layer.FULL
    return _mixed(config, dtypes, lambda index: kind, read_heads(config))


def gemma3_states(config: Fields, dtypes: Dtypes) -> Iterator[StateSpec]:
    """Gemma 3: one full layer after each five with a window. Its configs leave out values equal to 4 heads of 256."""
    pattern = config.size("sliding_window_pattern", 6)
    rule = every(pattern, last=Layer.FULL, others=Layer.SLIDING)
    return _mixed(config, dtypes, rule, gemma3_heads(config))


def gemma3_heads(config: Fields) -> Heads:
    return read_heads(config, num=4, head_dim=256)


def gpt_oss_states(config: Fields, dtypes: Dtypes) -> Iterator[StateSpec]:
    """gpt-oss: window and full in turn. Its attention sinks are weights, not state."""
    return _mixed(config, dtypes, every(2, last=Layer.FULL, others=Layer.SLIDING), read_heads(config))


def mimo_states(config: Fields, dtypes: Dtypes) -> Iterator[StateSpec]:
    """MiMo-V2: window layers have their own heads, and values are narrower than keys."""
    full = Heads(num=config.size("num_key_value_heads"), key_dim=config.size("head_dim"), value_dim=config.size("v_head_dim"))
    sliding = Heads(
        num=config.size("swa_num_key_value_heads", full.num),
        key_dim=config.size("swa_head_dim", full.key_dim),
        value_dim=config.size("swa_v_head_dim", full.value_dim),
    )
    field, meanings = ("layer_types", LAYER_TYPES) if config.has("layer_types") else ("hybrid_layer_pattern", _MIMO_PATTERN)
    kinds = config.per_layer(field, meanings, num_layers=config.num_layers())
    return _of_kinds(kinds, config, dtypes, full, sliding)


def _mixed(config: Fields, dtypes: Dtypes, rule: Rule, heads: Heads) -> Iterator[StateSpec]:
    return _of_kinds(schedule(config, rule), config, dtypes, heads, heads)


def _of_kinds(kinds: list[Layer], config: Fields, dtypes: Dtypes, full: Heads, sliding: Heads) -> Iterator[StateSpec]:
    if Layer.LINEAR in kinds:
        raise SpecError("config field layer_types names linear_attention, which this model family does not have")
    if count := kinds.count(Layer.FULL):
        yield kv_state(count, full, dtypes)
    if count := kinds.count(Layer.SLIDING):
        window = config.size("sliding_window" if config.has("sliding_window") else "sliding_window_size")
        yield swa_state(count, sliding, window, dtypes)
