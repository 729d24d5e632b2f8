"""Models that keep keys and values per head: all of the past, a sliding window of it, or both by layer.

Says which layer keeps what, and yields states; builds no ModelSpec.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass

from stepwell.base.errors import SpecError
from stepwell.base.spec.families.dtypes import Dtypes
from stepwell.base.spec.families.fields import Fields
from stepwell.base.spec.families.layers import LAYER_TYPES, Layer, Rule, every, keeping, layer_kinds, uniform
from stepwell.base.spec.schedule import Schedule, count
from stepwell.base.spec.shapes import Prefix, Window
from stepwell.base.spec.states import StateSpec

USUAL_WINDOW = 4096  # of Mistral and Qwen, where a config does not say
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


# ---- schedules --------------------------------------------------------------------------------------


def full_schedule(config: Fields) -> Schedule:
    """Llama and MiniMax-M2: full attention in every layer. Fields of a window mean nothing to them."""
    return keeping(uniform(config, Layer.FULL))


def mixtral_schedule(config: Fields) -> Schedule:
    """Mixtral: a window in every layer when one is set, else full attention."""
    return _one_window(config, window_of(config))


def mistral_schedule(config: Fields) -> Schedule:
    """Mistral: the same; its window is 4,096 tokens where the config does not say, and none where it says null."""
    return _one_window(config, window_of(config, USUAL_WINDOW))


def qwen3_moe_schedule(config: Fields) -> Schedule:
    """Qwen3-MoE: a window only counts when switched on, and then in every layer."""
    return _one_window(config, _switched_window(config))


def qwen_schedule(config: Fields) -> Schedule:
    """Qwen2 and Qwen3: a window only counts when switched on, and then from a given layer up."""
    window, first = _switched_window(config), config.size("max_window_layers", 28, least=0)
    return _with_window(config, lambda index: Layer.SLIDING if window and index >= first else Layer.FULL, window)


def qwen2_moe_schedule(config: Fields) -> Schedule:
    """Qwen2-MoE: when switched on, in every other layer up to a given one."""
    first, is_on = config.size("max_window_layers", 28, least=0), config.flag("use_sliding_window", False)
    rule: Rule = lambda index: Layer.SLIDING if is_on and index % 2 == 0 and index < first else Layer.FULL  # noqa: E731
    return _with_window(config, rule, _switched_window(config))


def gemma3_schedule(config: Fields) -> Schedule:
    """Gemma 3: one full layer after each five with a window."""
    pattern = config.size("sliding_window_pattern", 6)
    return _with_window(config, every(pattern, last=Layer.FULL, others=Layer.SLIDING), window_of(config))


def gpt_oss_schedule(config: Fields) -> Schedule:
    """gpt-oss: window and full in turn."""
    return _with_window(config, every(2, last=Layer.FULL, others=Layer.SLIDING), window_of(config))


def mimo_schedule(config: Fields) -> Schedule:
    """MiMo-V2: listed layer by layer, in either way of writing it."""
    field, meanings = ("layer_types", LAYER_TYPES) if config.has("layer_types") else ("hybrid_layer_pattern", _MIMO_PATTERN)
    kinds = config.per_layer(field, meanings, num_layers=config.num_layers())
    return _with_window(config, kinds.__getitem__, window_of(config))


def window_of(config: Fields, usual: int | None = None) -> int | None:
    """Tokens that layers with a window look at: `usual` where the config does not say, None where it says null."""
    if "sliding_window" in config.values and not config.has("sliding_window"):
        return None
    field = "sliding_window" if config.has("sliding_window") or not config.has("sliding_window_size") else "sliding_window_size"
    return config.size(field, usual) if config.has(field) else usual


def _switched_window(config: Fields) -> int | None:
    return window_of(config, USUAL_WINDOW) if config.flag("use_sliding_window", False) else None


def _one_window(config: Fields, window: int | None) -> Schedule:
    return keeping(uniform(config, Layer.FULL if window is None else Layer.SLIDING))


def _with_window(config: Fields, rule: Rule, window: int | None) -> Schedule:
    kinds = layer_kinds(config, rule)
    if Layer.LINEAR in kinds:
        raise SpecError("config field layer_types names linear_attention, which this model family does not have")
    if Layer.SLIDING in kinds and window is None:
        raise SpecError(
            f"config field {config.path}sliding_window is missing, or not switched on by use_sliding_window, and layers with a "
            "window are named: set it, or leave layer_types out"
        )
    return keeping(kinds)


# ---- states -----------------------------------------------------------------------------------------


def gqa_states(
    config: Fields, dtypes: Dtypes, schedule: Schedule, *, heads: Callable[[Fields], Heads] = read_heads
) -> Iterator[StateSpec]:
    """All layers have the same heads. Attention sinks are weights, not state."""
    return _states(config, dtypes, schedule, heads(config), heads(config))


def gemma3_heads(config: Fields) -> Heads:
    """Configs of Gemma 3 leave out values equal to 4 heads of 256."""
    return read_heads(config, num=4, head_dim=256)


def mimo_states(config: Fields, dtypes: Dtypes, schedule: Schedule) -> Iterator[StateSpec]:
    """MiMo-V2: window layers have their own heads, and values are narrower than keys."""
    full = Heads(num=config.size("num_key_value_heads"), key_dim=config.size("head_dim"), value_dim=config.size("v_head_dim"))
    sliding = Heads(
        num=config.size("swa_num_key_value_heads", full.num),
        key_dim=config.size("swa_head_dim", full.key_dim),
        value_dim=config.size("swa_v_head_dim", full.value_dim),
    )
    return _states(config, dtypes, schedule, full, sliding)


def _states(config: Fields, dtypes: Dtypes, schedule: Schedule, full: Heads, sliding: Heads) -> Iterator[StateSpec]:
    if layers := count(schedule, "kv"):
        yield kv_state(layers, full, dtypes)
    if layers := count(schedule, "swa"):
        window = window_of(config, USUAL_WINDOW)
        assert window is not None, f"a schedule with windows of no length: {schedule}"
        yield swa_state(layers, sliding, window, dtypes)
