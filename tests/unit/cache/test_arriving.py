"""What a pass may begin on before it has ended: the loads of a lease, all of them or none, and what comes of the pass."""

from __future__ import annotations

import pytest

from stepwell.base.ids import JobId, Kind, Tier
from stepwell.tiers.lease import LeaseState
from toys import FULL, HYBRID, Rig, text


class Queued:
    """A load that is queued to its last byte."""

    def __init__(self, job: JobId) -> None:
        self.job = job

    def wait(self, state: str, layer: int) -> None:
        pass


def rig_of(spec: object = FULL) -> tuple[Rig, set[JobId]]:
    """A prompt of 16 tokens on the host alone; and the jobs that are said not to be queued."""
    rig, unqueued = Rig(spec, host_pages=64), set[JobId]()  # type: ignore[arg-type]
    rig.serve(text(1, 17))
    rig.evict_all(Tier.DEVICE)
    rig.state.copies._arrivals = lambda job: None if job in unqueued else Queued(job)
    return rig, unqueued


@pytest.mark.parametrize("spec", [FULL, HYBRID])
def test_a_lease_arrives_with_its_load_until_that_has_ended(spec: object) -> None:
    rig, unqueued = rig_of(spec)
    with rig.open(text(1, 30)) as lease:
        (job,) = rig.executor.pending
        assert [each.job for each in rig.cache.arriving(lease)] == [job]  # type: ignore[attr-defined]
        assert rig.cache.arriving(lease) and not lease.ready, "asking changes nothing"
        unqueued.add(job)
        assert rig.cache.arriving(lease) == ()
        unqueued.clear()
        rig.settle()
        assert lease.ready and rig.cache.arriving(lease) == ()
    rig.idle_check()


def test_pages_that_another_loads_arrive_with_its_job() -> None:
    rig, _ = rig_of()
    with rig.open(text(1, 30)) as first, rig.open(text(1, 33)) as second:
        (job,) = rig.executor.pending
        assert first.arrives_with == second.arrives_with == (job,)
    rig.idle_check()


def test_a_checkpoint_of_its_own_arrives_beside_pages_that_another_loads() -> None:
    rig, unqueued = rig_of(HYBRID)
    with rig.open(text(1, 30)) as first, rig.open(text(1, 33)) as second:
        one, other = rig.executor.pending
        assert (first.arrives_with, second.arrives_with) == ((one,), (one, other))
        unqueued.add(one)
        assert rig.cache.arriving(second) == (), "all of it, or nothing"
        unqueued.clear()
        rig.executor.finish(one)
        rig.cache.step()
        assert [each.job for each in rig.cache.arriving(second)] == [other], "what has ended is there"  # type: ignore[attr-defined]
    rig.idle_check()


def test_a_page_that_no_load_brings_is_waited_for() -> None:
    rig, _ = rig_of()
    with rig.open(text(1, 30)) as first:
        pages = first.prefix_pages[:4]
        (job,) = rig.executor.pending
        assert rig.state.copies.loads_of(pages) == (job,)
        assert rig.state.copies.loads_of(first.prefix_pages[:5]) == ()
    rig.idle_check()


def test_a_copy_that_a_checkpoint_needs_is_waited_for_as_a_whole() -> None:
    rig, _ = rig_of(HYBRID)
    with rig.open(text(2, 17)) as lease:
        rig.compute(lease, rig.cache.next_stop(lease) or 16)
        assert lease.state is LeaseState.LOADING and rig.cache.arriving(lease) == ()
        rig.settle()
    rig.idle_check()


def test_after_the_pass_the_lease_is_ready_and_its_speed_is_not_measured() -> None:
    rig, _ = rig_of()
    with rig.open(text(1, 30)) as lease:
        rig.clock.advance(5.0)
        rig.executor.finish_all()
        compute = rig.cache._store_tier.compute
        assert rig.cache.wait_arriving(lease) and lease.ready
        rig.engine.check(lease)
        rig.compute(lease, 24)
        assert compute.seconds(0, 6) is None
        rig.clock.advance(1.0)
        rig.compute(lease, 30)
        assert compute.seconds(0, 6) is not None
    rig.idle_check()


def test_a_load_that_failed_under_a_pass_is_told_once_and_reported_by_the_next_step() -> None:
    rig, _ = rig_of()
    lease = rig.open(text(1, 30))
    rig.cache.arriving(lease)
    for job in rig.executor.pending:
        rig.executor.finish(job, failing_rank=0)
    assert not rig.cache.wait_arriving(lease) and lease.failed
    assert rig.cache.step().failed == (lease,)
    rig.cache.release(lease)
    assert rig.restore(text(1, 30)) == 0 and not rig.used(Tier.DEVICE, Kind.PREFIX)
    rig.idle_check()
