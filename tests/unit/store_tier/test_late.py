"""Under `exclusive` the store gets what leaves memory, and evicts first what memory has too."""

from __future__ import annotations

from dataclasses import replace

import pytest

from stepwell import Tier, WritePolicy
from stepwell.base.config import StoreConfig
from stepwell.base.errors import StoreError
from stepwell.base.ids import Kind, Level
from stepwell.policy.store_victims import StoreVictimEstimate
from stepwell.policy.value import ValueClass
from stepwell.store.api import Store, StoreSize, Traits
from stepwell.store.memory import MemoryStore
from stepwell.store.wrappers import Wrapper
from stepwell.store_tier import late
from stepwell.tiers.state import Leaving
from stepwell.tree.checkpoints import drop_residency
from stepwell.tree.node import LossReason
from stepwell.tree.pruning import discard_ids
from toys import FULL, FULL_POINT, FULL_WINDOW, PAGE, Rig, text

CONFIG = StoreConfig(checkpoint_delay_s=0, recompute_tokens_per_s=1.0)
MODELS = [FULL, FULL_POINT]
EARLY = 2  # evictions do not wait for a store that has taken nothing yet: this small tier loses its first pages


def rig(spec=FULL_POINT, *, write: WritePolicy = WritePolicy.EXCLUSIVE, pages: int = 24) -> Rig:  # type: ignore[no-untyped-def]
    return Rig(spec, device_pages=pages, host_pages=pages, store=MemoryStore(), store_config=CONFIG, write=write)


def store_of(here: Rig) -> MemoryStore:
    link = here.cache._store_tier.link
    assert link is not None and isinstance(link.store, MemoryStore)
    return link.store


def levels(here: Rig) -> set[Level]:
    """What the store's values are worth that nothing stands on."""
    values = store_of(here)._values
    parents = {(name[0], value.parent) for name, value in values.items()}
    return {value.level for name, value in values.items() if name not in parents}


def serve_many(here: Rig, names: range) -> None:
    for name in names:
        here.clock.advance(1)
        here.serve(text(name, 4 * PAGE + 1))
        here.settle()


@pytest.mark.parametrize("spec", MODELS)
def test_nothing_is_stored_while_memory_has_room(spec) -> None:  # type: ignore[no-untyped-def]
    here = rig(spec)
    serve_many(here, range(3))
    assert not store_of(here).used_bytes
    through = rig(spec, write=WritePolicy.THROUGH)
    serve_many(through, range(3))
    assert store_of(through).used_bytes


@pytest.mark.parametrize("spec", MODELS)
def test_what_left_memory_comes_back_from_the_store(spec) -> None:  # type: ignore[no-untyped-def]
    here = rig(spec)
    serve_many(here, range(20))
    assert here.restore(text(EARLY, 4 * PAGE + 1)) < 4 * PAGE, "it should have left memory"
    assert here.serve_fetched(text(EARLY, 4 * PAGE + 1)).store == 4 * PAGE
    here.idle_check()


@pytest.mark.parametrize("spec", MODELS)
def test_what_only_the_device_has_is_stored_when_the_cache_is_closed(spec) -> None:  # type: ignore[no-untyped-def]
    here = rig(spec, write=WritePolicy.EXCLUSIVE)
    serve_many(here, range(8))
    prompts = [text(name, 4 * PAGE + 1) for name in range(8) if here.restore(text(name, 4 * PAGE + 1)) == 4 * PAGE]
    alone = [node for node in here.tree.nodes() if node.runs[Tier.DEVICE] and not node.runs[Tier.HOST]]
    assert alone and len(prompts) > 2, "the device alone has nothing, so this shows nothing"
    store = store_of(here)
    assert here.cache.close()
    after = Rig(spec, device_pages=256, host_pages=256, store=store, store_config=CONFIG)
    assert [after.serve_fetched(prompt).store for prompt in prompts] == [4 * PAGE] * len(prompts)


class Unlevelled(MemoryStore):
    """A store that cannot learn what memory has too: nothing waits until it leaves memory."""

    @property
    def traits(self) -> Traits:
        return replace(super().traits, levels=False)


