"""Pages that go on to the device while later ones of their prompt are still being read from the store."""

from __future__ import annotations

from random import Random

import pytest

from stepwell import Kind, ModelSpec, Tier
from stepwell.base.tasks import FetchPages, Purpose
from stepwell.policy.store_use import StoreTuning
from stepwell.store.memory import MemoryStore
from stepwell.store_tier.ticket import Ticket
from toys import ALL_MODELS, FULL, PAGE, Rig, text

PROMPT = text(1, 10 * PAGE + 1)
ONE_PAGE = StoreTuning(fetch_chunk_bytes=1)


def restarted(spec: ModelSpec = FULL, *, tuning: StoreTuning = ONE_PAGE, device_pages: int = 256, ranks: int = 1) -> Rig:
    """A cache with nothing in memory, over a store that has a prompt of ten pages, to be read page by page."""
    store = MemoryStore()
    before = Rig(spec, host_pages=256, store=store, ranks=ranks)
    before.serve(PROMPT)
    before.idle_check()
    return Rig(spec, device_pages=device_pages, host_pages=256, store=store, store_tuning=tuning, ranks=ranks)


def asked(rig: Rig, tokens: list[int] = PROMPT) -> Ticket:
    """A ticket whose fetch was sent for, with nothing read yet."""
    ticket = rig.cache.prefetch(rig.cache.lookup(tokens))
    rig.store_executor.finish_all()
    rig.cache.step()
    return ticket


def read(rig: Rig, pages: int) -> None:
    """The next pages come."""
    fetching = [job for job in rig.store_executor.pending if isinstance(rig.store_executor.op(job).task, FetchPages)]
    for job in fetching[:pages]:
        rig.store_executor.finish(job)
        rig.cache.step()


@pytest.mark.parametrize("spec", ALL_MODELS.values(), ids=ALL_MODELS)
@pytest.mark.parametrize("ranks", [1, 2])
def test_what_has_been_read_is_loaded_while_the_rest_is_read(spec: ModelSpec, ranks: int) -> None:
    rig = restarted(spec, ranks=ranks)
    ticket = asked(rig)
    read(rig, 4)
    assert not ticket.ready and len(rig.pending(Purpose.LOAD)) == 4
    rig.executor.finish_all()
    rig.cache.step()
    assert rig.used(Tier.DEVICE, Kind.PREFIX) == 4 == rig.state.counters["loaded_ahead_pages"]
    rig.cache.audit()
    rig.settle()
    assert ticket.complete
    sources = rig.serve(PROMPT, ticket=ticket)
    assert (sources.store, sources.device, sources.host, sources.computed) == (10 * PAGE, 0, 0, 1)
    rig.idle_check()


def test_a_request_that_begins_waits_for_what_is_still_on_its_way_to_the_device() -> None:
    rig = restarted()
    ticket = asked(rig)
    read(rig, 10)
    loads = rig.pending(Purpose.LOAD)
    with rig.open(PROMPT, ticket=ticket) as lease:
        assert lease.arrives_with == tuple(loads), "the last page is the only one it loads itself, if any"
        rig.settle()
        assert lease.ready
        rig.engine.check(lease)
    rig.idle_check()


def test_what_is_on_the_host_already_goes_first() -> None:
    rig = restarted()
    rig.serve(PROMPT[: 4 * PAGE + 1])
    rig.evict_all(Tier.DEVICE)
    ticket = asked(rig)
    read(rig, 1)
    (job,) = rig.pending(Purpose.LOAD)
    assert sum(len(copy.target.ids) for copy in rig.executor.plan(job).copies) == 5
    rig.settle()
    assert rig.serve(PROMPT, ticket=ticket).computed == 1
    rig.idle_check()


