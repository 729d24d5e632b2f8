"""Tensors of DeepSeek-V4 under the names its model asks for, whichever of three ways a checkpoint has.

    layers.3.attn.wq_a.weight               as published
    model.layers.3.attn.wq_a.weight         as transformers writes files
    model.layers.3.self_attn.q_a_proj.weight    as transformers calls them in memory: the names asked for

Renames only: reads tensors one by one, when they are asked for, and changes none.
"""

from __future__ import annotations

from collections.abc import Iterable

import torch

from stepwell.engine.loading.weights import Region, TensorSource

_PUBLISHED = ".wq_a."  # some name has it, unless they are as in memory
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


def named(source: TensorSource) -> TensorSource:
    """The same tensors, under the names the model asks for."""
    return _Renamed(source) if any(_PUBLISHED in name for name in source.names()) else source


class _Renamed:
    def __init__(self, source: TensorSource) -> None:
        self._source = source
        self._theirs = {_ours(name): name for name in source.names()}

    def names(self) -> Iterable[str]:
        return self._theirs.keys()

    def shape(self, name: str) -> tuple[int, ...]:
        return self._source.shape(self._theirs[name])

    def read(self, name: str, region: Region = ()) -> torch.Tensor:
        return self._source.read(self._theirs[name], region)


def _ours(name: str) -> str:
    first, *rest = name.removeprefix("model.").split(".")
    if first == "layers":
        inner = ".".join(_INNER.get(part, part) for part in rest)
        for theirs, ours in _MOVED:
            inner = inner.replace(theirs, ours)
        return f"model.layers.{inner}"
    return ".".join([_OUTER[first], *rest]) if first in _OUTER else name
