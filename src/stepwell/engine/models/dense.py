"""Llama and its like: Llama, SmolLM2, Mistral, Qwen2, Qwen3, Qwen3-MoE. Attention, then a gated feed-forward block, or experts.

    x + attention(norm(x)),  then  x + mlp(norm(x))

Qwen3 norms queries and keys; Mistral and some Qwens look at a window in some layers.
"""

from __future__ import annotations

from stepwell.base.spec.families.attention import read_heads
from stepwell.base.spec.schedule import LayerSpec
from stepwell.engine.models.attention import Attention, head_norms, heads_of_rank, queries_keys_values, windows_of
from stepwell.engine.models.base import Block, Decoder, Parts, head_of
from stepwell.engine.models.layers import GatedMLP, Linear, RMSNorm, activation, norm_eps, rotary_from, said
from stepwell.engine.models.moe import Experts, MixtureOfExperts, gated, softmax_then_top

MODEL_TYPES = ("llama", "mistral", "qwen2", "qwen3", "qwen3_moe")


def build(parts: Parts) -> Decoder:
    config, weights, kernels = parts.config, parts.weights, parts.kernels
    head_dim = read_heads(config).key_dim
    rotary = rotary_from(config, head_dim, device=parts.device)
    blocks = [_block(parts, layer) for layer in parts.spec.layers]
    recordable = parts.kernels.experts_stay_on_device or all(isinstance(block.mlp, GatedMLP) for block in blocks)
    hidden = config.size("hidden_size")
    embed = weights.take("model.embed_tokens.weight", said(config, "vocab_size"), hidden)
    return Decoder(
        spec=parts.spec,
        embed=embed,
        layers=blocks,
        norm=RMSNorm.load(weights, "model.norm", hidden, norm_eps(config)),
        head=head_of(parts, embed),
        shared=lambda batch: rotary.angles(batch.positions_N, embed.dtype, kernels),
        steady=windows_of(blocks) if recordable else (),
    )


def _block(parts: Parts, layer: LayerSpec) -> Block:
    config, weights, name = parts.config, parts.weights, f"model.layers.{layer.number}"
    eps, hidden = norm_eps(config), config.size("hidden_size")
    queries, heads = heads_of_rank(parts.ranks, config.size("num_attention_heads"), read_heads(config))

    def norm(of: str, size: int) -> RMSNorm:
        return RMSNorm.load(weights, f"{name}.{of}", size, eps)

    state, place = layer.place("kv", "swa")
    normed = weights.has(f"{name}.self_attn.q_norm.weight")
    attention = Attention(
        state=state,
        layer=place,
        window=layer.window,
        heads=queries,
        kv_heads=heads.num,
        head_dim=heads.key_dim,
        scale=heads.key_dim**-0.5,
        qkv=queries_keys_values(weights, f"{name}.self_attn", queries, heads, hidden),
        out=Linear.load(weights, {f"{name}.self_attn.o_proj": hidden}, queries * heads.key_dim),
        norms=head_norms(norm("self_attn.q_norm", heads.key_dim), norm("self_attn.k_norm", heads.key_dim)) if normed else None,
        kernels=parts.kernels,
        selector=parts.selector if layer.window is None else None,
    )
    return Block(
        attention=attention,
        mlp=_feed_forward(parts, f"{name}.mlp"),
        kernels=parts.kernels,
        ranks=parts.ranks,
        before_attention=norm("input_layernorm", hidden),
        before_mlp=norm("post_attention_layernorm", hidden),
    )


def _feed_forward(parts: Parts, name: str) -> GatedMLP | MixtureOfExperts:
    """Experts in the layers whose tensors say so."""
    config, weights, hidden = parts.config, parts.weights, parts.config.size("hidden_size")
    if not weights.has(f"{name}.gate.weight"):
        inner = said(config, "intermediate_size")
        return GatedMLP.load(weights, name, activation(config), parts.kernels, hidden=hidden, inner=inner)
    count = config.size("num_experts" if config.has("num_experts") else "num_local_experts")
    top = config.size("num_experts_per_tok", most=count)
    return MixtureOfExperts(
        router=Linear.load(weights, {f"{name}.gate": count}, hidden),
        route=softmax_then_top(top, sum_to_one=config.flag("norm_topk_prob", False)),
        experts=Experts.load(
            weights,
            f"{name}.experts",
            count=count,
            hidden=hidden,
            inner=said(config, "moe_intermediate_size"),
            run=parts.kernels.experts,
            combine=gated(activation(config)),
        ),
    )
