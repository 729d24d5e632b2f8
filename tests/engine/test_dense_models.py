"""Llama, Mistral, Qwen2 and Qwen3 compared with transformers."""

from __future__ import annotations

import pytest

from engine.side_by_side import Pair, check_pair

transformers = pytest.importorskip("transformers")

SMALL = {
    "vocab_size": 128, "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 3, "num_attention_heads": 4,
    "num_key_value_heads": 2, "max_position_embeddings": 512,
}  # fmt: skip


def llama(**more: object) -> object:
    return transformers.LlamaForCausalLM(transformers.LlamaConfig(**SMALL | more))


def test_llama() -> None:
    check_pair(Pair(llama()))


def test_llama_with_tied_embeddings_and_scaled_rope() -> None:
    rope = {
        "rope_type": "llama3", "rope_theta": 10000.0, "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
        "original_max_position_embeddings": 64,
    }  # fmt: skip
    check_pair(Pair(llama(tie_word_embeddings=True, rope_parameters=rope)))


def test_llama_with_yarn() -> None:
    rope = {"rope_type": "yarn", "rope_theta": 10000.0, "factor": 4.0, "original_max_position_embeddings": 64}
    check_pair(Pair(llama(rope_parameters=rope)))


def test_mistral_looks_at_a_window_in_every_layer() -> None:
    check_pair(Pair(transformers.MistralForCausalLM(transformers.MistralConfig(**SMALL, sliding_window=24))))


def test_qwen2_has_biases() -> None:
    check_pair(Pair(transformers.Qwen2ForCausalLM(transformers.Qwen2Config(**SMALL))))


def test_qwen2_with_windows_in_its_upper_layers() -> None:
    config = transformers.Qwen2Config(**SMALL, use_sliding_window=True, sliding_window=24, max_window_layers=1)
    check_pair(Pair(transformers.Qwen2ForCausalLM(config)))


def test_qwen3_norms_queries_and_keys() -> None:
    check_pair(Pair(transformers.Qwen3ForCausalLM(transformers.Qwen3Config(**SMALL, head_dim=24))))


def test_qwen3_with_experts_in_some_layers() -> None:
    experts = {"num_experts": 6, "num_experts_per_tok": 2, "moe_intermediate_size": 32, "norm_topk_prob": True}
    config = transformers.Qwen3MoeConfig(**SMALL, **experts, head_dim=16, mlp_only_layers=[1], decoder_sparse_step=1)
    check_pair(Pair(transformers.Qwen3MoeForCausalLM(config)))
