"""DeepSeek-V3, R1 and Kimi-K2: latent attention, then a gated feed-forward block, or experts and one that all tokens visit.

    x + attention(norm(x)),  then  x + mlp(norm(x))

Never loads the layers behind the last, which predict further tokens; `latent_block` builds one of them, when it is asked to.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch

from stepwell.base.errors import ConfigError
from stepwell.base.spec.families.fields import MAX_LAYERS, Fields
from stepwell.engine.models.base import Block, Decoder, Layer, Parts, head_of
from stepwell.engine.models.latent import LatentAttention, LatentSizes, latent_rotary, query_scale
from stepwell.engine.models.layers import GatedMLP, Linear, RMSNorm, activation, norm_eps, number, said
from stepwell.engine.models.moe import Experts, MixtureOfExperts, WithShared, gated, sigmoid_in_groups
from stepwell.engine.passes.batch import Batch

MODEL_TYPES = ("deepseek_v3", "kimi_k2")


def build(parts: Parts) -> Decoder:
    rotary = latent_rotary(parts.config, device=parts.device)
    names = zip(layer_names(parts), parts.spec.layers, strict=True)
    blocks = [latent_block(parts, name, layer=layer.places["kv"], state="kv") for name, layer in names]
    dtype, kernels = parts.weights.dtype, parts.kernels
    return decoder(parts, blocks, lambda batch: rotary.angles(batch.positions_N, dtype, kernels))


def latent_block(parts: Parts, name: str, *, layer: int, state: str) -> Block:
    """The block whose tensors begin with `name`, and which keeps its rows in `layer` of `state`. Takes a pass's angles."""
    return block(parts, name, latent_attention(parts, f"{name}.self_attn", layer=layer, state=state))


# ---- shared with DeepSeek-V3.2 ----------------------------------------------------------------------


def layer_names(parts: Parts) -> list[str]:
    """What the tensors of each layer begin with. Says that those of draft layers, which have an `eh_proj`, are not needed.

    Any other layer behind the last is left over: a config that says too few would make another model.
    """
    count = parts.config.num_layers()
    behind = range(count, count + parts.config.size("num_nextn_predict_layers", 1, least=0, most=MAX_LAYERS))
    drafts = [f"model.layers.{index}." for index in behind if parts.weights.has(f"model.layers.{index}.eh_proj.weight")]
    parts.weights.skip(*drafts)
    return [f"model.layers.{index}" for index in range(count)]


def latent_attention(parts: Parts, name: str, *, layer: int, state: str) -> LatentAttention:
    sizes = LatentSizes.read(parts.config, parts.ranks)
    return LatentAttention.load(
        parts.weights,
        name,
        sizes,
        state=state,
        layer=layer,
        kept=sizes.rows(parts.spec.state(state).dtype),
        scale=query_scale(parts.config, sizes),
        neighbours=parts.config.flag("rope_interleave", True),
        kernels=parts.kernels,
    )


def block(parts: Parts, name: str, attention: Layer) -> Block:
    eps, hidden = norm_eps(parts.config), parts.config.size("hidden_size")
    return Block(
        attention=attention,
        mlp=_feed_forward(parts, f"{name}.mlp"),
        kernels=parts.kernels,
        ranks=parts.ranks,
        before_attention=RMSNorm.load(parts.weights, f"{name}.input_layernorm", hidden, eps),
        before_mlp=RMSNorm.load(parts.weights, f"{name}.post_attention_layernorm", hidden, eps),
    )


def decoder(parts: Parts, layers: Sequence[Layer], shared: Callable[[Batch], Any]) -> Decoder:
    hidden = parts.config.size("hidden_size")
    embed = parts.weights.take("model.embed_tokens.weight", said(parts.config, "vocab_size"), hidden)
    return Decoder(
        spec=parts.spec,
        embed=embed,
        layers=layers,
        norm=RMSNorm.load(parts.weights, "model.norm", hidden, norm_eps(parts.config)),
        head=head_of(parts, embed),
        shared=shared,
        steady=(None,) if parts.kernels.experts_stay_on_device else (),
    )


def _feed_forward(parts: Parts, name: str) -> Callable[[torch.Tensor], torch.Tensor]:
    """Experts in the layers whose tensors say so (`first_k_dense_replace` and `mlp_layer_types` say the same)."""
    config, weights, act, hidden = parts.config, parts.weights, activation(parts.config), parts.config.size("hidden_size")
    if not weights.has(f"{name}.gate.weight"):
        return GatedMLP.load(weights, name, act, parts.kernels, hidden=hidden, inner=said(config, "intermediate_size"))
    _refuse_unknown(config)
    count = config.size("n_routed_experts")
    groups = config.size("n_group", 1, most=count)
    if count % groups:
        raise ConfigError(f"n_group must divide the {count} experts, got {groups}")
    route = sigmoid_in_groups(
        config.size("num_experts_per_tok", most=count),
        bias_E=weights.take(f"{name}.gate.e_score_correction_bias", count, dtype=torch.float32),
        groups=groups,
        top_groups=config.size("topk_group", groups, most=groups),
        sum_to_one=config.flag("norm_topk_prob", True),
        scale=number(config, "routed_scaling_factor", 1.0),
    )
    experts = MixtureOfExperts(
        router=Linear(weights.take(f"{name}.gate.weight", count, hidden, dtype=torch.float32)),
        route=route,
        experts=Experts.load(
            weights,
            f"{name}.experts",
            count=count,
            hidden=hidden,
            inner=said(config, "moe_intermediate_size"),
            run=parts.kernels.experts,
            combine=gated(act),
        ),
    )
    if not (shared := config.size("n_shared_experts", 0, least=0)):
        return experts
    return WithShared(experts=experts, shared=shared_block(parts, f"{name}.shared_experts", shared))


def shared_block(parts: Parts, name: str, count: int) -> GatedMLP:
    """The block that all tokens visit, as wide as `count` experts together."""
    config, inner = parts.config, said(parts.config, "moe_intermediate_size")
    wide = None if inner is None else inner * count
    hidden = config.size("hidden_size")
    return GatedMLP.load(parts.weights, name, activation(config), parts.kernels, hidden=hidden, inner=wide)


def _refuse_unknown(config: Fields) -> None:
    """Raises ConfigError for a choice of experts that is not `sigmoid_in_groups`."""
    for name, known in (("scoring_func", "sigmoid"), ("topk_method", "noaux_tc")):
        if (config.text(name) or known) != known:
            raise ConfigError(f"config field {name} is {config.text(name)!r:.60}, not {known}")
