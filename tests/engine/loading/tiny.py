"""Tiny random models, written to disk as the world writes them, and their logits by both implementations."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import torch
import transformers
from safetensors.torch import save_file

from engine.side_by_side import Held, Memory, draw
from stepwell.engine.loading.checkpoint import Checkpoint
from stepwell.engine.models.registry import build_model
from stepwell.engine.passes.batch import Batch

SMALL = {
    "vocab_size": 300, "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 3, "num_attention_heads": 4,
    "num_key_value_heads": 2, "max_position_embeddings": 512, "bos_token_id": 256, "eos_token_id": 257, "pad_token_id": None,
}  # fmt: skip
TOKENS = np.random.default_rng(3).integers(0, 256, 50).tolist()


def reference(kind: str, **more: object) -> Any:
    model = getattr(transformers, f"{kind}ForCausalLM")(getattr(transformers, f"{_config_name(kind)}Config")(**SMALL | more))
    draw(model)
    return model.eval().float()


def _config_name(kind: str) -> str:
    return "Gemma3Text" if kind == "Gemma3" else kind


@torch.no_grad()
def expected(model: Any, tokens: Sequence[int] = TOKENS) -> torch.Tensor:
    logits = model(torch.tensor([list(tokens)]), use_cache=False).logits[0].float()
    assert logits.std() > 0.3, "a dead model proves nothing"
    return logits


def logits_of(checkpoint: Checkpoint, tokens: Sequence[int] = TOKENS) -> torch.Tensor:
    model = build_model(checkpoint.config, checkpoint.source, page_tokens=16)
    memory = Memory(model.spec, count=64)
    batch = Batch([Held(memory, len(tokens)).segment(tokens)], memory.pages, device="cpu", every_token=True)
    return model.forward(batch)


def write_directory(model: Any, path: Path, *, shards: int = 1) -> Path:
    """A Hugging Face directory without a tokenizer. Tensors that are tied are written once."""
    path.mkdir(exist_ok=True)
    (path / "config.json").write_text(json.dumps(model.config.to_dict()))
    names = sorted(name for name in model.state_dict() if not (name == "lm_head.weight" and model.config.tie_word_embeddings))
    tensors = {name: model.state_dict()[name].clone().contiguous() for name in names}
    if shards == 1:
        save_file(tensors, path / "model.safetensors")
        return path
    places = {name: f"model-{number % shards + 1:05}-of-{shards:05}.safetensors" for number, name in enumerate(names)}
    for file in set(places.values()):
        save_file({name: tensors[name] for name in names if places[name] == file}, path / file)
    (path / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": places}))
    return path


# ---- GGUF -----------------------------------------------------------------------------------------

_NAMES = {
    "model.embed_tokens": "token_embd", "model.norm": "output_norm", "lm_head": "output", "input_layernorm": "attn_norm",
    "self_attn.q_proj": "attn_q", "self_attn.k_proj": "attn_k", "self_attn.v_proj": "attn_v", "self_attn.o_proj": "attn_output",
    "self_attn.q_norm": "attn_q_norm", "self_attn.k_norm": "attn_k_norm", "mlp.gate_proj": "ffn_gate", "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
}  # fmt: skip
_PLAIN_NORMS = {"post_attention_layernorm": "ffn_norm"}
_GEMMA_NORMS = {
    "post_attention_layernorm": "post_attention_norm", "pre_feedforward_layernorm": "ffn_norm",
    "post_feedforward_layernorm": "post_ffw_norm",
}  # fmt: skip


def write_gguf(
    model: Any, path: Path, architecture: str, fields: Mapping[str, object] | None = None, *, quantize: bool = False,
    more: Mapping[str, torch.Tensor] | None = None,
) -> Path:  # fmt: skip
    """A GGUF file as llama.cpp's converter would. `quantize`: matrices as Q8_0, and the model gets what is left of them."""
    writer, config = gguf.GGUFWriter(path, architecture), model.config
    writer.add_block_count(config.num_hidden_layers)
    writer.add_context_length(config.max_position_embeddings)
    writer.add_embedding_length(config.hidden_size)
    writer.add_feed_forward_length(config.intermediate_size)
    writer.add_head_count(config.num_attention_heads)
    writer.add_head_count_kv(config.num_key_value_heads)
    writer.add_layer_norm_rms_eps(config.rms_norm_eps)
    if head_dim := getattr(config, "head_dim", None):
        writer.add_key_length(head_dim)
        writer.add_value_length(head_dim)
    for name, value in (fields or {}).items():
        _add(writer, name, value)
    for name, tensor in model.state_dict().items():
        if not (name == "lm_head.weight" and config.tie_word_embeddings):
            _add_tensor(writer, model, architecture, name, tensor, quantize=quantize and tensor.ndim > 1)
    for name, tensor in (more or {}).items():
        writer.add_tensor(name, tensor.numpy())
    _finish(writer)
    return path


def write_vocabulary(path: Path, fields: Mapping[str, object]) -> Path:
    """A GGUF file of metadata alone."""
    writer = gguf.GGUFWriter(path, "llama")
    for name, value in fields.items():
        _add(writer, name, value)
    _finish(writer)
    return path


def _finish(writer: gguf.GGUFWriter) -> None:
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def _add(writer: gguf.GGUFWriter, name: str, value: object) -> None:
    if isinstance(value, bool):
        writer.add_bool(name, value)
    elif isinstance(value, int):
        writer.add_uint32(name, value)
    elif isinstance(value, float):
        writer.add_float32(name, value)
    elif isinstance(value, str):
        writer.add_string(name, value)
    else:
        assert isinstance(value, list)
        writer.add_array(name, value)


def _add_tensor(
    writer: gguf.GGUFWriter, model: Any, architecture: str, name: str, tensor: torch.Tensor, *, quantize: bool
) -> None:
    if quantize:
        packed = gguf.quants.quantize(tensor.numpy(), gguf.GGMLQuantizationType.Q8_0)
        tensor.copy_(torch.from_numpy(gguf.quants.dequantize(packed, gguf.GGMLQuantizationType.Q8_0)))
    values = tensor.numpy()
    if architecture == "llama" and (".q_proj." in name or ".k_proj." in name):
        heads = model.config.num_attention_heads if ".q_proj." in name else model.config.num_key_value_heads
        half = values.shape[0] // heads // 2
        values = values.reshape(heads, 2, half, *values.shape[1:]).swapaxes(1, 2).reshape(values.shape)
    if architecture == "gemma3" and name.endswith("norm.weight"):
        values = values + 1
    values = np.ascontiguousarray(values)
    if quantize:
        kind = gguf.GGMLQuantizationType.Q8_0
        writer.add_tensor(_gguf_name(architecture, name), gguf.quants.quantize(values, kind), raw_dtype=kind)
    else:
        writer.add_tensor(_gguf_name(architecture, name), values)


def _gguf_name(architecture: str, name: str) -> str:
    name, _, ending = name.rpartition(".")
    known = _NAMES | (_GEMMA_NORMS if architecture == "gemma3" else _PLAIN_NORMS)
    if name in known:
        return f"{known[name]}.{ending}"
    number, _, part = name.removeprefix("model.layers.").partition(".")
    return f"blk.{number}.{known[part]}.{ending}"
