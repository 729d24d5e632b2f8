"""Checkpoints rest on the host before they are stored: what is superseded by then never is, and nothing else is lost."""

from __future__ import annotations

import pytest

from stepwell import Kind, PlacementConfig, Tier, WritePolicy
from stepwell.base.config import StoreConfig
from stepwell.base.tasks import ItemStatus
from stepwell.store.memory import MemoryStore
from stepwell.store_tier.backup import offer
from stepwell.store_tier.deferred import MOST_DELAYS
from stepwell.store_tier.link import MOST_PUTS, StoreLink
from stepwell.tiers.eviction import allocate
from stepwell.tiers.publish import drop_superseded
from toys import FULL_POINT, PAGE, Rig, text

DELAY_S = 30.0
PROMPT = text(1, 40 * PAGE + 1)


def rig(*, placement: PlacementConfig | None = None, host_pages: int = 256, **config: object) -> Rig:
    more = {"placement": placement} if placement is not None else {}
    store = StoreConfig(checkpoint_delay_s=DELAY_S, recompute_tokens_per_s=1.0)
    return Rig(FULL_POINT, host_pages=host_pages, store=MemoryStore(), store_config=store, **more, **config)  # type: ignore[arg-type]


def turn(here: Rig, pages: int, prompt: list[int] = PROMPT) -> None:
    """One turn of a conversation that has come to that many pages."""
    here.serve(prompt[: pages * PAGE + 1])


def later(here: Rig, seconds: float) -> None:
    here.clock.advance(seconds)
    here.settle()


def keep_last(here: Rig, prompt: list[int], count: int) -> None:
    """Drops all but the last checkpoints on a prompt's path, as later answers supersede them."""
    found = [each for node in here.cache.lookup(prompt).path for each in (node.checkpoints or {}).values()]
    for each in sorted(found, key=lambda each: each.page)[:-count]:
        if not each.in_use:
            drop_superseded(here.state, each)


def refuse(here: Rig) -> None:
    """The store fails all that is on its way to it."""
    for job in list(here.store_executor.pending):
        here.store_executor.finish(job, status=ItemStatus.FAILED)


def rest_out(here: Rig) -> None:
    """Longer than anything may rest."""
    for _ in range(MOST_DELAYS + 2):
        later(here, DELAY_S)


def stored(here: Rig, link: StoreLink | None = None) -> list[int]:
    """The boundaries, in pages, of checkpoints believed to be in the store."""
    link = link or here.cache._store_tier.link
    assert link is not None
    checkpoints = [each for node in here.tree.nodes() for each in (node.checkpoints or {}).values()]
    return sorted(each.page for each in checkpoints if link.beliefs.has(each))


def resumable(here: Rig, prompt: list[int] = PROMPT) -> int:
    """Pages that a new cache gets from the store alone."""
    link = here.cache._store_tier.link
    assert link is not None
    after = Rig(FULL_POINT, host_pages=1024, device_pages=1024, store=link.store, store_config=link.config)
    return after.serve_fetched(prompt).store // PAGE


def test_a_checkpoint_is_stored_when_its_rest_is_over() -> None:
    here = rig()
    turn(here, 10)
    later(here, DELAY_S - 1)
    assert stored(here) == [] and here.state.counters["backup_pages"] == 10, "pages do not rest"
    later(here, 1)
    assert stored(here) == [10] and resumable(here) == 10


def test_what_is_superseded_when_its_rest_is_over_is_not_stored() -> None:
    here = rig()
    for pages in (10, 12, 14):
        turn(here, pages)
        later(here, 10)
    later(here, DELAY_S)
    assert stored(here) == [14] and resumable(here) == 14
    later(here, DELAY_S)
    assert here.state.counters["backup_superseded_checkpoints"] == 2