def test_nobody_who_runs_loses_anything() -> None:
    rig = restarted(device_pages=16)
    with rig.ready(text(2, 13 * PAGE)) as other:
        rig.prefill(other)
        ticket = asked(rig)
        read(rig, 6)
        rig.settle()
        rig.engine.check(other)
        assert rig.state.counters["loaded_ahead_pages"] <= 3
        rig.cache.audit()
    assert rig.serve(PROMPT, ticket=ticket).computed == 1
    rig.idle_check()


def with_others_cached(device_share: float) -> Rig:
    """The same with a device that is full of unused pages."""
    rig = restarted(tuning=StoreTuning(fetch_chunk_bytes=1, device_share=device_share), device_pages=32)
    for name in range(10, 16):
        rig.serve(text(name, 6 * PAGE))
    return rig


def test_free_room_is_taken_without_limit() -> None:
    rig = restarted(tuning=StoreTuning(fetch_chunk_bytes=1, device_share=0.0))
    ticket = asked(rig)
    rig.settle()
    assert rig.state.counters["loaded_ahead_pages"] == 10
    assert rig.serve(PROMPT, ticket=ticket).store == 10 * PAGE
    rig.idle_check()


@pytest.mark.parametrize(("share", "pages"), [(5 / 32, 5), (0.0, 0)])
def test_waiting_prompts_evict_no_more_than_their_share_of_the_device(share: float, pages: int) -> None:
    rig = with_others_cached(share)
    free = 32 - rig.used(Tier.DEVICE, Kind.PREFIX)
    first, second = asked(rig), asked(rig, [*PROMPT[:-1], 7, 8])
    rig.settle()
    assert free < 10 and rig.state.counters["loaded_ahead_pages"] <= pages + free and first.complete and second.complete
    assert first.num_ahead + second.num_ahead == pages
    assert rig.serve(PROMPT, ticket=first).computed == 1
    second.close()
    rig.idle_check()


def test_a_load_that_fails_costs_its_pages_and_nothing_more() -> None:
    rig = restarted()
    ticket = asked(rig)
    read(rig, 3)
    rig.fail_all()
    rig.settle()
    rig.cache.audit()
    sources = rig.serve(PROMPT, ticket=ticket)
    assert sources.total == len(PROMPT)
    rig.idle_check()


def test_pages_of_a_request_that_is_gone_stay_cached() -> None:
    rig = restarted()
    ticket = asked(rig)
    read(rig, 3)
    ticket.close()
    rig.settle()
    rig.cache.audit()
    assert rig.serve(PROMPT).device == 3 * PAGE
    rig.idle_check()


@pytest.mark.parametrize("seed", range(20))
def test_any_order_of_reads_loads_and_failures_is_exact(seed: int) -> None:
    random = Random(seed)
    spec = random.choice(list(ALL_MODELS.values()))
    rig = restarted(spec, device_pages=random.choice([24, 40, 256]))
    prompts = [PROMPT, [*PROMPT[: 6 * PAGE], *text(3, 3 * PAGE)], text(4, 5 * PAGE + 2)]
    waiting: list[tuple[list[int], Ticket]] = []
    for _ in range(80):
        what = random.random()
        if what < 0.15 and len(waiting) < 4:
            tokens = random.choice(prompts)
            waiting.append((tokens, rig.cache.prefetch(rig.cache.lookup(tokens))))
        elif what < 0.5 and rig.store_executor.pending:
            rig.store_executor.finish(random.choice(rig.store_executor.pending))
        elif what < 0.75 and rig.executor.pending:
            job = random.choice(rig.executor.pending)
            fails = random.random() < 0.1 and rig.executor.plan(job).purpose is Purpose.LOAD
            rig.executor.finish(job, failing_rank=0 if fails else None)
        elif what < 0.85 and waiting:
            tokens, ticket = waiting.pop(random.randrange(len(waiting)))
            if random.random() < 0.3:
                ticket.close()
            else:
                rig.settle()
                assert rig.serve(tokens, ticket=ticket).total == len(tokens)
        rig.cache.step()
        rig.cache.audit()
    for _, ticket in waiting:
        ticket.close()
    rig.idle_check()
