"""Text to tokens and back, and tokens to text one at a time. Wraps the `tokenizers` package; reads no files.

Never changes a prompt apart from the token that begins it, which some models cannot do without. Never holds the interpreter
while it encodes, so other threads can run however long a text is.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from functools import cached_property

import tokenizers

from stepwell.base.errors import BadTokens, ConfigError
from stepwell.engine.loading.text_length import longest_token

_HALF = "\ufffd"  # what decoders put where bytes are not a character (yet)
_LONGEST_CHARACTER = 4  # bytes of UTF-8, so at most 4 tokens
_LONGEST_HELD = 64  # tokens of nothing but broken characters
_SEED = 8  # tokens of a prompt that decide how the first ones after it read
_USUAL = 8  # characters a token: hardly any text has more
_PIECE = 1 << 16  # characters that are counted at once


class Tokenizer:
    """A model's tokenizer. Any number of threads may use it."""

    def __init__(
        self, inner: tokenizers.Tokenizer, *, eos_ids: Iterable[int] = (), bos_id: int | None = None, add_bos: bool = False
    ) -> None:
        """`add_bos`: prompts must begin with `bos_id`, whether or not `inner` sees to it."""
        if add_bos and bos_id is None:
            raise ConfigError("the tokenizer wants a token that begins prompts (add_bos_token), but names none (bos_token)")
        inner.no_truncation()  # some files carry the settings of a training run
        inner.no_padding()
        self._inner = inner
        self._bos_id, self._add_bos = bos_id, add_bos
        self.eos_ids = frozenset(eos_ids)

    @property
    def bos_id(self) -> int | None:
        return self._bos_id

    @property
    def vocab_size(self) -> int:
        return self._inner.get_vocab_size()

    def token(self, token_id: int) -> str:
        """How the vocabulary writes a token; empty when it has none of this number."""
        return self._inner.id_to_token(token_id) or ""

    def unknown(self, ids: Sequence[int]) -> int | None:
        """The smallest of some numbers that is no token of the vocabulary; None where all are. Vocabularies may have gaps."""
        fits = range(2**32)  # what the library takes
        return next((each for each in sorted(set(ids)) if each not in fits or self._inner.id_to_token(each) is None), None)

    def token_id(self, token: str) -> int | None:
        return self._inner.token_to_id(token)

    def encode(self, text: str, *, special: bool = True) -> list[int]:
        """Tokens of a text. `special` adds what belongs around a whole prompt; not to be asked for parts of one.

        A text that writes its first token out, as chat templates do, does not get it twice. Raises BadTokens for text with half
        a surrogate pair in it, as JSON can carry it: nothing can encode that.
        """
        ids = self._ids(text, special=special)
        if not special or self._bos_id is None:
            return ids
        if self._add_bos and ids[:1] != [self._bos_id]:
            return [self._bos_id, *ids]
        return ids[1:] if ids[:2] == [self._bos_id, self._bos_id] else ids

    def exceeds(self, text: str, limit: int) -> bool:
        """Whether a text certainly has more than `limit` tokens. Cheaper than encoding all of it.

        By its length, or by its beginning, in pieces: cutting a text adds a few tokens at each cut, and never doubles them.
        """
        if len(text) <= limit * _USUAL:
            return False
        if self._longest is not None and len(text) > limit * self._longest:
            return True
        count = 0
        for start in range(0, len(text), _PIECE):
            count += len(self._ids(text[start : start + _PIECE], special=False))
            if count > 2 * limit:
                return True
        return False

    def decode(self, ids: Sequence[int], *, special: bool = False) -> str:
        """The text of tokens, without special ones unless they are wanted. Bytes that are no character become U+FFFD."""
        return self._inner.decode(list(ids), skip_special_tokens=not special)

    def stream(self, after: Sequence[int] = (), *, special: bool = False) -> TextStream:
        """Decodes an answer token by token. `after`: the prompt, for tokenizers that write a word's space before it."""
        return TextStream(self, after, special=special)

    def to_json(self) -> str:
        """As the `tokenizers` package writes it."""
        return self._inner.to_str()

    @cached_property
    def _longest(self) -> int | None:
        return longest_token(self._inner)

    def _ids(self, text: str, *, special: bool) -> list[int]:
        _must_be_whole(text)
        # Only the methods that encode several texts release the interpreter meanwhile.
        return self._inner.encode_batch_fast([text], add_special_tokens=special)[0].ids


class TextStream:
    """Tokens to text as they come. What was pushed out stays true whatever follows. Not for two threads at once.

    ids    ........ | context | held ......................... |
                    |         |-- sent as text --|-- ends within a character
                    |-- says how held reads, e.g. whether its first word has a space before it
    """

    def __init__(self, tokenizer: Tokenizer, after: Sequence[int] = (), *, special: bool = False) -> None:
        self._tokenizer = tokenizer
        self._special = special
        self._context = list(after[-_SEED:])
        self._held: list[int] = []
        self._sent = 0  # characters of what is held
        self._waited = 0  # tokens since the last character

    def push(self, token: int) -> str:
        """The text this token makes certain: often a word, none while a character is incomplete."""
        self._held.append(token)
        text = self._text()
        certain = max(len(text.rstrip(_HALF)), self._sent)
        if certain >= len(text) or len(self._held) > _LONGEST_HELD:
            return self._flush(text)
        self._waited = 0 if certain > self._sent else self._waited + 1
        if self._waited >= _LONGEST_CHARACTER:
            certain, self._waited = certain + 1, 0  # a byte that nothing completes any more
        new, self._sent = text[self._sent : certain], certain
        return new

    def finish(self) -> str:
        """What is still held, as well as it can be read."""
        return self._flush(self._text())

    def _text(self) -> str:
        before = self._tokenizer.decode(self._context, special=self._special)
        text = self._tokenizer.decode(self._context + self._held, special=self._special)
        if text.startswith(before):
            return text[len(before) :]
        return self._tokenizer.decode(self._held, special=self._special)  # bytes that spoil their neighbours: read alone

    def _flush(self, text: str) -> str:
        # A special token is no text and gives no context; then what came before still counts.
        self._context = self._held[-_SEED:] if text else (self._context + self._held)[-_SEED:]
        new = text[self._sent :]
        self._held, self._sent, self._waited = [], 0, 0
        return new


def _must_be_whole(text: str) -> None:
    try:
        text.encode()
    except UnicodeEncodeError as error:
        raise BadTokens(
            f"the text has half a character at {error.start} (a lone surrogate, as JSON can carry it): send whole ones"
        ) from None
