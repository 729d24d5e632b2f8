"""A tokenizer from the vocabulary inside a GGUF file: byte-level BPE (`gpt2`), or BPE by scores like SentencePiece's (`llama`).

Builds it anew from tokens, merges and scores; reads no other file.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from enum import IntEnum

import numpy as np
from tokenizers import AddedToken, Regex, decoders, models, normalizers, pre_tokenizers
from tokenizers import Tokenizer as Inner

from stepwell.base.errors import ConfigError
from stepwell.engine.loading.tokenizer import Tokenizer

_SPACE = "▁"
_LONGEST_TOKEN = 512  # characters; splits of longer ones would take time without end
_QWEN2 = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)  # fmt: skip
_LLAMA3 = _QWEN2.replace(r"\p{N}|", r"\p{N}{1,3}|")
# Ends of a turn or a text, which files often do not list as such.
_ENDS = ("<|im_end|>", "<|endoftext|>", "<|eot_id|>", "<|end_of_text|>", "<|eom_id|>", "<end_of_turn>")


class _Kind(IntEnum):
    NORMAL = 1
    UNKNOWN = 2
    CONTROL = 3
    USER_DEFINED = 4
    UNUSED = 5
    BYTE = 6


def tokenizer_of(fields: Mapping[str, object]) -> Tokenizer | None:
    """The tokenizer in a file's metadata; None when it has none. Raises ConfigError for one that is not known or not whole."""
    model = fields.get("tokenizer.ggml.model")
    if model is None or model == "no_vocab":
        return None
    vocabulary = _Vocabulary(fields)
    if model == "gpt2":
        inner = _byte_level(vocabulary, fields)
    elif model == "llama":
        inner = _by_scores(vocabulary, fields)
    else:
        raise ConfigError(f"GGUF tokenizer {model!r:.60} is not known; known are gpt2 and llama")
    inner.add_special_tokens(vocabulary.added(_Kind.CONTROL))
    add_bos = fields.get("tokenizer.ggml.add_bos_token", model == "llama") is True
    bos = vocabulary.number("bos")
    return Tokenizer(inner, eos_ids=_ends(vocabulary), bos_id=bos, add_bos=add_bos and bos is not None)


class _Vocabulary:
    """The lists every kind of tokenizer has, checked against each other."""

    def __init__(self, fields: Mapping[str, object]) -> None:
        self._fields = fields
        self.tokens = _strings(fields, "tokens")
        self.ids = {token: number for number, token in enumerate(self.tokens)}
        kinds = fields.get("tokenizer.ggml.token_type")
        self.kinds = _numbers(kinds, len(self.tokens), "token_type") if kinds is not None else np.ones(len(self.tokens), np.int32)

    def of(self, kind: _Kind) -> list[str]:
        return [self.tokens[number] for number in np.flatnonzero(self.kinds == kind) if self.tokens[number]]

    def added(self, kind: _Kind, *, normalized: bool = False) -> list[AddedToken]:
        return [AddedToken(token, special=kind is _Kind.CONTROL, normalized=normalized) for token in self.of(kind)]

    def number(self, name: str) -> int | None:
        value = self._fields.get(f"tokenizer.ggml.{name}_token_id")
        return value if isinstance(value, int) and 0 <= value < len(self.tokens) else None


def _ends(vocabulary: _Vocabulary) -> set[int]:
    named = {vocabulary.number(name) for name in ("eos", "eot", "eom")} - {None}
    control = {vocabulary.ids[token] for token in _ENDS if token in vocabulary.ids and _is_control(vocabulary, token)}
    return {number for number in named | control if number is not None}


def _is_control(vocabulary: _Vocabulary, token: str) -> bool:
    return bool(vocabulary.kinds[vocabulary.ids[token]] == _Kind.CONTROL)


# ---- byte-level BPE -------------------------------------------------------------------------------


def _byte_level(vocabulary: _Vocabulary, fields: Mapping[str, object]) -> Inner:
    pre = fields.get("tokenizer.ggml.pre", "default")
    merges = [_pair(merge) for merge in _strings(fields, "merges")]
    inner = _built(vocabulary.ids, merges, ignore_merges=pre == "llama-bpe")
    inner.pre_tokenizer = _pre_tokenizer(pre)
    inner.decoder = decoders.ByteLevel()
    if pre == "qwen2":
        inner.normalizer = normalizers.NFC()
    inner.add_tokens(vocabulary.added(_Kind.USER_DEFINED))
    return inner


