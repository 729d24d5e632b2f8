"""Calls that end in time, whatever the store does: pieces of a call run on worker threads, and its caller waits no longer
than its deadline. Pieces that have not ended by then go on, and can no longer touch the caller's memory.
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
    """The pieces of one call, and whether the caller still waits for them."""

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
        """Whether the caller no longer waits: for stores that can stop between values."""
        return self._over or self._clock.now() >= self._ends_s

    def must_be_open(self) -> None:
        """Raises StoreError if the caller no longer waits."""
        if self.is_over():
            raise StoreError("its turn did not come in time")

    def fail(self, why: str) -> None:
        """Records a failure outside of its pieces."""
        with self._changed:
            self.error = self.error or why

    def start(self, line: WorkQueue, piece: Piece) -> None:
        """Queues a piece. It runs in any case, also when the call is over, so that it can release what it holds."""
        with self._changed:
            self._running += 1
        line.submit(partial(self._run, piece))

    @contextmanager
    def landing(self) -> Iterator[bool]:
        """Around writes to the caller's memory. Yields whether the caller still waits; if so, it waits for the block to end."""
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
        """Waits until at most `most_running` pieces run, or until the deadline. Returns whether the deadline was kept."""
        with self._changed:
            left_s = max(self._ends_s - self._clock.now(), 0.0)
            return self._changed.wait_for(lambda: self._running <= most_running, left_s)

    def end(self) -> None:
        """Waits for all pieces or the deadline; afterwards no piece can write to the caller's memory."""
        self.overdue = not self.wait()
        self.abandon()

    def abandon(self) -> None:
        """Prevents all further writes to the caller's memory, at once."""
        with self._changed:
            self._over = True
            self._changed.wait_for(lambda: not self._landing)  # a copy in memory: it ends

    def _run(self, piece: Piece) -> None:
        error: str | None = None
        try:
            piece(self)
        except BaseException as raised:  # worker boundary: the failure is returned as a value, and the thread lives on
            error = f"{type(raised).__name__}: {raised}"
        with self._changed:
            self._running -= 1
            self.error = self.error or error
            self._changed.notify_all()
