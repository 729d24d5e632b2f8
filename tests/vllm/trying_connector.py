"""The connector with copies that are late, or loads that fail, as `TRYING` in the environment says: `late=0.3`, `fail=1`."""

from __future__ import annotations

import os
import time
from typing import Any

from stepwell.connectors.vllm import connector, worker_side
from stepwell.jobs.executors import ThreadCopyExecutor
from stepwell.transfer.copy_engine import CopyEngine

WHAT, _, AMOUNT = os.environ["TRYING"].partition("=")


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
        return work


def _fail() -> None:
    raise OSError("told to fail")


worker_side.ThreadCopyExecutor = lambda engines: ThreadCopyExecutor([_Trying(each) for each in engines])  # type: ignore[misc,assignment]
StepwellConnector = connector.StepwellConnector
