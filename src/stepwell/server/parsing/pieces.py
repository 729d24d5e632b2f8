"""What an answer's text is made of: content, reasoning, calls of tools. Joined pieces do not depend on how the text was cut.

    text      Let me look.  <tool_call>{"name": "f", ...}</tool_call>
    pieces    |- content -|             |------- one call -------|

A parser holds back what could still become a marker, and space that may stand before one. A call is told once it is whole.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Protocol


@dataclass(frozen=True, slots=True, kw_only=True)
class Call:
    """A tool that is to be called, with its arguments in JSON."""

    name: str
    arguments: str
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
        calls=tuple(call for piece in pieces for call in piece.calls),
    )


def call_of(found: Any) -> Call:
    """A call as most models write one. Raises ValueError."""
    if not isinstance(found, dict) or not isinstance(found.get("name"), str) or not found["name"]:
        raise ValueError("a call without a name")
    arguments = found.get("arguments", found.get("parameters", {}))
    if isinstance(arguments, str):
        arguments = json.loads(arguments or "{}")  # JSON within JSON
    if not isinstance(arguments, dict):
        raise ValueError("arguments that are no object")
    return Call(name=found["name"], arguments=json.dumps(arguments, ensure_ascii=False))


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
        keep = max((_overlap(text, marker) for marker in self._markers), default=0)
        self._held = text[len(text) - keep :]
        return text[: len(text) - keep], None, ""

    def finish(self) -> str:
        held, self._held = self._held, ""
        return held


def _overlap(text: str, marker: str) -> int:
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
