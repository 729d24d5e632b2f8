"""How long requests wait for a store: no longer than computing takes, a tenth of it at first, and seldom after waits in vain."""

from __future__ import annotations

from collections.abc import Callable
from random import Random

import pytest

from stepwell import Cause, Lease, Tier
from stepwell.base.config import PrefetchPolicy, StoreConfig
from stepwell.base.meters import ManualClock
from stepwell.policy.store_use import FAILURES_TO_OPEN, UNMEASURED_SHARE, BreakerState, StoreTuning
from stepwell.store.api import Store
from stepwell.store.memory import MemoryStore
from stepwell.store.wrappers import Faults, Faulty, Slow
from stepwell.store_tier.ticket import Ticket
from stepwell.testing import TimedStoreExecutor
from stepwell.transfer.store_worker import StoreWorker
from toys import FULL, HYBRID, PAGE, Rig, text

TOKENS_PER_S = 40.0
PROMPT = text(1, 300 * PAGE + 1)  # 30 s of computing
COMPUTE_S = len(PROMPT) / TOKENS_PER_S
COMPUTED = StoreConfig(recompute_tokens_per_s=TOKENS_PER_S)
Make = Callable[[Store, Callable[[float], None]], Store]


class Process:
    """A cache that knows how fast it computes, over a store that another one left; waiting and computing take virtual time."""

    def __init__(
        self, make: Make, store: MemoryStore, config: StoreConfig | None = None, tuning: StoreTuning | None = None
    ) -> None:
        self.clock = ManualClock()
        self.store_executor = TimedStoreExecutor(self.clock)
        self.rig = Rig(FULL, device_pages=1024, host_pages=2048, clock=self.clock)
        slow = make(store, self.store_executor.sleep)
        self.store_executor.serve([StoreWorker(slow, self.rig.memories[0][Tier.HOST])])
        self.rig.cache.store.attach(slow, config or COMPUTED, executor=self.store_executor, tuning=tuning)

    def wait(self, *tickets: Ticket) -> float:
        """Steps until every ticket is ready; says how long that took."""
        began_s = self.clock.now()
        while not all(ticket.ready for ticket in tickets):
            open_ones = [ticket.ended_s for ticket in tickets if not ticket.ready]
            next_s = min(self.store_executor.next_answer_s(), *open_ones)
            self.clock.advance(max(next_s - self.clock.now(), 0.0) + 1e-6)
            self.rig.cache.step()
        return self.clock.now() - began_s

    def compute(self, lease: Lease) -> None:
        self.settle()
        while lease.position < lease.num_tokens:
            upto = min(lease.position + 4 * PAGE, lease.num_tokens)
            self.rig.cache.grow(lease, upto)
            self.clock.advance((upto - lease.position) / TOKENS_PER_S)
            self.rig.cache.commit(lease, upto)
            self.settle()

    def settle(self) -> None:
        self.rig.cache.step()
        while self.rig.executor.pending:
            self.rig.executor.finish_all()
            self.rig.cache.step()

    def ask(self, tokens: list[int]) -> Ticket:
        return self.rig.cache.prefetch(self.rig.cache.lookup(tokens))

    def serve(self, tokens: list[int]) -> tuple[float, int]:
        """Seconds waited for the store, and tokens that came from it."""
        ticket = self.ask(tokens)
        waited_s = self.wait(ticket)
        with self.rig.cache.acquire(self.rig.cache.lookup(tokens), ticket=ticket) as lease:
            self.compute(lease)
        return waited_s, lease.sources.store


@pytest.fixture(scope="module")
def filled() -> MemoryStore:
    store = MemoryStore()
    before = Rig(FULL, device_pages=4096, host_pages=4096, store=store)
    for name in range(1, 10):
        before.serve_without_audit(text(name, 300 * PAGE + 1))
    before.idle_check()
    return store


def taking(seconds: float) -> Make:
    return lambda store, sleep: Slow(store, sleep=sleep, latency_s=seconds / 2)  # a question, and a fetch


def hanging(store: Store, sleep: Callable[[float], None]) -> Store:
    return Faulty(store, Faults(hang=1.0), random=Random(1), sleep=sleep)


def test_the_first_fetch_of_a_new_process_is_waited_for(filled: MemoryStore) -> None:
    waited_s, came = Process(taking(2.0), filled).serve(PROMPT)
    assert came == 300 * PAGE and waited_s == pytest.approx(2.0, abs=0.1), f"computing would take {COMPUTE_S:.0f} s"


