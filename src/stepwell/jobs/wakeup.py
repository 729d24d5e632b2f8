"""Wakes the cache's thread when a worker thread has answered something, so that it need not ask again and again."""

from __future__ import annotations

from collections.abc import Callable
from threading import Event


def _nothing() -> None:
    pass


class Wakeup:
    """One cache's. `set` may be called from any thread, all else from the cache's."""

    def __init__(self) -> None:
        self.answered = Event()
        self.polled = False  # some executor cannot call `set`: its answers must be asked for
        self.listener: Callable[[], None] = _nothing  # is called too, on the thread that has answered: must be quick

    def set(self) -> None:
        self.answered.set()
        self.listener()
