"""Waiting for a lease, closing next to something that hangs, and calls from a second thread: bounded, and never silent."""

from __future__ import annotations

import _thread
import gc
import sys
from collections.abc import Sequence
from dataclasses import replace
from math import inf
from threading import Barrier, Event, Semaphore, Thread, current_thread
from threading import enumerate as enumerate_threads

import pytest

from stepwell import Cache, CacheConfig, LeaseError, LeaseState, LoadFailed, WrongThread, build_cache
from stepwell.base.config import StoreConfig
from stepwell.base.ids import JobId, Kind, Tier
from stepwell.base.meters import ManualClock, SystemClock
from stepwell.base.tasks import Plan, Purpose
from stepwell.cache.build import layouts_for, numpy_memories
from stepwell.jobs.executors import ThreadCopyExecutor
from stepwell.jobs.workers import RankJobs, WorkQueue
from stepwell.policy.store_use import StoreTuning
from stepwell.store.api import Space
from stepwell.store.memory import MemoryStore
from stepwell.store.wrappers import Wrapper
from stepwell.tiers.eviction import make_room
from stepwell.transfer.copy_engine import Work
from toys import FULL, HYBRID, SMALL_PAGES, Rig, text
from waiting import step_until, wait_until

CONFIG = CacheConfig(device_bytes=128 * 32, host_bytes=128 * 32)


def loading(**config: object) -> tuple[Rig, object]:
    """A rig with a lease whose bytes are on their way from the host."""
    rig = Rig(HYBRID, host_pages=64, **config)  # type: ignore[arg-type]
    rig.serve(text(1, 17))
    rig.evict_all(Tier.DEVICE)
    return rig, rig.open(text(1, 17))


def test_waiting_returns_when_the_bytes_have_come() -> None:
    cache = build_cache(FULL, CONFIG, tuning=SMALL_PAGES)
    for _ in range(2):
        with cache.acquire(cache.lookup(text(1, 17))) as lease:
            cache.wait(lease)
            assert lease.ready
            cache.grow(lease, 17)
            cache.commit(lease, 16)
    assert cache.close()


def test_waiting_for_a_load_that_fails_raises_and_says_what_to_do() -> None:
    rig, lease = loading()
    for job in rig.executor.pending:
        rig.executor.finish(job, failing_rank=0)
    with pytest.raises(LoadFailed, match="release it and look the prompt up again"):
        rig.cache.wait(lease)  # type: ignore[arg-type]
    rig.cache.release(lease)  # type: ignore[arg-type]
    assert rig.serve(text(1, 17)).computed == 17
    rig.idle_check()


def test_waiting_for_a_load_that_hangs_ends() -> None:
    rig, lease = loading(tuning=replace(SMALL_PAGES, copy_timeout_s=2.0))
    with pytest.raises(LeaseError, match="not ready after 1 s"):
        rig.cache.wait(lease, timeout_s=1.0)  # type: ignore[arg-type]
    with pytest.raises(LoadFailed):
        rig.cache.wait(lease)  # type: ignore[arg-type]
    rig.cache.release(lease)  # type: ignore[arg-type]
    with pytest.raises(LeaseError, match="closed"):
        rig.cache.wait(lease)  # type: ignore[arg-type]
    rig.settle()
    rig.idle_check()


def test_waiting_for_a_ticket() -> None:
    cache, store = build_cache(FULL, CONFIG, tuning=SMALL_PAGES), MemoryStore()
    cache.store.attach(store)
    ticket = cache.prefetch(cache.lookup(text(1, 17)))
    cache.wait(ticket)
    assert ticket.ready
    ticket.close()
    assert cache.close()


# ---- a backlog, and something that hangs --------------------------------------------------------------


class Paced:
    """A copy engine whose every copy waits for its turn, and takes a second of a clock that only it moves."""

    def __init__(self) -> None:
        self.clock = ManualClock()
        self.begun, self.turns = Event(), Semaphore(0)
        self.waiting: list[Plan] = []

    def begin(self, plan: Plan) -> Work:
        return lambda: self._work(plan)

    def _work(self, plan: Plan) -> None:
        self.waiting.append(plan)
        self.begun.set()
        assert self.turns.acquire(timeout=60)
        self.waiting.remove(plan)
        self.clock.advance(1.0)


