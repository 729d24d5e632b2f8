"""What the tests of the pool have done in other processes. Imported there too, so it imports little."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable

from stepwell.base.errors import NoRoom

SERVED = 7  # requests of a task that ends


class Peculiar(Exception):
    """Cannot be made again from what it says."""

    def __init__(self, one: str, two: str) -> None:
        super().__init__(f"{one} and {two}")


def do(task: str, on_request: Callable[[], None]) -> str:
    """Ends in the way that its name says, or never."""
    while task == "endless":
        on_request()
        time.sleep(0.001)
    for _ in range(SERVED):
        on_request()
    if task == "no space":
        raise NoRoom("there is none", waiting=True)
    if task == "peculiar":
        raise Peculiar("this", "that")
    if task == "killed":
        os.kill(os.getpid(), signal.SIGKILL)
    if task == "exits":
        raise SystemExit(3)
    if task == "ends early":
        raise EOFError("the trace is cut off")
    if task == "cannot travel":
        return lambda: task  # type: ignore[return-value]
    return task.upper()
