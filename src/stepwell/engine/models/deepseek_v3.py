"""DeepSeek-V3, R1 and Kimi-K2: latent attention, then a gated feed-forward block, or experts and one that all tokens visit.

    x + attention(norm(x)),  then  x + mlp(norm(x))

Never loads the layers after the last, which predict further tokens; `mtp.py` builds one of them if asked to.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from stepwell.base.errors import ConfigError
from stepwell.base.spec.families.fields import MAX_LAYERS, Fields
from stepwell.engine.models.base import Block, Decoder, Layer, decoder
from stepwell.engine.models.latent import LatentAttention, latent_rotary
from stepwell.engine.models.layers import FeedForward, GatedMLP, Parts, number
from stepwell.engine.models.moe import MixtureOfExperts, WithShared, feed_forward, sigmoid_in_groups


def build(parts: Parts) -> Decoder:
    angles = parts.angles(latent_rotary(parts.config, device=parts.device))
    names = zip(layer_names(parts), parts.spec.layers, strict=True)
    blocks = [latent_block(parts, name, layer=layer.places["kv"], state="kv") for name, layer in names]
    return decoder(parts, blocks, angles, experts=True)


def latent_block(parts: Parts, name: str, *, layer: int, state: str) -> Block:
    """The block whose tensors begin with `name`, with rows in `layer` of `state`. Takes a pass's angles."""
    return block(parts, name, LatentAttention.load(parts, f"{name}.self_attn", layer=layer, state=state))


# ---- shared with DeepSeek-V3.2 and Kimi-Linear ------------------------------------------------------


def layer_names(parts: Parts) -> list[str]:
    """The prefix of the tensors of each layer. Skips those of draft layers, which have an `eh_proj`.

    Any other layer after the last is left over: a config that names too few would make another model.
    """
    count = parts.config.num_layers()
    behind = range(count, count + parts.config.size("num_nextn_predict_layers", 1, least=0, most=MAX_LAYERS))
    drafts = [f"model.layers.{index}." for index in behind if parts.weights.has(f"model.layers.{index}.eh_proj.weight")]
    parts.weights.skip(*drafts)
    return [f"model.layers.{index}" for index in range(count)]


def block(parts: Parts, name: str, attention: Layer) -> Block:
    return Block.load(parts, name, attention, feed_forward(parts, f"{name}.mlp", _experts))


@dataclass(frozen=True, slots=True, kw_only=True)
class GroupedFields:
    """The config fields of experts in groups, which makers name differently."""

    experts: str = "n_routed_experts"
    groups: str = "n_group"
    top: str = "num_experts_per_tok"
    sum_to_one: str = "norm_topk_prob"
    shared: str = "n_shared_experts"


def grouped_experts(parts: Parts, name: str, fields: GroupedFields) -> FeedForward:
    """Experts in groups, and the block that all tokens visit, as wide as several experts."""
    config, count = parts.config, parts.config.size(fields.experts)
    groups = config.size(fields.groups, 1, most=count)
    if count % groups:
        raise ConfigError(f"config field {fields.groups} must divide the {count} experts, got {groups}")
    route = sigmoid_in_groups(
        config.size(fields.top, most=count),
        bias_E=parts.exact(f"{name}.gate.e_score_correction_bias", count),
        groups=groups,
        top_groups=config.size("topk_group", groups, most=groups),
        sum_to_one=config.flag(fields.sum_to_one, True),
        scale=number(config, "routed_scaling_factor", 1.0),
    )
    experts = MixtureOfExperts.load(parts, name, count, route, dtype=torch.float32)
    if not (shared := config.size(fields.shared, 0, least=0)):
        return experts
    width = GatedMLP.load(parts, f"{name}.shared_experts", width="moe_intermediate_size", times=shared)
    return WithShared(experts=experts, shared=width)


def _experts(parts: Parts, name: str) -> FeedForward:
    _refuse_unknown(parts.config)
    return grouped_experts(parts, name, GroupedFields())


def _refuse_unknown(config: Fields) -> None:
    """Raises ConfigError for a choice of experts that is not `sigmoid_in_groups`."""
    for name, known in (("scoring_func", "sigmoid"), ("topk_method", "noaux_tc")):
        if (config.text(name) or known) != known:
            raise ConfigError(f"config field {name} is {config.text(name)!r:.60}, not {known}")
