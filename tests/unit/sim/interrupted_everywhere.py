"""A program that runs the pool again and again, interrupted in another place each time: after each call that can take a lock.

These are the calls into C of the main thread, in a run that is interrupted once its tasks are under way; those from there on
are interrupted a second time. Says how many there were. Where a run does not end, says where all threads are, and exits with 1.
"""

from __future__ import annotations

import faulthandler
import multiprocessing
import os
import signal
import sys
from types import FrameType

from pool_tasks import do

from stepwell.sim.pool import run_all

TASKS = ("short", "short", "short", "endless", "endless")  # so that only an interrupt ends a run
LIMIT_S = 60.0  # for one run

Place = tuple[str, int, str]  # a file, a line, and what was called there


def main() -> None:
    interrupted_run(None)  # a first one imports what the others find
    places = interrupted_run(None)
    for place in places:
        interrupted_run(place)
    sys.stdout.write(str(len(places)))


def interrupted_run(at: Place | None) -> list[Place]:
    """A run that is interrupted at a place, or at its end if it does not come there before; the places it passed."""
    passed: dict[Place, None] = {}
    finished: list[int] = []

    def pass_by(frame: FrameType, event: str, called: object) -> None:
        place = (frame.f_code.co_filename, frame.f_lineno, getattr(called, "__name__", ""))
        if event == "c_return" and place[0] != __file__ and place not in passed:
            passed[place] = None
            if place == at:
                interrupt()

    def watch(served: int) -> None:
        if len(finished) == 3 and at not in passed:
            interrupt()

    faulthandler.dump_traceback_later(LIMIT_S, exit=True)
    sys.setprofile(pass_by)
    try:
        run_all(do, TASKS, jobs=2, on_result=lambda place, result: finished.append(place), on_progress=watch)
    except KeyboardInterrupt:
        pass
    else:
        raise AssertionError("an interrupt was lost")
    finally:
        sys.setprofile(None)
        faulthandler.cancel_dump_traceback_later()
    assert not multiprocessing.active_children()
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler
    assert signal.SIGINT not in signal.pthread_sigmask(signal.SIG_BLOCK, ())
    return list(passed)


def interrupt() -> None:
    os.kill(os.getpid(), signal.SIGINT)


if __name__ == "__main__":
    main()
