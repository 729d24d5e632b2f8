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
LATENT = {
    "vocab_size": 128, "hidden_size": 64, "intermediate_size": 96, "num_attention_heads": 4, "num_key_value_heads": 4,
    "max_position_embeddings": 65536, "tie_word_embeddings": False, "kv_lora_rank": 32, "q_lora_rank": 24, "qk_rope_head_dim": 8,
    "qk_nope_head_dim": 12, "v_head_dim": 20, "n_routed_experts": 8, "num_experts_per_tok": 3, "moe_intermediate_size": 32,
    "n_shared_experts": 1, "n_group": 4, "topk_group": 2, "first_k_dense_replace": 1,
}  # fmt: skip
COMPRESSED = {
    "vocab_size": 128, "hidden_size": 64, "moe_intermediate_size": 32, "num_hidden_layers": 4, "num_attention_heads": 4,
    "head_dim": 24, "partial_rotary_factor": 1 / 3, "q_lora_rank": 24, "o_groups": 2, "o_lora_rank": 16, "hc_mult": 3,
    "hc_sinkhorn_iters": 4, "n_routed_experts": 8, "num_experts_per_tok": 3, "swiglu_limit": 2.0, "sliding_window": 24,
    "index_n_heads": 16, "index_head_dim": 16, "index_topk": 6, "max_position_embeddings": 65536,
    "mlp_layer_types": ["hash_moe", "hash_moe", "moe", "moe"],
    "layer_types": [f"{kind}_attention" for kind in ("sliding", "compressed_sparse", "heavily_compressed", "compressed_sparse")],
    "compress_rates": {"compressed_sparse_attention": 4, "heavily_compressed_attention": 32},
}  # fmt: skip
KIMI = {
    "vocab_size": 128, "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 5, "num_attention_heads": 4,
    "num_key_value_heads": 4, "max_position_embeddings": 65536, "kv_lora_rank": 32, "q_lora_rank": None, "qk_rope_head_dim": 8,
    "qk_nope_head_dim": 12, "v_head_dim": 20, "num_local_experts": 8, "num_experts_per_tok": 3, "moe_intermediate_size": 32,
    "n_shared_experts": 1, "n_group": 2, "topk_group": 1, "linear_num_heads": 4, "linear_head_dim": 16,
    "pad_token_id": None, "bos_token_id": None, "eos_token_id": None,
}  # fmt: skip
INDEX = {"index_n_heads": 16, "index_head_dim": 32, "index_topk": 24}  # with fewer heads many scores are equal, at 0

FAMILIES = (
    "llama",
    "mistral",
    "gemma3",
    "gpt_oss",
    "qwen3_next",
    "qwen3_5",
    "falcon_h1",
    "mamba2",
    "deepseek_v3",
    "deepseek_v32",
    "glm_moe_dsa",
    "deepseek_v4",
    "kimi_linear",
)


# Heads as wide as FlashInfer has kernels for. GLM-5 shares the code of V3.2 and Qwen3.5 that of Qwen3-Next; V4 has other kernels.
WIDE: dict[str, dict[str, Any]] = {
    "llama": {"head_dim": 64},
    "qwen3": {"head_dim": 128},
    "mistral": {"head_dim": 128},
    "gemma3": {"head_dim": 256},
    "gpt_oss": {"head_dim": 64},
    "qwen3_next": {"head_dim": 256},
    "falcon_h1": {"head_dim": 128},
    "deepseek_v3": {"kv_lora_rank": 512, "qk_rope_head_dim": 64, "num_attention_heads": 16, "num_key_value_heads": 16},
    "deepseek_v32": {
        "kv_lora_rank": 512, "qk_rope_head_dim": 64, "num_attention_heads": 16, "num_key_value_heads": 16, "index_head_dim": 128,
    },
    "kimi_linear": {"kv_lora_rank": 512, "qk_rope_head_dim": 64, "num_attention_heads": 16, "num_key_value_heads": 16},
}  # fmt: skip


# Sizes that four ranks can share, where the small ones have two of something.
FOUR: dict[str, dict[str, Any]] = {"qwen3_next": {"linear_num_key_heads": 4}, "deepseek_v4": {"o_groups": 4}}


def reference(family: str, corrections: float = 0.2, **wide: Any) -> Any:
    """The model of transformers, with weights that keep logits alive and are the same in every process; `wide` are sizes in
    place of the small ones.
    """
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)  # transformers draws biases
        made = _untrained(family, **wide)
    draw(made)
    draw_choices(made, corrections)
    return made.eval().float()


