"""Random lives of random caches over a device, or a device and a host, against a ledger and a brute-force oracle."""

from __future__ import annotations

import os

import pytest
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule
from lives import live, live_spilling, live_with_quotas
from toy_models import TRUNKS, Setup, make_setup, prompt
from traffic import Traffic
from world import World

Prompt = tuple[int, int, tuple[int, ...], int]

# Most prompts share a beginning: a cut of some trunk, perhaps pages of their own, and a tail.
prompts = st.tuples(
    st.sampled_from((0, *range(len(TRUNKS)))), st.integers(0, 7), st.sampled_from(((), (), (1,), (2, 0))), st.integers(0, 15)
)
picks = st.integers(0, 11)
ttls = st.sampled_from((None, None, None, 50.0))
hints = st.lists(st.integers(0, 60), max_size=2).map(tuple)


@st.composite
def setups(draw: st.DrawFn) -> Setup:
    return make_setup(lambda options: draw(st.sampled_from(options)))


class CacheMachine(RuleBasedStateMachine):
    """Requests come, compute in chunks, decode, leave or are thrown out, while copies end as the run says."""

    @initialize(setup=setups(), warm=st.lists(prompts, min_size=3, max_size=8))
    def build(self, setup: Setup, warm: list[Prompt]) -> None:
        self.traffic = Traffic(World(setup))
        for each in warm:
            self.traffic.serve(self.tokens(each), 0)

    def tokens(self, drawn: Prompt) -> list[int]:
        return prompt(*drawn, self.traffic.page)

    # ---- questions --------------------------------------------------------------------------------

    @rule(drawn=prompts, pick=picks)
    def look(self, drawn: Prompt, pick: int) -> None:
        self.traffic.look(self.tokens(drawn), pick)

    @rule(drawn=prompts, pick=picks)
    def keep_a_match(self, drawn: Prompt, pick: int) -> None:
        self.traffic.keep_a_match(self.tokens(drawn), pick)

    # ---- requests ---------------------------------------------------------------------------------

    @rule(drawn=prompts, pick=picks, hints=hints, priority=st.integers(0, 1), ttl_s=ttls)
    def acquire(self, drawn: Prompt, pick: int, hints: tuple[int, ...], priority: int, ttl_s: float | None) -> None:
        self.traffic.acquire(self.tokens(drawn), pick, hints, priority, ttl_s)

    @precondition(lambda self: self.traffic.matches)
    @rule(pick=picks)
    def acquire_an_old_match(self, pick: int) -> None:
        self.traffic.acquire_an_old_match(pick)

    @rule(drawn=st.lists(prompts, min_size=2, max_size=3), pick=picks)
    def acquire_a_batch(self, drawn: list[Prompt], pick: int) -> None:
        self.traffic.acquire_a_batch([self.tokens(each) for each in drawn], pick)

    @precondition(lambda self: self.traffic.world.held)
    @rule(pick=picks, extra=st.integers(1, 16), pin=st.booleans())
    def follow(self, pick: int, extra: int, pin: bool) -> None:
        self.traffic.follow(pick, extra, pin=pin)

    @precondition(lambda self: self.traffic.world.held)
    @rule(pick=picks, chunk=st.integers(1, 40), obey=st.booleans(), again=st.booleans())
    def prefill(self, pick: int, chunk: int, obey: bool, again: bool) -> None:
        self.traffic.prefill(pick, chunk, obey=obey, again=again)

    @rule(drawn=st.lists(prompts, min_size=1, max_size=3), pick=picks, ttl_s=ttls, last=st.booleans())
    def serve(self, drawn: list[Prompt], pick: int, ttl_s: float | None, last: bool) -> None:
        for each in drawn:
            self.traffic.serve(self.tokens(each), pick, ttl_s, last=last)

    @precondition(lambda self: self.traffic.world.held)
    @rule(pick=picks, letters=st.lists(st.sampled_from((0, 1)), min_size=1, max_size=5))
    def decode(self, pick: int, letters: list[int]) -> None:
        self.traffic.decode(pick, letters)

    @precondition(lambda self: self.traffic.world.held)
    @rule(pick=picks)
    def finish(self, pick: int) -> None:
        self.traffic.finish(pick)

    @precondition(lambda self: self.traffic.world.held)
    @rule(pick=picks)
    def release(self, pick: int) -> None:
        self.traffic.release(pick)

    @precondition(lambda self: self.traffic.world.held)
    @rule(pick=picks)
    def abort_after_computing(self, pick: int) -> None:
        self.traffic.abort_after_computing(pick)

    @precondition(lambda self: self.traffic.world.held)
    @rule(pick=picks)
    def preempt(self, pick: int) -> None:
        self.traffic.preempt(pick)

    @precondition(lambda self: self.traffic.preempted)
    @rule()
    def come_back(self) -> None:
        self.traffic.come_back()

    # ---- upkeep -----------------------------------------------------------------------------------

    @precondition(lambda self: self.traffic.world.executor.owed)
    @rule(pick=picks, rank=st.integers(0, 2), fail=st.sampled_from((False, False, False, True)))
    def answer(self, pick: int, rank: int, fail: bool) -> None:
        self.traffic.answer(pick, rank, fail=fail)

    @rule()
    def step(self) -> None:
        self.traffic.world.step()

    @precondition(lambda self: self.traffic.world.executor.owed)
    @rule()
    def settle(self) -> None:
        self.traffic.world.settle()

    @rule(seconds=st.sampled_from((1.0, 20.0, 60.0)))
    def tick(self, seconds: float) -> None:
        self.traffic.world.clock.advance(seconds)

    @precondition(lambda self: self.traffic.world.spec.spill is not None)
    @rule(pick=picks, may_spill=st.booleans())
    def press(self, pick: int, may_spill: bool) -> None:
        self.traffic.press(pick, may_spill=may_spill)

    @rule(drawn=prompts, pick=picks, ttl_s=ttls)
    def pin(self, drawn: Prompt, pick: int, ttl_s: float | None) -> None:
        self.traffic.pin(self.tokens(drawn), pick, ttl_s)

    @rule(drawn=prompts, pick=picks)
    def hand_out(self, drawn: Prompt, pick: int) -> None:
        self.traffic.hand_out(self.tokens(drawn), pick)

    @precondition(lambda self: not self.traffic.world.regime.exact and self.traffic.flushed < 3)
    @rule(pick=picks)
    def flush(self, pick: int) -> None:
        self.traffic.flush(pick)

    @precondition(lambda self: self.traffic.world.pinned)
    @rule(pick=picks)
    def unpin(self, pick: int) -> None:
        self.traffic.unpin(pick)

    @precondition(lambda self: self.traffic.cleared < 2)
    @rule(pick=picks)
    def clear(self, pick: int) -> None:
        self.traffic.clear(pick)

    # ---- always -----------------------------------------------------------------------------------

    @invariant()
    def everything_holds(self) -> None:
        self.traffic.world.check()

    def teardown(self) -> None:
        if hasattr(self, "traffic"):
            self.traffic.world.close()