def test_several_first_requests_all_wait_for_a_healthy_store(filled: MemoryStore) -> None:
    here = Process(taking(2.0), filled)
    prompts = [text(name, 300 * PAGE + 1) for name in (1, 2, 3)]
    tickets = [here.ask(prompt) for prompt in prompts]
    here.wait(*tickets)
    assert all(ticket.complete and ticket.from_store.all() for ticket in tickets)
    for ticket in tickets:
        ticket.close()
    assert not here.rig.state.counters["prefetch_given_up"]


def test_a_prompt_is_computed_while_it_is_not_known_how_fast_that_is(filled: MemoryStore) -> None:
    here = Process(taking(2.0), filled, StoreConfig())
    waited_s, came = here.serve(PROMPT)
    assert (waited_s, came) == (pytest.approx(0.0, abs=0.01), 0)
    waited_s, came = here.serve(text(2, 300 * PAGE + 1))
    assert came == 300 * PAGE and waited_s == pytest.approx(2.0, abs=0.1), "both were measured by then"


def test_no_request_waits_longer_than_a_tenth_of_computing_for_a_store_that_was_not_measured(filled: MemoryStore) -> None:
    waited_s, came = Process(hanging, filled, StoreConfig(recompute_tokens_per_s=12_000.0)).serve(PROMPT)
    assert came == 0 and waited_s == pytest.approx(0.01, abs=0.001)


def test_a_store_that_was_measured_is_waited_for_as_long_as_computing_takes(filled: MemoryStore) -> None:
    here = Process(taking(2.0), filled)
    here.serve(PROMPT)
    ticket = here.ask(text(2, 300 * PAGE + 1))
    assert ticket.deadline_s - ticket.started_s == pytest.approx(COMPUTE_S, abs=0.1)
    assert here.wait(ticket) == pytest.approx(2.0, abs=0.1)
    ticket.close()
    assert here.ask(text(3, PAGE + 1)).ready, "computing four tokens is sooner"


def test_a_store_that_hangs_is_waited_for_three_times_and_then_ever_more_seldom(filled: MemoryStore) -> None:
    config = StoreConfig(recompute_tokens_per_s=2.4 * TOKENS_PER_S)  # waits are of more than a second
    here = Process(hanging, filled, config, tuning=StoreTuning(op_timeout_s=1e6))  # the other breaker is not to help
    waited_s, limit_s = [], UNMEASURED_SHARE * COMPUTE_S / 2.4
    for name in range(1, 61):
        ticket = here.ask(text(name, 300 * PAGE + 1))
        waited_s.append(here.wait(ticket))
        ticket.close()
        here.clock.advance(limit_s)
    assert waited_s[:FAILURES_TO_OPEN] == pytest.approx([limit_s] * FAILURES_TO_OPEN, abs=0.01)
    assert sum(each > 0.01 for each in waited_s[FAILURES_TO_OPEN:]) <= 6, "cool-offs of 1, 2, 4, 8, 16, 32 and 60 seconds"
    assert sum(each > 0.01 for each in waited_s[FAILURES_TO_OPEN:]) >= 2, "it is tried again"


def test_those_who_wait_for_a_store_that_hangs_go_on_together(filled: MemoryStore) -> None:
    here = Process(hanging, filled)
    first = [here.ask(text(name, 300 * PAGE + 1)) for name in range(1, 1 + FAILURES_TO_OPEN)]
    here.clock.advance(1.0)
    last = here.ask(text(8, 300 * PAGE + 1))
    here.wait(*first)
    assert not last.ready
    for ticket in first:
        ticket.close()
    assert last.ready, "the store has had its chance"
    last.close()
    assert here.ask(text(9, 300 * PAGE + 1)).ready


def test_a_wait_in_vain_does_not_end_the_trial_of_another_request(filled: MemoryStore) -> None:
    here = Process(hanging, filled, tuning=StoreTuning(op_timeout_s=1e6))
    link = here.rig.cache._store_tier.link
    assert link is not None
    tickets = [here.ask(text(name, 300 * PAGE + 1)) for name in range(1, 1 + FAILURES_TO_OPEN)]
    link.fetching.state = BreakerState.TRYING  # a fetch of another request tests whether the store works again
    here.wait(*tickets)
    for ticket in tickets:
        ticket.close()
    assert link.fetching.state is BreakerState.TRYING and here.rig.state.counters["store_fetching_stopped"] == 0


def test_a_fetch_that_was_given_up_is_counted_and_explained(filled: MemoryStore) -> None:
    tuning = StoreTuning(op_timeout_s=1e6)
    here = Process(lambda store, sleep: Slow(store, sleep=sleep, latency_s=100.0), filled, tuning=tuning)
    ticket = here.ask(PROMPT)
    waited_s = here.wait(ticket)
    ticket.close()
    why = here.rig.cache.explain(PROMPT)
    assert why.cause is Cause.LATE and why.tier is Tier.STORE
    assert f"given up after {waited_s:.2f} s: computing is expected to take no longer" in why.detail
    assert here.rig.state.counters["prefetch_given_up"] == 1
    here.serve(PROMPT)
    why = here.rig.cache.explain(PROMPT)
    assert why.cause is Cause.COMPLETE and "given up" in str(why), "also when it was computed in the meantime"


