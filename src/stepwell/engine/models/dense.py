"""Llama and its like: Llama, SmolLM2, Mistral, Qwen2, Qwen3, Qwen3-MoE. Attention, then a gated feed-forward block, or experts.

    x + attention(norm(x)),  then  x + mlp(norm(x))

Qwen3 norms queries and keys; Mistral and some Qwens have a window in some layers.
"""

from __future__ import annotations

from stepwell.base.spec.families.attention import read_heads
from stepwell.base.spec.schedule import LayerSpec
from stepwell.engine.models.attention import Attention, windows_of
from stepwell.engine.models.base import Block, Decoder, decoder
from stepwell.engine.models.layers import Parts, rotary_from
from stepwell.engine.models.moe import MixtureOfExperts, feed_forward, softmax_then_top


def build(parts: Parts) -> Decoder:
    rotary = rotary_from(parts.config, read_heads(parts.config).key_dim, device=parts.device)
    blocks = [_block(parts, f"model.layers.{layer.number}", layer) for layer in parts.spec.layers]
    experts = any(block.has_experts for block in blocks)
    return decoder(parts, blocks, parts.angles(rotary), experts=experts, windows=windows_of(blocks))


def _block(parts: Parts, name: str, layer: LayerSpec) -> Block:
    attention = Attention.load(parts, f"{name}.self_attn", layer, read_heads(parts.config))
    return Block.load(parts, name, attention, feed_forward(parts, f"{name}.mlp", _experts))


def _experts(parts: Parts, name: str) -> MixtureOfExperts:
    config = parts.config
    count = config.size("num_experts" if config.has("num_experts") else "num_local_experts")
    top = config.size("num_experts_per_tok", most=count)
    return MixtureOfExperts.load(parts, name, count, softmax_then_top(top, sum_to_one=config.flag("norm_topk_prob", False)))
