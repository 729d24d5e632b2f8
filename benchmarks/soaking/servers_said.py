"""What servers wrote into their logs: kept where somebody can look after the soak, and told where it is a warning or worse.

A log is kept whole up to a size, and beyond it from both ends: how it began, and what came last.
"""

from __future__ import annotations

import re
import shutil
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path

from soaking.backend import LOG_SUFFIX

KEPT_BYTES = 8 << 20  # of one log; half of that from each end
_WARNED = re.compile(r"^\S+Z ((?:warning|error|critical) .*)$", re.MULTILINE)
_NUMBER = re.compile(r"0x[0-9a-f]+|\d[\d.]*")
_TRACE = re.compile(re.escape("Traceback (most recent call last)"))
_BEFORE, _AFTER = 300, 6000  # characters around a trace that are told
_MOST_TRACES = 5  # of one log; the rest is in the log that is kept
_TOLD = 160  # characters of a warning


def keep(logs: Sequence[Path], into: Path) -> None:
    """Copies what there is of these logs into a folder, in the place of those that servers of the same names had there."""
    into.mkdir(parents=True, exist_ok=True)
    for name in {path.name.partition("-")[0] for path in logs}:
        for old in into.glob(f"{name}-*{LOG_SUFFIX}"):
            old.unlink()
    for path in logs:
        size = path.stat().st_size
        with path.open("rb") as source, (into / path.name).open("wb") as target:
            if size > KEPT_BYTES:
                target.write(source.read(KEPT_BYTES // 2))
                target.write(f"\n... {size - KEPT_BYTES} bytes are left out here ...\n".encode())
                source.seek(size - KEPT_BYTES // 2)
            shutil.copyfileobj(source, target)


def traces(logs: Iterable[Path]) -> list[str]:
    """Exceptions that nobody expected, with what stands around each."""
    return [f"{path.name}: {told}" for path in logs for told in _traces(path.read_text(errors="replace"))]


def warnings(logs: Iterable[Path]) -> Counter[str]:
    """Warnings and errors, and how often each came, numbers aside."""
    texts = (path.read_text(errors="replace") for path in logs)
    return Counter(_NUMBER.sub("N", said)[:_TOLD] for text in texts for said in _WARNED.findall(text))


def _traces(text: str) -> Iterator[str]:
    told, end = 0, 0
    for match in _TRACE.finditer(text):
        if match.start() >= end and told < _MOST_TRACES:  # else it is part of what was told: one error while another was handled
            told, end = told + 1, match.start() + _AFTER
            yield text[max(match.start() - _BEFORE, 0) : end]
