"""Calls between markers, and reasoning before the answer. What is between markers and is no call stays content."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from stepwell.server.api.parsing.block_reader import BlockReader
from stepwell.server.api.parsing.pieces import Call, Markers, Parser, Piece, Place, Spaced, joined, portions
from stepwell.server.api.parsing.source import Nested, ReadCalls, Texts


@dataclass(frozen=True, slots=True, kw_only=True)
class Blocks:
    """How a family writes calls: in blocks, each from an opening marker to what closes it, None for the answer's end."""

    closes: Mapping[str, str | None]
    read: ReadCalls
    starts: tuple[str, ...] = ()  # an answer that begins with one of these may be calls as a whole
    parts: tuple[str, ...] = ()  # markers within blocks, behind the arguments of a call
    inside: tuple[str, ...] = ()  # further ones

    @property
    def markers(self) -> tuple[str, ...]:
        return (*self.closes, *(close for close in self.closes.values() if close is not None), *self.parts, *self.inside)


class BlockParser:
    """Content and calls of one answer.

    free       content, until a marker opens a block or the answer begins like one
    in block   calls as they come, until it is closed; or the text that it is
    """

    def __init__(self, blocks: Blocks, texts: Texts) -> None:
        """`texts`: parameters that are text, by tool, for formats that do not distinguish text from numbers."""
        self._blocks = blocks
        self._texts = texts
        self._block: BlockReader | None = None  # that we are in
        self._lead = ""  # held back: what may be the beginning of an answer that is calls, or the marker of the block
        self._space: list[str] = []  # held back before that, in the parts in which it came
        self._begun = False  # whether anything but space has come
        self._content = Spaced(keeps_start=True)
        self._markers = Markers(tuple(blocks.closes))

    @property
    def in_call(self) -> bool:
        return self._block is not None and self._block.in_call

    def push(self, text: str) -> Piece:
        pieces: list[Piece] = []
        for part in portions(text):
            while part:
                part = self._free(part, pieces) if self._block is None else self._in_block(self._block, part, pieces)
        return joined(pieces)

    def finish(self, *, cut: bool = False) -> Piece:
        pieces: list[Piece] = []
        while self._block is not None:
            last, close, behind = self._block.end(cut=cut)
            pieces.append(self._emitted(last))
            if close is None:
                pieces.append(self._unclosed(self._block, cut=cut))
                break
            pieces += [self._closed(self._block, close), self.push(behind)]
        else:
            pieces.append(Piece(content=self._held(cut=cut)))
        return joined([*pieces, Piece(content=self._content.finish())])

    def _unclosed(self, block: BlockReader, *, cut: bool) -> Piece:
        """What is left of a block that is not closed. One that no marker opened is emitted in any case: it may be content."""
        drops = cut and (block.emitted or bool(self._lead))
        self._lead = "" if drops else self._lead
        left = block.finish(closed=False, cut=drops)
        if drops and not left:
            self._content.drop()  # space that stands before a call
        last = self._emitted(left)
        return joined([last, Piece(content=self._content.push(self._lead))])

    def _held(self, *, cut: bool) -> str:
        """What was held back outside of blocks; where more would have come, without what may be a marker's beginning."""
        before, _, _ = self._markers.push("".join([*self._space, self._lead]))
        text, begun = self._content.push(before), self._markers.finish()
        if not cut:
            return text + self._content.push(begun)
        if begun:
            self._content.drop()
        return text

    def _free(self, text: str, pieces: list[Piece]) -> str:
        if not self._begun:
            if not self._lead and not text.strip():
                self._space.append(text)
                return ""
            text, self._lead = self._lead + text, ""
            start, starts = text.lstrip(), self._blocks.starts
            if any(each.startswith(start) and each != start for each in starts):
                self._lead = text  # the beginning of what an answer may begin with
                return ""
            text, self._begun, self._space = "".join([*self._space, text]), True, []
            if starts and start.startswith(starts):
                self._enter("", None)
                return text
        before, marker, text = self._markers.push(text)
        pieces.append(Piece(content=self._content.push(before)))
        if marker is not None:
            self._enter(marker, self._blocks.closes[marker])
        return text

    def _enter(self, marker: str, close: str | None) -> None:
        closes, blocks = () if close is None else (close,), self._blocks
        self._block = BlockReader(blocks.read, self._texts, closes, opens=tuple(blocks.closes), parts=blocks.parts)
        self._lead = marker

    def _in_block(self, block: BlockReader, text: str, pieces: list[Piece]) -> str:
        said, close, text = block.push(text)
        pieces.append(self._emitted(said))
        if close is not None:
            pieces.append(self._closed(block, close))
        return text

    def _closed(self, block: BlockReader, close: str) -> Piece:
        last = self._emitted(block.finish(closed=True))
        after = Piece() if block.emitted else Piece(content=self._content.push(self._lead + close))
        self._block, self._lead, self._markers = None, "", Markers(tuple(self._blocks.closes))
        return joined([last, after])

    def _emitted(self, piece: Piece) -> Piece:
        """The piece of a block: calls, before which space is dropped, or text, with the markers around it."""
        if piece.calls:
            self._content.drop()
            self._lead = ""
        if not piece.content:
            return piece
        content, self._lead = self._content.push(self._lead + piece.content), ""
        return Piece(content=content, calls=piece.calls)


