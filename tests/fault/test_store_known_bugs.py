"""Bugs that the state machines found in the store tier, or that they were shown and missed: each by a short life that has it."""

from __future__ import annotations

from stepwell import ModelSpec, Tier, WritePolicy
from stepwell.base.prompt import TOKEN_BYTES, pack, page_keys
from stepwell.base.tasks import FetchPages, ItemStatus
from stepwell.store.api import NO_PARENT
from stepwell.store.memory import MemoryStore
from stepwell.store_tier.link import LinkState
from toys import FULL, HYBRID, PAGE, Rig, text

PROMPT = text(1, 10 * PAGE + 1)
BRANCH = PROMPT[:PAGE] + text(2, 2 * PAGE)  # leaves the prompt after its first page


def rig(spec: ModelSpec, store: MemoryStore, **more: object) -> Rig:
    return Rig(spec, device_pages=256, host_pages=256, store=store, **more)  # type: ignore[arg-type]


def filled(spec: ModelSpec, prompt: list[int] = PROMPT) -> MemoryStore:
    """A store with everything a cache had of a prompt; that cache is gone."""
    store = MemoryStore()
    rig(spec, store).serve(prompt)
    return store


def fail_ops(here: Rig) -> None:
    for job in here.store_executor.pending:
        here.store_executor.finish(job, status=ItemStatus.FAILED)
    here.cache.step()


def test_a_cleared_namespace_stays_cleared_for_a_store_that_is_attached_again() -> None:
    """The link kept the bar, and dropping the link dropped it."""
    store = filled(FULL)
    here = rig(FULL, store)
    here.cache.clear()
    here.cache.store.detach()
    here.settle()
    here.attach(store)
    assert here.serve_fetched(PROMPT).computed == len(PROMPT), "weights may have changed under the same name"


def test_a_namespace_cleared_without_a_store_stays_cleared_for_one_that_comes_later() -> None:
    here = Rig(FULL, device_pages=256, host_pages=256)
    here.cache.clear()
    here.attach(filled(FULL))
    assert here.serve_fetched(PROMPT).computed == len(PROMPT), "weights may have changed under the same name"


def test_what_a_store_brought_is_still_held_for_a_ticket_when_the_store_is_gone() -> None:
    """The link was dropped with its last operation, and the audit missed the pages that its tickets hold."""
    here = rig(HYBRID, filled(HYBRID))
    ticket = here.fetched(PROMPT)
    here.cache.store.detach()
    assert len(here.cache.step().detached) == 1 and not here.cache.step().detached, "it is detached once"
    here.cache.audit()
    here.evict_idle(Tier.HOST)
    assert here.serve(PROMPT, ticket=ticket).store == 10 * PAGE
    here.idle_check()


def test_every_page_is_stored_as_the_child_of_the_page_before_it() -> None:
    """What was stored already in the middle of a path was left out of an operation, and its ends were joined."""
    store = filled(FULL, PROMPT[: 5 * PAGE + 1])
    store._drop(next(name for name, value in store._values.items() if value.parent == NO_PARENT))
    here = rig(FULL, store)
    with here.ready(BRANCH) as lease:
        here.compute(lease, len(BRANCH))
    here.executor.finish_all()
    here.cache.step()
    fail_ops(here)  # its first page is on the host and not in the store
    here.fetched(PROMPT[: 5 * PAGE + 1]).close()  # pages 1 to 4 are
    with here.open(PROMPT[: 7 * PAGE + 1]) as lease:
        here.executor.finish_all()
        here.cache.step()
        fail_ops(here)
        here.compute(lease, 7 * PAGE + 1)  # pages 5 and 6 are neither
    here.settle()
    keys = list(page_keys(here.cache.namespace.digest, pack(PROMPT[: 7 * PAGE]), PAGE * TOKEN_BYTES))
    parents = {key: value.parent for (_, key), value in store._values.items()}
    assert [parents[key] for key in keys] == [NO_PARENT, *keys[:-1]]


def test_a_trial_that_is_called_off_does_not_switch_a_store_off_for_ever() -> None:
    """The breaker waited for an answer to the one request that it had let through, and would never have sent another one."""
    here = rig(FULL, filled(FULL))
    for _ in range(3):
        ticket = here.cache.prefetch(here.cache.lookup(PROMPT))
        fail_ops(here)
        ticket.close()
    assert here.cache.store.state is LinkState.SWITCHED_OFF
    here.clock.advance(1.5)
    here.cache.prefetch(here.cache.lookup(PROMPT)).close()
    here.settle()
    here.clock.advance(61.0)
    assert here.serve_fetched(PROMPT).store == 10 * PAGE


def test_a_victim_is_evicted_when_only_what_it_stands_on_is_being_stored() -> None:
    """It was taken for one that is on its way, left the queue, and could never be evicted again."""
    store = filled(FULL, PROMPT[: 5 * PAGE + 1])
    here = rig(FULL, store, write=WritePolicy.EXCLUSIVE)
    here.serve(BRANCH)
    here.evict_all(Tier.DEVICE)  # to the host, and not to the store
    here.fetched(PROMPT[: 5 * PAGE + 1]).close()
    here.clock.advance(1.0)
    here.serve(BRANCH)
    here.evict_idle(Tier.HOST)
    here.cache.audit()
    here.settle()
    here.idle_check()


def test_room_for_a_fetch_is_not_made_out_of_what_it_stands_on() -> None:
    here = Rig(FULL, device_pages=64, host_pages=16, store=filled(FULL))
    here.serve(PROMPT[: 4 * PAGE + 1])
    here.clock.advance(10.0)
    here.serve(text(2, 8 * PAGE))
    here.evict_idle(Tier.DEVICE)
    ticket = here.fetched(PROMPT)  # six pages: two of them need space, and the oldest are its own
    assert here.serve(PROMPT, ticket=ticket).computed == 1
    here.idle_check()


def test_a_fetch_that_is_called_off_takes_nothing_with_it_that_was_computed_meanwhile() -> None:
    """A request saved nothing of what a fetch was still to bring, also when that had been called off."""
    here = rig(FULL, filled(FULL))
    ticket = here.cache.prefetch(here.cache.lookup(PROMPT))
    here.store_executor.finish_all()
    here.cache.step()
    assert isinstance(here.store_executor.op(here.store_executor.pending[0]).task, FetchPages)
    assert here.serve_beside_store(PROMPT, ticket) == len(PROMPT), "it begins without what has not come"
    here.settle()
    here.evict_idle(Tier.DEVICE)
    assert here.restore(PROMPT) == 10 * PAGE, "it was written through to the host"
    here.idle_check()
