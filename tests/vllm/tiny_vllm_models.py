"""Tiny models with random weights, one folder each, that vLLM runs on a CPU in fp32. Same seed, same weights.

python tiny_vllm_models.py FOLDER llama gemma3 ...
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

import torch
import transformers
from safetensors.torch import save_file
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from tokenizers.pre_tokenizers import WhitespaceSplit

BASE = {
    "vocab_size": 512, "hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 4, "num_attention_heads": 4,
    "num_key_value_heads": 2, "head_dim": 32, "max_position_embeddings": 4096, "tie_word_embeddings": False,
    "bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 0, "initializer_range": 0.1,
}  # fmt: skip
WINDOW = {"sliding_window": 32}


def llama() -> object:
    return transformers.LlamaConfig(**BASE)


def gemma3() -> object:
    layers = ["sliding_attention"] * 5 + ["full_attention"]
    return transformers.Gemma3TextConfig(
        **(BASE | WINDOW | {"num_hidden_layers": 6, "layer_types": layers, "query_pre_attn_scalar": 32})
    )


def gptoss() -> object:
    layers = ["sliding_attention", "full_attention"] * 2
    return transformers.GptOssConfig(
        **(BASE | WINDOW | {"num_local_experts": 4, "num_experts_per_tok": 2, "layer_types": layers})
    )


def falconh1() -> object:
    return transformers.FalconH1Config(
        **BASE | {"num_hidden_layers": 2, "mamba_d_ssm": 64, "mamba_n_heads": 4, "mamba_d_head": 16, "mamba_n_groups": 1,
                  "mamba_d_state": 16, "mamba_d_conv": 4, "mamba_chunk_size": 16}
    )  # fmt: skip


def phi3() -> object:
    """Rotations of another kind from prompts of more than 512 tokens on: vLLM chooses when it builds the model."""
    rotations = {"rope_type": "longrope", "rope_theta": 10_000.0, "short_factor": [1.0] * 16, "long_factor": [3.0] * 16}
    sizes = {name: value for name, value in BASE.items() if name != "head_dim"} | {"hidden_size": 128}
    return transformers.Phi3Config(
        **sizes, original_max_position_embeddings=512, rope_parameters=rotations | {"original_max_position_embeddings": 512}
    )


MODELS = {"llama": llama, "gemma3": gemma3, "gptoss": gptoss, "falconh1": falconh1}
OTHERS = {"phi3": phi3}


def make(name: str, folder: Path) -> Path:
    """Writes a model, unless it is there."""
    if not (folder / name / "config.json").exists():
        torch.manual_seed(7)
        model = transformers.AutoModelForCausalLM.from_config((MODELS | OTHERS)[name]()).to(torch.float32)
        for weight_name, weight in model.named_parameters():
            _remember(weight_name, weight)
        model.save_pretrained(folder / name)
    return folder / name


def make_tokenizer(model: Path) -> None:
    """Writes one word for each token next to a model: servers start with a tokenizer only."""
    words = {f"w{number}": number for number in range(BASE["vocab_size"])}
    tokenizer = Tokenizer(WordLevel(words, unk_token="w0"))
    tokenizer.pre_tokenizer = WhitespaceSplit()
    special = {"unk_token": "w0", "bos_token": "w1", "eos_token": "w2", "pad_token": "w0"}
    transformers.PreTrainedTokenizerFast(tokenizer_object=tokenizer, **special).save_pretrained(model)


def make_adapter(number: int, folder: Path) -> Path:
    """Writes a LoRA adapter for the tiny Llama, with weights of its own."""
    path = folder / f"adapter-{number}"
    path.mkdir(parents=True, exist_ok=True)
    torch.manual_seed(number)
    rows = {"q_proj": 128, "v_proj": 64}
    weights = {}
    for layer in range(BASE["num_hidden_layers"]):
        for name, out in rows.items():
            where = f"base_model.model.model.layers.{layer}.self_attn.{name}"
            weights[f"{where}.lora_A.weight"] = torch.randn(8, 64) * 0.3
            weights[f"{where}.lora_B.weight"] = torch.randn(out, 8) * 0.3
    save_file(weights, path / "adapter_model.safetensors")
    settings = {"peft_type": "LORA", "r": 8, "lora_alpha": 8, "target_modules": list(rows), "bias": "none", "lora_dropout": 0.0}
    (path / "adapter_config.json").write_text(json.dumps(settings))
    return path


def _remember(name: str, weight: torch.Tensor) -> None:
    """Recurrent state that lasts for hundreds of tokens, and matters: else a lost one would change no answer."""
    if name.endswith("dt_bias"):
        weight.data.fill_(-4.0)
    elif name.endswith("A_log"):
        weight.data.fill_(-1.5)
    elif name.endswith("mamba.out_proj.weight"):
        weight.data.mul_(8)


if __name__ == "__main__":
    for each in sys.argv[2:]:
        make(each, Path(sys.argv[1]))
