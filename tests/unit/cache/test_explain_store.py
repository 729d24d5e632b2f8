"""Explanations ask the store what it has: bounded in time, and changing nothing."""

from __future__ import annotations

from collections.abc import Sequence
from threading import Event
from time import monotonic

import pytest

from stepwell import CacheConfig, Cause, ConfigError, ModelSpec, Tier, build_cache
from stepwell.base.config import PrefetchPolicy, StoreConfig
from stepwell.base.tasks import ItemStatus
from stepwell.policy.store_use import StoreTuning
from stepwell.store.api import Space
from stepwell.store.memory import MemoryStore
from stepwell.store_tier.link import LinkState
from toys import ALL_MODELS, FULL, FULL_POINT, HYBRID, PAGE, SMALL_PAGES, Rig, text

PROMPT = text(1, 10 * PAGE + 1)
WHOLE = 10 * PAGE


def rig(spec: ModelSpec, store: MemoryStore, **more: object) -> Rig:
    return Rig(spec, device_pages=256, host_pages=256, store=store, **more)  # type: ignore[arg-type]


def filled(spec: ModelSpec, *prompts: list[int]) -> MemoryStore:
    store = MemoryStore()
    before = rig(spec, store)
    for prompt in prompts or (PROMPT,):
        before.serve(prompt)
    before.idle_check()
    return store


@pytest.mark.parametrize("spec", ALL_MODELS.values(), ids=ALL_MODELS)
def test_after_a_restart_it_says_what_the_store_has(spec: ModelSpec) -> None:
    after = rig(spec, filled(spec))
    why = after.cache.explain(PROMPT)
    assert (why.cause, why.tier, why.restore_tokens, why.store_tokens) == (Cause.IN_STORE, Tier.STORE, 0, WHOLE)
    assert f"resumes at token 0 of {WHOLE + 1} from memory, at {WHOLE} with the store" in str(why)
    assert after.serve_fetched(PROMPT).store == why.store_tokens


@pytest.mark.parametrize("spec", ALL_MODELS.values(), ids=ALL_MODELS)
def test_after_a_flush_it_says_what_the_store_has(spec: ModelSpec) -> None:
    here = rig(spec, MemoryStore())
    here.serve(PROMPT)
    here.cache.flush()
    why = here.cache.explain(PROMPT)
    assert (why.cause, why.store_tokens) == (Cause.IN_STORE, WHOLE) and "cleared on request at 1970-" in why.detail
    assert here.serve_fetched(PROMPT).store == WHOLE


def test_a_cleared_namespace_is_cleared_whatever_the_store_has() -> None:
    here = rig(FULL, MemoryStore())
    here.serve(PROMPT)
    here.cache.clear()
    sent = here.store_executor.num_submitted
    why = here.cache.explain(PROMPT)
    assert why.cause is Cause.CLEARED and why.store_tokens is None and "not used" in why.store_note
    assert here.store_executor.num_submitted == sent


def test_it_says_so_when_the_store_does_not_answer_in_time() -> None:
    after = rig(FULL, filled(FULL))
    after.store_executor.answers_in_time = False
    why = after.cache.explain(PROMPT, store_wait_s=0.125)
    assert why.cause is Cause.NEVER_STORED and why.store_tokens is None
    assert "the store did not answer within 0.125 s" in str(why)
    after.settle()
    assert after.cache.explain(PROMPT, store_wait_s=0).store_note == "the store was not asked"
    with pytest.raises(ConfigError, match="store_wait_s"):
        after.cache.explain(PROMPT, store_wait_s=-1.0)
    after.idle_check()


def test_a_question_is_ready_in_a_step_without_anybody_waiting() -> None:
    after = rig(HYBRID, filled(HYBRID))
    question = after.cache.question(PROMPT)
    after.cache.step()
    assert not question.ready
    after.store_executor.finish_all()
    assert not question.ready
    after.cache.step()
    assert question.ready and question.answer().store_tokens == WHOLE


def test_a_question_is_ready_when_its_time_is_up() -> None:
    after = rig(HYBRID, filled(HYBRID))
    question = after.cache.question(PROMPT, store_wait_s=0.25)
    after.clock.advance(0.3)
    assert question.ready and "did not answer within 0.25 s" in question.answer().store_note
    after.settle()
    after.idle_check()


def test_a_question_is_about_memory_as_it_is_when_answered() -> None:
    after = rig(FULL, filled(FULL))
    question = after.cache.question(PROMPT)
    after.serve_fetched(PROMPT)
    why = question.answer()
    assert why.cause is Cause.COMPLETE and why.restore_tokens == WHOLE
    question = after.cache.question(PROMPT[:-1] + text(2, 2 * PAGE))
    after.cache.flush()
    after.settle()
    why = question.answer()
    assert why.cause is Cause.CLEARED and "ask again" in str(why), "what was in memory was not asked for"


