"""What an answer's text is made of: content, reasoning, calls of tools. Joined pieces do not depend on how the text was cut.

    text      Let me look.  <tool_call>{"name": "f", "arguments": {...}}</tool_call>
    pieces    |- content -|                      |- name, then arguments as they come

A parser holds back what could still become a marker, and space that may stand before one. A call is told as soon as its name is
known and its arguments begin.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol


@dataclass(frozen=True, slots=True, kw_only=True)
class Call:
    """A tool that is to be called, with its arguments in JSON, or as much of both as came at once."""

    name: str | None = None  # None: more arguments of the call before it
    arguments: str = ""
    id: str | None = None  # as the model names it; None where it does not


@dataclass(frozen=True, slots=True, kw_only=True)
class Piece:
    content: str = ""
    reasoning: str = ""
    calls: tuple[Call, ...] = ()

    def __bool__(self) -> bool:
        return bool(self.content or self.reasoning or self.calls)


class Parser(Protocol):
    """One answer's text, piece by piece."""

    def push(self, text: str) -> Piece: ...

    def finish(self) -> Piece:
        """What was held back, when no more text comes."""
        ...


def joined(pieces: Sequence[Piece]) -> Piece:
    return Piece(
        content="".join(piece.content for piece in pieces),
        reasoning="".join(piece.reasoning for piece in pieces),
        calls=_whole([call for piece in pieces for call in piece.calls]),
    )


def _whole(parts: Sequence[Call]) -> tuple[Call, ...]:
    """Calls with as much of their arguments as there is. The first may go on from one that was told before."""
    calls: list[tuple[Call, list[str]]] = []
    for part in parts:
        if part.name is not None or not calls:
            calls.append((part, []))
        calls[-1][1].append(part.arguments)
    return tuple(Call(name=call.name, arguments="".join(arguments), id=call.id) for call, arguments in calls)


class Markers:
    """Finds the first of some markers in a text that comes in pieces."""

    def __init__(self, markers: Sequence[str]) -> None:
        self._markers = tuple(markers)
        self._held = ""

    def push(self, text: str) -> tuple[str, str | None, str]:
        """What is certain to stand before any marker; the marker, if there is one; and what stands behind it."""
        text = self._held + text
        found = [(at, marker) for marker in self._markers if (at := text.find(marker)) >= 0]
        if found:
            at, marker = min(found)
            self._held = ""
            return text[:at], marker, text[at + len(marker) :]
        keep = max((overlap(text, marker) for marker in self._markers), default=0)
        self._held = text[len(text) - keep :]
        return text[: len(text) - keep], None, ""

    def finish(self) -> str:
        held, self._held = self._held, ""
        return held


def overlap(text: str, marker: str) -> int:
    """The length of the longest end of `text` that begins `marker`."""
    return next((size for size in range(min(len(marker) - 1, len(text)), 0, -1) if text.endswith(marker[:size])), 0)


class Spaced:
    """Text without the space at its beginning, and without that at its end unless more text follows."""

    def __init__(self, *, keeps_start: bool) -> None:
        self._begun = keeps_start
        self._space = ""

    def push(self, text: str) -> str:
        text = self._space + text
        if not self._begun:
            text = text.lstrip()
        kept = text.rstrip()
        self._begun, self._space = self._begun or bool(kept), text[len(kept) :]
        return kept

    def drop(self) -> None:
        """What was space so far stood before something else."""
        self._space = ""

    def finish(self) -> str:
        held, self._space = self._space, ""
        return held if self._begun else ""
