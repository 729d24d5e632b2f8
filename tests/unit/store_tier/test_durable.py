"""By default what a process acknowledged is soon in a store that outlives it, whatever the write policy: one that is killed
finds it again.
"""

from __future__ import annotations

from dataclasses import replace

import pytest

from stepwell import Kind, ModelSpec, Tier, WritePolicy
from stepwell.base.config import StoreConfig
from stepwell.base.tasks import ItemStatus
from stepwell.store.api import Traits
from stepwell.store.memory import MemoryStore
from stepwell.tree.node import LossReason
from stepwell.tree.pruning import discard_ids
from toys import FULL, FULL_POINT, FULL_WINDOW, PAGE, LastingStore, Rig, text

DELAY_S = 30.0
MODELS = pytest.mark.parametrize("spec", [FULL, FULL_POINT, FULL_WINDOW], ids=["full", "point", "window"])
POLICIES = pytest.mark.parametrize("write", list(WritePolicy), ids=[each.value for each in WritePolicy])


def rig(
    spec: ModelSpec, write: WritePolicy, *, pages: int = 128, host_pages: int | None = None, store: LastingStore | None = None,
    durable: bool = True,
) -> Rig:  # fmt: skip
    config = StoreConfig(checkpoint_delay_s=DELAY_S, recompute_tokens_per_s=1.0)
    store = LastingStore() if store is None else store
    host_pages = host_pages or pages
    return Rig(spec, device_pages=pages, host_pages=host_pages, store=store, store_config=config, write=write, durable=durable)


def after_a_kill(here: Rig) -> Rig:
    """Another process over the same store: nothing was closed, and nothing flushed."""
    link = here.cache._store_tier.link
    assert link is not None and isinstance(link.store, LastingStore)
    return rig(here.spec, here.config.write, store=link.store)


def fill_host(here: Rig, *, but: int = 0) -> None:
    """Others take the host's memory, but for some pages."""
    arena = here.state.arena(Tier.HOST)
    free = next(count for count in range(arena.layout.rows(Kind.PREFIX), -1, -1) if arena.fits({Kind.PREFIX: count}))
    arena.alloc({Kind.PREFIX: free - but})


def wait(here: Rig, seconds: float) -> None:
    here.clock.advance(seconds)
    here.settle()


@MODELS
@POLICIES
def test_a_killed_process_finds_what_was_served_a_delay_ago(spec: ModelSpec, write: WritePolicy) -> None:
    here = rig(spec, write)
    prompts = [text(name, 4 * PAGE + 1) for name in range(4)]
    for prompt in prompts:
        here.serve(prompt)
    wait(here, DELAY_S)
    after = after_a_kill(here)
    assert [after.serve_fetched(prompt).store for prompt in prompts] == [4 * PAGE] * 4
    after.idle_check()


@pytest.mark.parametrize("write", [WritePolicy.SELECTIVE, WritePolicy.EXCLUSIVE])
def test_without_it_what_memory_holds_is_not_stored(write: WritePolicy) -> None:
    here = rig(FULL_POINT, write, durable=False)
    here.serve(text(1, 4 * PAGE + 1))
    wait(here, 10 * DELAY_S)
    assert after_a_kill(here).serve_fetched(text(1, 4 * PAGE + 1)).store == 0


@POLICIES
def test_a_conversation_that_never_pauses_is_stored_within_two_delays(write: WritePolicy) -> None:
    here, talk = rig(FULL_POINT, write), text(1, 60 * PAGE)
    turns = range(2, 26)
    for turn in turns:  # one every ten seconds: the next one supersedes each before its time
        here.serve(talk[: turn * PAGE + 1])
        wait(here, DELAY_S / 3)
    found = after_a_kill(here).serve_fetched(talk).store
    assert found >= (turns[-1] - 6) * PAGE, "a minute of turns is six of them"


@MODELS
def test_the_next_turn_saves_what_is_new_and_not_all_of_its_path_again(spec: ModelSpec) -> None:
    """The host's copy of a path is for the way down: once it is stored it may leave, and is not made again."""
    here, talk = rig(spec, WritePolicy.EXCLUSIVE), text(1, 40 * PAGE)
    here.serve(talk[: 20 * PAGE + 1])
    wait(here, DELAY_S)
    here.evict_all(Tier.HOST)
    fill_host(here, but=12)
    before = here.cache.counters["save_pages"]
    here.serve_without_audit(talk[: 22 * PAGE + 1])
    wait(here, DELAY_S)
    assert here.cache.counters["save_pages"] - before <= 2 + 2 + 1, "two pages, and a checkpoint"
    assert after_a_kill(here).serve_fetched(talk[: 22 * PAGE + 1]).store == 22 * PAGE


@MODELS
@POLICIES
def test_far_more_than_memory_holds_is_found_after_a_kill(spec: ModelSpec, write: WritePolicy) -> None:
    here = rig(spec, write, pages=24)
    prompts = [text(name, 4 * PAGE + 1) for name in range(12)]
    for prompt in prompts:
        here.serve(prompt)
        wait(here, 1.0)
    wait(here, DELAY_S)
    after = after_a_kill(here)
    assert sum(after.serve_fetched(prompt).store == 4 * PAGE for prompt in prompts) == 12
    here.idle_check()


def serve_without_the_store(here: Rig, prompt: list[int]) -> None:
    """A whole request while the store answers nothing."""
    with here.open(prompt) as lease:
        while lease.position < lease.num_tokens:
            here.compute(lease, min(here.cache.next_stop(lease) or lease.num_tokens, lease.num_tokens))
            copy(here)
    copy(here)
    here.cache.audit()


