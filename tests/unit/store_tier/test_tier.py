"""What reaches the store, and what comes back from it: backup, prefetch, tickets, and who is said to have served a token."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import pytest

from stepwell import CacheConfig, Cause, ConfigError, Kind, LeaseError, ModelSpec, Tier, WritePolicy, build_cache
from stepwell.base.config import PrefetchPolicy, StoreConfig
from stepwell.base.tasks import FetchCheckpoint, FetchPages, FindItems, ItemStatus, PutCheckpoint, PutPages
from stepwell.policy.store_use import UNMEASURED_SHARE, StoreTuning
from stepwell.store.api import NO_PARENT, Space, Write, WriteOutcome
from stepwell.store.memory import MemoryStore
from stepwell.store_tier.link import LinkState
from toys import ALL_MODELS, FULL, FULL_POINT, HYBRID, PAGE, SMALL_PAGES, Rig, text
from waiting import step_until

PROMPT = text(1, 10 * PAGE + 1)
WAIT = StoreConfig(prefetch=PrefetchPolicy.WAIT_COMPLETE, checkpoint_delay_s=0)
BEST_EFFORT = StoreConfig(prefetch=PrefetchPolicy.BEST_EFFORT)
ONE_PAGE = StoreTuning(fetch_chunk_bytes=1)


def rig(spec: ModelSpec, store: MemoryStore, **more: object) -> Rig:
    return Rig(spec, device_pages=256, host_pages=256, store=store, **more)  # type: ignore[arg-type]


def filled(spec: ModelSpec, *prompts: list[int]) -> MemoryStore:
    """A store with everything a cache had of some prompts; that cache is gone."""
    store = MemoryStore()
    before = rig(spec, store)
    for prompt in prompts or (PROMPT,):
        before.serve(prompt)
    before.idle_check()
    return store


@pytest.mark.parametrize("spec", ALL_MODELS.values(), ids=ALL_MODELS)
def test_a_new_cache_resumes_from_what_an_old_one_stored(spec: ModelSpec) -> None:
    after = rig(spec, filled(spec))
    sources = after.serve_fetched(PROMPT)
    assert (sources.store, sources.computed) == (10 * PAGE, 1)
    assert after.serve(PROMPT).device == 10 * PAGE
    after.idle_check()


@pytest.mark.parametrize("spec", ALL_MODELS.values(), ids=ALL_MODELS)
def test_without_a_ticket_nothing_is_fetched(spec: ModelSpec) -> None:
    after = rig(spec, filled(spec))
    assert after.serve(PROMPT).computed == len(PROMPT)


@pytest.mark.parametrize("spec", ALL_MODELS.values(), ids=ALL_MODELS)
def test_many_ranks_each_get_their_own_bytes_back(spec: ModelSpec) -> None:
    store = MemoryStore()
    rig(spec, store, ranks=3).serve(PROMPT)
    assert rig(spec, store, ranks=3).serve_fetched(PROMPT).store == 10 * PAGE
    assert rig(spec, store, ranks=2).serve_fetched(PROMPT).store == 0, "another number of ranks cuts pages in another way"


def test_what_one_rank_lacks_nobody_has() -> None:
    store = MemoryStore()
    rig(FULL, store, ranks=2).serve(PROMPT)
    space = sorted({digest for digest, _ in store._values})[0]
    for digest, key in [name for name in store._values if name[0] == space][:-3]:  # the deepest are the oldest
        store._drop((digest, key))
    assert rig(FULL, store, ranks=2).serve_fetched(PROMPT).store == 3 * PAGE


def test_only_what_is_not_in_memory_is_fetched() -> None:
    after = rig(FULL, filled(FULL))
    after.serve(PROMPT[: 4 * PAGE + 1])
    ticket = after.cache.prefetch(after.cache.lookup(PROMPT))
    ask = after.store_executor.op(after.store_executor.pending[-1]).task
    assert isinstance(ask, FindItems) and len(ask.pages) == 6
    after.settle()
    assert after.state.counters["fetched_pages"] == 6
    sources = after.serve(PROMPT, ticket=ticket)
    assert (sources.device, sources.store, sources.computed) == (4 * PAGE, 6 * PAGE, 1)


def test_a_prompt_in_memory_asks_the_store_for_nothing() -> None:
    after = rig(FULL, filled(FULL))
    after.serve(PROMPT)
    sent = after.store_executor.num_submitted
    ticket = after.cache.prefetch(after.cache.lookup(PROMPT))
    assert ticket.ready and ticket.complete and after.store_executor.num_submitted == sent


@pytest.mark.parametrize("spec", [FULL_POINT, HYBRID], ids=["point", "hybrid"])
def test_pages_beyond_the_deepest_checkpoint_are_not_fetched(spec: ModelSpec) -> None:
    store = filled(spec, PROMPT)  # a checkpoint at the end of page 10
    longer = PROMPT[:-1] + text(2, 4 * PAGE)
    rig(spec, store).serve(longer)  # and one at page 13, behind pages of its own
    after = rig(spec, store)
    ticket = after.fetched(PROMPT[:-1] + text(2, 2 * PAGE) + text(3, PAGE))  # pages to 12 are stored, the checkpoint at 10 is
    assert after.state.counters["fetched_pages"] == 10
    ticket.close()
    after.idle_check()


def test_a_checkpoint_alone_is_fetched_when_its_pages_are_in_memory() -> None:
    after = rig(FULL_POINT, filled(FULL_POINT))
    with after.ready(PROMPT) as lease:  # pages without the checkpoint: it stops short of it
        after.compute(lease, 9 * PAGE)
        after.compute(lease, 10 * PAGE - 1)
    after.settle()
    assert after.restore(PROMPT) == 0
    ticket = after.fetched(PROMPT)
    assert after.state.counters["fetched_pages"] == 1 and after.state.counters["fetched_checkpoints"] == 1
    assert after.serve(PROMPT, ticket=ticket).computed == 1


def test_one_fetch_serves_everybody_who_wants_the_same_pages() -> None:
    after = rig(HYBRID, filled(HYBRID))
    first = after.cache.prefetch(after.cache.lookup(PROMPT))
    after.store_executor.finish_all()
    after.cache.step()  # asked; fetching
    second = after.cache.prefetch(after.cache.lookup(PROMPT))
    after.settle()
    assert first.complete and second.complete
    assert after.state.counters["fetched_pages"] == 10 and after.state.counters["fetched_checkpoints"] == 1
    assert after.serve(PROMPT, ticket=first).store == 10 * PAGE
    assert second.from_store.all()
    second.close()
    after.idle_check()


def test_a_prompt_that_branches_off_shares_only_what_it_shares() -> None:
    branch = PROMPT[: 4 * PAGE] + text(2, 4 * PAGE)
    after = rig(FULL, filled(FULL, PROMPT, branch))
    first = after.cache.prefetch(after.cache.lookup(PROMPT))
    second = after.cache.prefetch(after.cache.lookup(branch))
    after.settle()
    assert after.state.counters["fetched_pages"] == 10 + 3
    assert after.serve(branch, ticket=second).store == 7 * PAGE
    assert after.serve(PROMPT, ticket=first).store == 10 * PAGE  # they came while it waited, whichever ticket loaded four of them
    after.idle_check()


def test_closing_one_of_two_tickets_leaves_the_fetch_to_the_other() -> None:
    after = rig(FULL, filled(FULL))
    first = after.cache.prefetch(after.cache.lookup(PROMPT))
    after.store_executor.finish_all()
    after.cache.step()
    second = after.cache.prefetch(after.cache.lookup(PROMPT))
    after.store_executor.finish_all()
    first.close()
    after.cache.step()
    after.settle()
    assert after.serve(PROMPT, ticket=second).store == 10 * PAGE
    after.idle_check()


def test_a_ticket_that_is_closed_calls_its_fetch_off_and_keeps_what_arrived() -> None:
    after = rig(FULL, filled(FULL), store_config=BEST_EFFORT, store_tuning=ONE_PAGE)
    ticket = after.cache.prefetch(after.cache.lookup(PROMPT))
    assert ticket.ready and not ticket.complete, "best effort never waits"
    after.store_executor.finish_all()
    after.cache.step()
    chunks = after.store_executor.pending
    assert len(chunks) == 10
    for job in chunks[:3]:
        after.store_executor.finish(job)
    after.cache.step()
    lease = after.open(PROMPT, ticket=ticket)
    assert lease.sources.store == 3 * PAGE
    after.settle()
    assert after.state.counters["fetched_pages"] == 3
    after.engine.check(lease)
    after.prefill(lease)
    lease.__exit__(None, None, None)
    assert after.serve(PROMPT).computed == 1
    after.idle_check()


def test_a_hybrid_that_is_stopped_early_falls_back_to_a_checkpoint_before() -> None:
    store = MemoryStore()
    prompt = text(1, 40 * PAGE + 1)
    before = rig(FULL_POINT, store)
    for pages in (10, 20, 30, 40):
        before.serve(prompt[: pages * PAGE + 1])
    after = rig(FULL_POINT, store, store_config=BEST_EFFORT, store_tuning=ONE_PAGE)
    ticket = after.cache.prefetch(after.cache.lookup(prompt))
    after.store_executor.finish_all()
    after.cache.step()
    for job in after.store_executor.pending[:27]:  # 25 pages and the checkpoints at 10 and 20
        after.store_executor.finish(job)
    after.cache.step()
    lease = after.open(prompt, ticket=ticket)
    assert lease.resume == 20 * PAGE and lease.sources.store == 20 * PAGE
    lease.__exit__(None, None, None)
    after.idle_check()


def test_a_ticket_waits_as_long_as_its_policy_says() -> None:
    after = rig(FULL, filled(FULL), store_config=StoreConfig(recompute_tokens_per_s=len(PROMPT) / 20))
    ticket = after.cache.prefetch(after.cache.lookup(PROMPT))
    limit_s = UNMEASURED_SHARE * 20 * (len(PROMPT) - 1) / len(PROMPT)
    after.clock.advance(limit_s - 0.001)
    assert not ticket.ready
    after.clock.advance(0.002)
    assert ticket.ready and not ticket.complete
    ticket.close()
    after.settle()
    after.idle_check()


def test_no_ticket_waits_longer_than_the_operator_says() -> None:
    for config, most_s in ((StoreConfig(), 30.0), (StoreConfig(prefetch_timeout_s=0.5), 0.5)):
        after = rig(FULL, filled(FULL), store_config=replace(config, recompute_tokens_per_s=1e-3))
        ticket = after.cache.prefetch(after.cache.lookup(PROMPT))
        assert ticket.deadline_s - ticket.started_s == most_s
        ticket.close()
        after.settle()


def test_what_is_stored_already_is_not_sent_again() -> None:
    store = filled(FULL)
    after = rig(FULL, store)
    held = dict(store._values)
    after.serve(PROMPT)
    assert after.state.counters["backup_pages"] == 10 and after.state.counters["backup_bytes"] == 0
    assert store._values.keys() == held.keys()


def test_what_came_from_the_store_is_not_offered_to_it() -> None:
    after = rig(HYBRID, filled(HYBRID))
    after.serve_fetched(PROMPT)
    puts = after.state.counters["backup_pages"], after.state.counters["backup_checkpoints"]
    assert puts == (0, 0)


def test_parents_go_before_children_and_members_before_their_manifest() -> None:
    here = rig(FULL_POINT, MemoryStore())
    with here.open(PROMPT) as lease:
        while lease.position < len(PROMPT):
            here.compute(lease, min(lease.position + 2 * PAGE, len(PROMPT)))
            here.executor.finish_all()
            here.cache.step()
    tasks = [here.store_executor.op(job).task for job in here.store_executor.pending]
    kinds = [type(task) for task in tasks]
    assert kinds == [PutPages] * 4, "no more than four are under way; the rest waits in line"
    firsts = [task.first for task in tasks if isinstance(task, PutPages)]
    assert firsts == sorted(firsts)
    here.store_executor.finish_all()
    here.cache.step()
    assert [type(here.store_executor.op(job).task) for job in here.store_executor.pending] == [PutPages, PutCheckpoint]


def test_a_node_may_split_while_it_is_backed_up() -> None:
    store = MemoryStore()
    here = rig(FULL, store)
    with here.ready(PROMPT) as lease:
        here.compute(lease, len(PROMPT))
        here.executor.finish_all()
        here.cache.step()
    assert here.store_executor.pending
    here.serve_without_audit(PROMPT[: 4 * PAGE] + text(2, 3 * PAGE))
    here.settle()
    assert rig(FULL, store).serve_fetched(PROMPT).store == 10 * PAGE


def test_a_node_may_be_evicted_while_it_waits_in_line() -> None:
    here = rig(FULL, MemoryStore(), store_config=StoreConfig(), store_tuning=StoreTuning(backup_bytes=1))
    with here.ready(PROMPT) as lease:
        here.compute(lease, len(PROMPT))
    here.executor.finish_all()
    here.cache.step()
    here.evict_idle(Tier.DEVICE)
    here.evict_idle(Tier.HOST)
    here.settle()
    here.idle_check()


def test_a_backup_that_fails_is_tried_again_at_the_next_use() -> None:
    store = MemoryStore()
    here = rig(FULL, store)
    with here.ready(PROMPT) as lease:
        here.compute(lease, len(PROMPT))
    here.executor.finish_all()
    here.cache.step()
    for job in here.store_executor.pending:
        here.store_executor.finish(job, status=ItemStatus.FAILED)
    report = here.cache.step()
    assert report.failures and here.state.counters["backup_failures"] == 1 and not store._values
    here.serve(PROMPT)
    assert len(store._values) == 10


class StrictStore(MemoryStore):
    """Has no space for what stands on nothing, nor for more than `most` values. A test that asks too often has failed."""

    def __init__(self, most: int = 1000) -> None:
        super().__init__()
        self.most = most
        self.num_asked = 0

    def write_from(self, space: Space, writes: Sequence[Write]) -> list[WriteOutcome]:
        self.num_asked += 1
        if self.num_asked > 50:
            pytest.fail("the same is tried for ever")  # no Exception, which an executor would take for the store's
        return [outcome for write in writes for outcome in self._judged(space, write)]

    def _judged(self, space: Space, write: Write) -> list[WriteOutcome]:
        stands = write.parent == NO_PARENT or (space.digest, write.parent) in self._values
        return super().write_from(space, [write]) if stands and len(self._values) < self.most else [WriteOutcome.NO_ROOM]

    def lose(self, most: int) -> None:
        """Gives up values, of each path the deepest first."""
        for name in list(self._values)[:most]:
            self._drop(name)


@pytest.mark.parametrize("lost", [1, 10])
def test_a_path_whose_beginning_was_given_up_by_the_store_is_whole_again_after_its_next_use(lost: int) -> None:
    store = StrictStore()
    here = rig(FULL, store)
    here.serve(PROMPT)
    store.lose(lost)
    longer = PROMPT[:-1] + text(2, 40 * PAGE + 1)  # more than one operation takes: it stays in line
    here.serve(longer)
    assert here.state.counters["backup_failures"] == 1, "no more than was under way: what was refused is not tried again"
    here.serve(longer)
    assert len(store._values) == 50 and here.state.counters["backup_failures"] == 1
    here.idle_check()


def test_what_refused_pages_stand_on_goes_down_again_at_once() -> None:
    store = StrictStore()
    here = rig(FULL, store)
    here.serve(PROMPT)
    here.serve(PROMPT[: 8 * PAGE] + text(3, PAGE + 1))  # a branch: what is shared is a node of its own
    store.lose(11)
    here.serve(PROMPT[: 8 * PAGE] + text(2, 40 * PAGE + 1))
    assert len(store._values) == 8
    here.idle_check()


@pytest.mark.parametrize("spec", [FULL, HYBRID], ids=["full", "hybrid"])
@pytest.mark.parametrize("most", [0, 16, 20])  # 16: a page is refused where an operation begins
def test_a_store_that_stays_full_is_not_asked_for_ever(spec: ModelSpec, most: int) -> None:
    store = StrictStore(most)
    here = rig(spec, store)
    for _ in range(3):
        before = store.num_asked
        here.serve(text(1, 50 * PAGE + 1))
        assert store.num_asked - before <= 4
    assert len(store._values) == most
    here.idle_check()


def test_what_one_store_refused_is_offered_to_the_next() -> None:
    here = rig(HYBRID, StrictStore(0))
    here.serve(PROMPT)
    here.cache.store.detach()
    store = MemoryStore()
    here.attach(store)
    here.settle()
    assert rig(HYBRID, store).serve_fetched(PROMPT).store == 10 * PAGE


def test_a_path_that_waits_too_long_is_given_up() -> None:
    tuning = StoreTuning(backup_bytes=1, backup_age_s=5.0, op_timeout_s=1000)
    here = rig(FULL, MemoryStore(), store_config=StoreConfig(), store_tuning=tuning)
    for name in range(3):
        with here.open(text(name, 4 * PAGE)) as lease:
            here.compute(lease, 4 * PAGE)
        here.executor.finish_all()
        here.cache.step()
    here.clock.advance(6.0)
    here.settle()
    assert here.state.counters["backup_dropped_too_old"] >= 1
    here.idle_check()


def test_what_nobody_came_by_for_is_not_given_up() -> None:
    """An engine takes minutes for one pass, or has nothing to do for as long: the store was free, and is when it goes on."""
    store = MemoryStore()
    here = rig(FULL, store, store_tuning=StoreTuning(backup_bytes=1, op_timeout_s=1000))
    for name in range(3):
        with here.open(text(name, 4 * PAGE)) as lease:
            here.compute(lease, 4 * PAGE)
        here.executor.finish_all()
        here.cache.step()
    assert here.cache._store_tier.link is not None and here.cache._store_tier.link.waiting
    here.clock.advance(600.0)
    here.settle()
    assert not here.state.counters["backup_dropped_too_old"]
    found = [rig(FULL, store).serve_fetched(text(name, 4 * PAGE)).store for name in range(3)]
    assert found == [3 * PAGE] * 3, "all but the page that is always computed"


def test_the_line_has_an_end() -> None:
    here = rig(FULL, MemoryStore(), store_config=StoreConfig(), store_tuning=StoreTuning(backup_bytes=1, backup_queue=2))
    for name in range(6):
        with here.open(text(name, 4 * PAGE)) as lease:
            here.compute(lease, 4 * PAGE)
        here.executor.finish_all()
    here.cache.step()
    assert here.state.counters["backup_dropped_queue_full"] >= 1
    here.settle()


def test_write_back_stores_what_the_host_gives_up() -> None:
    store = MemoryStore()
    here = Rig(HYBRID, device_pages=64, host_pages=192, store=store, write=WritePolicy.EXCLUSIVE)
    prompts = [text(name, 10 * PAGE + 1) for name in range(32)]
    for prompt in prompts:
        here.serve(prompt)
    assert store._values, "the host overflowed and nothing was stored"
    fetched = sum(here.serve_fetched(prompt).store for prompt in prompts)
    assert fetched > 0
    here.idle_check()


def test_selective_stores_what_was_used_again_and_nothing_else() -> None:
    store = MemoryStore()
    here = rig(FULL, store, write=WritePolicy.SELECTIVE)
    here.serve(PROMPT)
    assert not store._values
    here.serve(PROMPT)
    here.serve(PROMPT)
    assert len(store._values) == 10


def test_a_store_comes_and_goes_with_requests_in_flight() -> None:
    old, new = filled(FULL), MemoryStore()
    here = rig(FULL, old)
    ticket = here.cache.prefetch(here.cache.lookup(PROMPT))
    here.store_executor.finish_all()
    here.cache.step()
    store_executor = here.store_executor
    here.cache.store.detach()
    assert here.cache.store.state is LinkState.DETACHED
    here.attach(new)
    store_executor.finish_all()
    report = here.cache.step()
    assert report.detached == (old,), "what was under way has come home, and the store may be closed"
    assert here.serve(PROMPT, ticket=ticket).store == 10 * PAGE, "nothing that was on its way is lost"
    here.settle()
    assert rig(FULL, new).serve_fetched(PROMPT).store == 10 * PAGE, "the new store is offered what is on the host"
    here.idle_check()


def test_attaching_twice_and_detaching_nothing_are_errors() -> None:
    here = rig(FULL, MemoryStore())
    with pytest.raises(ConfigError, match="attached already"):
        here.attach(MemoryStore())
    here.cache.store.detach()
    with pytest.raises(ConfigError, match="no store"):
        here.cache.store.detach()
    with pytest.raises(ConfigError, match="host_bytes"):
        Rig(FULL, device_pages=64).cache.store.attach(MemoryStore())
    with pytest.raises(ConfigError, match="host_pages"):
        Rig(FULL, device_pages=64, host_pages=64).cache.store.attach(MemoryStore())


def test_a_ticket_is_for_its_own_prompt() -> None:
    here = rig(FULL, filled(FULL))
    ticket = here.fetched(PROMPT)
    with pytest.raises(LeaseError, match="another prompt"):
        here.open(text(2, 20), ticket=ticket)
    ticket.close()
    ticket.close()
    here.idle_check()


def test_fetches_hold_no_more_than_their_share_of_the_host() -> None:
    prompts = [text(name, 8 * PAGE + 1) for name in range(8)]
    store = filled(FULL, *prompts)
    here = Rig(FULL, device_pages=256, host_pages=64, store=store)
    tickets = [here.fetched(prompt) for prompt in prompts]
    assert here.used(Tier.HOST, Kind.PREFIX) <= 32 and here.state.counters["prefetch_no_room"]
    for ticket in tickets:
        ticket.close()
    here.idle_check()


def test_a_small_fetch_finds_room_beside_one_that_holds_most_of_the_host() -> None:
    large, *small = [text(1, 80 * PAGE + 1), *(text(name, 2 * PAGE + 1) for name in range(2, 5))]
    store = filled(FULL, large, *small)
    here = Rig(FULL, device_pages=256, host_pages=96, store=store)
    tickets = [here.fetched(prompt) for prompt in (large, *small)]
    fetched = [int(ticket.from_store.sum()) for ticket in tickets]
    assert fetched == [80, 2, 2, 2], "each takes no more than half of what is left"
    assert here.used(Tier.HOST, Kind.PREFIX) <= 90, "a sixteenth is left for what the device saves"
    for ticket in tickets:
        ticket.close()
    here.idle_check()


def test_a_cleared_namespace_gets_nothing_back_from_the_store() -> None:
    here = rig(FULL, filled(FULL))
    here.cache.clear()
    assert here.serve_fetched(PROMPT).computed == len(PROMPT), "weights may have changed under the same name"


def test_namespaces_never_meet_in_a_store() -> None:
    here = rig(FULL, filled(FULL))
    for other in (
        here.cache.namespace_for(salt="x"),
        here.cache.namespace_for(adapter="x"),
        here.cache.namespace_for(tenant="x"),
    ):
        ticket = here.cache.prefetch(here.cache.lookup(PROMPT, namespace=other))
        here.settle()
        assert ticket.complete and not ticket.from_store.any()
        ticket.close()


def test_explain_names_a_store_that_is_switched_off() -> None:
    here = rig(FULL, filled(FULL))
    for _ in range(3):
        ticket = here.cache.prefetch(here.cache.lookup(PROMPT))
        for job in here.store_executor.pending:
            here.store_executor.finish(job, status=ItemStatus.FAILED)
        here.cache.step()
        ticket.close()
    assert here.cache.store.state is LinkState.SWITCHED_OFF
    assert here.cache.explain(PROMPT).cause is Cause.STORE_OFF
    sent = here.store_executor.num_submitted
    assert here.cache.prefetch(here.cache.lookup(PROMPT)).ready and here.store_executor.num_submitted == sent
    here.clock.advance(1.5)
    assert here.serve_fetched(PROMPT).store == 10 * PAGE, "it is tried again after a while"
    assert here.cache.store.state is LinkState.ATTACHED


def test_a_store_that_never_answers_costs_a_miss_and_holds_its_pages() -> None:
    waits = StoreConfig(prefetch=PrefetchPolicy.WAIT_COMPLETE)
    here = rig(FULL, filled(FULL), store_config=waits, store_tuning=StoreTuning(op_timeout_s=5.0))
    ticket = here.cache.prefetch(here.cache.lookup(PROMPT))
    here.store_executor.finish_all()
    here.cache.step()
    (fetch,) = here.store_executor.pending
    assert isinstance(here.store_executor.op(fetch).task, FetchPages)
    here.clock.advance(6.0)
    report = here.cache.step()
    assert ticket.ready and "no answer" in report.failures[0]
    assert here.serve_beside_store(PROMPT, ticket) == len(PROMPT)
    assert here.used(Tier.HOST, Kind.PREFIX) >= 10, "it may still be writing there"
    here.settle()
    here.idle_check()


def test_the_cache_works_with_threads() -> None:
    store = MemoryStore()
    config = CacheConfig(device_bytes=64 * 1024, host_bytes=64 * 1024)
    for expected in (0, 10 * PAGE):
        cache = build_cache(HYBRID, config, tuning=SMALL_PAGES)
        cache.store.attach(store, replace(WAIT, recompute_tokens_per_s=1.0))  # worth it, however busy the machine is
        ticket = cache.prefetch(cache.lookup(PROMPT))
        step_until(cache, lambda: ticket.ready)  # noqa: B023 - called at once
        with cache.acquire(cache.lookup(PROMPT), ticket=ticket) as lease:
            assert lease.sources.store == expected
            step_until(cache, lambda: lease.ready)
            while lease.position < len(PROMPT):
                upto = min(cache.next_stop(lease) or len(PROMPT), len(PROMPT))
                cache.grow(lease, upto)
                cache.commit(lease, upto)
                step_until(cache, lambda: lease.ready)
        cache.close()
        cache.audit()


def test_a_checkpoint_is_one_operation() -> None:
    here = rig(HYBRID, filled(HYBRID))
    ticket = here.cache.prefetch(here.cache.lookup(PROMPT))
    here.store_executor.finish_all()
    here.cache.step()
    tasks = [here.store_executor.op(job).task for job in here.store_executor.pending]
    assert sum(isinstance(task, FetchCheckpoint) for task in tasks) == 1
    ticket.close()
    here.settle()
    here.idle_check()
