"""A transfer that failed is not always over: bytes may still arrive in its pages. Until then they go to no other request."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from stepwell import Kind, ModelSpec, Tier
from stepwell.base.errors import StoreError
from stepwell.base.meters import ManualClock
from stepwell.base.tasks import FetchCheckpoint, ItemStatus
from stepwell.store.api import Read, ReadOutcome, ReadResult, Space, Store, Traits, never
from stepwell.store.memory import MemoryStore
from stepwell.store.wrappers import Wrapper
from toys import ALL_MODELS, FULL, HYBRID, PAGE, Rig, text

LATE_S = 60.0
PROMPT, OTHER = text(1, 10 * PAGE + 1), text(2, 10 * PAGE + 1)


class Late(Wrapper):
    """Reads that must fail do so at once, and their bytes land whenever the test says."""

    def __init__(self, store: Store, *, late_write_s: float = LATE_S) -> None:
        super().__init__(store)
        self.late_write_s = late_write_s
        self.fails: Callable[[int, int], bool] = lambda index, reads: True  # which of the reads, by index and number
        self.lacks: Callable[[int, int], bool] = lambda index, reads: False
        self.outcome: ReadOutcome | None = ReadOutcome.FAILED  # or None: the whole call is an error
        self.clock = ManualClock()
        self.under_way: list[tuple[float, memoryview]] = []  # since when

    @property
    def traits(self) -> Traits:
        return replace(super().traits, late_write_s=self.late_write_s)

    def read_into(self, space: Space, reads: Sequence[Read], *, cancelled: Callable[[], bool] = never) -> list[ReadResult]:
        results = super().read_into(space, reads, cancelled=cancelled)
        failed = [index for index in range(len(reads)) if self.fails(index, len(reads))]
        self.under_way += [(self.clock.now(), reads[index].into) for index in failed]
        if failed and self.outcome is None:
            raise StoreError("gone in the middle of it")
        for index in range(len(reads)):
            if index in failed:
                results[index] = ReadResult(outcome=self.outcome or ReadOutcome.FAILED)
            elif self.lacks(index, len(reads)):
                results[index] = ReadResult(outcome=ReadOutcome.MISSING)
        return results

    def land(self) -> None:
        """What is still on its way arrives; after its time it never does."""
        for since_s, memory in self.under_way:
            if self.clock.now() < since_s + LATE_S:
                memory[:] = b"\xee" * len(memory)


def filled(spec: ModelSpec, ranks: int = 1, prompts: Sequence[list[int]] = (PROMPT,)) -> MemoryStore:
    """A store with what a cache had of some prompts; that cache is gone."""
    store = MemoryStore()
    rig = Rig(spec, host_pages=256, store=store, ranks=ranks)
    for prompt in prompts:
        rig.serve(prompt)
    return store


def failed_fetch(store: Late, spec: ModelSpec = FULL, ranks: int = 1) -> Rig:
    """A cache that tried to fetch the prompt, in vain."""
    rig = Rig(spec, device_pages=256, host_pages=160, store=store, ranks=ranks, clock=store.clock)
    ticket = rig.cache.prefetch(rig.cache.lookup(PROMPT))
    rig.settle()
    assert store.under_way and rig.restore(PROMPT) < 10 * PAGE, "nothing failed: the test proves nothing"
    ticket.close()
    rig.settle()
    rig.cache.audit()
    return rig


def serve_from_host(rig: Rig, prompt: list[int]) -> int:
    """Resumes a prompt with nothing of it on the device; every byte that comes from the host is checked."""
    rig.evict_all(Tier.DEVICE)
    return rig.serve(prompt).host


@pytest.mark.parametrize("outcome", [ReadOutcome.FAILED, ReadOutcome.LENGTH, None], ids=["failed", "length", "error"])
@pytest.mark.parametrize("spec", ALL_MODELS.values(), ids=ALL_MODELS)
def test_bytes_that_land_after_a_failure_reach_nobody_else(spec: ModelSpec, outcome: ReadOutcome | None) -> None:
    store = Late(filled(spec))
    store.outcome = outcome
    rig = failed_fetch(store, spec)
    rig.serve(OTHER)  # takes host pages, the lowest that are free
    rig.clock.advance(LATE_S - 0.1)
    store.land()
    assert serve_from_host(rig, OTHER) == 10 * PAGE


@pytest.mark.parametrize("ranks", [1, 3])
def test_a_member_of_a_checkpoint_that_is_missing_does_not_hide_one_that_failed(ranks: int) -> None:
    store = Late(filled(HYBRID, ranks))
    store.lacks = lambda index, reads: reads == 3 and index == 0  # of two window pages and a point
    store.fails = lambda index, reads: reads == 3 and index == 2
    rig = failed_fetch(store, HYBRID, ranks)
    rig.serve(OTHER)
    store.land()
    assert serve_from_host(rig, OTHER) == 10 * PAGE


def test_pages_of_a_failed_transfer_are_free_again_when_its_time_is_over() -> None:
    store = Late(filled(FULL))
    rig = failed_fetch(store)
    assert rig.used(Tier.HOST, Kind.PREFIX) == 10
    rig.clock.advance(LATE_S + 0.1)
    rig.cache.step()
    assert rig.used(Tier.HOST, Kind.PREFIX) == 0
    rig.cache.audit()


def test_what_arrived_beside_a_failure_is_used_and_not_held() -> None:
    store = Late(filled(FULL))
    store.fails = lambda index, reads: index >= 4
    rig = failed_fetch(store)
    assert rig.restore(PROMPT) == 4 * PAGE and rig.used(Tier.HOST, Kind.PREFIX) == 10
    rig.evict_all(Tier.HOST)
    assert rig.used(Tier.HOST, Kind.PREFIX) == 6, "only what failed"


def test_a_store_that_writes_nothing_late_has_its_pages_back_at_once() -> None:
    rig = failed_fetch(Late(filled(FULL), late_write_s=0.0))
    assert rig.used(Tier.HOST, Kind.PREFIX) == 0


def test_held_pages_count_against_what_fetches_may_hold() -> None:
    """A peer that fails one fetch in two never opens the breaker: what it holds must not take the host over."""
    store = Late(filled(FULL))
    rig = failed_fetch(store)
    assert rig.cache._store_tier.link is not None
    assert rig.cache._store_tier.link.held_bytes == 10 * rig.state.arena(Tier.HOST).layout.strides[Kind.PREFIX]


def test_a_store_is_given_back_while_pages_are_still_held() -> None:
    store = Late(filled(FULL))
    rig = failed_fetch(store)
    rig.cache.store.detach()
    assert rig.cache.step().detached == (store,), "its owner need not wait"
    rig.cache.audit()
    rig.serve(OTHER)
    store.land()
    assert serve_from_host(rig, OTHER) == 10 * PAGE
    rig.clock.advance(LATE_S + 0.1)
    rig.cache.step()
    rig.cache.audit()
    rig.evict_all(Tier.DEVICE)
    rig.evict_all(Tier.HOST)
    assert rig.used(Tier.HOST, Kind.PREFIX) == 0 and not rig.cache._store_tier.links


def test_an_operation_given_up_on_holds_its_pages_until_its_late_answer_and_then_some() -> None:
    store = Late(filled(HYBRID))
    rig = Rig(HYBRID, device_pages=256, host_pages=160, store=store)
    ticket = rig.cache.prefetch(rig.cache.lookup(PROMPT))
    rig.store_executor.finish_all()
    rig.cache.step()
    assert any(isinstance(rig.store_executor.op(job).task, FetchCheckpoint) for job in rig.store_executor.pending)
    rig.clock.advance(40.0)
    rig.cache.step()  # no answer in time
    ticket.close()
    used = rig.used(Tier.HOST, Kind.PREFIX)
    for job in rig.store_executor.pending:
        rig.store_executor.finish(job, status=ItemStatus.FAILED)
    rig.cache.step()
    rig.clock.advance(LATE_S - 0.1)
    rig.cache.step()
    assert used and rig.used(Tier.HOST, Kind.PREFIX) == used
    rig.clock.advance(0.2)
    rig.cache.step()
    assert rig.used(Tier.HOST, Kind.PREFIX) == 0
    rig.cache.audit()


PROMPTS = [text(name, pages * PAGE + 1) for name, pages in enumerate((10, 7, 12, 4), start=1)]
WHICH = st.integers(0, len(PROMPTS) - 1)
LIVES = st.lists(
    st.one_of(
        st.tuples(st.just("fetch"), WHICH, st.integers(0, 4)),
        st.tuples(st.just("serve"), WHICH, st.just(0)),
        st.tuples(st.just("resume"), WHICH, st.just(0)),
        st.tuples(st.just("wait"), st.sampled_from([1, 20, 61]), st.just(0)),
        st.tuples(st.just("land"), st.just(0), st.just(0)),
    ),
    max_size=25,
)


@given(spec=st.sampled_from([FULL, HYBRID]), life=LIVES)
def test_no_page_is_used_while_a_failed_transfer_may_write_into_it(spec: ModelSpec, life: list[tuple[str, int, int]]) -> None:
    """Prompts are fetched in part, served, and resumed from a host that is too small for them; bytes land at any moment."""
    store = Late(filled(spec, prompts=PROMPTS))
    rig = Rig(spec, device_pages=256, host_pages=64, store=store, clock=store.clock)
    for what, number, failing in life:
        if what == "fetch":
            store.fails = lambda index, reads, from_here=failing: index >= from_here
            rig.cache.prefetch(rig.cache.lookup(PROMPTS[number])).close()
            ticket = rig.cache.prefetch(rig.cache.lookup(PROMPTS[number]))
            rig.settle()
            ticket.close()
        elif what == "wait":
            store.clock.advance(float(number))
        elif what == "land":
            store.land()
        else:
            if what == "resume":
                rig.evict_all(Tier.DEVICE)
            rig.serve(PROMPTS[number])  # checks every byte that was restored
        rig.settle()
        rig.cache.audit()
