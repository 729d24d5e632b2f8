"""The text of a block as it comes, and how readers go through it.

A reader is a generator. It yields parts of calls as soon as they are certain, and None wherever it needs more text; so it is
written as if all text were there, and tells the same however the text was cut.

    text       {"name": "f", "arguments": {"x": 1, "y"   : 2}}
    yields                   name f       {"x": 1, "y"  None  : 2}
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Generator, Mapping, Sequence
from typing import Any, TypeVar

from stepwell.server.parsing.pieces import Call, Markers, Piece, first_of, joined, overlap

T = TypeVar("T")
Reading = Generator[Call | None, None, T]
Texts = Mapping[str, frozenset[str]]  # by tool: parameters that are text, whatever they look like
SPACE = " \n\t\r"
DONE = Call()  # all that was read is part of calls
_QUOTED = re.compile(r'"|\\.?', re.DOTALL)
_NESTED = re.compile(r'["{}\[\]]')
_LINE_ENDS = "\n\r"  # which strings of JSON have as escapes only


class Source:
    """What has come of a block, from the last thing that was told on."""

    def __init__(self) -> None:
        self._text = ""
        self._kept: list[str] = []  # of what was not told: what nobody has to read again
        self._told = 0  # or kept, as far as this
        self._at = 0  # and read as far as this
        self._ended = False
        self._closed = False
        self._nested = Nested()  # the value of JSON that is read

    @property
    def in_string(self) -> bool:
        """Whether what has come ends within a string of JSON."""
        return self._nested.quoted

    def add(self, text: str) -> None:
        """What was told or kept is dropped with it, so readers that wait remember no place but these two."""
        self._text, self._at, self._told = self._text[self._told :] + text, self._at - self._told, 0

    def end(self, *, closed: bool) -> None:
        """No more text comes. `closed`: its end was marked, so that nothing is missing."""
        self._ended, self._closed = True, closed

    def mark(self) -> None:
        """What was read so far has been told."""
        self._told = self._at
        self._kept.clear()

    def take(self) -> str:
        """All that was not told."""
        text = "".join([*self._kept, self._text[self._told :]])
        self._text, self._kept, self._told, self._at = "", [], 0, 0
        return text

    def unread(self) -> str:
        """What stands behind the last call, once its reader has found no other."""
        return self._text[self._at :]

    # ---- for readers ------------------------------------------------------------------------------

    def peek(self, size: int = 1) -> Reading[str]:
        """What comes next; less than asked for at the end."""
        while len(self._text) < self._at + size and not self._ended:
            yield None
        return self._text[self._at : self._at + size]

    def skip(self, characters: str) -> Reading[str]:
        """What comes behind any of these; nothing at the end."""
        while (found := (yield from self.peek())) and found in characters:
            self._at += 1
        return found

    def must_have(self, marker: str) -> Reading[None]:
        """Goes behind a marker that stands here; at the end a part of it will do. Raises ValueError."""
        found = yield from self.peek(len(marker))
        if not marker.startswith(found):
            raise ValueError(f"no {marker} where there should be one")
        self._at += len(found)

    def until(self, *markers: str, or_end: bool = False, consume: bool = True) -> Reading[tuple[str, str]]:
        """Goes behind the first of these, or to it, and returns the text before it and which one it was.

        `or_end`: the end of a block that was closed will do. Raises ValueError where there is none.
        """
        longest = max(map(len, markers))
        seen = 0  # behind where it reads: no marker begins there
        while (found := self._first(markers, self._at + seen)) is None:
            if self._ended and not (or_end and self._closed):
                raise ValueError(f"no {' or '.join(markers)}")
            if self._ended:
                found = len(self._text), ""
                break
            seen = max(seen, len(self._text) - self._at - longest + 1)
            yield None
        at, marker = found
        text = self._text[self._at : at]
        self._at = at + (len(marker) if consume else 0)
        return text, marker

    def rest(self) -> Reading[str]:
        """All that comes."""
        while not self._ended:
            yield None
        begin, self._at = self._at, len(self._text)
        return self._text[begin:]

    def find(self, marker: str) -> Reading[bool]:
        """Goes behind the next such marker, if there is one."""
        try:
            yield from self.until(marker)
        except ValueError:
            return False
        return True

    def string(self) -> Reading[str]:
        """A string of JSON. Raises ValueError."""
        return str(json.loads((yield from self.value())))

    def value(self) -> Reading[str]:
        """A value of JSON, as it is written. Raises ValueError."""
        first = yield from self.peek()
        if first in ('"', "{", "["):
            return (yield from self._nesting())
        begin = self._at - self._told  # nothing is told meanwhile
        while (found := (yield from self.peek())) and found not in f",}}]{SPACE}":
            self._at += 1
        return self._text[self._told + begin : self._at]

    def _nesting(self) -> Reading[str]:
        """A string, object or list. Each part of it is read once, in however many it comes."""
        self._nested, parts = Nested(), list[str]()
        while (end := self._nested.end(self._text, self._at)) is None:
            parts.append(self._text[self._at :])
            self._kept.append(self._text[self._told :])
            self._told = self._at = len(self._text)
            if self._ended:
                raise ValueError("a value that does not end")
            yield None
        parts.append(self._text[self._at : end])
        self._at = end
        return "".join(parts)

    def text(self, *markers: str, or_end: bool = False) -> Reading[str]:
        """Tells a text within quotes as it comes, goes behind the marker that ends it, and returns which. Raises ValueError."""
        while (found := self._first(markers, self._at)) is None:
            held = 0 if self._ended else max(overlap(self._text[self._at :], each) for each in markers)
            self._at = len(self._text) - held
            yield from self._quoted()
            if self._ended and not (or_end and self._closed):
                raise ValueError("a text that does not end")
            if self._ended:
                return ""
            yield None
        at, marker = found
        self._at = at
        yield from self._quoted()
        self._at += len(marker)
        return marker

    def object(self) -> Reading[None]:
        """Tells an object of JSON as it comes, as it is written. A model's mistakes in it are told as well."""
        self._nested = Nested()
        while (end := self._nested.end(self._text, self._at)) is None:
            if len(self._text) > self._at:
                begin, self._at = self._at, len(self._text)
                yield Call(arguments=self._text[begin:])
            if self._ended:
                return
            yield None
        begin, self._at = self._at, end
        yield Call(arguments=self._text[begin:end], ends=True)

    def _quoted(self) -> Reading[None]:
        """Tells what was read and not told; whoever begins a text has told all before it."""
        if self._at > self._told:
            yield Call(arguments=json.dumps(self._text[self._told : self._at], ensure_ascii=False)[1:-1])

    def _first(self, markers: tuple[str, ...], since: int) -> tuple[int, str] | None:
        return first_of(markers, self._text, since)


