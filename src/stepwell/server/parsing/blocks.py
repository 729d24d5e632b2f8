"""Calls between markers, and reasoning before the answer. What is between markers and is no call stays content."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

from stepwell.server.parsing.pieces import Call, Markers, Parser, Piece, Spaced, joined

ReadCalls = Callable[[str, Mapping[str, frozenset[str]]], list[Call]]  # raises ValueError for what is none


@dataclass(frozen=True, slots=True, kw_only=True)
class Blocks:
    """How a family writes calls: in blocks, each from an opening marker to what closes it, None for the answer's end."""

    closes: Mapping[str, str | None]
    read: ReadCalls
    starts: tuple[str, ...] = ()  # an answer that begins with one of these may be calls as a whole
    inside: tuple[str, ...] = ()  # further markers, within blocks

    @property
    def markers(self) -> tuple[str, ...]:
        return (*self.closes, *(close for close in self.closes.values() if close is not None), *self.inside)


class BlockParser:
    """Content and calls of one answer.

    free       content, until a marker opens a block or the answer begins like one
    in block   nothing, until it is closed; then its calls, or the text that it is
    """

    def __init__(self, blocks: Blocks, texts: Mapping[str, frozenset[str]]) -> None:
        """`texts`: parameters that are text, by tool, for formats that do not tell text from numbers."""
        self._blocks = blocks
        self._texts = texts
        self._open: str | None = None  # the marker of the block we are in; "" for an answer that begins like one
        self._begun = False  # whether anything but space has come
        self._lead = ""
        self._body = ""
        self._content = Spaced(keeps_start=True)
        self._markers = Markers(tuple(blocks.closes))

    def push(self, text: str) -> Piece:
        pieces: list[Piece] = []
        while text:
            text = self._in_block(text, pieces) if self._open is not None else self._free(text, pieces)
        return joined(pieces)

    def finish(self) -> Piece:
        if self._open is None:
            held = self._lead + self._markers.finish()
            return Piece(content=self._content.push(held) + self._content.finish())
        piece = self._read(self._markers.finish())
        return joined([piece, Piece(content=self._content.finish())])

    def _free(self, text: str, pieces: list[Piece]) -> str:
        if not self._begun:
            text, self._lead = self._lead + text, ""
            start, starts = text.lstrip(), self._blocks.starts
            if not start or any(each.startswith(start) and each != start for each in starts):
                self._lead = text  # space, or the beginning of what an answer may begin with
                return ""
            self._begun = True
            if starts and start.startswith(starts):
                self._enter("", None)
                return text
        before, marker, text = self._markers.push(text)
        pieces.append(Piece(content=self._content.push(before)))
        if marker is not None:
            self._content.drop()
            self._enter(marker, self._blocks.closes[marker])
        return text

    def _enter(self, marker: str, close: str | None) -> None:
        self._open, self._body = marker, ""
        self._markers = Markers(() if close is None else (close,))

    def _in_block(self, text: str, pieces: list[Piece]) -> str:
        before, close, text = self._markers.push(text)
        self._body += before
        if close is not None:
            pieces.append(self._read(close))
            self._open, self._markers = None, Markers(tuple(self._blocks.closes))
        return text

    def _read(self, close: str) -> Piece:
        """The block's calls; where it has none, its text with the markers around it."""
        try:
            calls = self._blocks.read(self._body, self._texts)
            if calls:
                return Piece(calls=tuple(calls))
        except (ValueError, RecursionError):
            pass
        return Piece(content=self._content.push(f"{self._open}{self._body}{close}"))


@dataclass(frozen=True, slots=True, kw_only=True)
class Reasoning:
    """The markers around what a model thinks before it answers."""

    open: str
    close: str


class ReasoningParser:
    """Reasoning apart, and what comes behind it to another parser. `begun`: the prompt has opened it already."""

    def __init__(self, around: Reasoning, rest: Parser, *, begun: bool) -> None:
        self._around = around
        self._rest = rest
        self._inside = begun
        self._done = False
        self._lead = ""
        self._markers = Markers((around.close,))
        self._thought = Spaced(keeps_start=False)
        self._answer = Spaced(keeps_start=False)

    def push(self, text: str) -> Piece:
        if not self._inside and not self._done:
            text, self._lead = self._lead + text, ""
            start = text.lstrip()
            if start.startswith(self._around.open):
                self._inside, text = True, start[len(self._around.open) :]
            elif self._around.open.startswith(start):
                self._lead = text  # space, or the beginning of the marker
                return Piece()
            else:
                self._done = True
                self._answer = Spaced(keeps_start=True)
        reasoning = ""
        if self._inside:
            before, close, text = self._markers.push(text)
            reasoning = self._thought.push(before)
            if close is not None:
                self._inside, self._done = False, True
        answered = self._rest.push(self._answer.push(text)) if self._done else Piece()
        return joined([Piece(reasoning=reasoning), answered])

    def finish(self) -> Piece:
        if self._inside:
            return Piece(reasoning=self._thought.push(self._markers.finish()))
        last = self._rest.push(self._lead + self._answer.finish())
        return joined([last, self._rest.finish()])


class Plain:
    """Nothing but content."""

    def push(self, text: str) -> Piece:
        return Piece(content=text)

    def finish(self) -> Piece:
        return Piece()
