"""Models of several families with random weights, written once as folders that engines load.

    python models.py FOLDER FAMILY ...

Random logits are flat, so that a cache that restores anything wrongly changes answers. Recurrent state is made to last.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

VOCABULARY = 32000
BASE = {
    "vocab_size": VOCABULARY, "max_position_embeddings": 131072, "tie_word_embeddings": False, "bos_token_id": 1,
    "eos_token_id": 2, "pad_token_id": 0, "initializer_range": 0.03, "rms_norm_eps": 1e-5,
}  # fmt: skip
NEEDED = {"qwen3next": {"full_attention_interval": 4}}  # that transformers drops when it saves


def sizes(hidden: int, inner: int, layers: int, heads: int, kv: int, dim: int) -> dict[str, int]:
    return {
        "hidden_size": hidden, "intermediate_size": inner, "num_hidden_layers": layers, "num_attention_heads": heads,
        "num_key_value_heads": kv, "head_dim": dim,
    }  # fmt: skip


def config(family: str) -> Any:
    import transformers

    if family == "tiny":
        return transformers.LlamaConfig(**BASE, **sizes(128, 256, 4, 4, 2, 32))
    if family == "llama":
        return transformers.LlamaConfig(**BASE, **sizes(2048, 8192, 16, 32, 8, 64), rope_theta=500000.0)
    if family == "llama8b":
        return transformers.LlamaConfig(**BASE, **sizes(4096, 14336, 32, 32, 8, 128), rope_theta=500000.0)
    if family == "gemma3":
        layers = (["sliding_attention"] * 5 + ["full_attention"]) * 2
        return transformers.Gemma3TextConfig(
            **BASE | {"tie_word_embeddings": True}, **sizes(1152, 6912, 12, 4, 1, 256), sliding_window=512,
            query_pre_attn_scalar=256, layer_types=layers,
        )  # fmt: skip
    if family == "gptoss":
        return transformers.GptOssConfig(
            **BASE, **sizes(1024, 1024, 12, 16, 4, 64), sliding_window=128, num_local_experts=8, num_experts_per_tok=2,
            layer_types=["sliding_attention", "full_attention"] * 6,
        )  # fmt: skip
    if family == "falconh1":
        return transformers.FalconH1Config(
            **BASE, **sizes(1024, 2048, 8, 8, 2, 128), mamba_d_ssm=1536, mamba_n_heads=24, mamba_d_head=64, mamba_n_groups=1,
            mamba_d_state=128, mamba_d_conv=4, mamba_chunk_size=256,
        )  # fmt: skip
    if family == "qwen3next":
        return transformers.Qwen3NextConfig(
            **BASE, **sizes(1024, 2048, 8, 8, 2, 256), linear_num_key_heads=8, linear_num_value_heads=16,
            linear_key_head_dim=128, linear_value_head_dim=128, linear_conv_kernel_dim=4, num_experts=8, num_experts_per_tok=2,
            moe_intermediate_size=512, shared_expert_intermediate_size=512, decoder_sparse_step=1,
            layer_types=(["linear_attention"] * 3 + ["full_attention"]) * 2,
        )  # fmt: skip
    assert family == "mla", family
    latent = {name: value for name, value in sizes(1024, 2048, 6, 16, 16, 64).items() if name != "head_dim"}
    return transformers.DeepseekV3Config(
        **BASE, **latent, q_lora_rank=512, kv_lora_rank=512, qk_nope_head_dim=128, qk_rope_head_dim=64, v_head_dim=128,
        n_routed_experts=8, num_experts_per_tok=2, n_shared_experts=1, moe_intermediate_size=512, first_k_dense_replace=1,
        n_group=1, topk_group=1, topk_method="noaux_tc",  # transformers writes the bias that vLLM reads with this method alone
    )  # fmt: skip


def make(family: str, root: Path) -> Path:
    """Writes a model, unless it is there."""
    folder = root / family
    if (folder / "made").exists():
        return folder
    import torch
    import transformers

    torch.manual_seed(7)
    on_gpu = torch.cuda.is_available()
    with torch.device("cuda" if on_gpu else "cpu"):
        model = transformers.AutoModelForCausalLM.from_config(config(family), dtype=torch.bfloat16 if on_gpu else torch.float32)
    for name, weight in model.named_parameters():
        if name.endswith("dt_bias"):
            weight.data.fill_(-4.0)
        elif name.endswith("A_log"):
            weight.data.fill_(-1.5)
        elif name.endswith("mamba.out_proj.weight"):
            weight.data.mul_(4)
    model.to("cpu").save_pretrained(folder)
    path = folder / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | NEEDED.get(family, {}), indent=1))
    (folder / "made").touch()
    return folder


if __name__ == "__main__":
    for each in sys.argv[2:]:
        make(each, Path(sys.argv[1]))
