"""Trace files, plain or gzipped: detects their format, reads them request by request, writes our own.

Holds one line at a time. Every error names the file and the line.
"""

from __future__ import annotations

import gzip
import json
import zlib
from collections.abc import Iterable, Iterator
from contextlib import suppress
from os import SEEK_CUR
from pathlib import Path
from typing import IO, Any

from stepwell.sim.formats import (
    FORMAT,
    MOONCAKE_BLOCK_TOKENS,
    TOKENS_BLOCK_TOKENS,
    VERSION,
    Parse,
    TraceError,
    block_tokens_of_header,
    parse_mooncake,
    parse_tokens,
    stepwell_parser,
)
from stepwell.sim.trace import TraceRequest, runs_of

MAX_LINE_BYTES = 128 * 2**20  # the longest prompt, written out as token ids
_GZIP_MAGIC = b"\x1f\x8b"


class TraceFile:
    """A trace on disk. Iterating it reads the file from its start."""

    def __init__(self, path: Path) -> None:
        """Opens the file once to detect its format. Raises TraceError."""
        self._path = path
        self._read_bytes = 0
        first = next(self._lines(), None)
        if first is None:
            raise TraceError(f"{path}: the file is empty")
        number, line = first
        self._has_header = isinstance(line, dict) and line.get("format") == FORMAT
        try:
            self.format, self._parse, self._block_tokens = _recognise(line)
        except TraceError as error:
            raise TraceError(f"{path}, line {number}: {error}") from None

    @property
    def name(self) -> str:
        return self._path.name

    @property
    def block_tokens(self) -> int:
        return self._block_tokens

    @property
    def size_bytes(self) -> int:
        return self._path.stat().st_size

    @property
    def read_bytes(self) -> int:
        """Bytes of the file on disk that have been read, for progress."""
        return self._read_bytes

    def __iter__(self) -> Iterator[TraceRequest]:
        lines = self._lines()
        if self._has_header:
            next(lines)
        for number, line in lines:
            try:
                request = self._parse(line)
            except TraceError as error:
                raise TraceError(f"{self._path}, line {number}: {error}") from None
            yield request

    def _lines(self) -> Iterator[tuple[int, Any]]:
        """The file's JSON values with their line numbers; blank lines are skipped."""
        number = 0
        try:
            with self._path.open("rb") as raw, _plain(raw) as stream:
                while line := stream.readline(MAX_LINE_BYTES + 1):
                    number += 1
                    self._read_bytes = raw.seek(0, SEEK_CUR)
                    if len(line) > MAX_LINE_BYTES:
                        raise TraceError(f"{self._path}, line {number}: longer than {MAX_LINE_BYTES} bytes")
                    if line.strip():
                        yield number, self._parsed(number, line)
        except (OSError, EOFError, zlib.error) as error:
            where = f"{self._path}, after line {number}" if number else str(self._path)
            why = error.strerror if isinstance(error, OSError) and error.strerror else error
            raise TraceError(f"{where}: cannot be read: {why}") from None

    def _parsed(self, number: int, line: bytes) -> Any:
        try:
            return json.loads(line)
        except (ValueError, RecursionError) as error:  # bad JSON, bad UTF-8, numbers too long, nesting too deep
            raise TraceError(f"{self._path}, line {number}: not valid JSON: {error}") from None


def write_trace(path: Path, requests: Iterable[TraceRequest], *, block_tokens: int, source: str) -> int:
    """Writes a trace in our own format, gzipped if the name ends in `.gz`; returns how many requests.

    All or nothing: raises TraceError and leaves what was there. The file may be the one being read.
    """
    part = path.with_name(f"{path.name}.part")
    try:
        count = _write(part, path.suffix == ".gz", requests, {"block_tokens": block_tokens, "source": source})
        part.replace(path)
    except OSError as error:
        raise TraceError(f"{path}: cannot be written: {error.strerror or error}") from None
    finally:
        with suppress(OSError):
            part.unlink(missing_ok=True)
    return count


def _write(path: Path, gzipped: bool, requests: Iterable[TraceRequest], about: dict[str, object]) -> int:
    count = 0
    with path.open("wb") as raw, _packing(raw, gzipped) as stream:
        stream.write(json.dumps({"format": FORMAT, "version": VERSION, **about}).encode() + b"\n")
        for request in requests:
            stream.write(_line(request))
            count += 1
    return count


def _line(request: TraceRequest) -> bytes:
    fields = {
        "t": round(request.at_s, 6),
        "session": request.session,
        "in": request.prompt_tokens,
        "out": request.output_tokens,
        "runs": runs_of(request.blocks),
    }
    return json.dumps(fields, separators=(",", ":")).encode() + b"\n"


def _plain(raw: IO[bytes]) -> IO[bytes]:
    """The stream behind a file that may be gzipped, whatever its name."""
    magic = raw.read(len(_GZIP_MAGIC))
    raw.seek(0)
    return gzip.GzipFile(fileobj=raw, mode="rb") if magic == _GZIP_MAGIC else raw  # type: ignore[return-value]


def _packing(raw: IO[bytes], gzipped: bool) -> IO[bytes]:
    # Without a time in its header the same trace is the same file.
    return gzip.GzipFile(fileobj=raw, mode="wb", filename="", mtime=0) if gzipped else raw  # type: ignore[return-value]


def _recognise(line: Any) -> tuple[str, Parse, int]:
    """Format, parser and block size of a file, by its first line."""
    if isinstance(line, list) or (isinstance(line, dict) and "tokens" in line):
        return "tokens", parse_tokens, TOKENS_BLOCK_TOKENS
    if isinstance(line, dict) and "hash_ids" in line:
        return "mooncake", parse_mooncake, MOONCAKE_BLOCK_TOKENS
    if isinstance(line, dict) and line.get("format") == FORMAT:
        block_tokens = block_tokens_of_header(line)
        return "stepwell", stepwell_parser(block_tokens), block_tokens
    raise TraceError(f"not a trace: expected a {FORMAT} header, a Mooncake request with `hash_ids`, or token ids under `tokens`")
