"""Text of answers: the part of a tokenizer that the engine needs (see `loading/tokenizer.py`), and stop strings."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol


class TextStream(Protocol):
    """An answer's tokens as text, as they come."""

    def push(self, token: int) -> str:
        """The text that is certain now, never half a character."""
        ...

    def finish(self) -> str:
        """What was held back, when no more tokens come."""
        ...


class Text(Protocol):
    def encode(self, text: str, *, special: bool = True) -> list[int]:
        """Raises BadTokens for what is not whole text. Must let other threads run meanwhile."""
        ...

    def exceeds(self, text: str, limit: int) -> bool:
        """Whether a text is certainly too long for `limit` tokens. Cheaper than encoding it."""
        ...

    def decode(self, ids: Sequence[int], *, special: bool = False) -> str:
        """`special`: with special tokens."""
        ...

    def unknown(self, ids: Sequence[int]) -> int | None:
        """The smallest of some numbers that is no token of the vocabulary; None where all are."""
        ...

    def to_json(self) -> str:
        """The tokenizer as the `tokenizers` package writes it, for libraries that have to know every token."""
        ...

    def stream(self, after: Sequence[int] = (), *, special: bool = False) -> TextStream:
        """For the answer to a prompt."""
        ...


class StopFinder:
    """Finds stop strings in a text that comes in pieces, and holds back what could still become one."""

    def __init__(self, stops: Sequence[str]) -> None:
        self._stops = tuple(stops)
        self._held = ""
        self.found: str | None = None  # the one that ended it

    def push(self, text: str) -> str:
        """What can be shown now. Once one is `found` nothing more is."""
        if self.found is not None:
            return ""
        text = self._held + text
        ends = [(at, stop) for stop in self._stops if (at := text.find(stop)) >= 0]
        if ends:
            at, self.found = min(ends)
            self._held = ""
            return text[:at]
        keep = max((self._overlap(text, stop) for stop in self._stops), default=0)
        self._held = text[len(text) - keep :]
        return text[: len(text) - keep]

    def finish(self) -> str:
        """What was held back, when the answer has ended otherwise."""
        held, self._held = self._held, ""
        return held

    @staticmethod
    def _overlap(text: str, stop: str) -> int:
        """The length of the longest end of `text` that begins `stop`."""
        return next((size for size in range(min(len(stop) - 1, len(text)), 0, -1) if text.endswith(stop[:size])), 0)