@pytest.mark.parametrize("comes_back", [False, True])
def test_an_answer_supersedes_its_prompt_once_somebody_came_back_with_it(comes_back: bool) -> None:
    here, answer = rig(placement=PlacementConfig(interval_tokens=0)), text(3, 3 * PAGE)
    lease = here.ready(PROMPT[: 10 * PAGE + 1])
    here.prefill(lease)
    for token in answer:
        here.decode(lease, [token])
    here.cache.release(lease)
    if comes_back:
        here.serve([*PROMPT[: 10 * PAGE + 1], *answer, *text(4, 2 * PAGE)])
    rest_out(here)
    assert (10 in stored(here)) is not comes_back
    assert resumable(here, PROMPT[: 10 * PAGE + 1]) == (0 if comes_back else 10)


@pytest.mark.parametrize("write", WritePolicy)
def test_an_answer_that_ended_is_saved_once_and_outlives_the_process(write: WritePolicy) -> None:
    here, answer = rig(placement=PlacementConfig(interval_tokens=0), write=write), text(3, 3 * PAGE)
    prompt = PROMPT[: 10 * PAGE + 1]
    lease = here.ready(prompt)
    here.prefill(lease)
    saved = here.state.counters["save_pages"]
    here.decode(lease, answer)
    assert here.state.counters["save_pages"] == saved, "checkpoints of a growing answer replace one another, and stay here"
    here.cache.release(lease)
    here.settle()
    at_once = write.saves_on_commit or write.is_exclusive
    assert here.state.counters["save_pages"] == saved + (3 + 1 if at_once else 0), "its pages, and one checkpoint"
    if write is WritePolicy.SELECTIVE:
        here.serve([*prompt, *answer])
    rest_out(here)
    if write.is_exclusive:  # the store gets what leaves memory
        here.evict_all(Tier.DEVICE)
        here.evict_all(Tier.HOST)
        here.settle()
    assert resumable(here, [*prompt, *answer, *text(4, 2 * PAGE)]) == 13


def test_milestones_are_stored_though_superseded() -> None:
    here = rig(placement=PlacementConfig(interval_tokens=8 * PAGE, decode_interval_tokens=0))
    turn(here, 10)
    turn(here, 12)
    later(here, DELAY_S)
    assert stored(here) == [8, 12]


def test_where_others_left_the_path_a_checkpoint_is_stored_though_followed() -> None:
    here = rig(placement=PlacementConfig(interval_tokens=0, decode_interval_tokens=0))
    turn(here, 10)
    here.serve(PROMPT[: 10 * PAGE] + text(2, 5 * PAGE))
    turn(here, 14)
    later(here, DELAY_S)
    assert 10 in stored(here)


def test_a_shorter_prompt_that_came_later_is_not_superseded_by_the_longer() -> None:
    here = rig()
    turn(here, 14)
    later(here, 1)
    turn(here, 10)
    later(here, DELAY_S)
    assert stored(here) == [10, 14]


def test_a_path_that_never_rests_is_stored_all_the_same() -> None:
    here, now = rig(), 0.0
    pages = 1
    while not stored(here):
        turn(here, pages)
        later(here, DELAY_S / 3)
        now, pages = now + DELAY_S / 3, pages + 1
        assert now <= (MOST_DELAYS + 2) * DELAY_S, "a crash now would cost all of it"
    assert now >= MOST_DELAYS * DELAY_S


def test_closing_stores_what_rests() -> None:
    here = rig()
    turn(here, 10)
    turn(here, 12)
    here.cache.close()
    assert resumable(here) == 12


def test_flushing_stores_what_rests() -> None:
    here = rig()
    for name in range(1, 8):
        turn(here, 10, text(name, 40 * PAGE + 1))
    here.cache.flush()
    here.settle()
    assert [resumable(here, text(name, 40 * PAGE + 1)) for name in range(1, 8)] == 7 * [10]


def test_detaching_stores_what_rests() -> None:
    here = rig()
    link = here.cache._store_tier.link
    assert link is not None
    turn(here, 10)
    here.cache.store.detach()
    here.settle()
    assert stored(here, link) == [10] and link.ended


