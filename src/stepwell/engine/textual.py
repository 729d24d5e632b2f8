"""What the engine needs of a tokenizer. The seam; `loading/tokenizer.py` fills it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol


class TextStream(Protocol):
    """An answer's tokens as text, as they come."""

    def push(self, token: int) -> str:
        """The text that is certain now: never half a character."""
        ...

    def finish(self) -> str:
        """What was held back, when no more tokens come."""
        ...


class Text(Protocol):
    def encode(self, text: str, *, special: bool = True) -> list[int]:
        """Raises BadTokens for what is not whole text. Must let other threads go on meanwhile."""
        ...

    def exceeds(self, text: str, limit: int) -> bool:
        """Whether a text is far too long for `limit` tokens, told sooner than by encoding it."""
        ...

    def decode(self, ids: Sequence[int]) -> str: ...

    def stream(self, after: Sequence[int] = ()) -> TextStream:
        """For the answer to a prompt."""
        ...
