"""How a server's log looks: one line for each event, as text or as JSON. Says nothing of its own.

    2026-01-31T12:00:00.000Z info request ended id=cmpl-9f output_tokens=12 finish=stop
    {"time": "2026-01-31T12:00:00.000Z", "level": "info", "message": "request ended", "id": "cmpl-9f", ...}

Whoever logs gives names and values as `extra={"fields": {...}}`. Lines are written on a thread of their own: the engine does not
wait for whoever reads them. Where nobody does, new lines are dropped, and the end waits a few seconds for it and no longer.
"""

from __future__ import annotations

import json
import logging
import os
import re
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from datetime import UTC, datetime
from logging.handlers import QueueHandler
from queue import Full, Queue
from threading import Thread
from typing import TextIO

FORMATS = ("text", "json")
_MOST_WAITING = 10_000  # lines
_LAST_LINES_S = 5.0  # that the end waits for lines to be read
_PLAIN = re.compile(r"[\w.:/%+-]+", re.ASCII)  # values that need no quotes


@contextmanager
def log_to(stream: TextIO, form: str) -> Iterator[None]:
    """Writes what the program logs to a stream, in one of FORMATS: all that Stepwell says, and warnings of others."""
    lines: Queue[logging.LogRecord | None] = Queue(_MOST_WAITING)
    handler = _Lines(lines)
    thread = Thread(target=_write, args=(lines, _writer(stream)), name="stepwell-log", daemon=True)
    handler.setFormatter(_Json() if form == "json" else _Text())
    root, ours = logging.getLogger(), logging.getLogger("stepwell")
    level = ours.level
    ours.setLevel(logging.INFO)
    root.addHandler(handler)
    thread.start()
    try:
        yield
    finally:
        root.removeHandler(handler)
        ours.setLevel(level)
        with suppress(Full):
            lines.put(None, timeout=_LAST_LINES_S)
        thread.join(_LAST_LINES_S)


def _write(lines: Queue[logging.LogRecord | None], write: Callable[[str], object]) -> None:
    while (record := lines.get()) is not None:
        with suppress(OSError, ValueError):  # a full disk, a reader that has gone, a closed stream: other lines may do better
            write(f"{record.getMessage()}\n")


def _writer(stream: TextIO) -> Callable[[str], object]:
    """What writes to a stream: to its file beneath it, where it has one.

    A thread that waits for a reader holds no lock then. The program takes that of the stream when it ends, and would wait too.
    """
    try:
        file = stream.fileno()
    except OSError:
        return stream.write

    def write(line: str) -> None:
        left = line.encode(errors="backslashreplace")  # clients can send what has no other form
        while left:
            left = left[os.write(file, left) :]

    return write


class _Lines(QueueHandler):
    """Takes lines for the thread that writes them. Formats them first: what they name may change meanwhile."""

    def enqueue(self, record: logging.LogRecord) -> None:
        with suppress(Full):  # to say so would take a line
            self.queue.put_nowait(record)


class _Text(logging.Formatter):
    def format(self, record: logging.LogRecord) -> str:
        message = record.getMessage().replace("\r", "\\r").replace("\n", "\\n")  # what clients send cannot look like a line
        fields = "".join(f" {name}={_value(value)}" for name, value in _fields(record).items())
        trace = "" if record.exc_info is None else "\n" + self.formatException(record.exc_info)
        return f"{_time(record)} {record.levelname.lower()} {message}{fields}{trace}"


class _Json(logging.Formatter):
    def format(self, record: logging.LogRecord) -> str:
        line = {"time": _time(record), "level": record.levelname.lower(), "logger": record.name, "message": record.getMessage()}
        trace = {} if record.exc_info is None else {"exception": self.formatException(record.exc_info)}
        return json.dumps({**line, **_fields(record), **trace}, default=str)


def _fields(record: logging.LogRecord) -> Mapping[str, object]:
    found: Mapping[str, object] = record.__dict__.get("fields", {})
    return found


def _time(record: logging.LogRecord) -> str:
    at = datetime.fromtimestamp(record.created, UTC)
    return at.strftime("%Y-%m-%dT%H:%M:%S.") + f"{at.microsecond // 1000:03d}Z"


def _value(value: object) -> str:
    return str(value) if _PLAIN.fullmatch(str(value)) else json.dumps(str(value))
