"""Progress in a file or a pipe, where bars are not drawn: a line now and then on stderr."""

from __future__ import annotations

import sys
from typing import TextIO

from stepwell.base.meters import Clock, SystemClock

LINE_S = 15.0  # between two lines


class ProgressLines:
    """Prints nothing on a terminal, and nothing in the first seconds. One thread."""

    def __init__(self, *, clock: Clock | None = None, stream: TextIO | None = None) -> None:
        self._clock = clock or SystemClock()
        self._stream = stream or sys.stderr
        self._began_s = self._said_s = self._clock.now()

    def report(self, what: str, done: int, total: int) -> None:
        """Reports that `done` of `total` of `what` are done."""
        now = self._clock.now()
        if self._stream.isatty() or now - self._said_s < LINE_S or not 0 < done <= total:
            return
        self._said_s = now
        left_s = (now - self._began_s) * (total - done) / done
        print(f"{what}: {done / total:.0%} done, about {span(left_s)} to go", file=self._stream, flush=True)


def span(seconds: float) -> str:
    return f"{seconds:.0f} s" if seconds < 90 else f"{seconds / 60:.0f} minutes"
