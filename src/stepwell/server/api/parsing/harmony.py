"""The messages that gpt-oss answers with: each has a channel, and a call names whom it is for.

<|channel|>analysis<|message|>thoughts<|end|>
<|start|>assistant<|channel|>commentary to=functions.f <|constrain|>json<|message|>{"x": 1}<|call|>
<|start|>assistant<|channel|>final<|message|>the answer<|return|>
"""

from __future__ import annotations

import re

from stepwell.server.api.parsing.block_reader import BlockReader
from stepwell.server.api.parsing.pieces import Call, Markers, Piece, Place, joined, portions
from stepwell.server.api.parsing.readers import arguments_alone
from stepwell.server.api.parsing.source import SPACE, Reading, Source, Texts

_MESSAGE = "<|message|>"
_START = "<|start|>"
_ENDS = ("<|end|>", "<|call|>", "<|return|>", _START)
HARMONY_MARKERS = (_MESSAGE, *_ENDS, "<|channel|>", "<|constrain|>")
_FOR = re.compile(r"to=functions\.([\w.-]+)")
_CHANNEL = re.compile(r"<\|channel\|>\s*(\w+)")


class HarmonyParser:
    """`tools`: whether calls are emitted; otherwise they are content."""

    def __init__(self, *, tools: bool) -> None:
        self._tools = tools
        self._in_header = True
        self._header = ""
        self._started = False  # whether a marker began the header: then it is never text
        self._call: BlockReader | None = None  # the message is one
        self._cut = False  # the answer ended within one
        self._thinks = False
        self._markers = Markers((_MESSAGE,))

    @property
    def in_call(self) -> bool:
        return self._cut or (self._call is not None and self._call.in_call)

    @property
    def place(self) -> Place:
        if self._in_header:
            return Place.HEADING
        return Place.THOUGHT if self._thinks else Place.ANSWER

    def push(self, text: str) -> Piece:
        pieces: list[Piece] = []
        for part in portions(text):
            while part:
                part = self._heading(part) if self._in_header else self._in_message(part, pieces)
        return joined(pieces)

    def _heading(self, text: str) -> str:
        before, marker, text = self._markers.push(text)
        self._header += before
        if marker is not None:
            self._begin()
        return text

    def _in_message(self, text: str, pieces: list[Piece]) -> str:
        said, marker, text = self._said(text) if self._call is None else self._call.push(text)
        pieces.append(said)
        if marker is not None:
            pieces.append(self._end(marker))
        return text

    def finish(self, *, cut: bool = False) -> Piece:
        pieces: list[Piece] = []
        while self._call is not None:
            last, marker, behind = self._call.end(cut=cut)
            pieces.append(last)
            if marker is None:
                self._cut = self._call.in_call
                pieces.append(self._call.finish(closed=not cut, cut=cut))
                return joined(pieces)
            pieces += [self._end(marker), self.push(behind)]
        held = "" if cut else self._markers.finish()  # the beginning of a marker
        if not self._in_header:
            return joined([*pieces, self._as_channel(held)])
        header = self._header + held
        plain = not self._started and "<|" not in header
        return joined([*pieces, Piece(content=header if plain else "")])  # a header without its message says nothing

    def _begin(self) -> None:
        """A message: the header says what it is. One without a channel is the answer."""
        called, channel = _FOR.search(self._header), _CHANNEL.search(self._header)
        self._call = _reader(called.group(1)) if called is not None and self._tools else None
        self._thinks = channel is not None and channel.group(1) == "analysis"
        self._in_header, self._header, self._started, self._markers = False, "", False, Markers(_ENDS)

    def _said(self, text: str) -> tuple[Piece, str | None, str]:
        before, marker, text = self._markers.push(text)
        return self._as_channel(before), marker, text

    def _as_channel(self, text: str) -> Piece:
        return Piece(reasoning=text) if self._thinks else Piece(content=text)

    def _end(self, marker: str) -> Piece:
        call, self._call = self._call, None
        self._in_header, self._started, self._markers = True, marker == _START, Markers((_MESSAGE,))
        return Piece() if call is None else call.finish(closed=True)


def _reader(name: str) -> BlockReader:
    """Reads a message to a tool: its arguments, none if it is empty."""

    def read(source: Source, texts: Texts) -> Reading[None]:
        if (yield from source.skip(SPACE)):
            yield from arguments_alone(source, name)
        else:
            yield Call(name=name, arguments="{}", ends=True)
        if (yield from source.skip(SPACE)):
            raise ValueError("more than arguments")

    return BlockReader(read, {}, _ENDS)