def save(cache: Cache, names: range) -> None:
    """Computes a page for each name, and leaves their saves on their way."""
    for name in names:
        with cache.acquire(cache.lookup(text(name, 5))) as lease:
            cache.grow(lease, 5)
            cache.commit(lease, 4)


def test_saves_behind_a_backlog_longer_than_the_timeout_all_count() -> None:
    """A save has its 30 seconds from when it begins: a line that moves is no failure, however long it is."""
    copy_engine = Paced()
    cache = build_cache(
        FULL,
        replace(CONFIG, device_bytes=8192, host_bytes=8192),
        tuning=SMALL_PAGES,
        copy_engines=[copy_engine],
        clock=copy_engine.clock,
    )
    save(cache, range(50))
    for left in reversed(range(50)):
        copy_engine.turns.release()
        while cache.copying > left:
            assert not cache.step().failures
    assert copy_engine.clock.now() == 50
    assert cache.counters["save_jobs"] == 50 and not cache.counters["save_failures"] and not cache.counters["abandoned_jobs"]
    assert cache.close()


def test_what_waits_behind_a_rank_that_hangs_is_taken_back_and_its_pages_are_free() -> None:
    copy_engine = Paced()
    cache = build_cache(FULL, CONFIG, tuning=SMALL_PAGES, copy_engines=[copy_engine], clock=copy_engine.clock)
    save(cache, range(3))
    assert copy_engine.begun.wait(60)
    copy_engine.clock.advance(31.0)
    failures = cache.step().failures
    assert len(failures) == 3 and (cache.counters["abandoned_jobs"], cache.counters["withdrawn_jobs"]) == (1, 2)
    assert cache.copying == 1, "pages that a rank may still write are held"
    cache.audit()
    copy_engine.turns.release()
    step_until(cache, lambda: not cache.copying)
    assert cache.close()
    cache.audit()


def test_a_rank_that_hangs_does_not_keep_the_cache_from_closing() -> None:
    copy_engine = Paced()
    cache = build_cache(FULL, CONFIG, tuning=SMALL_PAGES, copy_engines=[copy_engine])
    save(cache, range(1))
    clock = SystemClock()
    started_s = clock.now()
    assert not cache.close(timeout_s=0.2), "something was left undone"
    assert clock.now() - started_s < 20
    copy_engine.turns.release()


class Hanging(Wrapper):
    """Writes hang until the test releases them."""

    def __init__(self) -> None:
        super().__init__(memory := MemoryStore())
        self.values = memory._values
        self.go = Event()
        self.calls = 0

    def write_from(self, space: Space, writes: Sequence[object], **options: object) -> list[object]:  # type: ignore[override]
        self.calls += 1
        assert self.go.wait(60)
        return super().write_from(space, writes, **options)  # type: ignore[arg-type, return-value]


def test_a_store_that_hangs_does_not_keep_the_cache_from_closing() -> None:
    store, clock = Hanging(), SystemClock()
    cache = build_cache(FULL, CONFIG, tuning=SMALL_PAGES)
    cache.store.attach(store, tuning=StoreTuning(op_timeout_s=3600.0))
    with cache.acquire(cache.lookup(text(1, 17))) as lease:
        cache.grow(lease, 17)
        cache.commit(lease, 16)
    started_s = clock.now()
    assert not cache.close(timeout_s=0.2)
    assert clock.now() - started_s < 20
    store.go.set()


def test_copies_given_up_before_do_not_cost_the_backups_when_the_cache_closes() -> None:
    copy_engine, store = Paced(), MemoryStore()
    host = numpy_memories(FULL, layouts_for(FULL, CONFIG, alignment=16))[Tier.HOST]
    cache = build_cache(
        FULL, CONFIG, tuning=SMALL_PAGES, copy_engines=[copy_engine], clock=copy_engine.clock, host_pages=[host], model="toy"
    )
    copy_engine.turns.release()
    save(cache, range(1))
    step_until(cache, lambda: not cache.copying)
    save(cache, range(1, 2))  # this copy hangs, and is given up
    wait_until(lambda: copy_engine.waiting)
    copy_engine.clock.advance(31.0)
    assert cache.step().failures
    cache.store.attach(store, StoreConfig(checkpoint_delay_s=0.0))
    assert not cache.close(), "a copy was never answered"
    assert len(store._values) == 1, "what was on the host is stored all the same"
    copy_engine.turns.release()


