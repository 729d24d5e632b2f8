"""A Hugging Face style config from the metadata of a GGUF file. Reads one tensor at most: the factors of a scaled rotation."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass

import numpy as np
import torch

from stepwell.base.errors import ConfigError
from stepwell.engine.loading.gguf_header import Header

ARCHITECTURES = {"llama": "llama", "qwen2": "qwen2", "qwen3": "qwen3", "gemma3": "gemma3_text"}  # GGUF's name -> model_type

_GEMMA_PATTERN = 6  # every sixth layer looks at everything
_GEMMA_LOCAL_THETA = 10000.0
_GEMMA_27B_LAYERS = 62  # the one size whose scores are scaled by its width per head, not by its heads' width
# All of Llama 3.1 to 3.3; files keep the factors these make, not the values.
_LLAMA3_ROPE = {"low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 8192}

ReadTensor = Callable[[str], torch.Tensor]


def architecture_of(header: Header) -> str:
    name = header.fields.get("general.architecture")
    if not isinstance(name, str) or name not in ARCHITECTURES:
        raise ConfigError(f"GGUF architecture {name!r:.60} is not known; known are {', '.join(ARCHITECTURES)}")
    return name


def config_of(header: Header, read: ReadTensor) -> dict[str, object]:
    """What `config.json` would say. Raises ConfigError for a field that is missing or no sensible number."""
    architecture = architecture_of(header)
    fields = _Fields(values=header.fields, architecture=architecture)
    heads, hidden = fields.whole("attention.head_count"), fields.whole("embedding_length")
    head_dim = fields.whole("attention.key_length", hidden // heads)
    if fields.whole("attention.value_length", head_dim) != head_dim:
        raise ConfigError("a GGUF model whose keys and values differ in width is not known here")
    config: dict[str, object] = {
        "model_type": ARCHITECTURES[architecture],
        "hidden_size": hidden,
        "intermediate_size": fields.whole("feed_forward_length"),
        "num_hidden_layers": fields.whole("block_count"),
        "num_attention_heads": heads,
        "num_key_value_heads": fields.whole("attention.head_count_kv", heads),
        "head_dim": head_dim,
        "max_position_embeddings": fields.whole("context_length", 4096),
        "rms_norm_eps": fields.number("attention.layer_norm_rms_epsilon", 1e-6),
        "rope_theta": fields.number("rope.freq_base", 10000.0),
        "vocab_size": _vocab_size(header),
        "tie_word_embeddings": "output.weight" not in header.tensors,
    }
    if scaling := _rope_scaling(header, fields, config, read):
        config["rope_scaling"] = scaling
    if architecture == "gemma3":
        config |= _gemma(fields, config, hidden // heads)
    return config


def _vocab_size(header: Header) -> int:
    embed = header.tensors.get("token_embd.weight")
    if embed is None:
        raise ConfigError("the GGUF file has no tensor 'token_embd.weight': it is not a whole model")
    return embed.shape[0]


def _gemma(fields: _Fields, config: Mapping[str, object], width_per_head: int) -> dict[str, object]:
    layers = fields.whole("block_count")
    pattern = fields.whole("attention.sliding_window_pattern", _GEMMA_PATTERN)
    return {
        "hidden_activation": "gelu_pytorch_tanh",
        "sliding_window": fields.whole("attention.sliding_window"),
        "layer_types": ["sliding_attention" if (index + 1) % pattern else "full_attention" for index in range(min(layers, 4096))],
        "rope_local_base_freq": fields.number("rope.freq_base_swa", _GEMMA_LOCAL_THETA),
        "query_pre_attn_scalar": width_per_head if layers == _GEMMA_27B_LAYERS else config["head_dim"],
    }


def _rope_scaling(header: Header, fields: _Fields, config: Mapping[str, object], read: ReadTensor) -> dict[str, object] | None:
    if "rope_freqs.weight" in header.tensors:
        return _llama3_scaling(read("rope_freqs.weight"), config)
    kind = fields.values.get(f"{fields.architecture}.rope.scaling.type", "none")
    if kind == "none":
        return None
    if kind not in ("linear", "yarn"):
        raise ConfigError(f"GGUF rope scaling {kind!r:.60} is not known; known are none, linear and yarn")
    scaling: dict[str, object] = {"rope_type": kind, "factor": fields.number("rope.scaling.factor")}
    if kind == "yarn":
        original = fields.whole("rope.scaling.original_context_length", fields.whole("context_length", 4096))
        scaling["original_max_position_embeddings"] = original
    return scaling


def _llama3_scaling(factors: torch.Tensor, config: Mapping[str, object]) -> dict[str, object]:
    """The scaling whose factors the file holds. Raises ConfigError when Llama 3's rule does not give them."""
    factor, theta, width = float(factors.max()), config["rope_theta"], config["head_dim"]
    assert isinstance(theta, float) and isinstance(width, int), f"{theta=} {width=}"
    turns = 8192 / (2 * math.pi) * theta ** -(np.arange(0, width, 2) / width)
    keep = ((turns - 1.0) / 3.0).clip(0, 1)
    expected = 1.0 / ((1 - keep) / factor + keep) if factor > 0 else np.zeros(len(keep))
    if factors.shape != (len(keep),) or not np.allclose(factors.numpy(), expected, rtol=1e-3):
        raise ConfigError("the GGUF file scales its rotation (rope_freqs) in a way that is not Llama 3's, and not known here")
    return {"rope_type": "llama3", "factor": factor} | _LLAMA3_ROPE


@dataclass(frozen=True, slots=True, kw_only=True)
class _Fields:
    """The numbers of one architecture, whose names begin with its name."""

    values: Mapping[str, object]
    architecture: str

    def whole(self, name: str, default: int | None = None) -> int:
        value = self.values.get(f"{self.architecture}.{name}", default)
        if not isinstance(value, int) or isinstance(value, bool) or not 0 < value <= 1 << 24:
            raise ConfigError(f"GGUF field {self.architecture}.{name} must be a positive whole number, got {value!r:.60}")
        return value

    def number(self, name: str, default: float | None = None) -> float:
        value = self.values.get(f"{self.architecture}.{name}", default)
        if not isinstance(value, float) or not 0 < value < 1e12:
            raise ConfigError(f"GGUF field {self.architecture}.{name} must be a positive number, got {value!r:.60}")
        return value