@pytest.mark.parametrize("write", [WritePolicy.THROUGH, WritePolicy.EXCLUSIVE])
def test_what_leaves_the_host_is_stored_first(write: WritePolicy) -> None:
    here = rig(write=write)
    turn(here, 16)
    here.evict_all(Tier.DEVICE)
    here.evict_all(Tier.HOST)
    here.settle()
    assert here.restore(PROMPT) == 0 and resumable(here) == 16, "it left the host before its rest was over, and is nowhere"


def test_a_new_store_is_offered_what_rested_for_the_old_one() -> None:
    here = rig()
    turn(here, 10)
    here.cache.store.detach()
    fresh = MemoryStore()
    here.attach(fresh, StoreConfig(checkpoint_delay_s=DELAY_S, recompute_tokens_per_s=1.0))
    here.settle()
    assert stored(here) == []
    later(here, DELAY_S)
    assert stored(here) == [10] and resumable(here) == 10


def test_without_rest_everything_is_stored_at_once() -> None:
    store = StoreConfig(checkpoint_delay_s=0, recompute_tokens_per_s=1.0)
    here = Rig(FULL_POINT, host_pages=256, store=MemoryStore(), store_config=store)
    turn(here, 10)
    turn(here, 12)
    assert stored(here) == [10, 12]


def test_a_store_that_is_down_when_it_is_detached_keeps_nothing_waiting() -> None:
    here = rig()
    link = here.cache._store_tier.link
    assert link is not None
    turn(here, 10)
    link.num_putting += MOST_PUTS  # it answers nothing any more
    here.cache.store.detach()
    here.cache.step()
    assert len(link.deferred) == 1 and not link.ended
    for _ in range(8):  # a cache that does not step for long has not asked it
        here.clock.advance(link.tuning.backup_age_s / 7)
        here.cache.step()
    assert not len(link.deferred) and link.ended and here.state.counters["backup_dropped_too_old"] == 1


def test_what_is_due_is_not_given_up_for_a_pause_in_which_nobody_stepped() -> None:
    here = rig()
    link = here.cache._store_tier.link
    assert link is not None
    turn(here, 10)
    link.num_putting += MOST_PUTS  # it is busy
    here.cache.store.detach()
    here.cache.step()
    here.clock.advance(10 * link.tuning.backup_age_s)  # a long pass
    here.cache.step()
    link.num_putting -= MOST_PUTS
    here.settle()
    assert stored(here, link) == [10] and not here.state.counters["backup_dropped_too_old"]


def test_a_follower_that_is_nowhere_but_on_the_device_spares_nobody() -> None:
    here = rig(write=WritePolicy.SELECTIVE)
    for pages in range(1, 12):
        turn(here, pages)
        later(here, 40)
    later(here, MOST_DELAYS * DELAY_S)
    later(here, DELAY_S)
    assert resumable(here) >= 8, "each turn saves what the one before it left, and its own stays on the device"


def test_a_follower_with_a_time_to_live_spares_nobody() -> None:
    here = rig(host_pages=1024, device_pages=1024)
    prompt = text(1, 260 * PAGE + 1)
    turn(here, 256, prompt)
    here.serve(prompt, ttl_s=20)
    rest_out(here)
    assert resumable(here, prompt) == 256


def test_a_follower_that_was_refused_spares_nobody() -> None:
    here = rig()
    turn(here, 10)
    later(here, 10)
    turn(here, 14)
    later(here, DELAY_S - 1)
    here.clock.advance(1)
    here.cache.step()
    refuse(here)
    rest_out(here)
    assert resumable(here) == 10


def test_a_clock_that_jumps_loses_nothing() -> None:
    here = rig(host_pages=1024, device_pages=1024)
    prompts = [text(name, 10 * PAGE + 1) for name in range(1, 21)]
    for prompt in prompts:
        here.serve(prompt)
    later(here, 100 * DELAY_S)
    assert [resumable(here, prompt) for prompt in prompts] == 20 * [10]


def test_many_at_rest_go_down_early() -> None:
    here = rig()
    prompts = [text(name, 2 * PAGE + 1) for name in range(1, 31)]
    for prompt in prompts:
        here.serve(prompt)
    assert len(stored(here)) >= 30 - 256 / 16


