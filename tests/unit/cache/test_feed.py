"""A feed reports what is stored and evicted in every tier. `tests/property` proves that it reports all of it and nothing else."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor

import pytest

from stepwell import CacheEvent, ConfigError, EventFeed, EventKind, ModelSpec, StoreConfig, Tier, WrongThread
from stepwell.base.prompt import pack, page_keys
from stepwell.base.tasks import Purpose
from stepwell.store.memory import MemoryStore
from toys import ALL_MODELS, FULL, HYBRID, PAGE, Rig, text

PROMPT = text(1, 6 * PAGE + 1)


def keys_of(rig: Rig, tokens: list[int], pages: int) -> tuple[bytes, ...]:
    return tuple(page_keys(rig.cache.namespace.digest, pack(tokens[: pages * PAGE]), rig.tree.page_bytes))


def told(feed: EventFeed, kind: EventKind, tier: Tier) -> list[CacheEvent]:
    return [event for event in feed.take() if (event.kind, event.tier) == (kind, tier)]


def named(events: list[CacheEvent]) -> set[bytes]:
    return {key for event in events for key in event.keys}


def test_pages_are_told_with_what_a_listener_needs_to_name_them_itself() -> None:
    rig = Rig(FULL, host_pages=64)
    feed = rig.cache.listen()
    rig.serve(PROMPT)
    (event,) = told(feed, EventKind.PAGES_STORED, Tier.DEVICE)
    assert event.keys == keys_of(rig, PROMPT, 6) and event.parent == rig.cache.namespace.digest and event.first == 0
    assert event.tokens == pack(PROMPT[: 6 * PAGE])
    rig.serve(PROMPT[: 4 * PAGE] + text(2, 2 * PAGE + 1))
    (branch,) = told(feed, EventKind.PAGES_STORED, Tier.HOST)
    assert branch.first == 4 and branch.parent == event.keys[3] and branch.tokens == pack(text(2, 2 * PAGE))


@pytest.mark.parametrize("spec", ALL_MODELS.values(), ids=ALL_MODELS)
def test_each_tier_is_told_of_for_itself(spec: ModelSpec) -> None:
    rig = Rig(spec, host_pages=64, store=MemoryStore())
    feed = rig.cache.listen()
    rig.serve(PROMPT)
    rig.settle()
    events, keys = feed.take(), keys_of(rig, PROMPT, 6)
    for tier in (Tier.DEVICE, Tier.HOST, Tier.STORE):
        assert named([each for each in events if (each.kind, each.tier) == (EventKind.PAGES_STORED, tier)]) == set(keys)
        if spec is not FULL:
            kept = named([each for each in events if (each.kind, each.tier) == (EventKind.CHECKPOINT_STORED, tier)])
            assert kept == {keys[-1]} or tier is Tier.STORE, "stores are given checkpoints later"
    rig.evict_all(Tier.DEVICE)
    assert named(told(feed, EventKind.PAGES_EVICTED, Tier.DEVICE)) == set(keys)
    rig.evict_all(Tier.HOST)
    gone = feed.take()
    assert named([each for each in gone if each.kind is EventKind.PAGES_EVICTED]) == set(keys)
    assert {each.tier for each in gone} == {Tier.HOST}, "the store has all of it still"


@pytest.mark.parametrize("spec", [FULL, HYBRID], ids=["full", "hybrid"])
def test_what_a_store_has_lost_is_told_when_it_is_asked_for(spec: ModelSpec) -> None:
    class Forgetful(MemoryStore):
        """Says that it has a value, and then has not."""

        def read_into(self, *args: object, **more: object) -> object:
            self._values.clear()
            return super().read_into(*args, **more)  # type: ignore[arg-type]

    store = Forgetful()
    before = Rig(spec, host_pages=64, store=store)
    before.serve(PROMPT)
    before.idle_check()
    rig = Rig(spec, host_pages=64, store=store)
    feed = rig.cache.listen()
    rig.serve_fetched(PROMPT)
    gone = [event for event in feed.take() if event.tier is Tier.STORE and event.kind is EventKind.PAGES_EVICTED]
    assert named(gone) & set(keys_of(rig, PROMPT, 6))


@pytest.mark.parametrize("spec", [FULL, HYBRID], ids=["full", "hybrid"])
def test_what_a_store_has_evicted_is_told_once_when_it_says_so(spec: ModelSpec) -> None:
    store = MemoryStore()
    rig = Rig(spec, host_pages=64, store=store, store_config=StoreConfig(checkpoint_delay_s=0.0))
    feed, kinds = rig.cache.listen(), (EventKind.PAGES_EVICTED, EventKind.CHECKPOINT_EVICTED)
    rig.serve(PROMPT)
    rig.settle()
    stored = [event for event in feed.take() if event.tier is Tier.STORE]
    rig.evict_all(Tier.DEVICE)
    rig.evict_all(Tier.HOST)
    store._values.clear()
    feed.take()
    for again in range(2):
        rig.fetched(PROMPT + text(5, 2 * PAGE)).close()
        gone = [event for event in feed.take() if event.tier is Tier.STORE]
        assert all(event.kind in kinds for event in gone)
        for kind in kinds:
            was = EventKind.PAGES_STORED if kind is EventKind.PAGES_EVICTED else EventKind.CHECKPOINT_STORED
            told_before = named([event for event in stored if event.kind is was])
            assert told_before or (spec is FULL and kind is EventKind.CHECKPOINT_EVICTED)
            assert named([event for event in gone if event.kind is kind]) == (told_before if not again else set())


@pytest.mark.parametrize("spec", [FULL, HYBRID], ids=["full", "hybrid"])
@pytest.mark.parametrize("how", ["cleared", "detached", "replaced"])
def test_what_reaches_a_store_that_no_longer_serves_it_is_not_told(spec: ModelSpec, how: str) -> None:
    rig = Rig(spec, host_pages=64, store=MemoryStore(), store_config=StoreConfig(checkpoint_delay_s=0.0))
    feed = rig.cache.listen()
    with rig.ready(PROMPT) as lease:
        while lease.position < lease.num_tokens:
            rig.compute(lease, min(rig.cache.next_stop(lease) or lease.num_tokens, lease.num_tokens))
            rig.executor.finish_all()
            rig.cache.step()
    old = rig.store_executor
    assert old.pending, "nothing is on its way to the store"
    if how == "cleared":
        rig.cache.clear()
    else:
        rig.cache.store.detach()
    if how == "replaced":
        rig.attach(MemoryStore())
    while old.pending:
        old.finish_all()
        rig.cache.step()
    assert not [event for event in feed.take() if event.tier is Tier.STORE]


def test_a_feed_holds_a_page_or_more_and_belongs_to_the_thread_of_its_cache() -> None:
    rig = Rig(FULL, host_pages=64)
    for most_pages in (0, -1):
        with pytest.raises(ConfigError, match="1 page or more"):
            rig.cache.listen(most_pages=most_pages)
    feed = rig.cache.listen(most_pages=1)
    with ThreadPoolExecutor(1) as other:
        for verb in (feed.take, feed.close):
            with pytest.raises(WrongThread, match=r"EventFeed\.(take|close)"):
                other.submit(verb).result()
    feed.close()


def test_a_listener_that_takes_nothing_loses_the_oldest_and_is_told_how_much() -> None:
    rig = Rig(FULL, device_pages=64)
    feed, patient = rig.cache.listen(most_pages=8), rig.cache.listen()
    for name in range(1, 4):
        rig.serve(text(name, 6 * PAGE + 1))
    assert feed.lost_pages == 12 and named(feed.take()) == set(keys_of(rig, text(3, 6 * PAGE), 6))
    assert patient.lost_pages == 0 and len(named(patient.take())) == 18


def test_nobody_is_told_before_listening_nor_after_closing() -> None:
    rig = Rig(FULL, host_pages=64)
    rig.serve(PROMPT)
    assert not any(node.keys for node in rig.tree.nodes()), "keys are made although no listener is there"
    feed = rig.cache.listen()
    assert not feed.take()
    feed.close()
    feed.close()
    rig.serve(text(2, 4 * PAGE))
    assert not feed.take() and not rig.tree.feeds


def test_a_save_that_failed_is_told_neither_as_stored_nor_as_evicted() -> None:
    rig = Rig(HYBRID, host_pages=64)
    feed = rig.cache.listen()
    with rig.ready(PROMPT) as lease:
        while lease.position < lease.num_tokens:
            rig.compute(lease, min(rig.cache.next_stop(lease) or lease.num_tokens, lease.num_tokens))
            for job in list(rig.executor.pending):
                rig.executor.answer(job, error="fails on purpose" if _is_save(rig, job) else None)
            rig.cache.step()
    rig.settle()
    assert rig.cache.counters["save_failures"]
    assert not [event for event in feed.take() if event.tier is Tier.HOST]


def _is_save(rig: Rig, job: int) -> bool:
    return any(plan.job == job and plan.purpose is Purpose.SAVE for plan in rig.state.copies.tasks())
