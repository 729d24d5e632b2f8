"""The tensors of a GGUF file under their Hugging Face names, and in the order of channels that Hugging Face uses.

Reads weights as fp32 whatever they were quantized to. Knows no tokenizer; the config is made in `gguf_config.py`.
"""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path

import numpy as np
import torch
from gguf.constants import GGMLQuantizationType
from gguf.quants import dequantize

from stepwell.base.errors import ConfigError
from stepwell.engine.loading.gguf_config import ARCHITECTURES, architecture_of, config_of
from stepwell.engine.loading.gguf_header import Header, StoredTensor, read_header

_TOP = {"token_embd": "model.embed_tokens", "output_norm": "model.norm", "output": "lm_head"}
_BLOCK = {
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "attn_q_norm": "self_attn.q_norm",
    "attn_k_norm": "self_attn.k_norm",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}
_GEMMA_BLOCK = _BLOCK | {
    "post_attention_norm": "post_attention_layernorm",
    "ffn_norm": "pre_feedforward_layernorm",
    "post_ffw_norm": "post_feedforward_layernorm",
}
_DERIVED = ("rope_freqs.weight",)  # their content is in the config


class GgufTensors:
    """A TensorSource. Each read maps the file, copies and unmaps it. Any number of threads may read."""

    def __init__(self, path: Path, header: Header) -> None:
        self._path, self._header = path, header
        self._architecture = architecture_of(header)
        self._stored = {self._rename(name): name for name in header.tensors if name not in _DERIVED}
        self.config = config_of(header, self.read_raw)

    @classmethod
    def open(cls, path: Path) -> GgufTensors:
        """Raises ConfigError for what is not a GGUF file, and for architectures that are not known."""
        return cls(path, read_header(path))

    @property
    def header(self) -> Header:
        return self._header

    def names(self) -> Iterable[str]:
        return self._stored.keys()

    def shape(self, name: str) -> tuple[int, ...]:
        return tuple(self._header.tensors[self._stored[name]].shape)

    def read(self, name: str, region: tuple[slice, ...] = ()) -> torch.Tensor:
        """One tensor as a Hugging Face checkpoint would hold it. A region is cut out of the whole."""
        tensor = self._in_order(self._stored[name])
        return tensor[region] if region else tensor

    def _in_order(self, stored: str) -> torch.Tensor:
        tensor = self.read_raw(stored)
        if self._architecture == "llama" and ".attn_q." in stored:
            return _unpermuted(tensor, self._heads("num_attention_heads"))
        if self._architecture == "llama" and ".attn_k." in stored:
            return _unpermuted(tensor, self._heads("num_key_value_heads"))
        if self._architecture == "gemma3" and stored.endswith("norm.weight"):
            return tensor - 1.0  # GGUF holds the factor, Hugging Face its difference to one
        return tensor

    def read_raw(self, stored: str) -> torch.Tensor:
        """One tensor by its GGUF name, as it lies there."""
        where = self._header.tensors[stored]
        return torch.from_numpy(_dequantized(self._path, where, stored))

    def _heads(self, field: str) -> int:
        heads = self.config[field]
        assert isinstance(heads, int), f"{field=} {heads=}"
        return heads

    def _rename(self, stored: str) -> str:
        """`blk.3.attn_q.weight` -> `model.layers.3.self_attn.q_proj.weight`"""
        name, _, ending = stored.rpartition(".")
        if name in _TOP:
            return f"{_TOP[name]}.{ending}"
        first, _, rest = name.partition(".")
        number, _, part = rest.partition(".")
        known = _GEMMA_BLOCK if self._architecture == "gemma3" else _BLOCK
        if first != "blk" or not number.isdecimal() or part not in known:
            known_names = ", ".join(ARCHITECTURES)
            raise ConfigError(
                f"GGUF tensor {stored!r:.80} is none of a plain {self._architecture} model; known are {known_names}"
            )
        return f"model.layers.{int(number)}.{known[part]}.{ending}"


def _dequantized(path: Path, where: StoredTensor, name: str) -> np.ndarray[tuple[int, ...], np.dtype[np.float32]]:
    raw = np.memmap(path, np.uint8, mode="r", offset=where.offset, shape=(where.size_bytes,))
    try:
        values = dequantize(_typed(raw, where), where.kind)
    except NotImplementedError:
        raise ConfigError(f"GGUF tensor {name!r:.80} is quantized as {where.kind.name}, which cannot be undone here") from None
    return np.array(values, np.float32).reshape(where.shape)


def _typed(
    raw: np.ndarray[tuple[int], np.dtype[np.uint8]], where: StoredTensor
) -> np.ndarray[tuple[int, ...], np.dtype[np.generic]]:
    """Rows of blocks, as bytes where a block is a structure of its own."""
    plain = {GGMLQuantizationType.F32: np.float32, GGMLQuantizationType.F16: np.float16}
    values = np.asarray(raw).view(plain.get(where.kind, np.uint8))
    return values.reshape(*where.shape[:-1], -1)


def _unpermuted(tensor: torch.Tensor, heads: int) -> torch.Tensor:
    """Undoes GGUF's order of the rows of a llama's queries and keys.

    head   a0 b0 a1 b1 a2 b2 ..   pairs that turn together are neighbours (GGUF)
           a0 a1 a2 .. b0 b1 ..   first half against second half (Hugging Face)
    """
    rows = tensor.shape[0]
    if rows % (2 * heads):
        raise ConfigError(f"a query or key tensor of {rows} rows cannot have {heads} heads")
    return tensor.reshape(heads, rows // heads // 2, 2, *tensor.shape[1:]).swapaxes(1, 2).reshape(tensor.shape)