def test_what_left_the_path_meanwhile_ends_no_rest_early() -> None:
    here = rig()
    turn(here, 10)
    other = text(2, 40 * PAGE + 1)
    for pages in range(1, 31):
        turn(here, pages, other)
        keep_last(here, other, 2)
    assert stored(here) == [] and here.cache.stats().deferred == 3, "dropped checkpoints take no space on the host"


def test_what_left_the_host_does_not_rest_there() -> None:
    here = rig(write=WritePolicy.THROUGH)
    link = here.cache._store_tier.link
    assert link is not None
    turn(here, 10)
    here.evict_all(Tier.DEVICE)
    offer(here.state, link, next(node for node in here.tree.nodes() if node.checkpoints))
    here.settle()
    assert here.cache.stats().deferred == 1
    link.num_putting += MOST_PUTS  # it answers nothing any more
    link.backup_bytes += 2 * link.most_backup_bytes
    here.evict_idle(Tier.HOST)
    assert here.cache.stats().deferred == 0 and here.state.counters["backup_skipped_store_busy"] > 0


def test_a_small_host_lets_nothing_rest() -> None:
    here = rig(host_pages=12)
    prompts = [text(name, 3 * PAGE + 1) for name in range(1, 21)]
    for prompt in prompts:
        here.serve(prompt)
        later(here, 1)
    assert here.state.counters["save_skipped_no_room"] == 0
    assert [resumable(here, prompt) for prompt in prompts] == 20 * [3]


@pytest.mark.parametrize("count", [1, 3])
def test_a_path_whose_checkpoints_are_dropped_is_stored_all_the_same(count: int) -> None:
    here = rig()
    for pages in range(1, 39):
        turn(here, pages)
        keep_last(here, PROMPT, count)
        later(here, DELAY_S / 3)
    assert resumable(here) >= 28, "nothing for more than the most that a path may rest"


def test_what_was_refused_once_is_stored_before_it_is_evicted_after_its_next_use() -> None:
    here = rig()
    turn(here, 10)
    here.clock.advance(DELAY_S)
    here.cache.step()
    refuse(here)
    here.settle()
    assert stored(here) == []
    turn(here, 10)
    turn(here, 10)
    here.evict_all(Tier.DEVICE)
    here.evict_all(Tier.HOST)
    here.settle()
    assert resumable(here) == 10


def test_a_follower_that_is_on_its_way_spares_nobody_yet() -> None:
    here = rig()
    turn(here, 10)
    later(here, 29)
    turn(here, 14)
    here.clock.advance(1)  # the first rests again: the second is not stored
    here.cache.step()
    here.clock.advance(29)
    here.cache.step()
    assert here.store_executor.pending, "the second is on its way"
    here.clock.advance(1)
    here.cache.step()
    refuse(here)
    rest_out(here)
    assert resumable(here) == 10


def test_closing_stores_what_comes_to_rest_meanwhile() -> None:
    here = rig()
    turn(here, 14)
    later(here, DELAY_S)
    with here.ready(PROMPT[: 10 * PAGE + 1]) as lease:
        here.prefill(lease)
    here.executor.finish_all()
    here.cache.close()
    assert 10 in stored(here)


def test_paths_below_what_rests_make_room_on_a_full_host() -> None:
    here = rig(host_pages=128)
    prompts = [text(name, 30 * PAGE + 1) for name in range(1, 31)]
    for prompt in prompts:
        here.serve(prompt)
        later(here, 1)
    assert here.state.counters["save_skipped_no_room"] == 0
    later(here, DELAY_S)
    assert [resumable(here, prompt) for prompt in prompts] == 30 * [30]


