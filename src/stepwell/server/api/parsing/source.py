"""The text of a block as it comes, and how readers go through it.

A reader is a generator. It yields parts of calls as soon as they are certain, and None wherever it needs more text; so it is
written as if all text were there, and emits the same however the text was cut.

    text       {"name": "f", "arguments": {"x": 1, "y"   : 2}}
    yields                   name f       {"x": 1, "y"  None  : 2}
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Generator, Mapping
from typing import TypeVar

from stepwell.server.api.parsing.pieces import Call, first_of, longest_overlap

T = TypeVar("T")
Reading = Generator[Call | None, None, T]
Texts = Mapping[str, frozenset[str]]  # by tool: parameters that are text, whatever they look like
SPACE = " \n\t\r"
DONE = Call()  # all that was read is part of calls
_QUOTED = re.compile(r'"|\\.?', re.DOTALL)
_NESTED = re.compile(r'["{}\[\]]')


class Source:
    """The text of a block so far, from the last part that was emitted."""

    def __init__(self) -> None:
        self._text = ""
        self._kept: list[str] = []  # text that was read and not emitted
        self._emitted = 0  # position: all before it is emitted or kept
        self._at = 0  # position: all before it is read
        self._ended = False
        self._closed = False
        self._broken = False
        self._nested = Nested()  # the value of JSON that is read
        self._sought: tuple[str, ...] = ()  # tags that come next: all text before them is no part of a call
        self.value_ends: tuple[str, ...] = ()  # what ends the value that is no JSON and is read

    @property
    def in_string(self) -> bool:
        """Whether what has come ends within a string of JSON."""
        return self._nested.quoted

    def break_off(self) -> None:
        """The string of JSON that is read does not go on, nor does what it is in."""
        self._broken, self._nested = True, Nested()

    def add(self, text: str) -> None:
        """Appends text, and drops what was emitted or kept, so readers that wait remember no other positions."""
        self._text, self._at, self._emitted = self._text[self._emitted :] + text, self._at - self._emitted, 0

    def end(self, *, closed: bool) -> None:
        """No more text comes. `closed`: its end was marked, so that nothing is missing."""
        self._ended, self._closed = True, closed

    def mark(self) -> None:
        """What was read so far has been emitted."""
        self._emitted = self._at
        self._kept.clear()

    def take(self) -> str:
        """All text that was not emitted."""
        text = "".join([*self._kept, self._text[self._emitted :]])
        self._text, self._kept, self._emitted, self._at = "", [], 0, 0
        return text

    def unread(self) -> str:
        """What stands behind the last call, once its reader has found no other."""
        return self._text[self._at :]

    def outside(self) -> str:
        """What stands behind the last tag and before the next, where one is looked for; without what may be its beginning."""
        text = self.unread() if self._sought else ""
        return text[: len(text) - longest_overlap(text, self._sought)].rstrip()

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

    def next_tag(self, *tags: str, or_end: bool = False) -> Reading[str]:
        """Goes behind the next of these, as `until`, and returns which it was. What stands before it is no part of a call."""
        self._sought = tags
        _, tag = yield from self.until(*tags, or_end=or_end)
        self._sought = ()
        return tag

    def word(self, also: str) -> Reading[str]:
        """Letters, digits and these."""
        parts: list[str] = []
        while (found := (yield from self.peek())) and (found.isalnum() or found in also):
            parts.append(found)
            self._at += 1
        return "".join(parts)

    def rest(self) -> Reading[str]:
        """All that comes."""
        while not self._ended:
            yield None
        begin, self._at = self._at, len(self._text)
        return self._text[begin:]

    def find(self, marker: str) -> Reading[bool]:
        """Goes behind the next such marker, if there is one."""
        try:
            yield from self.next_tag(marker)
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
        begin = self._at - self._emitted  # nothing is emitted meanwhile
        while (found := (yield from self.peek())) and found not in f",}}]{SPACE}":
            self._at += 1
        return self._text[self._emitted + begin : self._at]

    def _nesting(self) -> Reading[str]:
        """A string, object or list. Each part of it is read once, in however many it comes."""
        self._nested, parts = Nested(), list[str]()
        while (end := self._nested.end(self._text, self._at)) is None:
            parts.append(self._text[self._at :])
            self._kept.append(self._text[self._emitted :])
            self._emitted = self._at = len(self._text)
            if self._ended or (yield from self._breaks()):
                raise ValueError("a value that does not end")
        parts.append(self._text[self._at : end])
        self._at = end
        return "".join(parts)

    def raw(self, *markers: str, or_end: bool = False, line_end: bool = False) -> Reading[tuple[str, str]]:
        """A value that is no JSON, and the marker that ends it, as `until`. `line_end`: one at its beginning is dropped."""
        yield from self._begin_raw(markers, line_end=line_end)
        found = yield from self.until(*markers, or_end=or_end)
        self.value_ends = ()
        return found

    def text(self, *markers: str, or_end: bool = False, line_end: bool = False) -> Reading[str]:
        """As `raw`, but emits the value as it comes, for use within quotes. Raises ValueError."""
        yield from self._begin_raw(markers, line_end=line_end)
        while (found := self._first(markers, self._at)) is None:
            is_whole = self._ended and self._closed
            held = 0 if is_whole else longest_overlap(self._text[self._at :], markers)
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
        self.value_ends = ()
        return marker

    def _begin_raw(self, ends: tuple[str, ...], *, line_end: bool) -> Reading[None]:
        self.value_ends = ends
        if line_end and (yield from self.peek()) == "\n":
            self._at += 1
            self._emitted = self._at  # or it would be emitted with the text

    def object(self) -> Reading[None]:
        """Emits an object of JSON as it comes, as it is written, with the model's mistakes."""
        self._nested = Nested()
        while (end := self._nested.end(self._text, self._at)) is None:
            if len(self._text) > self._at:
                begin, self._at = self._at, len(self._text)
                yield Call(arguments=self._text[begin:])
            if self._ended or (yield from self._breaks()):
                return
        begin, self._at = self._at, end
        yield Call(arguments=self._text[begin:end], ends=True)

    def _breaks(self) -> Reading[bool]:
        """Waits for more of a value of JSON, and returns whether it was broken off instead."""
        yield None
        broken, self._broken = self._broken, False
        return broken

    def _quoted(self) -> Reading[None]:
        """Emits text that was read and not emitted. All before a text is emitted when it begins."""
        if self._at > self._emitted:
            yield Call(arguments=json.dumps(self._text[self._emitted : self._at], ensure_ascii=False)[1:-1])

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
