"""Known bugs of earlier systems, groups D and E: what happens to tree and pages while copies run."""

from __future__ import annotations

import pytest

from stepwell import Kind, LeaseState, NoRoom, Tier, WritePolicy
from stepwell.base.tasks import Purpose
from toys import ALL_MODELS, FULL, FULL_POINT, HYBRID, Rig, text


@pytest.mark.parametrize("spec", ALL_MODELS)
def test_split_during_save_saves_both_halves(spec: str) -> None:
    """D1: a node cut in two while it is copied down: both parts count as saved when the copy ends."""
    rig = Rig(ALL_MODELS[spec], host_pages=256)
    prompt = text(1, 33)
    lease = rig.ready(prompt, hints=(16,))
    rig.prefill(lease, 16)
    rig.compute(lease, 32)
    assert rig.pending(Purpose.SAVE)
    branch = rig.open([*prompt[:16], *text(2, 9)])
    assert [node.num_pages for node in rig.cache.lookup(prompt).path] == [4, 4], "the node was not split"
    rig.settle()
    for each in (lease, branch):
        rig.cache.release(each)
    rig.evict_all(Tier.DEVICE)
    assert rig.serve(prompt).host == 32


def test_split_during_load_keeps_both_halves_held() -> None:
    """D2: a node cut in two while it is copied up: no half of its source may be reused before the copy ends."""
    rig = Rig(FULL, host_pages=16)
    prompt = text(1, 33)
    rig.serve(prompt)
    rig.evict_all(Tier.DEVICE)
    lease = rig.open(prompt)
    job = rig.pending(Purpose.LOAD)[0]
    sources = rig.executor.plan(job).copies[0].source.ids
    rig.cache.release(rig.open([*prompt[:16], *text(2, 9)]))
    assert len(rig.cache.lookup(prompt).path) == 2, "the node was not split"
    rig.evict_all(Tier.HOST)
    assert (rig.state.arena(Tier.HOST).refs[Kind.PREFIX][sources] > 0).all()
    rig.settle()
    rig.engine.check(lease)
    rig.cache.release(lease)
    rig.idle_check()


def test_split_during_load_keeps_both_halves_of_the_target() -> None:
    """D3: the pages a load writes are held in every fragment of a node that was cut meanwhile."""
    rig = Rig(FULL, host_pages=64, device_pages=24)
    prompt = text(1, 33)
    rig.serve(prompt)
    rig.evict_all(Tier.DEVICE)
    lease = rig.open(prompt)
    rig.cache.release(rig.open([*prompt[:16], *text(2, 9)]))
    rig.cache.release(lease)  # only the copy and the tree hold the targets now
    rig.evict_all(Tier.DEVICE)
    rig.cache.audit()
    assert rig.cache.lookup(prompt).known_tokens == 32
    rig.settle()
    assert rig.serve(prompt).device == 32


def test_host_page_is_not_evicted_while_it_is_loaded() -> None:
    """E1: pressure on the host during a load takes other pages, or fails; never the ones being read."""
    rig = Rig(HYBRID, host_pages=24)
    prompt = text(1, 17)
    rig.serve(prompt)
    rig.evict_all(Tier.DEVICE)
    lease = rig.open(prompt)
    assert rig.pending(Purpose.LOAD)
    for name in range(2, 6):
        other = rig.open(text(name, 17))
        rig.compute(other, 16)  # saves go to the host, which is short
        rig.cache.release(other)
        rig.cache.audit()
    rig.settle()
    assert lease.ready
    rig.engine.check(lease)
    rig.cache.release(lease)
    rig.idle_check()


def test_device_page_is_not_evicted_while_it_is_saved() -> None:
    """E1, downwards: pressure on the device during a save never takes the pages being read."""
    rig = Rig(HYBRID, device_pages=24, host_pages=64)
    lease = rig.ready(text(1, 17))
    rig.compute(lease, 16)
    rig.cache.release(lease)
    assert rig.pending(Purpose.SAVE)
    rig.evict_idle(Tier.DEVICE)
    rig.cache.audit()
    rig.settle()
    rig.evict_all(Tier.DEVICE)
    assert rig.serve(text(1, 17)).host == 16


