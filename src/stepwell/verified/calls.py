"""Calls that end in time, whatever the store does: pieces of a call run on worker threads, and its caller waits no longer
than its deadline. What has not ended by then is left to itself and reaches no memory of the caller's any more.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from threading import Condition

from stepwell.base.errors import StoreError
from stepwell.base.meters import Clock
from stepwell.jobs.workers import WorkQueue

Piece = Callable[["Call"], None]


class Call:
    """The pieces of one call, and whether anybody still waits for them."""

    def __init__(self, clock: Clock, deadline_s: float) -> None:
        self._clock = clock
        self._ends_s = clock.now() + deadline_s
        self._changed = Condition()
        self._running = 0
        self._landing = 0
        self._over = False
        self.overdue = False
        self.error: str | None = None  # the first

    def is_over(self) -> bool:
        """Whether nobody waits any more: for stores that can stop between values."""
        return self._over or self._clock.now() >= self._ends_s

    def must_be_open(self) -> None:
        """Raises StoreError when nobody waits any more."""
        if self.is_over():
            raise StoreError("its turn did not come in time")

    def fail(self, why: str) -> None:
        """Notes what went wrong outside of its pieces."""
        with self._changed:
            self.error = self.error or why

    def start(self, line: WorkQueue, piece: Piece) -> None:
        """Puts a piece in line. It runs in any case, also when the call is over: to give back what it holds."""
        with self._changed:
            self._running += 1
        line.submit(partial(self._run, piece))

    @contextmanager
    def landing(self) -> Iterator[bool]:
        """Around what touches the caller's memory: true while the caller waits, who then waits for this to end."""
        with self._changed:
            open_ = not self._over
            self._landing += open_
        try:
            yield open_
        finally:
            if open_:
                with self._changed:
                    self._landing -= 1
                    self._changed.notify_all()

    def wait(self, most_running: int = 0) -> bool:
        """Waits until no more than so many pieces run, or until the deadline. Whether it was kept."""
        with self._changed:
            left_s = max(self._ends_s - self._clock.now(), 0.0)
            return self._changed.wait_for(lambda: self._running <= most_running, left_s)

    def end(self) -> None:
        """Waits for all pieces or the deadline, and lets nothing land any more."""
        self.overdue = not self.wait()
        self.abandon()

    def abandon(self) -> None:
        """Lets nothing land any more, at once."""
        with self._changed:
            self._over = True
            self._changed.wait_for(lambda: not self._landing)  # a copy in memory: it ends

    def _run(self, piece: Piece) -> None:
        error: str | None = None
        try:
            piece(self)
        except BaseException as raised:  # the worker boundary: a failure comes home as a value, and the thread lives on
            error = f"{type(raised).__name__}: {raised}"
        with self._changed:
            self._running -= 1
            self.error = self.error or error
            self._changed.notify_all()
