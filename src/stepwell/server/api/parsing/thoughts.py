"""The thoughts of a model before a constrained answer, separated by the token after which the grammar begins."""

from __future__ import annotations

from collections.abc import Sequence

from stepwell.engine.requests.guided import Thoughts
from stepwell.engine.requests.text import Text
from stepwell.server.api.parsing.blocks import Reasoning
from stepwell.server.api.parsing.pieces import Markers, Parser, Piece, Spaced, joined


class ThoughtParser:
    """Reasoning apart, and what the grammar is for to another parser, as it is.

    The token that closes counts, and not its text alone: a model that spells the marker out in other tokens still thinks, free of
    any grammar. So each push is preceded by the tokens that have come, whose text may come later, and never sooner.
    """

    def __init__(self, thoughts: Thoughts, around: Reasoning, rest: Parser, text: Text) -> None:
        self._thoughts = thoughts
        self._around = around
        self._rest = rest
        self._text = text
        self._tokens: list[int] = []  # until the one that closes has come
        self._last: int | None = None  # then which of the markers in the text is that token's, counted from 1
        self._passed = 0  # markers
        self._opens: Markers | None = None if thoughts.begun else Markers((around.open,))
        self._closes = Markers((around.close,))
        self._inside = thoughts.begun
        self._thought = Spaced(keeps_start=False)
        self.thoughts = 0  # tokens, with those of the markers

    @property
    def in_call(self) -> bool:
        return self._rest.in_call

    def read(self, tokens: Sequence[int]) -> None:
        """Tokens whose text comes with the next push, or later."""
        if self._last is not None or not tokens:
            return
        since = len(self._tokens)
        self._tokens += tokens
        end = self._thoughts.end(self._tokens, since)
        self._inside = end != 0
        self.thoughts = len(self._tokens) if end is None else end
        if end is not None:
            self._last = self._text.decode(self._tokens[:end], special=True).count(self._around.close)
            self._tokens.clear()

    def push(self, text: str) -> Piece:
        if self._inside and self._opens is not None:
            _, opened, text = self._opens.push(text)
            self._opens = self._opens if opened is None else None
        reasoning = ""
        while self._inside and text:
            before, close, text = self._closes.push(text)
            self._passed += close is not None
            if close is not None and self._passed == self._last:
                self._inside, close = False, None
            reasoning += self._thought.push(before + (close or ""))
        return Piece(reasoning=reasoning) if self._inside else joined([Piece(reasoning=reasoning), self._rest.push(text)])

    def finish(self, *, cut: bool = False) -> Piece:
        if self._inside:  # the marker is one token, so what looks like its beginning is a thought
            return Piece(reasoning=self._thought.push(self._closes.finish()))
        return self._rest.finish(cut=cut)