def test_closing_stores_what_only_the_device_has_though_the_store_knows_no_levels() -> None:
    store = Unlevelled()
    here = Rig(FULL_POINT, device_pages=64, host_pages=24, store=store, store_config=CONFIG, write=WritePolicy.EXCLUSIVE)
    serve_many(here, range(8))
    link = here.cache._store_tier.link
    assert link is not None and not link.is_late
    assert any(node.runs[Tier.DEVICE] and not node.runs[Tier.HOST] for node in here.tree.nodes()), "this shows nothing"
    assert here.cache.close()
    after = Rig(FULL_POINT, device_pages=256, host_pages=256, store=store, store_config=CONFIG)
    assert [after.serve_fetched(text(name, 4 * PAGE + 1)).store for name in range(8)] == [4 * PAGE] * 8


def test_closing_ends_though_the_host_never_has_room_for_what_the_device_has() -> None:
    here = Rig(FULL, device_pages=64, host_pages=8, store=MemoryStore(), store_config=CONFIG, write=WritePolicy.EXCLUSIVE)
    here.serve(text(1, 40 * PAGE + 1))
    here.cache.close()
    assert here.state.counters["backup_dropped_no_room"] == 1, "it was not even tried"


def test_what_a_stored_checkpoint_stands_on_follows_it_when_it_leaves_the_device() -> None:
    """A checkpoint leaves the host while the device alone has its pages. They have to go down too, though by then nothing in
    memory can use them.
    """
    here, prompt = rig(pages=64), text(1, 4 * PAGE + 1)
    here.serve(prompt)
    (node,) = [node for node in here.tree.nodes() if node.checkpoints]
    (checkpoint,) = node.checkpoints.values()
    device, host = checkpoint.ready_in(Tier.DEVICE), node.runs[Tier.HOST]
    assert device is not None and host is not None and checkpoint.ready_in(Tier.HOST) is not None
    drop_residency(here.tree, device, here.state.loss(LossReason.EVICTED, Tier.DEVICE))
    discard_ids(here.tree, Tier.HOST, host.ids.copy(), here.state.loss(LossReason.EVICTED, Tier.HOST))
    for tier in (Tier.HOST, Tier.DEVICE, Tier.HOST):
        here.evict_all(tier)
        here.settle()
    assert here.restore(prompt) == 0, "it should have left memory"
    assert here.serve_fetched(prompt).store == 4 * PAGE
    here.idle_check()


def test_what_memory_can_still_use_is_not_stored_with_the_end_of_its_path() -> None:
    """The last checkpoint of a branch leaves memory, and that of the trunk stays: so do the trunk's pages."""
    here, trunk = rig(pages=256), text(1, 4 * PAGE)
    prompt, other = [*trunk, *text(2, 4 * PAGE + 1)], [*trunk, *text(3, 4 * PAGE + 1)]
    for each in ([*trunk, 0], other, prompt):
        here.clock.advance(1)
        here.serve(each)
        here.settle()
    last = here.cache.lookup(prompt).checkpoint
    assert last is not None and last.page == 8
    device, host = last.residencies
    assert device is not None and host is not None and not store_of(here).used_bytes
    drop_residency(here.tree, device, here.state.loss(LossReason.EVICTED, Tier.DEVICE))
    assert here.cache._store_tier.before_eviction(host) is Leaving.AT_ONCE
    drop_residency(here.tree, host, here.state.loss(LossReason.EVICTED, Tier.HOST))
    here.settle()
    assert here.cache.counters["backup_pages"] == 4, "pages were stored that memory can use"
    assert here.restore(prompt) == 4 * PAGE
    for tier in (Tier.DEVICE, Tier.HOST):
        here.evict_all(tier)
        here.settle()
    assert here.restore(prompt) == 0, "it should have left memory"
    assert here.serve_fetched(prompt).store == 8 * PAGE
    here.idle_check()


