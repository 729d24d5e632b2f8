"""A vocabulary of made-up words, of any size, for measuring what grammars cost: one token a word, all bytes among them."""

from __future__ import annotations

import random

import tokenizers
from tokenizers import decoders, models, pre_tokenizers

END = "<eos>"  # the last of the vocabulary
_LETTERS = 'etaoinshrdlcumwfgypbvk0123456789_-:,."{}[]Ġ'


def words(count: int) -> list[str]:
    """So many, as byte-level vocabularies write them; the same every time."""
    draw, made = random.Random(1), dict.fromkeys(sorted(pre_tokenizers.ByteLevel.alphabet()))
    while len(made) < count - 1:
        made["".join(draw.choice(_LETTERS) for _ in range(draw.choice([2, 3, 3, 4, 5, 6])))] = None
    return [*made, END]


def tokenizer_of(vocab: list[str]) -> tokenizers.Tokenizer:
    made = tokenizers.Tokenizer(models.BPE(vocab={word: at for at, word in enumerate(vocab)}, merges=[]))
    made.pre_tokenizer, made.decoder = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False), decoders.ByteLevel()
    made.add_special_tokens([END])
    return made