class Nested:
    """Where a string, object or list of JSON ends, in a text that comes in pieces. Trusts it to be JSON."""

    def __init__(self) -> None:
        self._depth = 0
        self.quoted = self._escaped = False  # `quoted`: within a string

    def end(self, text: str, at: int) -> int | None:
        """Goes on from `at`, where the last piece ended; None where it does not end in this one."""
        if self._escaped and at < len(text):
            at, self._escaped = at + 1, False
        while found := (_QUOTED if self.quoted else _NESTED).search(text, at):
            at, sign = found.end(), found.group()
            if sign == '"':
                self.quoted = not self.quoted
            elif self.quoted:
                self._escaped = sign == "\\"  # and what it escapes comes with the next piece
            else:
                self._depth += 1 if sign in "{[" else -1
            if not self.quoted and self._depth <= 0:
                return at
        return None


ReadCalls = Callable[[Source, Texts], Reading[None]]  # raises ValueError for what is no call; ends with its text


class BlockReader:
    """Calls of one block, as they come, until a marker closes it. What is none is content: all, or what is behind the last.

    A marker within a string of JSON is part of that, unless the answer or the line ends behind it: no string of JSON goes on over
    lines, so that one was broken off, and the block ends as if it were whole.

        {"name": "f", "arguments": {"text": "... </tool_call> ..."}}</tool_call>
                                                 part of it         closes
    """

    def __init__(self, read: ReadCalls, texts: Texts, closes: Sequence[str]) -> None:
        self._source = Source()
        self._reading: Reading[Any] | None = read(self._source, texts)  # None: the rest is content
        self._markers = Markers(closes)
        self._in_string = ""  # a marker that stands there, until it is known what comes behind it
        self.told = False  # whether any call was
        self.in_call = False  # whether the last one has not ended

    def push(self, text: str) -> tuple[Piece, str | None, str]:
        """What it says; the marker that closes it, if there is one; and what stands behind that."""
        pieces: list[Piece] = []
        while text:
            marker, self._in_string = self._in_string, ""
            if marker and text[0] in _LINE_ENDS:
                return joined(pieces), marker, text
            before, found, text = self._markers.push(text)
            pieces.append(self._add(marker + before))
            if found is not None and not self._quoted:
                return joined(pieces), found, text
            self._in_string = found or ""
        return joined(pieces), None, ""

    def end(self) -> tuple[Piece, str | None]:
        """What was held back when no more text comes, and the marker that closes the block, if there is one."""
        held = self._markers.finish()
        if self.told and not self._quoted:
            held = ""  # the beginning of a marker that would have closed it
        return self._add(held), self._in_string or None

    def finish(self, *, closed: bool) -> Piece:
        """`closed`: the end of the block was marked, so that nothing is missing."""
        self._source.end(closed=closed)
        piece = Piece() if self._reading is None else self._read(self._reading)
        self.in_call = self.in_call and not closed
        left = self._source.unread() if self.told else self._source.take()
        return joined([piece, Piece(content=left)]) if not self.told or left.strip() else piece

    @property
    def _quoted(self) -> bool:
        return self._reading is not None and self._source.in_string

    def _add(self, text: str) -> Piece:
        if self._reading is None:
            return Piece(content=text)
        self._source.add(text)
        return self._read(self._reading)

    def _read(self, reading: Reading[Any]) -> Piece:
        parts: list[Piece] = []
        try:
            for part in reading:
                if part is None:
                    break
                self._source.mark()
                if part is not DONE:
                    parts.append(Piece(calls=(part,)))
                    self.told, self.in_call = True, not part.ends
        except (ValueError, RecursionError):
            self._reading = None
            parts.append(Piece(content=self._source.take()))
        return joined(parts)
