"""Executors: threads, inline, scripted; failures come home as values.

At the store, questions never wait behind reads, what has not begun is cancelled, and nothing holds the process.
"""

from __future__ import annotations

import subprocess
import sys
import threading
from collections.abc import Sequence
from threading import Event

import numpy as np
import pytest

from stepwell import Cache, CacheConfig, Lease, Tier, build_cache
from stepwell.base.ids import JobId
from stepwell.base.meters import SystemClock
from stepwell.base.prompt import Namespace, PageKey
from stepwell.base.tasks import FetchPages, FindItems, ItemStatus, Plan, Purpose, StoreOp, Task
from stepwell.cache.build import layouts_for, numpy_memories
from stepwell.jobs import workers
from stepwell.jobs.executors import CopyExecutor, InlineCopyExecutor, ThreadCopyExecutor, ThreadStoreExecutor
from stepwell.jobs.workers import WorkQueue
from stepwell.store.api import Space
from stepwell.store.memory import MemoryStore
from stepwell.store.wrappers import Wrapper
from stepwell.testing import DigestEngine, ScriptedExecutor
from stepwell.tiers.eviction import make_room
from stepwell.transfer.copy_engine import CopyEngine, NumpyCopyEngine, Work
from stepwell.transfer.store_worker import StoreWorker
from toys import FULL, HYBRID, NO_INTERVALS, SMALL_PAGES, Rig, text
from waiting import PATIENCE_S, settle, wait_until

CONFIG = CacheConfig(device_bytes=128 * 32, host_bytes=128 * 32, placement=NO_INTERVALS)
EMPTY = Plan(job=JobId(7), purpose=Purpose.SAVE, copies=())


class Gate:
    """A copy engine that waits until it is let through, and may then fail."""

    def __init__(self, inner: CopyEngine) -> None:
        self._inner = inner
        self.open = threading.Event()
        self.error: Exception | None = None

    def begin(self, plan: Plan) -> Work:
        work = self._inner.begin(plan)

        def behind_the_gate() -> None:
            assert self.open.wait(PATIENCE_S), "the test never opened the gate"
            if self.error is not None:
                raise self.error
            work()

        return behind_the_gate


class Unwilling:
    """A copy engine that does not even begin."""

    def begin(self, plan: Plan) -> Work:
        raise OSError("no stream")


class Threaded:
    """A cache on real threads, two ranks, each behind a gate."""

    def __init__(self) -> None:
        memories = [numpy_memories(HYBRID, layouts_for(HYBRID, CONFIG, alignment=16)) for _ in range(2)]
        self.gates = [Gate(NumpyCopyEngine(memory)) for memory in memories]
        self.engine = DigestEngine(HYBRID, memories)
        self.cache: Cache = build_cache(HYBRID, CONFIG, tuning=SMALL_PAGES, copy_engines=self.gates, on_free=self.engine.poison)

    def let_through(self, *, failing: int | None = None) -> None:
        for rank, gate in enumerate(self.gates):
            gate.error = RuntimeError("bus error") if rank == failing else None
            gate.open.set()

    def settle(self) -> list[str]:
        """Steps until no copy runs; returns what failed."""
        return [failure for report in settle(self.cache) for failure in report.failures]

    def serve(self, tokens: list[int]) -> Lease:
        with self.cache.acquire(self.cache.lookup(tokens)) as lease:
            self.settle()
            assert lease.ready, lease
            self.engine.check(lease)
            while lease.position < lease.num_tokens:
                upto = min(self.cache.next_stop(lease) or lease.num_tokens, lease.num_tokens)
                self.cache.grow(lease, upto)
                self.engine.compute(lease, upto)
                self.cache.commit(lease, upto)
                self.settle()
        self.cache.audit()
        return lease

    def empty_device(self) -> None:
        make_room(self.cache._state, Tier.DEVICE, {0: 10_000})  # type: ignore[dict-item]


@pytest.fixture
def threaded() -> Threaded:
    return Threaded()


def test_threads_save_and_load_every_byte(threaded: Threaded) -> None:
    threaded.let_through()
    for name in range(4):
        threaded.serve(text(name, 17))
    threaded.empty_device()
    assert [threaded.serve(text(name, 17)).sources.host for name in range(4)] == [16] * 4
    threaded.cache.close()


def test_step_never_blocks_while_a_copy_is_stuck(threaded: Threaded) -> None:
    lease = threaded.cache.acquire(threaded.cache.lookup(text(1, 17)))
    threaded.cache.grow(lease, 16)
    threaded.engine.compute(lease, 16)
    threaded.cache.commit(lease, 16)
    for _ in range(5):
        report = threaded.cache.step()
        assert report.completed == 0 and report.running > 0
    threaded.cache.audit()
    threaded.cache.release(lease)
    threaded.let_through()
    threaded.cache.close()
    threaded.cache.audit()


@pytest.mark.parametrize("failing", [0, 1])
def test_one_rank_that_fails_makes_a_miss_and_keeps_its_error(threaded: Threaded, failing: int) -> None:
    threaded.let_through()
    threaded.serve(text(1, 17))
    threaded.empty_device()
    threaded.let_through(failing=failing)
    lease = threaded.cache.acquire(threaded.cache.lookup(text(1, 17)))
    failures = threaded.settle()
    assert lease.failed and failures == [f"rank {failing}: RuntimeError: bus error"]
    threaded.cache.release(lease)
    threaded.cache.audit()
    threaded.let_through()
    assert threaded.serve(text(1, 17)).sources.computed == 17
    threaded.cache.close()


