"""GGUF files: the logits of the model they were made from, and a clear refusal of broken ones."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
import torch

pytest.importorskip("transformers")

from engine.loading.tiny import SMALL, expected, logits_of, reference, write_gguf, write_vocabulary
from stepwell.base.errors import ConfigError
from stepwell.engine.loading.checkpoint import open_checkpoint
from stepwell.engine.loading.gguf_file import GgufTensors
from stepwell.engine.loading.gguf_header import read_header
from stepwell.engine.models.registry import build_model
from stepwell.engine.ranks import Ranks

TOLERANCE = 1e-4
ROPE = {"rope_type": "llama3", "rope_theta": 10000.0, "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
        "original_max_position_embeddings": 8192}  # fmt: skip


def check(model: Any, path: Path) -> None:
    wanted = expected(model)
    error = (logits_of(open_checkpoint(str(path))) - wanted).abs().max()
    assert error <= TOLERANCE, error


@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize("quantize", [False, True])
def test_llama_with_its_permuted_queries_and_keys(tmp_path: Path, tied: bool, quantize: bool) -> None:
    model = reference("Llama", tie_word_embeddings=tied)
    check(model, write_gguf(model, tmp_path / "a.gguf", "llama", quantize=quantize))


def test_ranks_cut_queries_and_keys_that_are_in_order_again(tmp_path: Path) -> None:
    opened = open_checkpoint(str(write_gguf(reference("Llama"), tmp_path / "a.gguf", "llama", quantize=True)))
    models = [build_model(opened.config, opened.source, ranks=Ranks(rank=rank, size=2)) for rank in range(2)]
    whole = build_model(opened.config, opened.source).layers[0].attention
    halves = [model.layers[0].attention for model in models]
    assert [half.kv_heads for half in halves] == [whole.kv_heads // 2] * 2 and type(halves[0].heads) is int
    each = (whole.heads * whole.head_dim, whole.kv_heads * whole.head_dim, whole.kv_heads * whole.head_dim)
    parts = [half.qkv.weight.split([size // 2 for size in each]) for half in halves]
    assert torch.cat([torch.cat(part) for part in zip(*parts, strict=True)]).equal(whole.qkv.weight)


def test_qwen2_with_biases(tmp_path: Path) -> None:
    model = reference("Qwen2", rope_parameters={"rope_type": "default", "rope_theta": 1000000.0})
    check(model, write_gguf(model, tmp_path / "a.gguf", "qwen2", {"qwen2.rope.freq_base": 1000000.0}))


def test_qwen3_with_yarn(tmp_path: Path) -> None:
    rope = {"rope_type": "yarn", "rope_theta": 10000.0, "factor": 4.0, "original_max_position_embeddings": 64}
    model = reference("Qwen3", head_dim=24, rope_parameters=rope)
    fields = {
        "qwen3.rope.freq_base": 10000.0, "qwen3.rope.scaling.type": "yarn", "qwen3.rope.scaling.factor": 4.0,
        "qwen3.rope.scaling.original_context_length": 64,
    }  # fmt: skip
    check(model, write_gguf(model, tmp_path / "a.gguf", "qwen3", fields))


def test_gemma3_with_norms_around_one_and_its_pattern_of_windows(tmp_path: Path) -> None:
    model = reference("Gemma3", num_hidden_layers=7, head_dim=32, sliding_window=16, query_pre_attn_scalar=32)
    path = write_gguf(
        model, tmp_path / "a.gguf", "gemma3", {"gemma3.rope.freq_base": 1000000.0, "gemma3.attention.sliding_window": 16}
    )
    assert open_checkpoint(str(path)).config["layer_types"] == model.config.layer_types
    check(model, path)


def llama3_factors(width: int, theta: float) -> torch.Tensor:
    """As llama.cpp's converter computes them."""
    factors = []
    for frequency in 1.0 / theta ** (np.arange(0, width, 2) / width):
        wave = 2 * np.pi / frequency
        smooth = (8192 / wave - 1) / (4 - 1)
        factors.append(1.0 if wave < 8192 / 4 else 8.0 if wave > 8192 else 1 / ((1 - smooth) / 8 + smooth))
    return torch.tensor(factors, dtype=torch.float32)


