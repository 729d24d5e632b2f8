"""One block of an answer: the calls in it as they come, until a marker closes it. What is none is content.

A marker that stands within a value may be part of it, or the value was broken off there. What follows decides:

    {"name": "f", "arguments": {"text": "... </tool_call> ..."}}</tool_call>                  part of it, then closes
    {"name": "f", "arguments": {"text": "... </tool_call><tool_call>{"name": ...              closes: no JSON otherwise
    <parameter=text>... </tool_call> ...</parameter></function></tool_call>                   part of it, then closes
    <parameter=text>... </tool_call><tool_call><function=...                                  closes: another block begins
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Any, Protocol

from stepwell.server.api.parsing.pieces import Markers, Piece, joined
from stepwell.server.api.parsing.source import DONE, SPACE, ReadCalls, Reading, Source, Texts

_SIGNS = re.compile(r'"|\\.?|[\n\r]', re.DOTALL)  # within a string of JSON: none goes on over lines
_BEHIND_STRING = ",:}]"
_DOUBT = 1024  # characters of a string for which it may be open whether it was broken off; then it was not


class Doubt(Protocol):
    """What has come behind a marker that stands within a value, until it is known whether the marker is part of that."""

    def push(self, text: str) -> bool | None:
        """Whether it is part of the value; None while that is open. Nothing is pushed behind that."""
        ...

    def taken(self) -> tuple[str, str]:
        """What has come, as far as it is part of the value if the marker is; and the rest."""
        ...

    def at_end(self, *, cut: bool) -> bool:
        """As `push`, when no more comes. `cut`: more would have come."""
        ...


class InString:
    """The value is a string of JSON: it ends with a quote behind which JSON goes on."""

    def __init__(self) -> None:
        self._text = ""
        self._at = 0  # as far as this it is certain

    def push(self, text: str) -> bool | None:
        self._text += text
        seen = self._text[:_DOUBT]
        while found := _SIGNS.search(seen, self._at):
            sign = found.group()
            if sign in "\n\r":
                return False
            behind = seen[found.end() :].lstrip(SPACE)
            if sign == '"' and behind:
                self._at = found.end()
                return behind[0] in _BEHIND_STRING
            self._at = found.start()
            if sign in ('"', "\\"):
                break  # what follows decides
            self._at = found.end()
        else:
            self._at = len(seen)
        if len(seen) < _DOUBT:
            return None
        self._at = _DOUBT
        return True

    def taken(self) -> tuple[str, str]:
        return self._text[: self._at], self._text[self._at :]

    def at_end(self, *, cut: bool) -> bool:
        return self._text.startswith('"', self._at) or (cut and bool(self._text.strip()))


class InText:
    """The value is no JSON: it ends with a marker of its own, before any other block opens."""

    def __init__(self, ends: tuple[str, ...], opens: tuple[str, ...]) -> None:
        self._ends = ends
        self._markers = Markers((*ends, *opens))
        self._parts: list[str] = []
        self._rest = ""

    def push(self, text: str) -> bool | None:
        before, found, behind = self._markers.push(text)
        self._parts.append(before)
        if found is None:
            return None
        self._parts.append(found)
        self._rest = behind
        return found in self._ends

    def taken(self) -> tuple[str, str]:
        return "".join(self._parts), self._rest

    def at_end(self, *, cut: bool) -> bool:
        self._parts.append(self._markers.finish())
        return cut and any(part.strip() for part in self._parts)


class BlockReader:
    """Calls of one block, as they come, until a marker closes it. The rest is content: all text, or that after the last call."""

    def __init__(
        self, read: ReadCalls, texts: Texts, closes: Sequence[str], *, opens: Sequence[str] = (), parts: Sequence[str] = ()
    ) -> None:
        """`opens`: what opens another block. `parts`: markers that stand behind the arguments of a call within the block."""
        self._source = Source()
        self._reading: Reading[Any] | None = read(self._source, texts)  # None: the rest is content
        self._opens, self._parts = tuple(opens), frozenset(parts)
        self._markers = Markers((*closes, *parts))
        self._doubt: tuple[str, Doubt] | None = None  # a marker within a value, until it is known whether it is part of that
        self.emitted = False  # whether any call was emitted
        self.in_call = False  # whether the last one has not ended

    def push(self, text: str) -> tuple[Piece, str | None, str]:
        """Its piece; the marker that closes it, if there is one; and the text after that."""
        pieces: list[Piece] = []
        while text:
            if self._doubt is not None:
                is_part = self._doubt[1].push(text)
                if is_part is None:
                    break
                close, text = self._decide(pieces, is_part=is_part)
            else:
                before, marker, text = self._markers.push(text)
                pieces.append(self._add(before))
                close = None if marker is None else self._met(marker, pieces)
            if close is not None:
                return joined(pieces), close, text
        return joined(pieces), None, ""

    def end(self, *, cut: bool) -> tuple[Piece, str | None, str]:
        """As `push`, with what was held back when no more text comes. `cut`: more would have come."""
        pieces: list[Piece] = []
        while self._doubt is not None:
            close, text = self._decide(pieces, is_part=self._doubt[1].at_end(cut=cut))
            if close is None:
                said, close, text = self.push(text)
                pieces.append(said)
            if close is not None:
                return joined(pieces), close, text
        held = self._markers.finish()
        if self.emitted and not self._in_string:
            held = ""  # the beginning of a marker that would have closed it
        return joined([*pieces, self._add(held)]), None, ""

    def finish(self, *, closed: bool, cut: bool = False) -> Piece:
        """`closed`: the end of the block was marked, so that nothing is missing. `cut`: more would have come."""
        if cut and self._reading is not None:
            return Piece(content=self._source.outside())
        self._source.end(closed=closed)
        piece = Piece() if self._reading is None else self._read(self._reading, at_end=True)
        left = self._left()
        self.in_call = self.in_call and not closed
        return joined([piece, Piece(content=left)]) if not self.emitted or left.strip() else piece

    def _left(self) -> str:
        """The content in text that was not emitted. The rest of a call is part of it, and never content."""
        if self.in_call and self._reading is not None:
            return self._source.outside()
        return self._source.unread() if self.emitted and self._reading is not None else self._source.take()

    @property
    def _in_string(self) -> bool:
        return self._reading is not None and self._source.in_string

    def _met(self, marker: str, pieces: list[Piece]) -> str | None:
        """A marker has come: returns it if it closes the block."""
        if self._in_string:
            self._doubt = marker, InString()
        elif marker in self._parts:
            pieces.append(self._add(marker))
        elif self._reading is not None and self._source.value_ends:
            self._doubt = marker, InText(self._source.value_ends, self._opens)
        else:
            return marker
        return None

    def _decide(self, pieces: list[Piece], *, is_part: bool) -> tuple[str | None, str]:
        """What comes of the marker in doubt. Returns it if it closes the block, and the text that is still to be read."""
        assert self._doubt is not None
        (marker, doubt), self._doubt = self._doubt, None
        value, rest = doubt.taken()
        if is_part:
            pieces.append(self._add(marker + value))
            return None, rest
        if marker not in self._parts:
            return marker, value + rest
        self._source.break_off()
        pieces.append(self._add(marker))
        return None, value + rest

    def _add(self, text: str) -> Piece:
        if self._reading is None:
            return Piece(content=text)
        self._source.add(text)
        return self._read(self._reading)

    def _read(self, reading: Reading[Any], *, at_end: bool = False) -> Piece:
        parts: list[Piece] = []
        try:
            for part in reading:
                if part is None:
                    break
                self._source.mark()
                if part is not DONE:
                    parts.append(Piece(calls=(part,)))
                    self.emitted, self.in_call = True, not part.ends
        except (ValueError, RecursionError):
            if not (at_end and self.in_call):
                self._reading = None
                parts.append(Piece(content=self._source.take()))
        return joined(parts)