class Partly(Hanging):
    """Questions of requests hang; writes do not."""

    def __init__(self) -> None:
        super().__init__()
        self.asked = Event()

    def write_from(self, space: Space, writes: Sequence[object], **options: object) -> list[object]:  # type: ignore[override]
        return Wrapper.write_from(self, space, writes, **options)  # type: ignore[arg-type, return-value]

    def contains(self, space: Space, keys: Sequence[bytes]) -> list[bool]:
        if current_thread().name.startswith("stepwell-ask"):
            self.asked.set()
            assert self.go.wait(60)
        return super().contains(space, keys)


def test_a_question_that_hangs_does_not_cost_the_backups_when_the_cache_closes() -> None:
    store, names = Partly(), range(1, 31)
    cache = build_cache(FULL, replace(CONFIG, device_bytes=8192, host_bytes=8192), tuning=SMALL_PAGES)
    cache.store.attach(store, StoreConfig(checkpoint_delay_s=0.0))
    ticket = cache.prefetch(cache.lookup(text(99, 17)))
    assert store.asked.wait(60)
    ticket.close()
    save(cache, names)
    assert not cache.close(timeout_s=3.0), "the question was never answered"
    assert len(store.values) == len(names)
    store.go.set()


class Answering(MemoryStore):
    """Says when it is asked, and answers when it may."""

    def __init__(self) -> None:
        super().__init__()
        self.asked, self.go = Event(), Event()

    def contains(self, space: Space, keys: Sequence[bytes]) -> list[bool]:
        self.asked.set()
        assert self.go.wait(60)
        return super().contains(space, keys)


def test_closing_waits_for_a_question_that_somebody_asked_out_of_curiosity() -> None:
    """When it returns true, nothing uses the store any more."""
    cache, store = build_cache(FULL, CONFIG, tuning=SMALL_PAGES), Answering()
    cache.store.attach(store)
    question = cache.question(text(1, 17), store_wait_s=60.0)
    assert store.asked.wait(60)
    assert not question.ready and cache.stores_awaited == 1
    store.go.set()
    assert cache.close(timeout_s=60.0)
    assert question.ready and not cache.stores_awaited


def test_a_cache_with_open_leases_is_not_closed() -> None:
    cache = build_cache(FULL, CONFIG, tuning=SMALL_PAGES)
    lease = cache.acquire(cache.lookup(text(1, 17)))
    with pytest.raises(LeaseError, match=r"1 lease\(s\) are open; release them before the cache is closed"):
        cache.close()
    cache.grow(lease, 17)
    cache.commit(lease, 16)
    cache.release(lease)
    assert cache.close(), "the refused call left everything as it was"


def test_what_had_not_begun_when_the_time_was_over_is_not_done_later() -> None:
    store = Hanging()
    cache = build_cache(FULL, replace(CONFIG, device_bytes=8192, host_bytes=8192), tuning=SMALL_PAGES)
    cache.store.attach(store, StoreConfig(checkpoint_delay_s=0.0))
    save(cache, range(1, 9))
    assert not cache.close(timeout_s=0.2)
    store.go.set()
    threads = [thread for thread in enumerate_threads() if thread.name.startswith("stepwell-write")]
    for thread in threads:
        thread.join(60)
    assert store.calls <= 1 and len(store.values) < 8, "what had begun together, and nothing else"


def test_closing_takes_any_time_and_ends_what_it_can() -> None:
    cache = build_cache(FULL, CONFIG, tuning=SMALL_PAGES)
    save(cache, range(1))
    assert cache.close(timeout_s=inf)
    with pytest.raises(AssertionError, match="closed"):
        save(cache, range(1, 2))


