"""A small hybrid model of random weights, the same every time: for demos, tests and machines without weights.

Shaped like Gemma 3: five layers with a window, one without. Its answers mean nothing, but depend on every token of the prompt.
Writes no files.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
from tokenizers import AddedToken, decoders, models, pre_tokenizers
from tokenizers import Tokenizer as Inner

from stepwell.engine.loading.tokenizer import Tokenizer

_SEED = 20260101
_SPECIAL = ("<bos>", "<eos>", "<start_of_turn>", "<end_of_turn>")
_BOS, _EOS, _END_OF_TURN = 256, 257, 259

_HIDDEN, _INNER, _LAYERS, _HEADS, _KV_HEADS, _HEAD_DIM = 256, 512, 6, 4, 2, 64
_VOCAB = 256 + len(_SPECIAL)
_SHARP = ("q_norm.weight", "k_norm.weight")

CHAT_TEMPLATE = (
    "{{ bos_token }}{% for message in messages %}<start_of_turn>{{ message.role }}\n{{ message.content }}<end_of_turn>\n"
    "{% endfor %}{% if add_generation_prompt %}<start_of_turn>assistant\n{% endif %}"
)


def hybrid_config() -> dict[str, object]:
    return {
        "model_type": "gemma3_text",
        "hidden_size": _HIDDEN,
        "intermediate_size": _INNER,
        "num_hidden_layers": _LAYERS,
        "num_attention_heads": _HEADS,
        "num_key_value_heads": _KV_HEADS,
        "head_dim": _HEAD_DIM,
        "query_pre_attn_scalar": _HEAD_DIM,
        "vocab_size": _VOCAB,
        "sliding_window": 256,
        "sliding_window_pattern": 6,
        "max_position_embeddings": 131072,
        "rms_norm_eps": 1e-6,
        "rope_theta": 1000000.0,
        "rope_local_base_freq": 10000.0,
        "hidden_activation": "gelu_pytorch_tanh",
        "tie_word_embeddings": False,  # tied random weights say the last token again and again
        "bos_token_id": _BOS,
        "eos_token_id": [_EOS, _END_OF_TURN],
    }


def hybrid_tensors() -> dict[str, torch.Tensor]:
    """Matrices that keep the size of what goes through them, and norms near neutral (zero: they are kept as differences to one).

    Queries and keys are twice as long: else every token attends to all alike, and greedy answers go round in circles.
    """
    generator = torch.Generator().manual_seed(_SEED)
    made: dict[str, torch.Tensor] = {}
    for name, shape in _shapes():
        noise = torch.randn(shape, generator=generator)
        made[name] = noise / shape[-1] ** 0.5 if len(shape) > 1 else noise * 0.1 + float(name.endswith(_SHARP))
    return made


def byte_tokenizer() -> Tokenizer:
    """A token for each byte, numbered as the byte, and a few special ones after them."""
    vocab = {character: byte for byte, character in enumerate(_byte_characters())}
    inner = Inner(models.BPE(vocab=vocab, merges=[]))
    inner.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    inner.decoder = decoders.ByteLevel()
    inner.add_special_tokens([AddedToken(token, special=True, normalized=False) for token in _SPECIAL])
    return Tokenizer(inner, eos_ids=(_EOS, _END_OF_TURN), bos_id=_BOS, add_bos=True)


def _shapes() -> Iterator[tuple[str, tuple[int, ...]]]:
    yield "model.embed_tokens.weight", (_VOCAB, _HIDDEN)
    for layer in range(_LAYERS):
        name = f"model.layers.{layer}"
        yield f"{name}.self_attn.q_proj.weight", (_HEADS * _HEAD_DIM, _HIDDEN)
        yield f"{name}.self_attn.k_proj.weight", (_KV_HEADS * _HEAD_DIM, _HIDDEN)
        yield f"{name}.self_attn.v_proj.weight", (_KV_HEADS * _HEAD_DIM, _HIDDEN)
        yield f"{name}.self_attn.o_proj.weight", (_HIDDEN, _HEADS * _HEAD_DIM)
        yield f"{name}.self_attn.q_norm.weight", (_HEAD_DIM,)
        yield f"{name}.self_attn.k_norm.weight", (_HEAD_DIM,)
        yield f"{name}.mlp.gate_proj.weight", (_INNER, _HIDDEN)
        yield f"{name}.mlp.up_proj.weight", (_INNER, _HIDDEN)
        yield f"{name}.mlp.down_proj.weight", (_HIDDEN, _INNER)
        for norm in ("input", "post_attention", "pre_feedforward", "post_feedforward"):
            yield f"{name}.{norm}_layernorm.weight", (_HIDDEN,)
    yield "model.norm.weight", (_HIDDEN,)
    yield "lm_head.weight", (_VOCAB, _HIDDEN)


def _byte_characters() -> list[str]:
    """How byte-level vocabularies write bytes: printable ones as themselves, the others as characters from 256 up."""
    printable = {*range(33, 127), *range(161, 173), *range(174, 256)}
    others = [byte for byte in range(256) if byte not in printable]
    return [chr(byte) if byte in printable else chr(256 + others.index(byte)) for byte in range(256)]