def _pre_tokenizer(pre: object) -> pre_tokenizers.PreTokenizer:
    """How text is cut before merging. Cutting it wrongly gives a poor answer, not an error; so an unknown name is refused."""
    gpt2 = pre_tokenizers.ByteLevel(add_prefix_space=False)
    if pre in ("default", "gpt-2", "gpt2"):
        return gpt2
    if pre == "smollm":
        return pre_tokenizers.Sequence([pre_tokenizers.Digits(individual_digits=True), gpt2])
    patterns = {"qwen2": _QWEN2, "llama-bpe": _LLAMA3}
    if not isinstance(pre, str) or pre not in patterns:
        raise ConfigError(f"GGUF pre-tokenizer {pre!r:.60} is not known; known are default, gpt-2, smollm, {', '.join(patterns)}")
    cut = pre_tokenizers.Split(Regex(patterns[pre]), behavior="isolated")
    return pre_tokenizers.Sequence([cut, pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)])


def _pair(merge: str) -> tuple[str, str]:
    left, _, right = merge.partition(" ")
    return left, right


# ---- BPE by scores --------------------------------------------------------------------------------


def _by_scores(vocabulary: _Vocabulary, fields: Mapping[str, object]) -> Inner:
    scores = _numbers(fields.get("tokenizer.ggml.scores"), len(vocabulary.tokens), "scores")
    normal = np.flatnonzero((vocabulary.kinds == _Kind.NORMAL) | (vocabulary.kinds == _Kind.USER_DEFINED)).tolist()
    unknown = vocabulary.number("unknown")
    inner = _built(
        vocabulary.ids,
        _merges_by_score(vocabulary, normal, scores.tolist()),
        unk_token=vocabulary.tokens[unknown] if unknown is not None else None,
        fuse_unk=True,
        byte_fallback=bool(vocabulary.of(_Kind.BYTE)),
    )
    spaces = normalizers.Replace(" ", _SPACE)
    text = [decoders.Replace(_SPACE, " "), decoders.ByteFallback(), decoders.Fuse()]
    if fields.get("tokenizer.ggml.add_space_prefix", True) is True:
        inner.normalizer = normalizers.Sequence([normalizers.Prepend(_SPACE), spaces])
        inner.decoder = decoders.Sequence([*text, decoders.Strip(" ", 1, 0)])
    else:
        inner.normalizer = spaces
        inner.decoder = decoders.Sequence(text)
    # Taken whole wherever they stand, after spaces were replaced: some are runs of spaces.
    inner.add_tokens(vocabulary.added(_Kind.USER_DEFINED, normalized=True))
    return inner


def _merges_by_score(vocabulary: _Vocabulary, normal: Iterable[int], scores: Sequence[float]) -> list[tuple[str, str]]:
    """Every way to make a token of two others, best token first, as SentencePiece would pick them.

    For one token: pairs in the order of their parts' numbers.
    """
    ids, tokens = vocabulary.ids, vocabulary.tokens
    found: list[tuple[float, int, int, int]] = []
    for number in normal:
        token = tokens[number]
        for cut in range(1, min(len(token), _LONGEST_TOKEN)):
            left = ids.get(token[:cut])
            if left is not None:
                right = ids.get(token[cut:])
                if right is not None:
                    found.append((-scores[number], number, left, right))
    found.sort()
    return [(tokens[left], tokens[right]) for _, _, left, right in found]


# ---- reading --------------------------------------------------------------------------------------


def _built(vocab: dict[str, int], merges: list[tuple[str, str]], **options: object) -> Inner:
    try:
        return Inner(models.BPE(vocab=vocab, merges=merges, **options))
    except Exception as error:  # the package raises nothing narrower
        raise ConfigError(f"the GGUF file's vocabulary does not make a tokenizer: {error}") from None


def _strings(fields: Mapping[str, object], name: str) -> list[str]:
    value = fields.get(f"tokenizer.ggml.{name}")
    if not isinstance(value, list) or not value:
        raise ConfigError(f"GGUF field tokenizer.ggml.{name} must be a list of strings")
    return value


def _numbers(value: object, count: int, name: str) -> np.ndarray[tuple[int], np.dtype[np.generic]]:
    if not isinstance(value, np.ndarray) or len(value) != count:
        raise ConfigError(f"GGUF field tokenizer.ggml.{name} must have {count} numbers, one for each token")
    return value
