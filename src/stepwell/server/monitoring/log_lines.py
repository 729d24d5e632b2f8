"""How a server's log looks: one line for each event, as text or as JSON. Logs nothing of its own.

    2026-01-31T12:00:00.000Z info request ended id=cmpl-9f output_tokens=12 finish=stop
    {"time": "2026-01-31T12:00:00.000Z", "level": "info", "message": "request ended", "id": "cmpl-9f", ...}

Callers pass names and values as `extra={"fields": {...}}`.
"""

from __future__ import annotations

import json
import logging
import re
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from datetime import UTC, datetime
from typing import TextIO

FORMATS = ("text", "json")
_PLAIN = re.compile(r"[\w.:/%+-]+", re.ASCII)  # values that need no quotes


@contextmanager
def log_to(stream: TextIO, form: str) -> Iterator[None]:
    """Writes what the program logs to a stream, in one of FORMATS: all lines of Stepwell, and warnings of others."""
    handler = logging.StreamHandler(stream)
    handler.setFormatter(_Json() if form == "json" else _Text())
    root, ours = logging.getLogger(), logging.getLogger("stepwell")
    level = ours.level
    ours.setLevel(logging.INFO)
    root.addHandler(handler)
    try:
        yield
    finally:
        root.removeHandler(handler)
        ours.setLevel(level)


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
