"""Models with random weights in the shapes of three families, small enough for a CPU. The same weights every time."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
import transformers

VOCABULARY = 8192
SIZES = {
    "hidden_size": 512, "intermediate_size": 1024, "num_hidden_layers": 8, "num_attention_heads": 8, "num_key_value_heads": 2,
    "head_dim": 64, "vocab_size": VOCABULARY, "max_position_embeddings": 1 << 17,
}  # fmt: skip
MAMBA = {"mamba_d_ssm": 512, "mamba_n_heads": 8, "mamba_d_head": 64, "mamba_d_state": 64, "mamba_n_groups": 1}


def _config(family: str) -> Any:
    if family == "llama":
        return transformers.LlamaConfig(**SIZES)
    if family == "gemma3":
        return transformers.Gemma3TextConfig(**SIZES, sliding_window=512)
    assert family == "falcon_h1", family
    return transformers.FalconH1Config(**SIZES, **MAMBA)


def saved(family: str, directory: Path) -> Path:
    """Writes the model, unless it is there."""
    if not (directory / "config.json").exists():
        torch.manual_seed(0)
        transformers.AutoModelForCausalLM.from_config(_config(family)).eval().float().save_pretrained(directory)
    return directory


def prompt(tokens: int, *, seed: int) -> list[int]:
    return [int(each) for each in torch.randint(3, VOCABULARY, (tokens,), generator=torch.Generator().manual_seed(seed))]