def _untrained(family: str, **wide: Any) -> Any:
    import transformers as hf

    small, latent, kimi = SMALL | wide, LATENT | INDEX | wide, KIMI | wide
    match family:
        case "llama":
            made = hf.LlamaForCausalLM(hf.LlamaConfig(**small))
        case "qwen3":
            made = hf.Qwen3ForCausalLM(hf.Qwen3Config(**small))
        case "mistral":
            made = hf.MistralForCausalLM(hf.MistralConfig(**small, sliding_window=40))
        case "gemma3":
            kinds = ["sliding_attention", "sliding_attention", "full_attention", "sliding_attention"]
            config = hf.Gemma3TextConfig(
                **small, sliding_window=24, layer_types=kinds, query_pre_attn_scalar=small["head_dim"]
            )  # fmt: skip
            made = hf.Gemma3ForCausalLM(config)
        case "gpt_oss":
            config = hf.GptOssConfig(**small, num_local_experts=4, num_experts_per_tok=2, sliding_window=24)
            config._attn_implementation = "eager"
            made = hf.GptOssForCausalLM(config)
        case "qwen3_next":
            made = hf.Qwen3NextForCausalLM(hf.Qwen3NextConfig(**(SMALL | MOE | DELTA | wide)))
        case "qwen3_5":
            made = hf.Qwen3_5ForCausalLM(hf.Qwen3_5TextConfig(**small, **DELTA))
        case "mamba2":
            sizes = {"num_heads": 8, "head_dim": 16, "state_size": 16, "n_groups": 2, "expand": 2, "chunk_size": 16}
            made = hf.Mamba2ForCausalLM(hf.Mamba2Config(vocab_size=128, hidden_size=64, num_hidden_layers=3, **sizes))
        case "falcon_h1":
            made = hf.FalconH1ForCausalLM(hf.FalconH1Config(**small, **MAMBA))
        case "deepseek_v3":
            made = hf.DeepseekV3ForCausalLM(hf.DeepseekV3Config(**(LATENT | wide), num_hidden_layers=3))
        case "deepseek_v32":
            made = hf.DeepseekV32ForCausalLM(hf.DeepseekV32Config(**latent, num_hidden_layers=3))
        case "glm_moe_dsa":
            kinds = ["full", "full", "shared", "full", "shared"]
            made = hf.GlmMoeDsaForCausalLM(hf.GlmMoeDsaConfig(**latent, num_hidden_layers=5, indexer_types=kinds))
        case "deepseek_v4":
            made = hf.DeepseekV4ForCausalLM(hf.DeepseekV4Config(**(COMPRESSED | wide), attn_implementation="eager"))
        case "kimi_linear":
            made = hf.KimiLinearForCausalLM(hf.KimiLinearConfig(**kimi))  # its fifth layer is the first that is not linear
        case _:
            raise AssertionError(family)
    return made


def draw_choices(model: torch.nn.Module, corrections: float = 0.2, seed: int = 0) -> None:
    """Random corrections of the choice of experts, and random tables of it: they are no parameters, and start at 0.

    Corrections far larger than 1, the largest score, decide alone: rounding then never makes another choice. gpt-oss has none:
    there all experts of a layer but those that a token takes get so much less.
    """
    generator = torch.Generator().manual_seed(seed)
    for name, bias in model.named_parameters():
        if name.endswith("router.bias") and corrections > 1:
            left_out = torch.randperm(len(bias), generator=generator)[model.config.num_experts_per_tok :]
            bias.data[left_out] -= corrections
    for name, tensor in model.named_buffers():
        if name.endswith("e_score_correction_bias"):
            tensor.copy_(torch.randn(tensor.shape, generator=generator) * corrections)
        elif name.endswith("tid2eid"):
            scores = torch.rand(len(tensor), model.config.n_routed_experts, generator=generator)
            tensor.copy_(scores.argsort(dim=-1)[:, : tensor.shape[1]])


@cache
def checkpoint(family: str) -> Checkpoint:
    return checkpoint_of(family, reference(family))


@cache
def wide_checkpoint(family: str, corrections: float = 0.2) -> Checkpoint:
    return checkpoint_of(f"wide-{family}", reference(family, corrections, **WIDE[family]))


@cache
def four_checkpoint(family: str) -> Checkpoint:
    return checkpoint_of(f"four-{family}", reference(family, **FOUR[family])) if family in FOUR else checkpoint(family)


def checkpoint_of(name: str, model: torch.nn.Module) -> Checkpoint:
    """The tensors of a model of transformers, as if they were read from files."""
    tensors = {name: tensor.detach().clone() for name, tensor in model.state_dict().items()}
    assert all(torch.isfinite(tensor).all() for tensor in tensors.values())
    return Checkpoint(
        name=name,
        config=model.config.to_dict(),
        source=HeldTensors(tensors),
        text=None,
        digest=f"test-{name}",
        eos_ids=frozenset(),
        defaults={},
        chat=ChatTemplate(None),
    )