def test_pages_beyond_the_last_checkpoint_of_the_store_have_none() -> None:
    store = filled(FULL_POINT, PROMPT)
    longer = PROMPT[:-1] + text(2, 4 * PAGE)
    rig(FULL_POINT, store).serve(longer)
    after = rig(FULL_POINT, store)
    why = after.cache.explain(PROMPT[:-1] + text(2, 2 * PAGE) + text(3, PAGE))
    assert (why.cause, why.tier, why.states) == (Cause.NO_CHECKPOINT, Tier.STORE, ("ssm",))
    assert (why.restore_tokens, why.store_tokens, why.usable_tokens) == (0, WHOLE, 12 * PAGE)


def test_what_neither_memory_nor_the_store_has_was_never_stored() -> None:
    after = rig(FULL, filled(FULL))
    why = after.cache.explain(PROMPT[:-1] + text(2, 5 * PAGE))
    assert (why.cause, why.restore_tokens, why.store_tokens) == (Cause.NEVER_STORED, 0, WHOLE)
    why = after.cache.explain(text(7, 9))
    assert (why.cause, why.store_tokens) == (Cause.NEVER_STORED, 0)


def test_a_checkpoint_that_only_the_store_has_is_named() -> None:
    after = rig(FULL_POINT, filled(FULL_POINT))
    with after.ready(PROMPT) as lease:
        after.compute(lease, WHOLE + 1)  # ran past its stop: pages and no checkpoint
    after.settle()
    why = after.cache.explain(PROMPT)
    assert (why.cause, why.states, why.known_tokens, why.store_tokens) == (Cause.IN_STORE, ("ssm",), WHOLE, WHOLE)


def test_a_fetch_that_takes_longer_than_computing_is_called_that() -> None:
    after = rig(FULL, filled(FULL), store_config=StoreConfig(recompute_tokens_per_s=1e6))
    after.cache._store_tier.link.fetch_time.measure(1, 1.0, 0.0)  # type: ignore[union-attr]
    why = after.cache.explain(PROMPT)
    assert why.cause is Cause.IN_STORE and "longer than computing" in str(why)


def test_asking_changes_nothing() -> None:
    after = rig(HYBRID, filled(HYBRID))
    after.serve_fetched(PROMPT)
    link = after.cache._store_tier.link
    assert link is not None
    for _ in range(2):
        link.breaker.failed(0.0)
    before = after.tree.version, after.cache.counters.snapshot(), vars(link.breaker).copy()
    longer = PROMPT + text(2, 40)
    for _ in range(5):
        after.cache.explain(longer)
        question = after.cache.question(longer)
        after.store_executor.finish(after.store_executor.pending[-1], status=ItemStatus.FAILED)
        after.cache.step()
        assert question.ready and "could not say" in question.answer().store_note
    assert before == (after.tree.version, after.cache.counters.snapshot(), vars(link.breaker))
    after.idle_check()


def test_a_question_that_hangs_fails_nothing() -> None:
    after = rig(
        FULL,
        filled(FULL),
        store_config=StoreConfig(prefetch=PrefetchPolicy.WAIT_COMPLETE),
        store_tuning=StoreTuning(op_timeout_s=5.0),
    )
    after.cache.question(PROMPT)
    after.clock.advance(6.0)
    assert not after.cache.step().failures and not after.cache.counters["store_ops_failed"]
    assert after.cache.store.state is LinkState.ATTACHED
    after.settle()
    after.idle_check()


def test_a_store_that_is_switched_off_is_not_asked() -> None:
    here = rig(FULL, MemoryStore())
    here.serve(PROMPT)
    here.cache.flush()
    for _ in range(3):
        here.cache._store_tier.link.breaker.failed(here.clock.now())  # type: ignore[union-attr]
    sent = here.store_executor.num_submitted
    why = here.cache.explain(PROMPT)
    assert why.cause is Cause.CLEARED and "switched off" in str(why) and here.store_executor.num_submitted == sent


class Stuck(MemoryStore):
    """Answers no question until the test releases it."""

    def __init__(self) -> None:
        super().__init__()
        self.let_go = Event()

    def contains(self, space: Space, keys: Sequence[bytes]) -> list[bool]:
        assert self.let_go.wait(60), "the test never released it"
        return super().contains(space, keys)


def test_with_threads_the_wait_has_an_end_and_nothing_is_left_behind() -> None:
    store = Stuck()
    cache = build_cache(FULL, CacheConfig(device_bytes=64 * 1024, host_bytes=64 * 1024), tuning=SMALL_PAGES)
    cache.store.attach(store)
    began_s = monotonic()
    why = cache.explain(PROMPT, store_wait_s=0.05)
    assert "did not answer within 0.05 s" in str(why) and monotonic() - began_s < 30
    store.let_go.set()
    deadline_s = monotonic() + 60
    while (why := cache.explain(PROMPT, store_wait_s=10.0)).store_tokens is None:
        assert monotonic() < deadline_s, why
    assert why.store_tokens == 0 and why.cause is Cause.NEVER_STORED
    cache.close()
    cache.audit()


def test_what_the_device_cannot_hold_is_said_not_to_be_fetched() -> None:
    after = Rig(FULL, device_pages=2, host_pages=256, store=filled(FULL))
    why = after.cache.explain(PROMPT)
    assert why.store_tokens == WHOLE and "the device cannot hold a prompt of this length" in str(why)
    assert not after.fetched(PROMPT).asked
