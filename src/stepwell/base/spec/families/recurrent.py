"""Models with a recurrent state: gated delta nets, Kimi delta attention, Mamba-2, alone or with attention.

Each recurrent layer keeps two points: `ssm`, the state itself, and `conv`, the last inputs of its short
convolution (as many columns as the kernel is long). Says which layer keeps what, and yields states; builds no ModelSpec.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from stepwell.base.errors import SpecError
from stepwell.base.spec.families.attention import kv_state, read_heads
from stepwell.base.spec.families.dtypes import WIDTH_BYTES, Dtypes, recurrent_dtype
from stepwell.base.spec.families.fields import Fields
from stepwell.base.spec.families.latent import latent_state
from stepwell.base.spec.families.layers import Layer, every, keeping, layer_kinds
from stepwell.base.spec.schedule import Schedule, count
from stepwell.base.spec.shapes import Point
from stepwell.base.spec.states import Cut, StateSpec


@dataclass(frozen=True, slots=True, kw_only=True)
class Recurrence:
    """The sizes of one recurrent layer.

    `conv` is what its convolution is over: channels, and of how many heads or groups they are. `conv_shards` is over how many
    ranks all of them can be cut.
    """

    heads: int
    head_elements: int
    conv: tuple[tuple[int, int], ...]
    conv_columns: int
    conv_shards: int


@dataclass(frozen=True, slots=True, kw_only=True)
class KimiHeads:
    """The heads of one layer of Kimi delta attention; keys and values have one width."""

    num: int
    dim: int
    conv_columns: int


def delta_net_schedule(config: Fields) -> Schedule:
    """Qwen3-Next and Qwen3.5: three gated delta nets, then one full attention."""
    rule = every(config.size("full_attention_interval", 4), last=Layer.FULL, others=Layer.LINEAR)
    return _without_windows(layer_kinds(config, rule))


def delta_net_states(config: Fields, dtypes: Dtypes, schedule: Schedule) -> Iterator[StateSpec]:
    if full := count(schedule, "kv"):
        yield kv_state(full, read_heads(config), dtypes)
    if linear := count(schedule, "ssm"):
        yield from _points(linear, _delta_net(config), config, dtypes)


def kimi_schedule(config: Fields) -> Schedule:
    """Kimi-Linear and Kimi-K3: Kimi delta attention, and latents in the full layers."""
    return _without_windows(_kimi_kinds(config))


def kimi_states(config: Fields, dtypes: Dtypes, schedule: Schedule) -> Iterator[StateSpec]:
    if full := count(schedule, "kv"):
        yield latent_state(full, config, dtypes)
    if linear := count(schedule, "ssm"):
        yield from _points(linear, _kimi_delta(config), config, dtypes)


def read_kimi_heads(config: Fields) -> KimiHeads:
    """In either way of writing them: the publisher's, or that of transformers."""
    nested = config.section("linear_attn_config")
    if nested.has("num_heads"):
        columns = nested.size("short_conv_kernel_size", 4)
        return KimiHeads(num=nested.size("num_heads"), dim=nested.size("head_dim"), conv_columns=columns)
    columns = config.size("linear_conv_kernel_dim", 4)
    return KimiHeads(num=config.size("linear_num_heads"), dim=config.size("linear_head_dim"), conv_columns=columns)


def _kimi_kinds(config: Fields) -> list[Layer]:
    """The kind of each layer, in order. `kda_layers` and `full_attn_layers` count from 1.

    Without any list every fourth layer behind the first is full, which is how transformers reads such a config.
    """
    nested = config.section("linear_attn_config")
    if config.has("layer_types") or not (nested.has("kda_layers") or nested.has("full_attn_layers")):
        return layer_kinds(config, lambda index: Layer.FULL if index and index % 4 == 0 else Layer.LINEAR)
    num_layers = config.num_layers()
    linear = nested.layer_numbers("kda_layers", num_layers=num_layers)
    full = nested.layer_numbers("full_attn_layers", num_layers=num_layers)
    if linear & full or linear | full != set(range(1, num_layers + 1)):
        raise SpecError(
            f"config fields kda_layers ({len(linear)}) and full_attn_layers ({len(full)}) in linear_attn_config "
            f"must name each of the {num_layers} layers once, from 1 on"
        )
    return [Layer.LINEAR if number in linear else Layer.FULL for number in range(1, num_layers + 1)]