@pytest.mark.parametrize("end", ["close", "flush", "detach"])
def test_an_heir_whose_pages_were_refused_costs_nothing(end: str) -> None:
    here = rig()
    turn(here, 10)
    later(here, 1)
    with here.ready(PROMPT[: 14 * PAGE + 1]) as lease:
        while lease.position < lease.num_tokens:
            here.compute(lease, min(here.cache.next_stop(lease) or lease.num_tokens, lease.num_tokens))
            here.executor.finish_all()
            here.cache.step()
    here.executor.finish_all()
    here.cache.step()
    refuse(here)
    here.cache.step()
    store = here.cache._store_tier.link
    assert store is not None
    {"close": here.cache.close, "flush": here.cache.flush, "detach": here.cache.store.detach}[end]()
    here.settle()
    after = Rig(FULL_POINT, host_pages=1024, device_pages=1024, store=store.store, store_config=store.config)
    assert after.serve_fetched(PROMPT).store >= 10 * PAGE


def test_an_heir_that_is_refused_when_many_rest_costs_nothing() -> None:
    here = rig()
    link = here.cache._store_tier.link
    assert link is not None
    turn(here, 10)
    later(here, 1)
    turn(here, 14)
    link.deferred._most_bytes = 0  # as if many others rested: the first is skipped, the second sent off
    here.cache.step()
    refuse(here)
    link.deferred._most_bytes = 1 << 20
    rest_out(here)
    assert resumable(here) == 10


def test_nothing_is_deferred_before_a_store_that_others_read() -> None:
    assert StoreConfig().delay_s(shared=False) == 30.0 and StoreConfig().delay_s(shared=True) == 0.0
    assert StoreConfig(checkpoint_delay_s=5.0).delay_s(shared=True) == 5.0


def test_what_rests_is_worth_more_on_the_host() -> None:
    here = rig()
    link = here.cache._store_tier.link
    assert link is not None
    older, newer = text(2, 40 * PAGE + 1), text(3, 40 * PAGE + 1)
    turn(here, 10, older)
    later(here, 1)
    turn(here, 10, newer)
    later(here, 20)
    turn(here, 10)  # so that it is known how long ago those were
    first, second, _ = link.deferred
    ranking = here.tree.ranking
    assert ranking.pop(Tier.HOST, runs=False, checkpoints=True) is first.residencies[Tier.HOST], "both rest: the older one goes"
    ranking.queue_residency(first.residencies[Tier.HOST])  # type: ignore[arg-type]
    assert link.deferred.leave(second)
    assert ranking.pop(Tier.HOST, runs=False, checkpoints=True) is second.residencies[Tier.HOST], "of two alike, what rests stays"


@pytest.mark.parametrize("end", ["rested", "detached", "replaced"])
def test_what_rests_no_longer_is_worth_no_more(end: str) -> None:
    here = rig()
    turn(here, 10)
    [residency] = [each.residencies[Tier.HOST] for node in here.tree.nodes() for each in (node.checkpoints or {}).values()]
    assert residency is not None and residency.backup_deferred
    if end == "rested":
        later(here, DELAY_S)
    else:
        here.cache.store.detach()
        if end == "replaced":
            here.attach(MemoryStore(), StoreConfig(checkpoint_delay_s=0.0, recompute_tokens_per_s=1.0))
        here.settle()
    assert not residency.backup_deferred


def test_a_high_priority_is_worth_more_than_rest() -> None:
    here = rig(host_pages=64)
    kept, passing = text(2, 12 * PAGE + 1), text(3, 12 * PAGE + 1)
    here.serve(kept, priority=8)
    later(here, DELAY_S)
    here.serve(passing)
    here.evict_all(Tier.DEVICE)
    ids = allocate(here.state, Tier.HOST, {Kind.PREFIX: 45})[Kind.PREFIX]
    assert here.restore(kept) == 12 * PAGE and here.restore(passing) == 0
    here.state.tree.release(Tier.HOST, Kind.PREFIX, ids)


def test_many_that_leave_the_host_at_once_are_all_stored() -> None:
    here = rig(host_pages=512)
    prompts = [text(name, 2 * PAGE + 1) for name in range(1, 21)]
    for prompt in prompts:
        here.serve(prompt)
    assert here.cache.stats().deferred == 20 > MOST_PUTS
    here.evict_all(Tier.DEVICE)
    here.evict_idle(Tier.HOST)
    here.settle()
    assert [resumable(here, prompt) for prompt in prompts] == 20 * [2]
