"""gpt-oss: windows and the whole past in turn, sinks in every head, experts in every layer.

    x + attention(norm(x)),  then  x + experts(norm(x))

Reads experts as plain numbers or as MXFP4, which it unpacks while loading: it never computes in four bits.
"""

from __future__ import annotations

from dataclasses import replace

import torch

from stepwell.base.errors import ConfigError
from stepwell.base.spec.families.attention import read_heads
from stepwell.base.spec.families.fields import Fields
from stepwell.base.spec.schedule import LayerSpec
from stepwell.engine.loading.weights import Weights
from stepwell.engine.models.attention import Attention, windows_of
from stepwell.engine.models.base import Block, Decoder, decoder
from stepwell.engine.models.layers import INNER, Parts, number, rotary_from
from stepwell.engine.models.moe import Experts, MixtureOfExperts, Route
from stepwell.engine.ops.experts import Combine, ExpertWeights, Routing
from stepwell.engine.ranks import Share

_ROPE = {"rope_type": "yarn", "factor": 32.0, "truncate": False, "original_max_position_embeddings": 4096}

# MXFP4: 32 numbers share a power of two, a byte with 127 for 2**0; each is four bits, the low half of a byte first.
_GROUP = 32
_FP4 = [0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0]
_FP4 += [-value for value in _FP4]


def build(parts: Parts) -> Decoder:
    parts = replace(parts, eps=number(parts.config, "rms_norm_eps", 1e-5))
    rotary = rotary_from(_with_rope(parts.config), read_heads(parts.config).key_dim, device=parts.device)
    blocks = [_block(parts, f"model.layers.{layer.number}", layer) for layer in parts.spec.layers]
    return decoder(parts, blocks, parts.angles(rotary), experts=True, windows=windows_of(blocks))


def _block(parts: Parts, name: str, layer: LayerSpec) -> Block:
    config = parts.config
    biased, count = config.flag("attention_bias", True), config.size("num_local_experts")
    attention = Attention.load(parts, f"{name}.self_attn", layer, read_heads(config), biased=biased, sinks=True, normed=False)
    experts = MixtureOfExperts(
        router=parts.linear(f"{name}.mlp.router", count, parts.hidden, biased=True),
        route=top_then_softmax(config.size("num_experts_per_tok", most=count)),
        experts=_experts(parts, f"{name}.mlp.experts"),
    )
    return Block.load(parts, name, attention, experts)


def top_then_softmax(count: int) -> Route:
    """The `count` best experts, with shares as if there were no others."""

    def route(logits_NE: torch.Tensor) -> Routing:
        best_NK, expert_NK = logits_NE.topk(count, dim=-1)
        return Routing(expert_NK=expert_NK, share_NK=best_NK.softmax(dim=-1))

    return route


def clamped_swiglu(alpha: float, limit: float) -> Combine:
    """`gate * sigmoid(alpha * gate) * (up + 1)`, with gates clamped from above and ups from both sides."""

    def combine(gate: torch.Tensor, up: torch.Tensor) -> torch.Tensor:
        gate, up = gate.clamp(max=limit), up.clamp(-limit, limit)
        return gate * torch.sigmoid(gate * alpha) * (up + 1)

    return combine


def _experts(parts: Parts, name: str) -> Experts:
    config, weights = parts.config, parts.weights
    count, hidden = config.size("num_local_experts"), config.size("hidden_size")
    inner = parts.ranks.share(config.size("intermediate_size"), INNER)  # gate and up are neighbours, so that ranks have both
    down_bias_EC = weights.take(f"{name}.down_proj_bias", count, hidden)
    matrices = ExpertWeights(
        gate_up_EIC=_apart(_matrices(weights, f"{name}.gate_up_proj", count, 2 * inner, hidden)),
        gate_up_bias_EI=_apart(weights.take(f"{name}.gate_up_proj_bias", count, 2 * inner)),
        down_ECI=_matrices(weights, f"{name}.down_proj", count, hidden, inner).contiguous(),
        down_bias_EC=torch.zeros_like(down_bias_EC) if parts.ranks.rank else down_bias_EC,  # of the sum over ranks, once
    )
    return Experts(
        weights=matrices,
        run=parts.kernels.experts,
        combine=clamped_swiglu(number(config, "swiglu_alpha", 1.702), number(config, "swiglu_limit", 7.0)),
    )


def _matrices(weights: Weights, name: str, count: int, outputs: int, inputs: int) -> torch.Tensor:
    """All experts' matrices, `[expert, output, input]`. Plain checkpoints keep them the other way round."""
    if not weights.has(f"{name}_blocks"):
        return weights.take(name, count, inputs, outputs).mT
    whole = inputs.whole if isinstance(inputs, Share) else inputs
    if whole % _GROUP:
        raise ConfigError(f"tensor '{name}_blocks' is MXFP4, whose rows must be multiples of {_GROUP}, got {whole}")
    shared = inputs.in_groups(_GROUP) if isinstance(inputs, Share) else None
    groups = (count, outputs, whole // _GROUP if shared is None else shared)
    blocks = weights.take(f"{name}_blocks", *groups, _GROUP // 2, dtype=torch.uint8)
    numbers = unpack_mxfp4(blocks, weights.take(f"{name}_scales", *groups, dtype=torch.uint8), weights.dtype)
    return numbers.narrow(2, inputs.start, inputs) if isinstance(inputs, Share) and shared is None else numbers


def unpack_mxfp4(blocks_EIGB: torch.Tensor, scales_EIG: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """`[expert, row, group, byte]` and `[expert, row, group]` as numbers `[expert, row, column]`."""
    values = torch.tensor(_FP4, device=blocks_EIGB.device)
    pairs_256x2 = torch.stack([values.repeat(16), values.repeat_interleave(16)], dim=1)  # of each byte: low half, high half
    out = torch.empty(*scales_EIG.shape[:2], scales_EIG.shape[2] * _GROUP, dtype=dtype, device=blocks_EIGB.device)
    for expert, (blocks_IGB, scales_IG) in enumerate(zip(blocks_EIGB, scales_EIG, strict=True)):  # all at once takes much memory
        numbers_IGV = pairs_256x2[blocks_IGB.int()].flatten(-2)
        out[expert] = torch.ldexp(numbers_IGV, scales_IG[..., None].int() - 127).flatten(1)
    return out


def _apart(tensor: torch.Tensor) -> torch.Tensor:
    """Rows gate, up, gate, up, ... of each expert as all gates, then all ups."""
    return torch.cat([tensor[:, ::2], tensor[:, 1::2]], dim=1)


def _with_rope(config: Fields) -> Fields:
    """Without a rotation in the config, the one the model was trained with."""
    values = {"rope_theta": 150000.0, **config.values}
    if not config.has("rope_parameters") and not config.has("rope_scaling"):
        values["rope_scaling"] = _ROPE
    return Fields(values=values)