def falcon_h1_schedule(config: Fields) -> Schedule:
    """Falcon-H1: attention and Mamba-2 side by side in every layer."""
    return (("kv", "ssm", "conv"),) * config.num_layers()


def falcon_h1_states(config: Fields, dtypes: Dtypes, schedule: Schedule) -> Iterator[StateSpec]:
    heads = config.size("mamba_n_heads")
    if config.has("mamba_d_ssm"):
        inner = config.size("mamba_d_ssm")
    else:
        inner = config.size("mamba_expand", 2) * config.size("hidden_size")
    head_dim = inner // heads if config.text("mamba_d_head") == "auto" else config.size("mamba_d_head", inner // heads)
    if heads * head_dim != inner:
        raise SpecError(f"config field mamba_n_heads {heads} must cut the {inner} channels of a layer into heads of mamba_d_head")
    groups, state = config.size("mamba_n_groups", 1), config.size("mamba_d_state")
    yield kv_state(len(schedule), read_heads(config), dtypes)
    layer = _mamba2(heads, head_dim, state, groups, config.size("mamba_d_conv", 4))
    yield from _points(len(schedule), layer, config, dtypes)


def mamba2_schedule(config: Fields) -> Schedule:
    """Mamba-2: nothing but points."""
    return (("ssm", "conv"),) * config.num_layers()


def mamba2_states(config: Fields, dtypes: Dtypes, schedule: Schedule) -> Iterator[StateSpec]:
    groups, state = config.size("n_groups", 1), config.size("state_size")
    layer = _mamba2(config.size("num_heads"), config.size("head_dim"), state, groups, config.size("conv_kernel", 4))
    return _points(len(schedule), layer, config, dtypes)


def _points(layers: int, layer: Recurrence, config: Fields, dtypes: Dtypes) -> Iterator[StateSpec]:
    dtype = recurrent_dtype(config)
    state_bytes = layer.heads * layer.head_elements * WIDTH_BYTES[dtype]
    cuts = tuple(Cut(num_bytes=channels * dtypes.model_width, units=units) for channels, units in layer.conv)
    yield StateSpec(name="ssm", shape=Point(), layers=layers, row_bytes=state_bytes, dtype=dtype, shards=layer.heads)
    yield StateSpec(
        name="conv",
        shape=Point(),
        layers=layers,
        row_bytes=layer.conv_columns * sum(cut.num_bytes for cut in cuts),  # column by column
        dtype=dtypes.model,
        shards=layer.conv_shards,
        cuts=cuts,
    )


def _delta_net(config: Fields) -> Recurrence:
    key_heads, key_dim = config.size("linear_num_key_heads"), config.size("linear_key_head_dim")
    value_heads, value_dim = config.size("linear_num_value_heads"), config.size("linear_value_head_dim")
    if value_heads % key_heads:
        raise SpecError(f"config field linear_num_value_heads {value_heads} must be a multiple of {key_heads} key heads")
    return Recurrence(
        heads=value_heads,
        head_elements=key_dim * value_dim,
        conv=(*[(key_heads * key_dim, key_heads)] * 2, (value_heads * value_dim, value_heads)),  # queries, keys, values
        conv_columns=config.size("linear_conv_kernel_dim", 4),
        conv_shards=key_heads,
    )


def _kimi_delta(config: Fields) -> Recurrence:
    heads = read_kimi_heads(config)
    return Recurrence(
        heads=heads.num,
        head_elements=heads.dim * heads.dim,
        conv=((heads.num * heads.dim, heads.num),) * 3,  # queries, keys, values
        conv_columns=heads.conv_columns,
        conv_shards=heads.num,
    )


def _mamba2(heads: int, head_dim: int, state: int, groups: int, columns: int) -> Recurrence:
    if heads % groups:
        raise SpecError(f"{heads} Mamba heads cannot share {groups} groups equally; check the group count in the config")
    # all heads of a group read the same two projections of it: ranks that share a group keep both
    conv = ((heads * head_dim, heads), *[(groups * state, groups)] * 2)
    return Recurrence(heads=heads, head_elements=head_dim * state, conv=conv, conv_columns=columns, conv_shards=groups)


def _without_windows(kinds: list[Layer]) -> Schedule:
    if Layer.SLIDING in kinds:
        raise SpecError("config field layer_types names sliding_attention, which this model family does not have")
    return keeping(kinds)