class NamedParser:
    """An answer that is the arguments of one tool, as it comes."""

    def __init__(self, name: str) -> None:
        self._name = name
        self._begun = False
        self._nested = Nested()
        self._starts = False  # whether anything but space has come
        self.in_call = False  # until its object has ended; what is none is taken as whole

    def push(self, text: str) -> Piece:
        if not text:
            return Piece()
        if not self._starts and (start := text.lstrip()):
            self._starts, self.in_call = True, start[0] == "{"
        if self.in_call:
            self.in_call = self._nested.end(text, 0) is None
        begun, self._begun = self._begun, True
        return Piece(calls=(Call(name=None if begun else self._name, arguments=text, ends=not self.in_call),))

    def finish(self, *, cut: bool = False) -> Piece:
        return Piece() if self._begun else Piece(calls=(Call(name=self._name),))


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
        self._space: list[str] = []  # held back, and behind it what may be the beginning of the marker
        self._lead = ""
        self._markers = Markers((around.close,))
        self._thought = Spaced(keeps_start=False)
        self._answer = Spaced(keeps_start=False)

    @property
    def in_call(self) -> bool:
        return self._rest.in_call

    @property
    def place(self) -> Place:
        if self._inside:
            return Place.THOUGHT
        return Place.LAST if self._done else Place.HEADING

    def push(self, text: str) -> Piece:
        if not self._inside and not self._done:
            if not self._lead and not text.strip():
                self._space.append(text)
                return Piece()
            text, self._lead = self._lead + text, ""
            start = text.lstrip()
            if start.startswith(self._around.open):
                self._inside, text, self._space = True, start[len(self._around.open) :], []
            elif self._around.open.startswith(start):
                self._lead = text
                return Piece()
            else:
                text, self._done, self._space = "".join([*self._space, text]), True, []
                self._answer = Spaced(keeps_start=True)
        reasoning = ""
        if self._inside:
            before, close, text = self._markers.push(text)
            reasoning = self._thought.push(before)
            if close is not None:
                self._inside, self._done = False, True
        answered = self._rest.push(self._answer.push(text)) if self._done else Piece()
        return joined([Piece(reasoning=reasoning), answered])

    def finish(self, *, cut: bool = False) -> Piece:
        held = "" if cut else self._markers.finish() + self._lead  # the beginning of a marker
        if self._inside:
            return Piece(reasoning=self._thought.push(held))
        last = self._rest.push("".join([*self._space, held, self._answer.finish()]))
        return joined([last, self._rest.finish(cut=cut)])


class Plain:
    """Nothing but content."""

    in_call = False

    def push(self, text: str) -> Piece:
        return Piece(content=text)

    def finish(self, *, cut: bool = False) -> Piece:
        return Piece()
