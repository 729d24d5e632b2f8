"""Requests that wait for a fetch which was sent for another one's prompt: what does not come is noted by those whose it is.

A note for a boundary beyond the end of a shorter prompt broke the step that was to take it. What else the store had answered by
then was lost: those operations were never reported as ended, and they were never abandoned.
"""

from __future__ import annotations

from stepwell.base.ids import JobId
from stepwell.base.prompt import TOKEN_BYTES, pack, page_keys
from stepwell.base.tasks import FetchCheckpoint, ItemStatus
from stepwell.policy.store_use import StoreTuning
from stepwell.store.memory import MemoryStore
from stepwell.store_tier.ticket import Ticket
from toys import FULL_POINT, PAGE, Rig, text

PROMPT = text(1, 12 * PAGE + 1)
MANY_FALLBACKS = StoreTuning(fallback_share=100.0)


def rig(store: MemoryStore) -> Rig:
    return Rig(FULL_POINT, device_pages=256, host_pages=256, store=store, store_tuning=MANY_FALLBACKS)


def filled(*prompts: list[int]) -> MemoryStore:
    """A store with the pages of these prompts, and a checkpoint at the end of each."""
    store = MemoryStore()
    before = rig(store)
    for prompt in prompts:
        before.serve(prompt)
    return store


def upto(pages: int) -> list[int]:
    return PROMPT[: pages * PAGE + 1]


def with_pages(store: MemoryStore, prompt: list[int]) -> Rig:
    """A cache with a prompt's pages in memory, and none of its checkpoints."""
    here = rig(store)
    with here.ready(prompt) as lease:
        here.compute(lease, len(prompt) - 1 - PAGE // 2)  # no chunk ends where a checkpoint could be
        here.compute(lease, len(prompt))
    here.settle()
    assert here.restore(prompt) == 0
    return here


def asked(here: Rig, prompt: list[int]) -> Ticket:
    """A ticket that has had its answer, and sent for what it wants."""
    ticket = here.cache.prefetch(here.cache.lookup(prompt))
    here.store_executor.finish(here.store_executor.pending[-1])
    here.cache.step()
    return ticket


def checkpoint_at(here: Rig, page: int) -> JobId:
    """The operation that fetches the prompt's checkpoint there."""
    *_, boundary = page_keys(here.cache.namespace.digest, pack(PROMPT[: page * PAGE]), PAGE * TOKEN_BYTES)
    tasks = {job: here.store_executor.op(job).task for job in here.store_executor.pending}
    (found,) = (job for job, task in tasks.items() if isinstance(task, FetchCheckpoint) and task.boundary == boundary)
    return found


def test_a_shorter_prompt_waits_for_no_checkpoint_behind_its_end() -> None:
    here = with_pages(filled(upto(10)), upto(10))
    longer = asked(here, upto(10))
    shorter = here.cache.prefetch(here.cache.lookup(upto(8)))
    assert longer.fetches and not shorter.fetches
    for ticket in (longer, shorter):
        ticket.close()
    here.idle_check()


def test_a_checkpoint_that_does_not_come_is_noted_by_those_whose_prompt_reaches_it() -> None:
    """The shorter prompt waits for the checkpoint at page 4, of a fetch that begins with page 10; the one at page 9 is lost."""
    here = with_pages(filled(upto(4), upto(9), upto(12)), upto(10))
    longer, shorter = asked(here, upto(12)), asked(here, upto(8))
    assert shorter.fetches == longer.fetches != []
    here.store_executor.finish(checkpoint_at(here, 9), status=ItemStatus.MISSING)
    here.cache.step()
    assert not longer.has_checkpoint[9] and shorter.has_checkpoint[4]
    here.settle()
    assert here.serve(upto(8), ticket=shorter).computed == 4 * PAGE + 1
    assert here.serve(upto(12), ticket=longer).computed == 1
    here.idle_check()


def test_a_prompt_that_branches_off_keeps_its_own_checkpoint_in_the_store() -> None:
    """Theirs was at the same page as the one that was lost."""
    branch = PROMPT[: 8 * PAGE] + text(2, PAGE + 1)
    here = with_pages(filled(upto(4), upto(9), upto(12), branch), upto(10))
    longer, other = asked(here, upto(12)), asked(here, branch)
    assert other.fetches == longer.fetches != []
    here.store_executor.finish(checkpoint_at(here, 9), status=ItemStatus.MISSING)
    here.settle()
    assert here.serve(branch, ticket=other).computed == 1
    longer.close()
    here.idle_check()