def filled(prompt: list[int]) -> MemoryStore:
    """A store that has a prompt."""
    before = Rig(FULL, device_pages=256, host_pages=256, store=MemoryStore(), store_config=CONFIG)
    before.serve(prompt)
    before.settle()
    return store_of(before)


def test_a_prompt_of_more_than_half_the_host_is_fetched_while_nobody_else_fetches() -> None:
    prompt = text(1, 40 * PAGE + 1)
    here = Rig(FULL, device_pages=64, host_pages=64, store=filled(prompt), store_config=CONFIG, write=WritePolicy.EXCLUSIVE)
    assert here.serve_fetched(prompt).store == 40 * PAGE
    here.idle_check()


def test_a_prompt_that_the_device_cannot_hold_is_not_fetched() -> None:
    prompt = text(1, 40 * PAGE + 1)
    here = Rig(FULL, device_pages=32, host_pages=256, store=filled(prompt), store_config=CONFIG, write=WritePolicy.EXCLUSIVE)
    ticket = here.fetched(prompt)
    assert not ticket.asked and not here.used(Tier.HOST, Kind.PREFIX)
    assert here.cache.counters["prefetch_skipped_too_large"] == 1
    ticket.close()
    here.idle_check()


def test_what_came_back_is_expendable_in_the_store_until_it_leaves_again() -> None:
    here = rig()
    serve_many(here, range(20))
    assert Level.EXPENDABLE not in levels(here)
    here.serve_fetched(text(EARLY, 4 * PAGE + 1))
    here.settle()
    assert Level.EXPENDABLE in levels(here)
    serve_many(here, range(30, 50))
    assert here.serve_fetched(text(EARLY, 4 * PAGE + 1)).store == 4 * PAGE


def test_a_superseded_checkpoint_is_expendable_once_a_later_one_is_stored() -> None:
    here = rig(write=WritePolicy.THROUGH, pages=64)
    prompt = text(1, 20 * PAGE)
    here.serve(prompt[: 4 * PAGE + 1])
    here.settle()
    assert levels(here) == {Level.NORMAL}
    here.clock.advance(1)
    here.serve(prompt[: 8 * PAGE + 1])
    here.settle()
    assert levels(here) == {Level.EXPENDABLE, Level.NORMAL}
    puts = here.cache.counters["backup_pages"]
    assert puts and sum(here.cache._store_tier.times["put"].counts) == 4, "hints count as writes"
    assert here.serve_fetched(prompt[: 8 * PAGE + 1]).total == 8 * PAGE + 1


def test_what_has_a_priority_is_valuable() -> None:
    here = rig(write=WritePolicy.THROUGH, pages=64)
    here.serve(text(1, 4 * PAGE + 1), priority=5)
    here.settle()
    assert levels(here) == {Level.VALUABLE}


def test_what_is_on_the_host_is_stored_before_the_store_goes() -> None:
    here = rig()
    serve_many(here, range(3))
    here.evict_all(Tier.DEVICE)
    here.cache._store_tier.end_deferral()
    here.settle()
    after = Rig(FULL_POINT, host_pages=64, device_pages=64, store=store_of(here), store_config=CONFIG)
    assert after.serve_fetched(text(0, 4 * PAGE + 1)).store == 4 * PAGE


def test_a_store_is_given_back_though_things_were_in_line_for_it() -> None:
    here = rig()
    serve_many(here, range(3))
    here.evict_all(Tier.DEVICE)
    link, store = here.cache._store_tier.link, store_of(here)
    assert link is not None
    link.left_bytes = here.config.host_bytes or 0
    late.keep_clean(here.state, link)
    assert link.ahead, "nothing was in line"
    here.cache.store.detach()
    given_back: list[object] = []
    for _ in range(50):
        here.executor.finish_all()
        here.store_executor.finish_all()
        given_back += here.cache.step().detached
    assert given_back == [store]


@pytest.mark.parametrize("spec", MODELS)
def test_what_is_on_the_host_is_stored_before_a_flush_empties_it(spec) -> None:  # type: ignore[no-untyped-def]
    here = rig(spec)
    serve_many(here, range(3))
    here.evict_all(Tier.DEVICE)
    here.cache.flush()
    here.settle()
    assert here.restore(text(0, 4 * PAGE + 1)) == 0
    assert here.serve_fetched(text(0, 4 * PAGE + 1)).store == 4 * PAGE
    here.idle_check()


