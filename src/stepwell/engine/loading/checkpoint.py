"""From a name or a path to everything a model is made of: config, tensors, tokenizer, chat template, and an identity.

The one place that knows all the ways in which models are stored. Opens files, and never changes one.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path

import torch
import xxhash

from stepwell.base.errors import ConfigError
from stepwell.engine.loading.chat import ChatTemplate
from stepwell.engine.loading.gguf_file import GgufTensors
from stepwell.engine.loading.gguf_tokenizer import tokenizer_of
from stepwell.engine.loading.hf_directory import HfDirectory
from stepwell.engine.loading.known import RANDOM_HYBRID, find_known, known_names, must_be_there
from stepwell.engine.loading.random_hybrid import CHAT_TEMPLATE, byte_tokenizer, hybrid_config, hybrid_tensors
from stepwell.engine.loading.tokenizer import Tokenizer
from stepwell.engine.loading.weights import HeldTensors, TensorSource

_BLOCK_BYTES = 8 << 20
_DEFAULTS = ("temperature", "top_p", "top_k", "min_p", "repetition_penalty", "do_sample", "max_new_tokens")
_CONTEXT_FIELDS = ("max_position_embeddings", "model_max_length")  # the second is Kimi's
_MAX_CONTEXT = 4096  # for configs that do not say


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Checkpoint:
    """A model on disk, opened. Tensors are read when asked for.

    `digest` names config and weights to the last bit: what one computes is worth nothing to another.
    `defaults` are sampling settings its makers suggest, those with a number or flag for a value.
    """

    name: str
    config: Mapping[str, object]
    source: TensorSource
    text: Tokenizer | None
    digest: str
    eos_ids: frozenset[int]
    defaults: Mapping[str, float | int | bool]
    chat: ChatTemplate

    @property
    def max_context(self) -> int:
        """Tokens its positions were made for."""
        nested = self.config.get("text_config")
        for values in (nested if isinstance(nested, Mapping) else {}, self.config):
            for name in _CONTEXT_FIELDS:
                value = values.get(name)
                if type(value) is int and value > 0:
                    return value
        return _MAX_CONTEXT


def open_checkpoint(where: str, *, cache_dir: Path | None = None) -> Checkpoint:
    """Opens a Hugging Face directory, a `.gguf` file, or a model by a known name. Reads all weights once, for the digest.

    Raises ConfigError that says what is missing and what to do. `cache_dir` (else `~/.cache`) is for models that come in parts.
    """
    if where == RANDOM_HYBRID:
        return _open_random(where)
    path = find_known(where, cache_dir or Path.home() / ".cache") or Path(where)
    if path.is_dir():
        return _open_directory(path, name=path.resolve().name)
    if path.is_file() and path.suffix == ".gguf":
        return _open_gguf(path, name=where if where in known_names() else path.stem)
    must_be_there(where)
    raise ConfigError(f"{where} is no model: give a Hugging Face model directory or a .gguf file; other formats are not opened")


def _open_directory(path: Path, *, name: str) -> Checkpoint:
    files = HfDirectory.read(path)
    text = files.tokenizer()
    return Checkpoint(
        name=name,
        config=files.config,
        source=files.source(),
        text=text,
        digest=_digest(files.config, files.weight_files),
        eos_ids=text.eos_ids if text is not None else files.eos_ids(),
        defaults={key: value for key in _DEFAULTS if isinstance(value := files.generation.get(key), int | float)},
        chat=ChatTemplate(files.template, bos_token=files.special_token("bos_token"), eos_token=files.special_token("eos_token")),
    )


def _open_gguf(path: Path, *, name: str) -> Checkpoint:
    source = GgufTensors.open(path)
    fields = source.header.fields
    text = tokenizer_of(fields)
    template, eos = fields.get("tokenizer.chat_template"), fields.get("tokenizer.ggml.eos_token_id")
    return Checkpoint(
        name=name,
        config=source.config,
        source=source,
        text=text,
        digest=_digest(source.config, [path]),
        eos_ids=text.eos_ids if text is not None else frozenset(),
        defaults={},
        chat=ChatTemplate(
            template if isinstance(template, str) else None,
            bos_token=text.token(text.bos_id) if text is not None and text.bos_id is not None else "",
            eos_token=text.token(eos) if text is not None and isinstance(eos, int) and eos >= 0 else "",
        ),
    )


def _open_random(name: str) -> Checkpoint:
    config, tensors, text = hybrid_config(), hybrid_tensors(), byte_tokenizer()
    return Checkpoint(
        name=name,
        config=config,
        source=HeldTensors(tensors),
        text=text,
        digest=_digest_of_tensors(config, tensors),
        eos_ids=text.eos_ids,
        defaults={},
        chat=ChatTemplate(CHAT_TEMPLATE, bos_token="<bos>", eos_token="<eos>"),
    )


# ---- identity -------------------------------------------------------------------------------------


def _digest(config: Mapping[str, object], files: Iterable[Path]) -> str:
    """Over the config and every byte of the files. Read in blocks, not mapped: a file that shrinks meanwhile must not end us."""
    hashed = _hashed(config)
    block = memoryview(bytearray(_BLOCK_BYTES))
    try:
        for file in files:
            hashed.update(f"\n{file.name} {file.stat().st_size}\n".encode())
            with file.open("rb", buffering=0) as opened:
                while count := opened.readinto(block):
                    hashed.update(block[:count])
    except OSError as error:
        raise ConfigError(f"the weights cannot be read: {error}") from None
    return hashed.hexdigest()


def _digest_of_tensors(config: Mapping[str, object], tensors: Mapping[str, torch.Tensor]) -> str:
    hashed = _hashed(config)
    for name, tensor in tensors.items():
        hashed.update(f"\n{name} {list(tensor.shape)}\n".encode())
        hashed.update(tensor.contiguous().numpy().data)
    return hashed.hexdigest()


def _hashed(config: Mapping[str, object]) -> xxhash.xxh3_128:
    return xxhash.xxh3_128(json.dumps(config, sort_keys=True).encode())
