"""Well-known models by name, each as the part of its `config.json` that says what it remembers.

Presets take the same path as a config file: `from_config`. Holds no sizes of its own making.
"""

from __future__ import annotations

import difflib
import json
from collections.abc import Mapping
from pathlib import Path

from stepwell.base.errors import SpecError
from stepwell.base.spec.families import from_config
from stepwell.base.spec.model import ModelSpec

__all__ = ["load_spec", "preset", "preset_names"]

MAX_CONFIG_BYTES = 4 << 20
CONFIG_FILE = "config.json"

Config = Mapping[str, object]


def _gqa(model_type: str, layers: int, heads: int, kv_heads: int, head_dim: int = 128) -> Config:
    return {
        "model_type": model_type,
        "num_hidden_layers": layers,
        "num_attention_heads": heads,
        "num_key_value_heads": kv_heads,
        "head_dim": head_dim,
    }


def _gemma3(layers: int, heads: int, kv_heads: int, head_dim: int, window: int) -> Config:
    return {**_gqa("gemma3_text", layers, heads, kv_heads, head_dim), "sliding_window": window, "sliding_window_pattern": 6}


def _gpt_oss(layers: int) -> Config:
    kinds = ["sliding_attention", "full_attention"] * (layers // 2)
    return {**_gqa("gpt_oss", layers, 64, 8, 64), "sliding_window": 128, "layer_types": kinds}


def _mla(model_type: str, layers: int, draft_layers: int = 0, hidden: int = 7168) -> Config:
    return {
        "model_type": model_type,
        "num_hidden_layers": layers,
        "kv_lora_rank": 512,
        "qk_rope_head_dim": 64,
        "num_nextn_predict_layers": draft_layers,
        "hidden_size": hidden,
    }


def _dsa(model_type: str, layers: int, hidden: int, **sharing: int) -> Config:
    return {**_mla(model_type, layers, 1, hidden), "index_head_dim": 128, **sharing}


def _v4(first: int, pairs: int) -> Config:
    """Two first layers of one ratio, then C4 and C128 in turn, then C4; the last entry is the draft layer's."""
    ratios = [first, first, *[4, 128] * pairs, 4, 0]
    return {
        "model_type": "deepseek_v4",
        "num_hidden_layers": len(ratios) - 1,
        "head_dim": 512,
        "qk_rope_head_dim": 64,
        "sliding_window": 128,
        "index_head_dim": 128,
        "compress_ratios": ratios,
    }


def _delta_net(model_type: str, layers: int, heads: int, kv_heads: int, value_heads: int) -> Config:
    return {
        **_gqa(model_type, layers, heads, kv_heads, 256),
        "full_attention_interval": 4,
        "linear_num_key_heads": 16,
        "linear_key_head_dim": 128,
        "linear_num_value_heads": value_heads,
        "linear_value_head_dim": 128,
        "linear_conv_kernel_dim": 4,
    }


def _kimi_delta(layers: int, heads: int) -> Config:
    """Every fourth layer is full, and so is the last."""
    full = sorted({*range(4, layers, 4), layers})
    linear = {
        "full_attn_layers": full,
        "kda_layers": [layer for layer in range(1, layers + 1) if layer not in full],
        "num_heads": heads,
        "head_dim": 128,
        "short_conv_kernel_size": 4,
    }
    return {**_mla("kimi_linear", layers), "linear_attn_config": linear}


def _mimo_v2(layers: int, kv_heads: int, window_kv_heads: int) -> Config:
    """The first layer is full, then one after each five with a window counted from the first."""
    pattern = [0 if index == 0 or index % 6 == 5 else 1 for index in range(layers)]
    return {
        **_gqa("mimo_v2", layers, 64, kv_heads, 192),
        "v_head_dim": 128,
        "swa_num_key_value_heads": window_kv_heads,
        "swa_head_dim": 192,
        "swa_v_head_dim": 128,
        "sliding_window": 128,
        "hybrid_layer_pattern": pattern,
    }


def _falcon_h1(layers: int, heads: int, head_dim: int, mamba_heads: int, mamba_head_dim: int, state: int) -> Config:
    return {
        **_gqa("falcon_h1", layers, heads, 2, head_dim),
        "mamba_d_ssm": mamba_heads * mamba_head_dim,
        "mamba_n_heads": mamba_heads,
        "mamba_d_head": mamba_head_dim,
        "mamba_n_groups": 1,
        "mamba_d_state": state,
        "mamba_d_conv": 4,
    }


def _mamba2(layers: int, heads: int) -> Config:
    sizes = {"num_heads": heads, "head_dim": 64, "state_size": 128, "n_groups": 1, "conv_kernel": 4}
    return {"model_type": "mamba2", "num_hidden_layers": layers, **sizes}


_PRESETS: dict[str, Config] = {
    "llama-3.1-8b": _gqa("llama", 32, 32, 8),
    "llama-3.1-70b": _gqa("llama", 80, 64, 8),
    "llama-3.3-70b": _gqa("llama", 80, 64, 8),
    "qwen2.5-7b": _gqa("qwen2", 28, 28, 4),
    "qwen2.5-32b": _gqa("qwen2", 64, 40, 8),
    "qwen2.5-72b": _gqa("qwen2", 80, 64, 8),
    "qwen3-0.6b": _gqa("qwen3", 28, 16, 8),
    "qwen3-1.7b": _gqa("qwen3", 28, 16, 8),
    "qwen3-4b": _gqa("qwen3", 36, 32, 8),
    "qwen3-8b": _gqa("qwen3", 36, 32, 8),
    "qwen3-14b": _gqa("qwen3", 40, 40, 8),
    "qwen3-32b": _gqa("qwen3", 64, 64, 8),
    "qwen3-30b-a3b": _gqa("qwen3_moe", 48, 32, 4),
    "qwen3-235b-a22b": _gqa("qwen3_moe", 94, 64, 4),
    "minimax-m2": _gqa("minimax_m2", 62, 48, 8),
    "gemma-3-270m": _gemma3(18, 4, 1, 256, 512),
    "gemma-3-27b": _gemma3(62, 32, 16, 128, 1024),
    "gpt-oss-20b": _gpt_oss(24),
    "gpt-oss-120b": _gpt_oss(36),
    "mimo-v2.5": _mimo_v2(48, 4, 8),
    "deepseek-v3": _mla("deepseek_v3", 61, 1),
    "deepseek-r1": _mla("deepseek_v3", 61, 1),
    "kimi-k2.5": _mla("kimi_k2", 61),
    "kimi-k2.6": _mla("kimi_k2", 61),
    "deepseek-v3.2": _dsa("deepseek_v32", 61, 7168),
    "glm-5": _dsa("glm_moe_dsa", 78, 6144),
    "glm-5.1": _dsa("glm_moe_dsa", 78, 6144),
    "glm-5.2": _dsa("glm_moe_dsa", 78, 6144, index_topk_freq=4, index_skip_topk_offset=3),
    "deepseek-v4-flash": _v4(0, 20),
    "deepseek-v4-pro": _v4(128, 29),
    "qwen3-next-80b": _delta_net("qwen3_next", 48, 16, 2, 32),
    "qwen3.5-0.8b": _delta_net("qwen3_5", 24, 8, 2, 16),
    "qwen3.5-2b": _delta_net("qwen3_5", 24, 8, 2, 16),
    "qwen3.5-4b": _delta_net("qwen3_5", 32, 16, 4, 32),
    "qwen3.5-9b": _delta_net("qwen3_5", 32, 16, 4, 32),
    "qwen3.5-27b": _delta_net("qwen3_5", 64, 24, 4, 48),
    "qwen3.5-35b-a3b": _delta_net("qwen3_5_moe", 40, 16, 2, 32),
    "qwen3.5-122b-a10b": _delta_net("qwen3_5_moe", 48, 32, 2, 64),
    "qwen3.5-397b-a17b": _delta_net("qwen3_5_moe", 60, 32, 2, 64),
    "qwen3.6-27b": _delta_net("qwen3_5", 64, 24, 4, 48),
    "qwen3.6-35b-a3b": _delta_net("qwen3_5_moe", 40, 16, 2, 32),
    "qwen3.8-2.4t-a95b": _delta_net("qwen3_5_moe", 92, 64, 4, 128),
    "kimi-linear-48b": _kimi_delta(27, 32),
    "kimi-k3": _kimi_delta(93, 96),
    "falcon-h1-0.5b": _falcon_h1(36, 8, 64, 24, 64, 128),
    "falcon-h1-7b": _falcon_h1(44, 12, 128, 24, 128, 256),
    "mamba2-2.7b": _mamba2(64, 80),
}


def preset_names() -> tuple[str, ...]:
    return tuple(sorted(_PRESETS))


def preset(name: str, *, kv_dtype: str | None = None, page_tokens: int | None = None, draft: bool = False) -> ModelSpec:
    """The spec of a well-known model, with that of its draft layers if wanted.

    Raises SpecError with near matches for a name that is not one.
    """
    key = name.lower()
    if key not in _PRESETS:
        raise _unknown(name)
    return from_config(_PRESETS[key], kv_dtype=kv_dtype, page_tokens=page_tokens, name=key, draft=draft)


def load_spec(
    name_or_path: str | Path, *, kv_dtype: str | None = None, page_tokens: int | None = None, draft: bool = False
) -> ModelSpec:
    """The spec of a preset, of a `config.json`, or of the folder that holds one. Raises SpecError."""
    name = str(name_or_path)
    if name.lower() in _PRESETS:
        return preset(name, kv_dtype=kv_dtype, page_tokens=page_tokens, draft=draft)
    path = Path(name)
    try:
        file = path / CONFIG_FILE if path.is_dir() else path
        found = file.is_file()
    except (OSError, ValueError) as error:
        raise _unknown(name) from error
    if not found:
        if path.is_dir():
            raise SpecError(f"the folder {name} holds no {CONFIG_FILE}")
        raise _unknown(name)
    title = file.resolve().parent.name if file.name == CONFIG_FILE else file.stem
    try:
        return from_config(read_config(file), kv_dtype=kv_dtype, page_tokens=page_tokens, name=title or None, draft=draft)
    except SpecError as error:
        raise SpecError(f"{file}: {error}") from error


def read_config(file: Path) -> Config:
    """The JSON object in `file`. Reads at most MAX_CONFIG_BYTES; raises SpecError for anything else."""
    try:
        with file.open("rb") as stream:
            raw = stream.read(MAX_CONFIG_BYTES + 1)
    except OSError as error:
        raise SpecError(f"cannot read the config: {error.strerror}") from error
    if len(raw) > MAX_CONFIG_BYTES:
        raise SpecError(f"larger than {MAX_CONFIG_BYTES} bytes, which no model config is")
    try:
        config = json.loads(raw)
    except (ValueError, RecursionError) as error:  # bad JSON, bad UTF-8, numbers too long, nesting too deep
        raise SpecError(f"not valid JSON: {error}") from error
    if not isinstance(config, dict):
        raise SpecError(f"a model config must be a JSON object, got {type(config).__name__}")
    return config


def _unknown(name: str) -> SpecError:
    near = difflib.get_close_matches(name[:100].lower(), preset_names(), n=3)
    hint = f"did you mean {', '.join(near)}? " if near else ""
    return SpecError(f"no preset or config is called {name!r:.200}; {hint}`stepwell spec --list` shows all presets")
