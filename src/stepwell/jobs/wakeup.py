"""Wakes the cache's thread when a worker thread has answered, so that it need not poll."""

from __future__ import annotations

from collections.abc import Callable
from threading import Event


def _nothing() -> None:
    pass


class Wakeup:
    """One cache's wakeup. `set` may be called from any thread, everything else from the cache's."""

    def __init__(self) -> None:
        self.answered = Event()
        self.polled = False  # an executor cannot call `set`: its answers must be polled
        self.listener: Callable[[], None] = _nothing  # also called, on the thread that has answered: must be quick

    def set(self) -> None:
        self.answered.set()
        self.listener()
