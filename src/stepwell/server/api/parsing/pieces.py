"""What an answer's text is made of: content, reasoning, calls of tools. Joined pieces do not depend on how the text was cut.

    text      Let me look.  <tool_call>{"name": "f", "arguments": {...}}</tool_call>
    pieces    |- content -|                      |- name, then arguments as they come

A parser holds back what could still become a marker, and space that may stand before one. It emits a call as soon as its name is
known and its arguments begin.
"""

from __future__ import annotations

import uuid
from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from enum import Enum
from typing import Protocol

_PORTION = 4096  # characters


@dataclass(frozen=True, slots=True, kw_only=True)
class Call:
    """A call of a tool, with its arguments in JSON, or the part of both that came at once."""

    name: str | None = None  # None: more arguments of the call before it
    arguments: str = ""
    id: str | None = None  # as the model names it; None where it does not
    ends: bool = field(default=False, compare=False)  # its arguments are whole with this
    behind: int = field(default=0, compare=False)  # how many characters of the content that came with it stand before it


@dataclass(frozen=True, slots=True, kw_only=True)
class Thought:
    """Where a part of the reasoning stands among the content and the calls that came with it."""

    size: int  # characters
    behind: int  # characters of the content before it
    calls: int  # calls before it


@dataclass(frozen=True, slots=True, kw_only=True)
class Piece:
    content: str = ""
    reasoning: str = ""
    calls: tuple[Call, ...] = ()
    thoughts: tuple[Thought, ...] = field(default=(), compare=False)  # none: all reasoning stands before all the rest

    def __bool__(self) -> bool:
        return bool(self.content or self.reasoning or self.calls)


class Place(Enum):
    """What an answer's text ends within, as far as that is known."""

    HEADING = "heading"  # a header, a marker, or what may be one: what follows says what it belongs to
    THOUGHT = "thought"
    ANSWER = "answer"
    LAST = "last"  # the answer, behind which no thoughts come


class Parser(Protocol):
    """One answer's text, piece by piece."""

    @property
    def in_call(self) -> bool:
        """Whether the text so far ends within the arguments of a call."""
        ...

    def push(self, text: str) -> Piece: ...

    def finish(self, *, cut: bool = False) -> Piece:
        """What was held back, when no more text comes.

        `cut`: the answer would have gone on. What may be a part of a marker, or of a call that was not emitted yet, is dropped
        then, so that the output is a beginning of what would have been. It is content if the model has ended there.
        """
        ...


def id_of(call: Call) -> str:
    """What clients answer a call by: a new one, where the model has none."""
    return call.id or f"call_{uuid.uuid4().hex[:24]}"


def joined(pieces: Sequence[Piece]) -> Piece:
    calls: list[Call] = []
    thoughts: list[Thought] = []
    length = begun = 0  # characters of the content, and calls
    for piece in pieces:
        first = begun - (begun > 0 and bool(piece.calls) and piece.calls[0].name is None)  # which may go on
        for each in _thoughts(piece):
            number = first + each.calls if each.calls else begun
            thoughts.append(Thought(size=each.size, behind=length + each.behind, calls=number))
        calls += piece.calls if not length else (replace(call, behind=length + call.behind) for call in piece.calls)
        begun = first + len(piece.calls) if piece.calls else begun
        length += len(piece.content)
    return Piece(
        content="".join(piece.content for piece in pieces),
        reasoning="".join(piece.reasoning for piece in pieces),
        calls=_whole(calls),
        thoughts=tuple(thoughts),
    )


def parts_of(piece: Piece) -> Iterator[Call | tuple[str, str]]:
    """What a piece is made of, in the order in which it came: calls, content and reasoning, each of the two with its name."""
    at = begin = 0
    thoughts = deque(_thoughts(piece))
    for number, call in enumerate([*piece.calls, None]):
        while thoughts and (thoughts[0].calls <= number or call is None):
            each = thoughts.popleft()
            yield "content", piece.content[at : each.behind]
            yield "reasoning", piece.reasoning[begin : begin + each.size]
            at, begin = each.behind, begin + each.size
        if call is not None:
            yield "content", piece.content[at : call.behind]
            yield call
            at = call.behind
    yield "content", piece.content[at:]


def _thoughts(piece: Piece) -> tuple[Thought, ...]:
    if not piece.reasoning or piece.thoughts:
        return piece.thoughts
    return (Thought(size=len(piece.reasoning), behind=0, calls=0),)


def _whole(parts: Sequence[Call]) -> tuple[Call, ...]:
    """Calls with as much of their arguments as there is. The first may continue one that was emitted before."""
    calls: list[list[Call]] = []
    for part in parts:
        if part.name is not None or not calls:
            calls.append([])
        calls[-1].append(part)
    return tuple(replace(call[0], arguments="".join(part.arguments for part in call), ends=call[-1].ends) for call in calls)


def portions(text: str) -> Iterator[str]:
    """A long text in parts: each marker in it has what is behind it copied, and that had better be short."""
    return (text[at : at + _PORTION] for at in range(0, len(text), _PORTION))


class Markers:
    """Finds the first of some markers in a text that comes in pieces."""

    def __init__(self, markers: Sequence[str]) -> None:
        self._markers = tuple(markers)
        self._held = ""

    def push(self, text: str) -> tuple[str, str | None, str]:
        """What is certain to stand before any marker; the marker, if there is one; and what stands behind it."""
        text = self._held + text
        found = first_of(self._markers, text)
        if found is not None:
            at, marker = found
            self._held = ""
            return text[:at], marker, text[at + len(marker) :]
        keep = longest_overlap(text, self._markers)
        self._held = text[len(text) - keep :]
        return text[: len(text) - keep], None, ""

    def finish(self) -> str:
        held, self._held = self._held, ""
        return held


def first_of(markers: Sequence[str], text: str, since: int = 0) -> tuple[int, str] | None:
    """Where the first of these stands, and which it is. Looks for each no further than where another was found."""
    first: tuple[int, str] | None = None
    for marker in markers:
        at = text.find(marker, since, len(text) if first is None else first[0] + len(marker))
        if at >= 0 and (first is None or (at, marker) < first):
            first = at, marker
    return first


def overlap(text: str, marker: str) -> int:
    """The length of the longest end of `text` that begins `marker`."""
    return next((size for size in range(min(len(marker) - 1, len(text)), 0, -1) if text.endswith(marker[:size])), 0)


def longest_overlap(text: str, markers: Sequence[str]) -> int:
    return max((overlap(text, marker) for marker in markers), default=0)


class Spaced:
    """Text without the space at its beginning, and without that at its end unless more text follows."""

    def __init__(self, *, keeps_start: bool) -> None:
        self._begun = keeps_start
        self._space: list[str] = []  # held back, in the parts in which it came: each is looked at once

    def push(self, text: str) -> str:
        kept = text.rstrip()
        space = text[len(kept) :]
        if kept:
            kept = "".join([*self._space, kept]) if self._begun else kept.lstrip()
            self._begun, self._space = True, []
        if space and self._begun:
            self._space.append(space)
        return kept

    def drop(self) -> None:
        """What was space so far stood before something else."""
        self._space = []

    def finish(self) -> str:
        held, self._space = "".join(self._space), []
        return held