def test_a_load_that_never_began_leaves_its_sources_where_they_are() -> None:
    copy_engine = Paced()
    cache = build_cache(FULL, CONFIG, tuning=SMALL_PAGES, copy_engines=[copy_engine], clock=copy_engine.clock)
    for _ in range(3):
        copy_engine.turns.release()
    save(cache, range(3))
    step_until(cache, lambda: not cache.copying)
    make_room(cache._state, Tier.DEVICE, {Kind.PREFIX: 10_000})
    leases = [cache.acquire(cache.lookup(text(name, 5))) for name in range(3)]  # two threads hang, the third waits
    wait_until(lambda: len(copy_engine.waiting) == 2)
    copy_engine.clock.advance(31.0)
    assert set(cache.step().failed) == set(leases)
    for lease in leases:
        cache.release(lease)
    assert [cache.lookup(text(name, 5)).restore_tokens for name in range(3)] == [0, 0, 4]
    for _ in range(2):
        copy_engine.turns.release()
    step_until(cache, lambda: not cache.copying)
    assert cache.close()
    cache.audit()


def test_a_copy_engine_that_wants_to_end_the_process_fails_like_others() -> None:
    class Leaving:
        def begin(self, plan: Plan) -> Work:
            return sys.exit

    cache = build_cache(FULL, CONFIG, tuning=SMALL_PAGES, copy_engines=[Leaving()])
    for name in range(2):
        save(cache, range(name, name + 1))
        step_until(cache, lambda: not cache.copying)
    assert cache.counters["save_failures"] == 2
    assert cache.close()


def test_a_checkpoint_that_a_request_waits_for_is_not_behind_other_saves() -> None:
    saved = Event()

    class Bulk:
        def begin(self, plan: Plan) -> Work:
            return saved.set if plan.awaited else lambda: (saved.wait(60), None)[1]

    executor = ThreadCopyExecutor([Bulk()])
    executor.submit(Plan(job=JobId(1), purpose=Purpose.SAVE, copies=()))
    executor.submit(Plan(job=JobId(2), purpose=Purpose.SAVE, copies=(), awaited=True))
    executor.drain(60)
    assert [done.job for done in executor.answers()] == [2, 1]
    executor.close()


def workers() -> set[Thread]:
    return {thread for thread in enumerate_threads() if thread.name.startswith("stepwell-") and thread.is_alive()}


def test_threads_start_with_work_and_end_with_their_cache_even_where_nobody_closed_it() -> None:
    def use() -> set[Thread]:
        before = workers()
        cache = build_cache(FULL, CONFIG, tuning=SMALL_PAGES)
        assert workers() <= before, "nothing to do yet"
        save(cache, range(1))
        step_until(cache, lambda: not cache.copying)
        return workers() - before

    mine = use()
    assert mine
    gc.collect()
    wait_until(lambda: not any(thread.is_alive() for thread in mine), "the threads of a dropped cache end")


def test_what_waiting_found_is_told_by_the_next_step() -> None:
    rig, lease = loading()
    other = rig.open(text(1, 17))
    rig.executor.finish_all()
    rig.cache.wait(lease, timeout_s=0.0)  # type: ignore[arg-type]
    report = rig.cache.step()
    assert set(report.ready) == {lease, other} and report.completed
    assert rig.cache.step().ready == ()
    for each in (lease, other):
        rig.cache.release(each)  # type: ignore[arg-type]
    rig.idle_check()


def test_a_part_that_has_begun_counts_from_there_and_not_from_its_line() -> None:
    clock, hold, begun = ManualClock(), Event(), Event()
    jobs: RankJobs[int] = RankJobs(clock)
    stuck, moving = WorkQueue("stuck", clock), WorkQueue("moving", clock)
    jobs.open(JobId(1), [stuck, moving], called_off=-1)
    jobs.enqueue(JobId(1), 0, stuck, lambda: (begun.set(), hold.wait(60), 1)[2])
    assert begun.wait(60)
    for _ in range(40):
        clock.advance(1.0)
        moved = Event()
        moving.submit(moved.set)
        assert moved.wait(60)
    assert jobs.progressed_s(JobId(1)) == 0.0, "one rank has not moved since it began"
    assert not jobs.withdraw(JobId(1))  # rank 1 never begins; rank 0 has to be waited for
    hold.set()
    assert jobs.drain(60)
    (answer,) = jobs.answers()
    assert answer.outcomes == (1, -1)
    stuck.close()
    moving.close()


