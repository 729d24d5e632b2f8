"""The connector with copies that are late, loads that fail, a store that hangs, or a process that is killed while it saves.

`TRYING` in the environment says which: `late=0.3`, `fail=1`, `hang=60` (reads of the store, that long), `kill=3,pages`
or `kill=6,checkpoint` (in the third or sixth save, once the store has acknowledged pages or a whole checkpoint).
"""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable, Sequence
from itertools import count
from threading import Event
from typing import Any

from stepwell.base.tasks import ItemStatus, Outcome, PutCheckpoint
from stepwell.connectors.vllm import connector, worker_side
from stepwell.jobs.executors import ThreadCopyExecutor
from stepwell.store.log.store import LogStore
from stepwell.transfer.copy_engine import CopyEngine
from stepwell.transfer.store_worker import Sealed, StoreWorker

WHAT, _, AMOUNT = os.environ["TRYING"].partition("=")
KILLED_SAVE, _, AWAITED = AMOUNT.partition(",")
STORE_S = 300.0  # the longest wait for its store, of a process that the test kills
saves, acknowledged = count(1), {"pages": Event(), "checkpoint": Event()}


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
        if WHAT == "kill" and plan.purpose.value == "save" and next(saves) == int(KILLED_SAVE):
            return _kill
        return work


def _fail() -> None:
    raise OSError("fails on purpose")


def _kill() -> None:
    if not acknowledged[AWAITED].wait(STORE_S):
        raise TimeoutError(f"the store acknowledged no {AWAITED}")
    os.kill(os.getpid(), signal.SIGKILL)


def _put(self: StoreWorker, group: Sequence[Sealed], cancelled: Callable[[], bool]) -> list[Outcome]:
    """The manifest of a checkpoint is written last: before that, its pages and its members are there in vain."""
    outcomes = _inner_put(self, group, cancelled)
    for sealed, outcome in zip(group, outcomes, strict=True):
        if all(status is ItemStatus.OK for status in outcome.statuses):
            acknowledged["checkpoint" if isinstance(sealed.task, PutCheckpoint) else "pages"].set()
    return outcomes


def _read_into(self: LogStore, *args: Any, **more: Any) -> Any:
    if WHAT == "hang":
        time.sleep(float(AMOUNT))
    return _inner_read_into(self, *args, **more)


_inner_put, _inner_read_into = StoreWorker.put, LogStore.read_into
StoreWorker.put, LogStore.read_into = _put, _read_into  # type: ignore[method-assign]

worker_side.ThreadCopyExecutor = lambda engines: ThreadCopyExecutor([_Trying(each) for each in engines])  # type: ignore[misc,assignment]
StepwellConnector = connector.StepwellConnector
