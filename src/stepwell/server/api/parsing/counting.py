"""How many tokens of an answer are reasoning: those whose text falls within it, and the markers and headers of it.

    tokens    <think>  so  it  is  </think>  \n\n  Rome
    counted      1     2   3   4      5

Exact whatever tokens come at once: it decodes them one by one, and asks after each where a parser of its own stands.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from stepwell.engine.requests.text import TextStream
from stepwell.server.api.parsing.pieces import Piece, Place


class Placed(Protocol):
    @property
    def place(self) -> Place:
        """What the text so far ends within."""
        ...

    def push(self, text: str) -> Piece: ...


class ThoughtCounter:
    """Counts in one answer. A token that has the end of reasoning and the beginning of something else in it counts."""

    def __init__(self, parser: Placed, stream: TextStream) -> None:
        self._parser = parser
        self._stream = stream
        self._heading = 0  # tokens whose successors say whether they belong to reasoning
        self.thoughts = 0

    def read(self, tokens: Sequence[int]) -> None:
        place = self._parser.place
        for token in tokens:
            if place is Place.LAST:
                return
            before = place
            if text := self._stream.push(token):
                self._parser.push(text)
                place = self._parser.place
            self._heading += 1
            if Place.THOUGHT in (before, place):
                self.thoughts, self._heading = self.thoughts + self._heading, 0
            elif (before, place) != (Place.HEADING, Place.HEADING):
                self._heading = 0
