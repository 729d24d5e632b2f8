"""Threads at the store: questions never wait behind reads, what has not begun is taken back, and nothing holds the process."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Sequence
from threading import Event

import numpy as np

from stepwell.base.clock import SystemClock
from stepwell.base.ids import JobId
from stepwell.base.keys import Namespace, PageKey
from stepwell.base.store_op import FetchPages, FindItems, ItemStatus, StoreOp, Task
from stepwell.jobs.store_executor import ThreadStoreExecutor
from stepwell.store.api import Space
from stepwell.store.memory import MemoryStore
from stepwell.store.wrappers import Wrapper
from stepwell.transfer.store_worker import StoreWorker
from toys import FULL, Rig
from waiting import PATIENCE_S, wait_until

HERE = Namespace(model="m", layout="l")
KEY = PageKey(b"k" * 32)
ASK = FindItems(pages=(KEY,), boundaries=())
FETCH = FetchPages(keys=(KEY,), ids=np.array([0], np.int32))


class Stuck(Wrapper):
    """Reads hang until they are let go."""

    def __init__(self) -> None:
        super().__init__(MemoryStore())
        self.begun, self.go = Event(), Event()

    def read_into(self, space: Space, reads: Sequence[object], **options: object) -> list[object]:  # type: ignore[override]
        self.begun.set()
        assert self.go.wait(PATIENCE_S)
        return super().read_into(space, reads, **options)  # type: ignore[arg-type, return-value]


def op(number: int, task: Task) -> StoreOp:
    return StoreOp(job=JobId(number), namespace=HERE, task=task)


def store_executor(store: Stuck, ranks: int = 1) -> ThreadStoreExecutor:
    memories = Rig(FULL, device_pages=16, host_pages=16, ranks=ranks).memories
    worker = [StoreWorker(store, list(memory.values())[1], rank=i, ranks=ranks) for i, memory in enumerate(memories)]
    return ThreadStoreExecutor(worker, SystemClock(), readers=1)


def test_a_question_is_answered_while_reads_hang_and_what_waits_behind_them_can_be_taken_back() -> None:
    store = Stuck()
    busy = store_executor(store)
    busy.submit(op(1, FETCH))
    assert store.begun.wait(PATIENCE_S)
    busy.submit(op(2, FETCH))
    busy.submit(op(3, ASK))
    replies = wait_until(busy.answers)
    assert [reply.job for reply in replies] == [3] and replies[0].outcome.statuses == (ItemStatus.MISSING,)
    assert busy.withdraw(JobId(2)) and not busy.withdraw(JobId(1)) and not busy.withdraw(JobId(3))
    store.go.set()
    busy.drain(PATIENCE_S)
    assert [reply.job for reply in busy.answers()] == [1], "what was taken back is never answered"
    busy.close()


def test_an_exception_of_the_store_comes_home_as_an_outcome_and_the_thread_lives_on() -> None:
    store = MemoryStore()
    worker = StoreWorker(store, Rig(FULL, device_pages=16, host_pages=16).memories[0][1])  # type: ignore[index]
    one = ThreadStoreExecutor([worker], SystemClock(), readers=1)
    store.close()
    for number in (1, 2):
        one.submit(op(number, FETCH))
    one.drain(PATIENCE_S)
    replies = one.answers()
    assert [reply.outcome.statuses for reply in replies] == [(ItemStatus.FAILED,)] * 2
    assert all("closed" in (reply.outcome.error or "") for reply in replies)
    one.close()


HANGING = """
import time
from stepwell import CacheConfig, build_cache
from stepwell.policy.tuning import StoreTuning
from stepwell.store.memory import MemoryStore
from stepwell.store.wrappers import Slow
from toys import FULL, SMALL_PAGES, text
cache = build_cache(FULL, CacheConfig(device_bytes=4096, host_bytes=4096), tuning=SMALL_PAGES)
cache.store.attach(Slow(MemoryStore(), sleep=time.sleep, latency_s=3600), tuning=StoreTuning(op_timeout_s=0.2))
ticket = cache.prefetch(cache.lookup(text(1, 40)))
ticket.close()
cache.close()
print("ended")
"""


def test_a_store_that_hangs_for_ever_does_not_keep_the_process_from_ending() -> None:
    done = subprocess.run([sys.executable, "-c", HANGING], capture_output=True, text=True, timeout=PATIENCE_S, cwd="tests")
    assert done.stdout.strip() == "ended", done.stderr