@pytest.mark.parametrize("short_bytes", range(16, 160, 16))
def test_a_checkpoint_is_stored_with_what_it_shares_with_one_that_is_expendable(short_bytes: int) -> None:
    here, prompt = rig(FULL_WINDOW, write=WritePolicy.THROUGH, pages=64), text(1, 5 * PAGE + 1)
    serve_many(here, range(2, 6))
    here.serve(prompt[: 4 * PAGE + 1])
    here.settle()
    store = store_of(here)
    digest, manifest = list(store._values)[-1]
    store.relevel(store._sizes[digest].space, [manifest], Level.EXPENDABLE)
    store._budget_bytes = store.used_bytes - short_bytes
    here.clock.advance(1)
    here.serve(prompt)
    here.settle()
    after = Rig(FULL_WINDOW, device_pages=64, host_pages=64, store=store, store_config=CONFIG)
    assert after.serve_fetched(prompt).store == 5 * PAGE


def test_what_has_a_time_to_live_never_reaches_the_store() -> None:
    """Neither its pages nor its checkpoints, though those would find their pages in memory."""
    here = rig(write=WritePolicy.EXCLUSIVE)
    for name in range(12):
        here.clock.advance(1)
        here.serve(text(name, 4 * PAGE + 1), ttl_s=1000.0)
        here.settle()
    assert here.cache.counters["evicted_host_checkpoints"], "nothing had to leave"
    here.cache.flush()
    here.settle()
    assert not store_of(here).used_bytes
    here.idle_check()


def test_a_run_that_is_cut_while_it_is_in_line_is_passed_over() -> None:
    """A run to store ahead waits while the store is busy, and a request may branch off in the middle of it."""
    here, prompt = rig(FULL, pages=64), text(1, 8 * PAGE + 1)
    here.serve(prompt)
    (node,) = [node for node in here.tree.nodes() if node.parent is not None]
    link, run = here.cache._store_tier.link, node.runs[Tier.HOST]
    assert link is not None and run is not None
    here.serve([*text(1, 4 * PAGE), *text(2, PAGE + 1)])
    assert node.runs[Tier.HOST] is not run, "it was not cut"
    link.ahead[run] = True
    here.settle()
    assert not link.ahead
    for tier in (Tier.DEVICE, Tier.HOST):
        here.evict_all(tier)
        here.settle()
    assert here.serve_fetched(prompt).store == 8 * PAGE
    here.idle_check()


def test_no_checkpoint_is_stored_on_pages_that_the_store_refused() -> None:
    """They leave memory without another try, so it would be of no use."""
    here, prompt = rig(pages=64), text(1, 4 * PAGE + 1)
    here.serve(prompt)
    checkpoint = here.cache.lookup(prompt).checkpoint
    assert checkpoint is not None and checkpoint.node is not None
    device, host = checkpoint.residencies
    pages = checkpoint.node.runs[Tier.HOST]
    assert device is not None and host is not None and pages is not None
    drop_residency(here.tree, device, here.state.loss(LossReason.EVICTED, Tier.DEVICE))
    pages.unsaved = True
    assert here.cache._store_tier.before_eviction(host) is Leaving.NOW
    here.settle()
    assert not store_of(here).used_bytes and here.cache.counters["backup_skipped_missing_pages"] == 1
    pages.unsaved = False
    assert here.cache._store_tier.before_eviction(host) is Leaving.AT_ONCE
    here.idle_check()


def test_a_full_store_does_not_give_up_what_is_worth_more(monkeypatch: pytest.MonkeyPatch) -> None:
    """Conversations that come back stay in a full store while hundreds come that never do."""
    kept, skipped = _found_beside_many()
    assert skipped > 0
    monkeypatch.setattr(late, "_is_worth_its_room", lambda *_: True)
    assert kept > 1.5 * _found_beside_many()[0], "it would have been so anyway"


