"""The connector with copies that are late, loads that fail, a store that hangs, or a process that is killed while it saves.

`TRYING` in the environment says which: `late=0.3`, `fail=1`, `hang=60` (reads of the store, that long), `kill=3` (in the third
save, once the store has something).
"""

from __future__ import annotations

import os
import signal
import time
from itertools import count
from threading import Event
from typing import Any

from stepwell.connectors.vllm import connector, worker_side
from stepwell.jobs.executors import ThreadCopyExecutor
from stepwell.store.log.store import LogStore
from stepwell.transfer.copy_engine import CopyEngine

WHAT, _, AMOUNT = os.environ["TRYING"].partition("=")
STORE_S = 60.0  # that a killed process waits for its store to have taken something, at most
has_stored, saves = Event(), count(1)


class _Trying:
    """A copy engine that is late, or fails at loads."""

    def __init__(self, inner: CopyEngine) -> None:
        self._inner = inner

    def begin(self, plan: Any) -> Any:
        work = self._inner.begin(plan)
        if WHAT == "late":
            return lambda: (time.sleep(float(AMOUNT)), work())
        if WHAT == "fail" and plan.purpose.value == "load":
            return _fail
        if WHAT == "kill" and plan.purpose.value == "save" and next(saves) == int(AMOUNT):
            return _kill
        return work


def _fail() -> None:
    raise OSError("told to fail")


def _kill() -> None:
    has_stored.wait(STORE_S)
    os.kill(os.getpid(), signal.SIGKILL)


def _write_from(self: LogStore, *args: Any, **more: Any) -> Any:
    done = _inner_write_from(self, *args, **more)
    has_stored.set()
    return done


def _read_into(self: LogStore, *args: Any, **more: Any) -> Any:
    if WHAT == "hang":
        time.sleep(float(AMOUNT))
    return _inner_read_into(self, *args, **more)


_inner_write_from, _inner_read_into = LogStore.write_from, LogStore.read_into
LogStore.write_from, LogStore.read_into = _write_from, _read_into  # type: ignore[method-assign]

worker_side.ThreadCopyExecutor = lambda engines: ThreadCopyExecutor([_Trying(each) for each in engines])  # type: ignore[misc,assignment]
StepwellConnector = connector.StepwellConnector
