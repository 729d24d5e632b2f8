"""Models with random weights in the shapes of three families, small enough for a CPU. The same weights every time.

config(family, device), model(family, device)      for this process
saved(family, directory)                           a folder that other engines load
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
import transformers

VOCABULARY = 8192
CPU = {"hidden_size": 512, "intermediate_size": 1024, "num_hidden_layers": 8, "num_attention_heads": 8, "num_key_value_heads": 2}
CUDA = {
    "hidden_size": 2048,
    "intermediate_size": 8192,
    "num_hidden_layers": 16,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
}
SHARED = {"head_dim": 64, "vocab_size": VOCABULARY, "max_position_embeddings": 1 << 17}
MAMBA = {"mamba_d_ssm": 512, "mamba_n_heads": 8, "mamba_d_head": 64, "mamba_d_state": 64, "mamba_n_groups": 1}


def config(family: str, device: str) -> Any:
    sizes = {**(CUDA if device == "cuda" else CPU), **SHARED}
    if family == "llama":
        return transformers.LlamaConfig(**sizes)
    if family == "gemma3":
        return transformers.Gemma3TextConfig(**sizes, sliding_window=512)
    assert family == "falcon_h1", family
    return transformers.FalconH1Config(**sizes, **MAMBA)


def model(family: str, device: str) -> Any:
    torch.manual_seed(0)
    made = transformers.AutoModelForCausalLM.from_config(config(family, device))
    return made.eval().to(device, torch.bfloat16 if device == "cuda" else torch.float32)


def saved(family: str, directory: Path) -> Path:
    """Writes the model for a CPU, unless it is there."""
    if not (directory / "config.json").exists():
        model(family, "cpu").save_pretrained(directory)
    return directory


def prompt(tokens: int, *, seed: int) -> list[int]:
    return [int(each) for each in torch.randint(3, VOCABULARY, (tokens,), generator=torch.Generator().manual_seed(seed))]