# ---- threads ------------------------------------------------------------------------------------------


def from_another_thread(act: object) -> BaseException | None:
    caught: list[BaseException] = []

    def run() -> None:
        try:
            act()  # type: ignore[operator]
        except BaseException as error:
            caught.append(error)

    thread = Thread(target=run, name="second")
    thread.start()
    thread.join(60)
    return caught[0] if caught else None


def test_every_verb_notices_a_second_thread_and_changes_nothing() -> None:
    cache = build_cache(FULL, CONFIG, tuning=SMALL_PAGES)
    lease = cache.acquire(cache.lookup(text(1, 17)))
    verbs = [
        lambda: cache.lookup(text(1, 17)),
        lambda: cache.acquire(cache.lookup(text(1, 17))),
        lambda: cache.grow(lease, 17),
        lambda: cache.commit(lease, 16),
        lambda: cache.append(lease, [1]),
        lambda: cache.wait(lease),
        lambda: cache.release(lease),
        lambda: lease.__exit__(None, None, None),
        lambda: cache.pins.add(text(1, 17)),
        lambda: cache.explain(text(1, 17)),
        lambda: cache.clear(),
        cache.flush,
        cache.step,
        cache.audit,
        cache.hand_over,
        cache.close,
    ]
    for verb in verbs:
        error = from_another_thread(verb)
        assert isinstance(error, WrongThread) and "second" in str(error) and "hand_over" in str(error), verb
    for verb, name in ((cache.stats, "Cache.stats"), (cache.step, "Cache.step"), (cache.store.detach, "Cache.store.detach")):
        assert str(from_another_thread(verb)).startswith(f"{name}() was called from thread 'second'")
    assert str(from_another_thread(lambda: cache.pins.add(text(1, 17)))).startswith("Cache.pins.add()")
    assert from_another_thread(lambda: cache.counters.snapshot()) is None, "counters may be read from any thread"
    assert lease.state is LeaseState.READY and lease.position == 0
    cache.release(lease)
    cache.close()


def test_a_cache_can_be_handed_to_another_thread_and_outlives_its_first() -> None:
    cache = build_cache(FULL, CONFIG, tuning=SMALL_PAGES)
    cache.lookup(text(1, 17))
    cache.hand_over()
    assert from_another_thread(lambda: cache.lookup(text(1, 17))) is None
    cache.lookup(text(1, 17))  # the other thread has ended
    assert isinstance(from_another_thread(cache.step), WrongThread)
    cache.close()


def test_a_thread_that_python_did_not_start_can_have_it_and_end() -> None:
    cache, done = build_cache(FULL, CONFIG, tuning=SMALL_PAGES), Event()

    def use() -> None:
        cache.lookup(text(1, 17))
        done.set()

    _thread.start_new_thread(use, ())
    assert done.wait(60)

    def is_mine() -> bool:
        try:
            cache.step()
        except WrongThread:
            return False  # it is just ending
        return True

    wait_until(is_mine)
    cache.close()


def test_a_ticket_is_closed_by_the_thread_that_has_the_cache() -> None:
    cache = build_cache(FULL, CONFIG, tuning=SMALL_PAGES)
    cache.store.attach(MemoryStore())
    ticket = cache.prefetch(cache.lookup(text(1, 17)))
    assert isinstance(from_another_thread(ticket.close), WrongThread)
    ticket.close()
    cache.close()


def test_four_threads_cannot_get_each_others_bytes() -> None:
    """The one that had it first goes on; all others are refused."""
    cache: Cache = build_cache(FULL, CONFIG, tuning=SMALL_PAGES)
    cache.lookup(text(1, 17))
    errors: list[type] = []
    together = Barrier(4)

    def serve(name: int) -> None:
        together.wait(60)
        try:
            cache.acquire(cache.lookup(text(name, 17)))
        except WrongThread as error:
            errors.append(type(error))

    threads = [Thread(target=serve, args=(name,)) for name in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert errors == [WrongThread] * 4
    cache.close()