def _found_beside_many() -> tuple[int, int]:
    """Tokens found of 20 conversations that come back among 60 others, and what was not stored. 12 paths fit into memory, 24 into
    the store.
    """
    path_bytes = 4 * FULL.object_bytes(Kind.PREFIX)
    store = MemoryStore(24 * path_bytes)
    here = Rig(FULL, device_pages=24, host_pages=24, store=store, store_config=CONFIG, write=WritePolicy.EXCLUSIVE)
    found = 0
    for turn in range(12):
        for name in range(20):
            here.clock.advance(1)
            found += 4 * PAGE + 1 - here.serve_fetched(text(name, 4 * PAGE + 1)).computed
            here.settle()
        serve_many(here, range(100 + 60 * turn, 160 + 60 * turn))
    here.idle_check()
    return found, here.cache.counters["backup_skipped_worth_less"]


def test_a_prompt_leaves_a_checkpoint_where_it_parts_from_what_only_the_store_knows() -> None:
    """After a restart memory knows nothing of the path that others left."""
    before = rig(pages=64)
    shared = text(1, 4 * PAGE)
    before.serve(shared + text(2, 4 * PAGE + 1))
    before.settle()
    store = store_of(before)
    assert before.cache.close()
    after = Rig(FULL_POINT, device_pages=64, host_pages=64, store=store, store_config=CONFIG)
    assert after.serve_fetched(shared + text(3, 4 * PAGE + 1)).computed == 8 * PAGE + 1, "no checkpoint was there to resume from"
    assert after.restore(shared + text(4, 4 * PAGE + 1)) == 4 * PAGE


@pytest.mark.parametrize("ahead", [False, True])
def test_what_stored_pages_stand_on_follows_them_however_little_it_is_worth(ahead: bool) -> None:
    """The end of a path is stored while there is space. By the time its beginning leaves memory, better values fill the store."""
    here, trunk = rig(FULL, pages=64), text(1, 4 * PAGE)
    prompt = [*trunk, *text(2, 4 * PAGE + 1)]
    for each in ([*trunk, *text(3, 4 * PAGE + 1)], prompt):
        here.clock.advance(1)
        here.serve(each)
        here.settle()
    here.evict_all(Tier.DEVICE)
    here.settle()
    link, host = here.cache._store_tier.link, here.cache.lookup(prompt).path[-1].runs[Tier.HOST]
    assert link is not None and host is not None and host.node.start == 4 and not store_of(here).used_bytes
    if ahead:
        link.ahead[host] = True
        late.put_ahead(here.state, link)
    else:
        assert here.cache._store_tier.before_eviction(host) is not Leaving.BLOCKED
        link.left_bytes = 0  # so that the other branch is not stored ahead
    here.settle()
    assert here.cache.counters["backup_pages"] == 4, "the end of the path, and nothing else"
    link.displaced = StoreVictimEstimate(1)
    link.displaced.note(ValueClass(hazard_group=0, gain_level=100, last_visit_s=here.clock.now()), 1)
    here.evict_all(Tier.HOST)
    here.settle()
    assert here.cache.counters["backup_skipped_worth_less"] > 0, "the other branch is worth less than that"
    assert here.restore(prompt) == 0, "it should have left memory"
    assert here.serve_fetched(prompt).store == 8 * PAGE
    here.idle_check()


class Away(Wrapper):
    """A store that cannot say how full it is just now."""

    def size(self) -> StoreSize:
        raise StoreError("its server does not answer")


@pytest.mark.parametrize("store", [Away(MemoryStore(1 << 20)), Unlevelled(1 << 20), MemoryStore(0), MemoryStore()])
def test_a_store_of_which_nobody_knows_how_much_it_keeps_is_attached_and_given_everything(store: Store) -> None:
    here = Rig(FULL, device_pages=24, host_pages=24, store=store, store_config=CONFIG, write=WritePolicy.EXCLUSIVE)
    serve_many(here, range(20))
    assert here.cache.counters["backup_skipped_worth_less"] == 0
    here.idle_check()
