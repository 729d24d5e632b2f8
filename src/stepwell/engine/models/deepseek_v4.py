"""DeepSeek-V4: windows and compressed entries, experts in every layer, and a stream of several lanes.

    connected(attention(norm(x))),  then  connected(experts(norm(x)))        connected: read from all lanes, written to all

The first layers choose experts by a table of tokens, the others by scores; in all of them every token visits one more. Never
loads next-token-prediction layers. A checkpoint may have its tensors under any of three kinds of names:

    layers.3.attn.wq_a.weight                       as published
    model.layers.3.attn.wq_a.weight                 as transformers writes files
    model.layers.3.self_attn.q_a_proj.weight        as transformers calls them in memory, and this file
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
from torch.nn.functional import softplus

from stepwell.base.errors import ConfigError
from stepwell.base.spec.families.compressed import HEAVY, SPARSE, Sizes
from stepwell.base.spec.families.fields import Fields
from stepwell.base.spec.schedule import LayerSpec
from stepwell.engine.models.base import Decoder, Layer, decoder
from stepwell.engine.models.compressed import Closing, Compressor, Indexer, Kept, Shared, SharedAttention, turns
from stepwell.engine.models.hyper import Gather, HyperConnection, Spread
from stepwell.engine.models.layers import INNER, Linear, Parts, RMSNorm, Rotary, activation, number, rotary, said
from stepwell.engine.models.moe import Experts
from stepwell.engine.ops.experts import Combine, Routing
from stepwell.engine.ops.pointwise import Activation
from stepwell.engine.passes.batch import Batch
from stepwell.engine.passes.rows import latent_rows, shared_rows
from stepwell.engine.ranks import Ranks

_NO_SHARE = 1e-20  # a sum of shares is never 0
_SCORES: dict[str, Activation] = {
    "sqrtsoftplus": lambda x: softplus(x).sqrt(),
    "softmax": lambda x: x.softmax(dim=-1),
    "sigmoid": torch.sigmoid,
}

_PUBLISHED = ".wq_a."  # in some name, unless they are as in memory
_OUTER = {
    "embed": "model.embed_tokens", "norm": "model.norm", "head": "lm_head",
    "hc_head_fn": "model.hc_head.hc_fn", "hc_head_base": "model.hc_head.hc_base", "hc_head_scale": "model.hc_head.hc_scale",
}  # fmt: skip
_INNER = {
    "attn": "self_attn", "ffn": "mlp", "attn_norm": "input_layernorm", "ffn_norm": "post_attention_layernorm",
    "hc_attn_fn": "attn_hc.fn", "hc_attn_base": "attn_hc.base", "hc_attn_scale": "attn_hc.scale",
    "hc_ffn_fn": "ffn_hc.fn", "hc_ffn_base": "ffn_hc.base", "hc_ffn_scale": "ffn_hc.scale",
    "wq_a": "q_a_proj", "q_norm": "q_a_norm", "wq_b": "q_b_proj", "wkv": "kv_proj", "norm": "kv_norm", "attn_sink": "sinks",
    "wo_a": "o_a_proj", "wo_b": "o_b_proj", "wgate": "gate_proj", "ape": "position_bias", "weights_proj": "scorer.weights_proj",
    "w1": "gate_proj", "w2": "down_proj", "w3": "up_proj",
}  # fmt: skip
_MOVED = (  # in this order
    ("self_attn.indexer.compressor.", "self_attn.compressor.indexer."),
    ("self_attn.indexer.", "self_attn.compressor.indexer."),
    ("mlp.gate.bias", "mlp.gate.e_score_correction_bias"),
)


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Expert:
    """One that all tokens visit."""

    gate_up: Linear
    down: Linear
    combine: Combine

    def __call__(self, x_NC: torch.Tensor) -> torch.Tensor:
        gate_NI, up_NI = self.gate_up(x_NC).chunk(2, dim=-1)
        return self.down(self.combine(gate_NI, up_NI))


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class TokenExperts:
    """Experts that a table of tokens or the best scores choose, and one that all tokens visit."""

    router: Linear
    score: Activation
    count: int
    scale: float
    table_VK: torch.Tensor | None  # experts of each token of the vocabulary
    bias_E: torch.Tensor | None  # counts for the choice and not for the shares
    experts: Experts
    shared: Expert

    def __call__(self, x_NC: torch.Tensor, tokens_N: torch.Tensor) -> torch.Tensor:
        score_NE = self.score(self.router(x_NC).float())
        if self.table_VK is not None:
            expert_NK = self.table_VK[tokens_N]
        else:
            choice_NE = score_NE if self.bias_E is None else score_NE + self.bias_E
            expert_NK = choice_NE.topk(self.count, dim=-1).indices
        share_NK = score_NE.gather(1, expert_NK)
        share_NK = share_NK / (share_NK.sum(dim=-1, keepdim=True) + _NO_SHARE) * self.scale
        routed_NC = self.experts(x_NC, Routing(expert_NK=expert_NK, share_NK=share_NK.to(x_NC.dtype)))
        return routed_NC + self.shared(x_NC)


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Block:
    attention: SharedAttention
    experts: TokenExperts
    before_attention: RMSNorm
    before_experts: RMSNorm
    around_attention: HyperConnection
    around_experts: HyperConnection
    ranks: Ranks

    def __call__(self, x_NMC: torch.Tensor, shared: Shared, batch: Batch) -> torch.Tensor:
        def attend(x_NC: torch.Tensor) -> torch.Tensor:
            return self.ranks.all_reduce(self.attention(self.before_attention(x_NC), shared, batch))

        def visit(x_NC: torch.Tensor) -> torch.Tensor:
            return self.ranks.all_reduce(self.experts(self.before_experts(x_NC), batch.tokens_N))

        return self.around_experts(self.around_attention(x_NMC, attend), visit)


def build(parts: Parts) -> Decoder:
    weights, layers, sizes = parts.weights, parts.spec.layers, Sizes.read(parts.config)
    if any(_PUBLISHED in name for name in weights.names()):
        weights.rename(_name_in_memory)
    weights.skip("mtp.", "model.mtp.")
    parts = replace(parts, exact_norms=True)
    plain, slowed = _rotary(parts, sizes, "main"), _rotary(parts, sizes, "compress")
    window, kept = layers[0].window, {state for layer in layers for state in layer.places}
    ratios = [sizes.ratios[kind] for kind in (SPARSE, HEAVY) if f"c{sizes.ratios[kind]}" in kept]

    def shared(batch: Batch) -> Shared:
        paging = batch.paging(window)
        groups = [batch.groups(ratio, paging) for ratio in ratios]
        return Shared(
            paging=paging,
            turn_NX=turns(plain, batch.positions_N),
            turn_with_entries_NX=turns(slowed, batch.positions_N),
            closing={each.ratio: Closing(groups=each, turn_GX=turns(slowed, each.position_G)) for each in groups},
        )

    blocks = [_block(parts, sizes, f"model.layers.{layer.number}", layer) for layer in layers]
    lanes: list[Layer] = [Spread(parts.config.size("hc_mult", 4)), *blocks, Gather.load(parts, "model.hc_head")]
    return decoder(parts, lanes, shared, experts=True, windows=(window, None))


def _block(parts: Parts, sizes: Sizes, name: str, layer: LayerSpec) -> Block:
    return Block(
        attention=_attention(parts, sizes, f"{name}.self_attn", layer),
        experts=_experts(parts, f"{name}.mlp"),
        before_attention=parts.norm(f"{name}.input_layernorm"),
        before_experts=parts.norm(f"{name}.post_attention_layernorm"),
        around_attention=HyperConnection.load(parts, f"{name}.attn_hc"),
        around_experts=HyperConnection.load(parts, f"{name}.ffn_hc"),
        ranks=parts.ranks,
    )


def _attention(parts: Parts, sizes: Sizes, name: str, layer: LayerSpec) -> SharedAttention:
    config, weights = parts.config, parts.weights
    kind = next((kind for kind in (SPARSE, HEAVY) if f"c{sizes.ratios[kind]}" in layer.places), None)  # of its compression
    heads = parts.ranks.share(config.size("num_attention_heads"), "attention heads")
    groups = parts.ranks.share(whole := config.size("o_groups", 8), "groups of heads (o_groups)")
    hidden, rank, made = parts.hidden, said(config, "q_lora_rank"), said(config, "o_lora_rank")
    together = weights.shared(None if made is None else whole * made, "rows", of=f"{name}.o_a_proj.weight", axis=0)
    return SharedAttention(
        layer=layer.places["swa"],
        heads=heads,
        into=Linear.load(weights, {f"{name}.q_a_proj": rank, f"{name}.kv_proj": sizes.row}, hidden),
        query_norm=RMSNorm(parts.exact(f"{name}.q_a_norm.weight", rank), parts.eps),
        query=parts.linear(f"{name}.q_b_proj", heads * sizes.row, rank),
        row=_kept_row(parts, sizes, "swa", f"{name}.kv_norm"),
        sinks_H=parts.exact(f"{name}.sinks", heads),
        out_OXC=weights.take(f"{name}.o_a_proj.weight", together, heads * sizes.row // groups).unflatten(0, (groups, -1)),
        out=parts.linear(f"{name}.o_b_proj", hidden, together),
        kernels=parts.kernels,
        compressor=None if kind is None else _compressor(parts, sizes, f"{name}.compressor", kind, layer),
        indexer=_indexer(parts, sizes, f"{name}.compressor.indexer") if kind == SPARSE else None,
    )


def _compressor(parts: Parts, sizes: Sizes, name: str, kind: str, layer: LayerSpec) -> Compressor:
    state, names = f"c{sizes.ratios[kind]}", [name]
    kept = [_kept_row(parts, sizes, state, f"{name}.kv_norm")]
    if kind == SPARSE:
        keys, index = f"{state}_index", f"{name}.indexer"
        names.append(index)
        rows = latent_rows(parts.spec.state(keys).dtype, sizes.index, 0)
        kept.append(Kept(state=keys, width=sizes.index, norm=parts.norm(f"{index}.kv_norm", sizes.index), format=rows))
    halves, weights, ratio = 2 if kind == SPARSE else 1, parts.weights, sizes.ratios[kind]
    wide = {each: halves * part.width for each, part in zip(names, kept, strict=True)}
    values, gates = (
        [weights.take(f"{each}.{made}_proj.weight", size, parts.hidden) for each, size in wide.items()] for made in ("kv", "gate")
    )  # fmt: skip
    biases = [parts.exact(f"{each}.position_bias", ratio, size) for each, size in wide.items()]
    return Compressor(
        layer=layer.places[state],
        ratio=ratio,
        into=Linear(torch.cat([_by_half(values, halves), _by_half(gates, halves)])),
        bias_RE=_by_half([bias.T for bias in biases], halves).T.contiguous(),
        kept=tuple(kept),
        overlap=f"{state}_overlap" if kind == SPARSE else None,
        kernels=parts.kernels,
    )


def _by_half(tensors: Sequence[torch.Tensor], halves: int) -> torch.Tensor:
    """Rows of all: the first half of each, then the second half of each."""
    return torch.cat([half for chunks in zip(*(each.chunk(halves) for each in tensors), strict=True) for half in chunks])


def _indexer(parts: Parts, sizes: Sizes, name: str) -> Indexer:
    config, heads = parts.config, parts.config.size("index_n_heads", 64)
    return Indexer(
        heads=heads,
        count=config.size("index_topk", 512),
        query=parts.linear(f"{name}.q_b_proj", heads * sizes.index, said(config, "q_lora_rank")),
        weight=parts.linear(f"{name}.scorer.weights_proj", heads, parts.hidden),
        scale=(heads * sizes.index) ** -0.5,
    )


def _kept_row(parts: Parts, sizes: Sizes, state: str, norm: str) -> Kept:
    rows = shared_rows(parts.spec.state(state).dtype, sizes.row - sizes.rope, sizes.rope)
    return Kept(state=state, width=sizes.row, norm=parts.norm(norm, sizes.row), format=rows)


def _experts(parts: Parts, name: str) -> TokenExperts:
    config, weights = parts.config, parts.weights
    count, combine = config.size("n_routed_experts"), _clamped(activation(config), number(config, "swiglu_limit", 10.0))
    scoring = config.text("scoring_func") or "sqrtsoftplus"
    if scoring not in _SCORES:
        raise ConfigError(f"scoring_func {scoring!r} is not known; known are {', '.join(_SCORES)}")
    table, bias = f"{name}.gate.tid2eid", f"{name}.gate.e_score_correction_bias"
    inner, shared = said(config, "moe_intermediate_size"), f"{name}.shared_experts"
    wide = None if inner is None else inner * config.size("n_shared_experts", 1)
    wide = weights.shared(wide, INNER, of=f"{shared}.gate_proj.weight", axis=0)
    top = config.size("num_experts_per_tok", most=count)
    return TokenExperts(
        router=parts.linear(f"{name}.gate", count, parts.hidden, biased=False),
        score=_SCORES[scoring],
        count=top,
        scale=number(config, "routed_scaling_factor", 1.5),
        table_VK=weights.take(table, said(config, "vocab_size"), top, dtype=torch.int64) if weights.has(table) else None,
        bias_E=parts.exact(bias, count) if weights.has(bias) else None,
        experts=Experts.load(parts, f"{name}.experts", count, combine=combine),
        shared=Expert(
            gate_up=Linear.load(weights, dict.fromkeys((f"{shared}.gate_proj", f"{shared}.up_proj"), wide), parts.hidden),
            down=parts.linear(f"{shared}.down_proj", parts.hidden, wide),
            combine=combine,
        ),
    )


def _clamped(act: Activation, limit: float) -> Combine:
    """`act(gate) * up`, with gates clamped from above and ups from both sides."""
    return lambda gate, up: act(gate.clamp(max=limit)) * up.clamp(-limit, limit)


def _rotary(parts: Parts, sizes: Sizes, kind: str) -> Rotary:
    """`main` for windows alone, `compress` for layers with entries. Older configs have one scaling, which is for the latter."""
    config, device = parts.config, parts.device
    written = config.section("rope_parameters") if config.has("rope_parameters") else config.section("rope_scaling")
    field, default = ("rope_theta", 10000.0) if kind == "main" else ("compress_rope_theta", 160000.0)
    if written.has(kind):
        scaling = written.section(kind)
    else:
        scaling = Fields(values={} if kind == "main" else {**written.values, "rope_theta": None}, path=written.path)
    base = number(scaling, "rope_theta", number(config, field, default))
    scaling = Fields(values={"attention_factor": 1.0, **scaling.values}, path=scaling.path)  # scores do not grow with the length
    return rotary(base, sizes.rope, scaling, config, device)


def _name_in_memory(name: str) -> str:
    first, *rest = name.removeprefix("model.").split(".")
    if first == "layers":
        inner = ".".join(_INNER.get(part, part) for part in rest)
        for theirs, ours in _MOVED:
            inner = inner.replace(theirs, ours)
        return f"model.layers.{inner}"
    return ".".join([_OUTER[first], *rest]) if first in _OUTER else name
