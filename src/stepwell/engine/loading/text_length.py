"""The greatest number of characters that one token can stand for, read off a tokenizer's parts. Tokenizes nothing.

A text that is longer than that for each token of a context cannot fit, and is refused without tokenizing it. If a part may drop
characters, or fold any number of them into one token, there is no such number.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import tokenizers

_COMPOSED = 4  # characters that composing normal forms make one of, at most
_NORMALIZERS = {"NFD": 1, "NFKD": 1, "NFC": _COMPOSED, "NFKC": _COMPOSED, "Lowercase": 1, "Prepend": 1, "ByteLevel": 1}
_SPLITTERS = ("ByteLevel", "Metaspace", "Digits")


def longest_token(inner: tokenizers.Tokenizer) -> int | None:
    """The most characters of a text that one token stands for; None if nothing bounds them."""
    added = inner.get_added_tokens_decoder().values()
    parts = [*_parts(inner.normalizer, "normalizers"), *_parts(inner.pre_tokenizer, "pretokenizers")]
    shrinks = [_shrinks(part) for part in parts]
    if not _keeps_unknown(inner, parts) or None in shrinks or any(token.lstrip or token.rstrip for token in added):
        return None
    longest = max((len(token) for token in inner.get_vocab()), default=1)
    for factor in shrinks:
        longest *= factor or 1
    return longest


def _keeps_unknown(inner: tokenizers.Tokenizer, parts: list[dict[str, Any]]) -> bool:
    """Whether a character that the vocabulary lacks is written in bytes, a token for each, and not left out or run together."""
    model = inner.model
    by_bytes = any(part["type"] == "ByteLevel" for part in parts)
    return isinstance(model, tokenizers.models.BPE) and (by_bytes or bool(model.byte_fallback))


def _parts(component: Any, name: str) -> Iterator[dict[str, Any]]:
    """The parts of a normalizer or pre-tokenizer, each as its settings."""
    if component is not None:
        yield from _flat(json.loads(component.__getstate__()), name)


def _flat(settings: dict[str, Any], name: str) -> Iterator[dict[str, Any]]:
    if settings.get("type") != "Sequence":
        yield settings
        return
    for each in settings[name]:
        yield from _flat(each, name)


def _shrinks(part: dict[str, Any]) -> int | None:
    """How many characters a part may make one of; None for one that may drop some."""
    kind = part["type"]
    if kind in _NORMALIZERS:
        return _NORMALIZERS[kind]
    if kind in _SPLITTERS:
        return 1
    if kind in ("Split", "Punctuation"):
        return 1 if part.get("behavior") != "Removed" else None
    if kind == "Replace":
        replaced = part["pattern"].get("String")
        return 1 if replaced and len(part["content"]) >= len(replaced) else None
    return None