@pytest.mark.parametrize("make", [InlineCopyExecutor, ThreadCopyExecutor, ScriptedExecutor])
def test_a_plan_completes_once_and_with_the_first_ranks_error(make: type) -> None:
    ok, bad = Gate(NumpyCopyEngine({})), Gate(NumpyCopyEngine({}))
    bad.error = ValueError("no")
    for gate in (ok, bad):
        gate.open.set()
    executor: CopyExecutor = make([ok, bad])
    executor.submit(EMPTY)
    if isinstance(executor, ScriptedExecutor):
        executor.finish_all()
    executor.drain(30)
    executor.close()
    (done,) = executor.answers()
    assert done.job == 7 and done.error == "rank 1: ValueError: no"
    assert executor.answers() == []


@pytest.mark.parametrize("make", [InlineCopyExecutor, ThreadCopyExecutor, ScriptedExecutor])
def test_a_copy_engine_that_cannot_begin_fails_like_one_that_cannot_copy(make: type) -> None:
    executor: CopyExecutor = make([NumpyCopyEngine({}), Unwilling()])
    executor.submit(EMPTY)
    executor.drain(30)
    executor.close()
    (done,) = executor.answers()
    assert done.error == "rank 1: OSError: no stream"


def test_saves_that_are_stuck_do_not_delay_what_a_request_waits_for() -> None:
    saves, others = Gate(NumpyCopyEngine({})), Gate(NumpyCopyEngine({}))
    others.open.set()

    class Sorting:
        def begin(self, plan: Plan) -> Work:
            return (saves if plan.purpose is Purpose.SAVE else others).begin(plan)

    executor = ThreadCopyExecutor([Sorting()])
    for number in range(8):
        executor.submit(Plan(job=JobId(number), purpose=Purpose.SAVE, copies=()))
    executor.submit(Plan(job=JobId(99), purpose=Purpose.LOAD, copies=()))
    done = wait_until(executor.answers)
    assert [each.job for each in done] == [99]
    saves.open.set()
    executor.drain(30)
    executor.close()
    assert len(executor.answers()) == 8


def test_inline_executor_serves_a_whole_cache() -> None:
    memories = numpy_memories(HYBRID, layouts_for(HYBRID, CONFIG, alignment=16))
    cache = build_cache(HYBRID, CONFIG, tuning=SMALL_PAGES, executor=InlineCopyExecutor([NumpyCopyEngine(memories)]))
    with cache.acquire(cache.lookup(text(1, 17))) as lease:
        cache.grow(lease, 16)
        cache.commit(lease, 16)
        assert cache.step().ready == (lease,)
    cache.close()
    cache.audit()
    assert cache.lookup(text(1, 17)).restore_tokens == 16


def test_scripted_ranks_answer_once_each() -> None:
    rig = Rig(HYBRID, host_pages=64, ranks=2)
    lease = rig.open(text(1, 17))
    rig.compute(lease, 16, last=True)
    job = rig.executor.pending[0]
    rig.executor.answer(job, 0)
    with pytest.raises(AssertionError, match="answered for job"):
        rig.executor.answer(job, 0)
    rig.cache.release(lease)
    rig.idle_check()


HERE = Namespace(model="m", layout="l")
KEY = PageKey(b"k" * 32)
ASK = FindItems(pages=(KEY,), boundaries=())
FETCH = FetchPages(keys=(KEY,), ids=np.array([0], np.int32))


class Stuck(Wrapper):
    """Reads hang until the test releases them."""

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
    assert [reply.job for reply in busy.answers()] == [1], "what was cancelled is never answered"
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
from stepwell.policy.store_use import StoreTuning
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


def test_work_waits_where_the_system_has_no_more_threads(monkeypatch: pytest.MonkeyPatch) -> None:
    """The earlier work was lost, and the line took all that came later for work under way in another thread."""
    began: list[int] = []
    done = Event()

    class Refused(threading.Thread):
        def start(self) -> None:
            raise RuntimeError("can't start new thread")

    line = WorkQueue("line", SystemClock())
    with monkeypatch.context() as few:
        few.setattr(workers, "Thread", Refused)
        line.submit(lambda: began.append(1))
    assert not began
    line.submit(done.set)
    assert done.wait(PATIENCE_S) and began == [1], "in their order"
    line.close()


def test_two_who_submit_at_once_start_one_thread_for_one_line(monkeypatch: pytest.MonkeyPatch) -> None:
    started: list[threading.Thread] = []
    line, done = WorkQueue("line", SystemClock()), Event()
    other = threading.Thread(target=line.submit, args=(done.set,))

    class Interrupted(threading.Thread):
        """While the first one starts, another thread submits."""

        def start(self) -> None:
            started.append(self)
            if len(started) > 3:
                raise RuntimeError("threads without end")
            if len(started) == 1:
                other.start()
                wait_until(lambda: line._queue.qsize() == 2)
            super().start()

    monkeypatch.setattr(workers, "Thread", Interrupted)
    line.submit(lambda: None)
    other.join(PATIENCE_S)
    assert done.wait(PATIENCE_S) and len(started) == 1
    line.close()