def test_write_back_copy_is_not_the_next_victim_of_the_same_sweep() -> None:
    """E2: a page on its way to the host cannot be evicted from there by the next save of the same round."""
    rig = Rig(FULL, device_pages=16, host_pages=16, write=WritePolicy.EXCLUSIVE)
    for name in (1, 2):
        rig.serve(text(name, 29))
    rig.evict_all(Tier.HOST)
    with pytest.raises(NoRoom) as refusal:
        rig.open(text(3, 57))
    assert refusal.value.waiting
    saving = [rig.executor.plan(job).copies[0].target.ids for job in rig.pending(Purpose.SAVE)]
    assert sum(map(len, saving)) == 14
    rig.evict_idle(Tier.HOST)
    for ids in saving:
        assert (rig.state.arena(Tier.HOST).refs[Kind.PREFIX][ids] > 0).all()
    rig.settle()
    assert rig.serve(text(3, 57)).computed == 57
    assert [rig.restore(text(name, 29)) for name in (1, 2)] == [28, 28]


def test_overlapping_loads_of_prefix_and_checkpoint_finish_in_any_order() -> None:
    """E3: two requests load one checkpoint, one of them the prefix as well; neither minds who is done first."""
    for order in (1, -1):
        rig = Rig(HYBRID, host_pages=64)
        prompt = text(1, 17)
        rig.serve(prompt)
        rig.evict_all(Tier.DEVICE)
        leases = [rig.open([*prompt, name]) for name in (1, 2, 3)]
        for job in rig.executor.pending[::order]:
            rig.executor.finish(job)
            rig.cache.step()
            rig.cache.audit()
        for lease in leases:
            assert lease.ready
            rig.engine.check(lease)
            rig.cache.release(lease)
        rig.idle_check()


def test_commit_of_the_same_path_during_a_load_frees_nothing_under_it() -> None:
    """E4: a request commits pages that are just being loaded: its own stay private, the targets stay the tree's."""
    rig = Rig(FULL, host_pages=64)
    prompt = text(1, 17)
    slow = rig.ready(prompt)
    rig.serve(prompt)
    rig.evict_all(Tier.DEVICE)
    lease = rig.open(prompt)
    targets = rig.executor.plan(rig.pending(Purpose.LOAD)[0]).copies[0].target.ids
    rig.compute(slow, 17)
    rig.cache.release(slow)
    rig.cache.release(lease)
    assert (rig.state.arena(Tier.DEVICE).refs[Kind.PREFIX][targets] == 2).all()  # the copy's and the tree's
    rig.settle()
    assert rig.serve(prompt).device == 16


def test_a_lease_is_not_ready_before_its_last_byte() -> None:
    """E6: there is no way to read a page that is still arriving: a lease stays LOADING until all of it is there."""
    rig = Rig(HYBRID, host_pages=64, ranks=2)
    prompt = text(1, 17)
    rig.serve(prompt)
    rig.evict_all(Tier.DEVICE)
    first, second = rig.open(prompt), rig.open(prompt)  # the second waits for the first one's pages as well as its own
    jobs = rig.pending(Purpose.LOAD)
    assert len(jobs) == 2
    rig.executor.finish(jobs[1])
    rig.executor.answer(jobs[0], 0)
    assert rig.cache.step().ready == () and second.state is LeaseState.LOADING
    rig.executor.answer(jobs[0], 1)
    assert rig.cache.step().ready == (first, second)
    for lease in (first, second):
        rig.engine.check(lease)
        rig.cache.release(lease)
    rig.idle_check()


def test_point_copy_ends_before_the_request_computes_on() -> None:
    """E5, on the brain's side: after handing its point state over, a request waits until its own copy is made."""
    rig = Rig(FULL_POINT)
    lease = rig.ready(text(1, 17))
    rig.compute(lease, 16)
    assert lease.state is LeaseState.LOADING and rig.pending(Purpose.FORK)
    assert rig.cache.step().ready == ()
    rig.settle()
    assert lease.ready
    rig.engine.check(lease)
    rig.cache.release(lease)
    rig.idle_check()