def test_llama3_rotations_are_read_from_their_factors(tmp_path: Path) -> None:
    model = reference("Llama", rope_parameters=ROPE | {"rope_theta": 500000.0}, head_dim=32, max_position_embeddings=16384)
    factors, fields = llama3_factors(32, 500000.0), {"llama.rope.freq_base": 500000.0}
    path = write_gguf(model, tmp_path / "a.gguf", "llama", fields, more={"rope_freqs.weight": factors})
    assert open_checkpoint(str(path)).config["rope_scaling"] == {k: v for k, v in ROPE.items() if k != "rope_theta"}
    check(model, path)
    factors[3] = 1.5
    with pytest.raises(ConfigError, match="rope_freqs"):
        open_checkpoint(str(write_gguf(model, tmp_path / "b.gguf", "llama", fields, more={"rope_freqs.weight": factors})))


def test_config_values_come_back_as_they_were_meant(tmp_path: Path) -> None:
    model = reference("Llama", rms_norm_eps=1e-5)
    config = open_checkpoint(str(write_gguf(model, tmp_path / "some name.gguf", "llama"))).config
    assert (
        config["rms_norm_eps"] == 1e-5 and config["vocab_size"] == SMALL["vocab_size"] and config["tie_word_embeddings"] is False
    )


# ---- refusals -------------------------------------------------------------------------------------


def test_an_unknown_architecture_names_those_known(tmp_path: Path) -> None:
    writer = gguf.GGUFWriter(tmp_path / "a.gguf", "mamba")
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.close()
    with pytest.raises(ConfigError, match="'mamba' is not known; known are llama, qwen2, qwen3, gemma3"):
        open_checkpoint(str(tmp_path / "a.gguf"))


def test_a_missing_field_or_tensor_is_named(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"llama\.attention\.head_count must be"):
        open_checkpoint(str(write_vocabulary(tmp_path / "a.gguf", {})))
    fields = {f"llama.{name}": 8 for name in ("attention.head_count", "embedding_length", "feed_forward_length", "block_count")}
    with pytest.raises(ConfigError, match="token_embd"):
        open_checkpoint(str(write_vocabulary(tmp_path / "b.gguf", fields)))


def test_an_unknown_tensor_is_refused(tmp_path: Path) -> None:
    model = reference("Qwen2")
    path = write_gguf(model, tmp_path / "a.gguf", "qwen2")
    path.write_bytes(path.read_bytes().replace(b"blk.1.ffn_gate.weight", b"blk.1.ffn_gate_exps.w"))
    with pytest.raises(ConfigError, match="ffn_gate_exps"):
        open_checkpoint(str(path))


def test_every_cut_and_many_changes_are_refused_or_read_but_never_crash(tmp_path: Path) -> None:
    path = write_gguf(
        reference("Qwen3", num_hidden_layers=1), tmp_path / "a.gguf", "qwen3", {"tokenizer.ggml.tokens": ["a", "b"]}
    )
    whole, dice = path.read_bytes(), random.Random(1)
    head = min(tensor.offset for tensor in read_header(path).tensors.values())
    for cut in [*range(0, head, 7), len(whole) - 1]:
        path.write_bytes(whole[:cut])
        with pytest.raises(ConfigError):
            GgufTensors.open(path)
    for _ in range(400):
        changed = bytearray(whole)
        for _ in range(dice.randint(1, 4)):
            changed[dice.randrange(head)] = dice.choice((0, 1, 255, dice.randrange(256)))
        path.write_bytes(changed)
        try:
            source = GgufTensors.open(path)
            for name in source.names():
                source.read(name)
        except ConfigError:
            continue
