"""Random lives with a store below the host: tickets, operations in any order, faults of every kind, stores that come and go."""

from __future__ import annotations

import os

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import initialize, precondition, rule
from lives import live_with_store
from shelf import StoreSetup, make_store_setup
from store_traffic import STATUSES, StoreTraffic
from store_world import BorrowedStoreWorld, StoreWorld
from test_cache_machine import CacheMachine, Prompt, picks, prompts, ttls

from stepwell.base.tasks import ItemStatus

Again = tuple[int, int, int]
again = st.tuples(st.integers(0, 11), st.sampled_from((0, 0, 1, 5, 20)), st.sampled_from((0, 1, 9)))  # which, less, more


@st.composite
def store_setups(draw: st.DrawFn, *, external: bool) -> StoreSetup:
    return make_store_setup(lambda options: draw(st.sampled_from(options)), external=external)


class StoreMachine(CacheMachine):
    """A device over a host over a store."""

    traffic: StoreTraffic

    @initialize(setup=store_setups(external=False), warm=st.lists(prompts, min_size=2, max_size=5), fresh=st.booleans())
    def build(self, setup: StoreSetup, warm: list[Prompt], fresh: bool) -> None:
        self.begin(StoreTraffic(StoreWorld(setup)), warm, fresh=fresh)

    def begin(self, traffic: StoreTraffic, warm: list[Prompt], *, fresh: bool) -> None:
        self.traffic = traffic
        for each in warm:
            self.traffic.serve(self.tokens(each), 0)
        if fresh:
            self.traffic.restart()

    # ---- requests ---------------------------------------------------------------------------------

    def tokens_again(self, drawn: Again) -> list[int]:
        return self.traffic.again(*drawn)

    @rule(drawn=prompts, pick=picks, priority=st.integers(0, 1), ttl_s=ttls)
    def prefetch(self, drawn: Prompt, pick: int, priority: int, ttl_s: float | None) -> None:
        self.traffic.prefetch(self.tokens(drawn), pick, priority, ttl_s)

    @rule(drawn=again, pick=picks)
    def prefetch_again(self, drawn: Again, pick: int) -> None:
        self.traffic.prefetch(self.tokens_again(drawn), pick)

    @rule(drawn=again, pick=picks)
    def prefetch_twins(self, drawn: Again, pick: int) -> None:
        self.traffic.prefetch_twins(self.tokens_again(drawn), pick)

    @precondition(lambda self: self.traffic.world.awaited)
    @rule(pick=picks)
    def close_ticket(self, pick: int) -> None:
        self.traffic.close_ticket(pick)

    @precondition(lambda self: self.traffic.world.awaited or self.traffic.world.spent)
    @rule(pick=picks, spent=st.sampled_from((False, False, False, True)))
    def acquire_awaited(self, pick: int, spent: bool) -> None:
        self.traffic.acquire_awaited(pick, spent=spent)

    @precondition(lambda self: self.traffic.world.awaited)
    @rule(pick=picks)
    def overtake(self, pick: int) -> None:
        self.traffic.overtake(pick)

    @rule(drawn=again, pick=picks)
    def serve_awaited(self, drawn: Again, pick: int) -> None:
        self.traffic.serve_awaited(self.tokens_again(drawn), pick)

    # ---- stores -----------------------------------------------------------------------------------

    @precondition(lambda self: self.traffic.world.pending)
    @rule(pick=picks, status=st.sampled_from(STATUSES), took_s=st.sampled_from((0.0, 0.0, 0.1, 5.0)))
    def answer_op(self, pick: int, status: ItemStatus | None, took_s: float) -> None:
        self.traffic.answer_op(pick, status, took_s)

    @precondition(lambda self: self.traffic.world.pending)
    @rule(answers=st.lists(picks, min_size=1, max_size=4))
    def answer_ops_and_step(self, answers: list[int]) -> None:
        for pick in answers:
            self.traffic.answer_op(pick)
        self.traffic.world.step()

    @precondition(lambda self: self.traffic.world.pending)
    @rule()
    def fail_ops(self) -> None:
        self.traffic.fail_ops()

    @precondition(lambda self: self.traffic.world.pending)
    @rule()
    def time_out(self) -> None:
        self.traffic.time_out()

    @precondition(lambda self: self.traffic.world.pending)
    @rule()
    def settle_everything(self) -> None:
        self.traffic.world.settle_everything()

    @rule(pick=picks)
    def move_store(self, pick: int) -> None:
        self.traffic.move_store(pick)

    @rule(pick=picks)
    def evict(self, pick: int) -> None:
        self.traffic.evict(pick)

    @rule(drawn=again, pick=picks, outage=st.booleans(), serve=st.booleans(), anew=st.booleans(), drop=st.booleans())
    def recover(self, drawn: Again, pick: int, outage: bool, serve: bool, anew: bool, drop: bool) -> None:
        self.traffic.recover(self.tokens_again(drawn), pick, outage=outage, serve=serve, anew=anew, drop=drop)

    @rule()
    def restart(self) -> None:
        self.traffic.restart()


class BorrowedStoreMachine(StoreMachine):
    """A host over a store, under an engine that owns its device memory."""

    @initialize(setup=store_setups(external=True), warm=st.lists(prompts, min_size=2, max_size=5), fresh=st.booleans())
    def build(self, setup: StoreSetup, warm: list[Prompt], fresh: bool) -> None:
        self.begin(StoreTraffic(BorrowedStoreWorld(setup)), warm, fresh=fresh)


class TestStoreMachine(StoreMachine.TestCase):
    settings = settings(max_examples=max(settings.default.max_examples // 2, 1))


class TestBorrowedStoreMachine(BorrowedStoreMachine.TestCase):
    settings = settings(max_examples=max(settings.default.max_examples // 4, 1))


@pytest.mark.parametrize("seed", range(int(os.environ.get("STEPWELL_EXAMPLES", "16"))))
def test_a_long_life_over_a_store_claims_only_what_exists(seed: int) -> None:
    live_with_store(seed, steps=120, external=seed % 3 == 2)
