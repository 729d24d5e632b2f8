"""A small random model of every family the engine runs, as a checkpoint: made with transformers, for its configs and names."""

from __future__ import annotations

from functools import cache
from typing import Any

import torch

from engine.side_by_side import draw
from stepwell.engine.loading.chat import ChatTemplate
from stepwell.engine.loading.checkpoint import Checkpoint
from stepwell.engine.loading.weights import HeldTensors

SMALL = {
    "vocab_size": 128, "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 4, "num_attention_heads": 4,
    "num_key_value_heads": 2, "head_dim": 16, "max_position_embeddings": 65536, "tie_word_embeddings": False,
}  # fmt: skip
MOE = {
    "num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32, "shared_expert_intermediate_size": 32,
    "norm_topk_prob": True,
}  # fmt: skip
DELTA = {
    "linear_num_key_heads": 2, "linear_num_value_heads": 4, "linear_key_head_dim": 16, "linear_value_head_dim": 16,
    "linear_conv_kernel_dim": 4,
}  # fmt: skip
MAMBA = {
    "mamba_d_ssm": 64, "mamba_n_heads": 4, "mamba_d_head": 16, "mamba_n_groups": 2, "mamba_d_state": 16, "mamba_d_conv": 4,
    "mamba_chunk_size": 16,
}  # fmt: skip

FAMILIES = ("llama", "mistral", "gemma3", "gpt_oss", "qwen3_next", "qwen3_5", "falcon_h1", "mamba2")


def reference(family: str) -> Any:
    """The model of transformers, with weights that keep logits alive."""
    import transformers as hf

    match family:
        case "llama":
            made = hf.LlamaForCausalLM(hf.LlamaConfig(**SMALL))
        case "mistral":
            made = hf.MistralForCausalLM(hf.MistralConfig(**SMALL, sliding_window=40))
        case "gemma3":
            kinds = ["sliding_attention", "sliding_attention", "full_attention", "sliding_attention"]
            config = hf.Gemma3TextConfig(**SMALL, sliding_window=24, layer_types=kinds, query_pre_attn_scalar=16)
            made = hf.Gemma3ForCausalLM(config)
        case "gpt_oss":
            config = hf.GptOssConfig(**SMALL, num_local_experts=4, num_experts_per_tok=2, sliding_window=24)
            config._attn_implementation = "eager"
            made = hf.GptOssForCausalLM(config)
        case "qwen3_next":
            made = hf.Qwen3NextForCausalLM(hf.Qwen3NextConfig(**SMALL, **MOE, **DELTA))
        case "qwen3_5":
            made = hf.Qwen3_5ForCausalLM(hf.Qwen3_5TextConfig(**SMALL, **DELTA))
        case "mamba2":
            sizes = {"num_heads": 8, "head_dim": 16, "state_size": 16, "n_groups": 2, "expand": 2, "chunk_size": 16}
            made = hf.Mamba2ForCausalLM(hf.Mamba2Config(vocab_size=128, hidden_size=64, num_hidden_layers=3, **sizes))
        case "falcon_h1":
            made = hf.FalconH1ForCausalLM(hf.FalconH1Config(**SMALL, **MAMBA))
        case _:
            raise AssertionError(family)
    draw(made)
    return made.eval().float()


@cache
def checkpoint(family: str) -> Checkpoint:
    model = reference(family)
    tensors = {name: tensor.detach().clone() for name, tensor in model.state_dict().items()}
    assert all(torch.isfinite(tensor).all() for tensor in tensors.values())
    return Checkpoint(
        name=family,
        config=model.config.to_dict(),
        source=HeldTensors(tensors),
        text=None,
        digest=f"test-{family}",
        eos_ids=frozenset(),
        defaults={},
        chat=ChatTemplate(None),
    )
