"""The logs of servers in a soak: kept for inspection, and searched for exceptions and warnings."""

from __future__ import annotations

import re
import shutil
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path

from soaking.backend import LOG_SUFFIX

_WARNED = re.compile(r"^\S+Z ((?:warning|error|critical) .*)$", re.MULTILINE)
_NUMBER = re.compile(r"0x[0-9a-f]+|\d[\d.]*")
_TRACE = re.compile(re.escape("Traceback (most recent call last)"))
_BEFORE, _AFTER = 300, 6000  # characters around an exception that are reported
_MOST_TRACES = 5  # of one log; the others are in the log that is kept
_WARNING = 160  # characters of a warning


def keep(logs: Sequence[Path], into: Path) -> None:
    """Copies these logs into a folder, in place of those that servers of the same names had there."""
    into.mkdir(parents=True, exist_ok=True)
    for name in {path.name.partition("-")[0] for path in logs}:
        for old in into.glob(f"{name}-*{LOG_SUFFIX}"):
            old.unlink()
    for path in logs:
        shutil.copy(path, into)


def traces(logs: Iterable[Path]) -> list[str]:
    """Exceptions, each with the lines around it."""
    return [f"{path.name}: {trace}" for path in logs for trace in _traces(path.read_text(errors="replace"))]


def warnings(logs: Iterable[Path]) -> Counter[str]:
    """Warnings and errors with their counts, without numbers."""
    texts = (path.read_text(errors="replace") for path in logs)
    return Counter(_NUMBER.sub("N", said)[:_WARNING] for text in texts for said in _WARNED.findall(text))


def _traces(text: str) -> Iterator[str]:
    count, end = 0, 0
    for match in _TRACE.finditer(text):
        if match.start() >= end and count < _MOST_TRACES:  # else it is part of the last one: an error during another
            count, end = count + 1, match.start() + _AFTER
            yield text[max(match.start() - _BEFORE, 0) : end]