def copy(here: Rig) -> None:
    """Lets copies between memories end, and no operation of the store."""
    while here.executor.pending:
        here.executor.finish_all()
        here.cache.step()


@MODELS
@POLICIES
def test_a_burst_of_more_than_the_host_is_found_after_a_kill(spec: ModelSpec, write: WritePolicy) -> None:
    """The device has space for all of it. The host has not, and the store is slow to begin."""
    here = rig(spec, write, pages=128, host_pages=24)
    prompts = [text(name, 4 * PAGE + 1) for name in range(10)]
    for prompt in prompts:
        serve_without_the_store(here, prompt)
    here.settle()
    wait(here, DELAY_S)
    after = after_a_kill(here)
    assert [after.serve_fetched(prompt).store for prompt in prompts] == [4 * PAGE] * len(prompts)
    here.idle_check()


@MODELS
@POLICIES
def test_what_leaves_the_host_before_its_turn_is_stored_first(spec: ModelSpec, write: WritePolicy) -> None:
    here, prompt = rig(spec, write, pages=128), text(1, 8 * PAGE + 1)
    serve_without_the_store(here, prompt)
    assert here.restore(prompt) == 8 * PAGE
    here.evict_idle(Tier.HOST)
    here.evict_idle(Tier.DEVICE)
    here.settle()
    wait(here, DELAY_S)
    assert after_a_kill(here).serve_fetched(prompt).store == 8 * PAGE
    here.idle_check()


@POLICIES
def test_what_the_store_refused_goes_down_at_its_next_use(write: WritePolicy) -> None:
    here, prompt = rig(FULL, write), text(1, 4 * PAGE + 1)
    serve_without_the_store(here, prompt)
    for job in here.store_executor.pending:
        here.store_executor.finish(job, status=ItemStatus.FAILED)
    here.settle()
    assert not here.cache.counters["backup_pages"]
    with here.ready(prompt):
        here.settle()
    assert after_a_kill(here).serve_fetched(prompt).store == 4 * PAGE


def test_what_has_a_time_to_live_is_not_copied_for_the_store() -> None:
    here = rig(FULL_POINT, WritePolicy.EXCLUSIVE)
    fill_host(here)
    here.serve_without_audit(text(1, 4 * PAGE + 1), ttl_s=1000.0)
    assert not here.cache.counters["save_skipped_no_room"]
    here.serve_without_audit(text(2, 4 * PAGE + 1))
    assert here.cache.counters["save_skipped_no_room"]


@pytest.mark.parametrize("store", [None, MemoryStore()], ids=["no store", "a store that ends with the process"])
def test_without_a_store_that_outlives_the_process_it_changes_nothing(store: MemoryStore | None) -> None:
    here = Rig(FULL_POINT, device_pages=64, host_pages=64, write=WritePolicy.EXCLUSIVE, store=store)
    fill_host(here)
    here.serve_without_audit(text(1, 4 * PAGE + 1))
    assert not here.cache.counters["save_skipped_no_room"] and here.cache.store.resumable_after_s is None


@POLICIES
def test_a_store_that_is_attached_later_gets_what_memory_has(write: WritePolicy) -> None:
    here, prompt = Rig(FULL_POINT, device_pages=64, host_pages=64, write=write), text(1, 8 * PAGE + 1)
    here.serve(prompt)
    here.attach(LastingStore())
    wait(here, DELAY_S)
    assert after_a_kill(here).serve_fetched(prompt).store == 8 * PAGE


@pytest.mark.parametrize(("delay_s", "shared", "found"), [(None, False, 60.0), (5.0, False, 10.0), (None, True, 0.0)])
def test_how_old_something_must_be_to_survive_a_kill_is_reported(delay_s: float | None, shared: bool, found: float) -> None:
    class Shared(LastingStore):
        @property
        def traits(self) -> Traits:
            return replace(super().traits, shared=shared)

    here = Rig(FULL, host_pages=64, store=Shared(), store_config=StoreConfig(checkpoint_delay_s=delay_s))
    assert here.cache.store.resumable_after_s == found
    here.cache.store.detach()
    assert here.cache.store.resumable_after_s is None


def test_what_is_exclusive_may_be_lost() -> None:
    assert rig(FULL, WritePolicy.EXCLUSIVE, durable=False).cache.store.resumable_after_s is None


def test_what_waits_for_room_goes_on_waiting_when_the_end_of_it_leaves() -> None:
    """A long run leaves the device from its end: what is left of it is still to be stored."""
    here, prompt = Rig(FULL, device_pages=64, host_pages=64, write=WritePolicy.EXCLUSIVE, durable=True), text(1, 8 * PAGE + 1)
    here.serve(prompt)
    here.evict_all(Tier.HOST)
    here.attach(LastingStore())
    (node,) = [node for node in here.tree.nodes() if node.parent is not None]
    link = here.cache._store_tier.link
    assert link is not None and list(link.unplaced) == [node], "what only the device has waits for memory on the host"
    here.tree.split(node, 4)
    end = node.runs[Tier.DEVICE]
    assert end is not None
    discard_ids(here.tree, Tier.DEVICE, end.ids.copy(), here.state.loss(LossReason.EVICTED, Tier.DEVICE))
    here.settle()
    assert not link.unplaced
    assert after_a_kill(here).serve_fetched(prompt).store == 4 * PAGE
    here.idle_check()