def test_a_wait_that_ended_because_others_waited_in_vain_is_explained(filled: MemoryStore) -> None:
    here = Process(hanging, filled, tuning=StoreTuning(op_timeout_s=1e6))
    tickets = [here.ask(text(name, 300 * PAGE + 1)) for name in range(1, 3 + FAILURES_TO_OPEN)]
    here.wait(*tickets[:FAILURES_TO_OPEN])
    for ticket in tickets:
        ticket.close()
    assert "in vain" in here.rig.cache.explain(text(2 + FAILURES_TO_OPEN, 300 * PAGE + 1)).detail
    assert here.rig.state.counters["store_fetching_stopped"] == 1


def test_pages_that_were_on_their_way_are_explained_too(filled: MemoryStore) -> None:
    here = Rig(FULL, device_pages=1024, host_pages=1024, store=filled, store_config=COMPUTED)
    ticket = here.cache.prefetch(here.cache.lookup(PROMPT))
    here.store_executor.finish_all()
    here.cache.step()
    here.clock.advance(1000.0)
    assert ticket.ready and not ticket.complete
    ticket.close()
    why = here.cache.explain(PROMPT)
    assert why.cause is Cause.LATE and "given up after" in why.detail
    here.settle()
    here.idle_check()


def test_a_request_that_went_away_has_not_given_up(filled: MemoryStore) -> None:
    here = Process(taking(2.0), filled)
    ticket = here.ask(PROMPT)
    here.clock.advance(0.9)
    ticket.close()
    assert not here.rig.state.counters["prefetch_given_up"]
    assert here.serve(PROMPT)[1] == 300 * PAGE, "a client that leaves says nothing about the store"


def test_best_effort_says_that_it_never_waits() -> None:
    store = MemoryStore()
    Rig(HYBRID, host_pages=256, store=store).serve(text(1, 41))
    here = Rig(HYBRID, host_pages=256, store=store, store_config=StoreConfig(prefetch=PrefetchPolicy.BEST_EFFORT))
    ticket = here.cache.prefetch(here.cache.lookup(text(1, 41)))
    here.store_executor.finish_all()
    here.cache.step()
    ticket.close()
    assert "best_effort" in here.cache.explain(text(1, 41)).detail
    here.settle()
    here.idle_check()


def test_answers_that_a_busy_engine_noticed_late_cost_no_trust(filled: MemoryStore) -> None:
    here = Process(taking(0.01), filled)
    for name in range(100, 120):
        ticket = here.ask(text(name, 300 * PAGE + 1))  # nothing of it is stored
        here.clock.advance(1.0)  # one long pass over another request's tokens
        here.rig.cache.step()
        assert ticket.complete
        ticket.close()
    assert here.serve(PROMPT)[1] == 300 * PAGE


# ---- for requests that are still to come ----------------------------------------------------------


@pytest.mark.parametrize("policy", list(PrefetchPolicy))
def test_what_is_brought_up_before_its_request_comes_whatever_the_policy(filled: MemoryStore, policy: PrefetchPolicy) -> None:
    here = Process(taking(2.0), filled, StoreConfig(prefetch=policy, recompute_tokens_per_s=TOKENS_PER_S))
    ticket = here.rig.cache.prefetch(here.rig.cache.lookup(PROMPT), awaited=False)
    assert here.wait(ticket) == pytest.approx(2.0, abs=0.1) and ticket.complete
    ticket.close()
    assert here.rig.cache.lookup(PROMPT).restore_tokens == 300 * PAGE
    assert not here.rig.state.counters["loaded_ahead_pages"], "it stays on the host until a request wants it"


def test_what_is_brought_up_before_its_request_takes_no_patience_from_others(filled: MemoryStore) -> None:
    here = Process(taking(2.0), filled)
    for name in range(2, 8):
        ticket = here.rig.cache.prefetch(here.rig.cache.lookup(text(name, 300 * PAGE + 1)), awaited=False)
        here.wait(ticket)
        ticket.close()  # and no request has used it yet
    unfinished = here.rig.cache.prefetch(here.rig.cache.lookup(text(8, 300 * PAGE + 1)), awaited=False)
    here.clock.advance(5.0)
    unfinished.close()
    assert here.rig.state.counters["prefetch_given_up"] == 0
    assert here.serve(PROMPT)[1] == 300 * PAGE
