"""A model shaped like DeepSeek-V3.2 in small, of random weights, as a directory: latents, an index, experts."""

from __future__ import annotations

from pathlib import Path

import torch
import transformers

_SIZES = {
    "vocab_size": 256, "hidden_size": 384, "intermediate_size": 1024, "moe_intermediate_size": 256, "num_hidden_layers": 6,
    "num_attention_heads": 8, "num_key_value_heads": 8, "q_lora_rank": 192, "kv_lora_rank": 128, "qk_rope_head_dim": 32,
    "qk_nope_head_dim": 64, "v_head_dim": 64, "n_routed_experts": 8, "num_experts_per_tok": 2, "n_shared_experts": 1,
    "n_group": 2, "topk_group": 1, "first_k_dense_replace": 1, "index_n_heads": 16, "index_head_dim": 64, "index_topk": 256,
    "max_position_embeddings": 16384,
}  # fmt: skip


def save_model(directory: Path) -> None:
    """The same weights every time. A token is a byte."""
    torch.manual_seed(0)
    transformers.utils.logging.disable_progress_bar()
    config = transformers.AutoConfig.for_model("deepseek_v32", **_SIZES)
    model = transformers.AutoModelForCausalLM.from_config(config).float()
    with torch.no_grad():
        for tensor in model.parameters():
            if tensor.ndim > 1:  # matrices that keep the size of what goes through them, so that answers depend on the prompt
                tensor.normal_(std=tensor.shape[-1] ** -0.5)
    model.save_pretrained(directory, max_shard_size="20MB")