TestCacheMachine = CacheMachine.TestCase


@pytest.mark.parametrize("seed", range(int(os.environ.get("STEPWELL_EXAMPLES", "60"))))
def test_a_long_life_claims_only_what_exists_and_forgets_nothing_without_reason(seed: int) -> None:
    live(seed, steps=120)


@pytest.mark.parametrize("seed", range(int(os.environ.get("STEPWELL_EXAMPLES", "40"))))
def test_a_long_life_with_rows_that_spill_loses_none_of_them(seed: int) -> None:
    live_spilling(seed, steps=120)


@pytest.mark.parametrize("seed", range(int(os.environ.get("STEPWELL_EXAMPLES", "40"))))
def test_in_a_long_life_nobody_loses_for_a_tenant_that_is_over_its_quota(seed: int) -> None:
    live_with_quotas(seed, steps=120)


def test_lives_tell_listeners_of_much_that_comes_and_goes() -> None:
    """Else what is checked of feeds after each verb of a life would prove nothing."""
    feeds = [world.feed for world in (live(seed, steps=120) for seed in range(8)) if world.feed is not None]
    assert sum(feed.num_stored for feed in feeds) > sum(feed.num_evicted for feed in feeds) / 2 > 50


def test_lives_with_quotas_have_tenants_over_theirs_and_evict_for_it() -> None:
    """Else the lives above would prove nothing."""
    worlds = [live_with_quotas(seed, steps=120) for seed in range(12)]
    counted = [name for world in worlds for name, count in world.cache.counters.snapshot().items() if count]
    assert {"over_quota_device_pages", "over_quota_device_checkpoints", "over_quota_host_pages"} <= set(counted)
    assert sum(world.quotas.judged for world in worlds) > 0
