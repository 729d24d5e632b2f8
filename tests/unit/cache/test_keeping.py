"""Pins, time to live and priority: what is kept, and for how long."""

from __future__ import annotations

from dataclasses import replace
from math import log2

import pytest

from stepwell import Cause, ConfigError, LeaseError, ModelSpec, Tier, WritePolicy
from stepwell.base.config import MAX_PRIORITY, PRIORITY_STEP_S
from stepwell.policy.value import Expected, ReuseModel, Visit
from toys import EVICTIONS, FULL, HYBRID, PAGE, SMALL_PAGES, Rig, text


@pytest.mark.parametrize("host_pages", [None, 256])
def test_a_pin_keeps_a_prompt_whatever_else_needs_room(host_pages: int | None) -> None:
    rig = Rig(HYBRID, device_pages=48, host_pages=host_pages)
    rig.serve(text(1, 17))
    pin = rig.cache.pins.add(text(1, 17))
    assert pin.tokens == 16 and repr(pin) == "Pin(16 tokens)"
    for name in range(2, 14):
        rig.clock.advance(1000)
        rig.serve(text(name, 17))
    rig.evict_all(Tier.DEVICE)
    if host_pages:
        rig.evict_all(Tier.HOST)
    assert rig.restore(text(1, 17)) == 16
    rig.cache.pins.release(pin)
    for tier in rig.tree.tiers:
        rig.evict_all(tier)
    assert rig.restore(text(1, 17)) == 0
    rig.idle_check()


def test_a_pin_holds_one_copy_the_lowest() -> None:
    rig = Rig(FULL, host_pages=64)
    rig.serve(text(1, 17))
    pin = rig.cache.pins.add(text(1, 17))
    rig.evict_all(Tier.DEVICE)
    match = rig.cache.lookup(text(1, 17))
    assert (match.device_tokens, match.host_tokens) == (0, 16)
    rig.cache.pins.release(pin)
    rig.idle_check()


def test_a_pin_runs_out_by_itself() -> None:
    rig = Rig(HYBRID)
    rig.serve(text(1, 17))
    pin = rig.cache.pins.add(text(1, 17), ttl_s=10.0)
    rig.clock.advance(10.0)
    rig.cache.step()
    with pytest.raises(LeaseError, match="released already, or has expired"):
        rig.cache.pins.release(pin)
    rig.idle_check()


def test_a_pinned_path_outlives_the_time_to_live_of_its_requests() -> None:
    rig = Rig(HYBRID)
    rig.serve(text(1, 17), ttl_s=5.0)
    pin = rig.cache.pins.add(text(1, 17))
    rig.clock.advance(60.0)
    rig.cache.step()
    assert rig.restore(text(1, 17)) == 16
    rig.cache.pins.release(pin)
    rig.idle_check()


@pytest.mark.parametrize("ttl_s", [None, 60.0])
def test_a_path_with_a_time_to_live_runs_out_when_its_last_pin_is_gone(ttl_s: float | None) -> None:
    rig = Rig(HYBRID, host_pages=64)
    rig.serve(text(1, 17), ttl_s=5.0)
    pins = [rig.cache.pins.add(text(1, 17), ttl_s=ttl_s) for _ in range(2)]
    rig.clock.advance(50.0)
    rig.cache.step()
    rig.cache.pins.release(pins[0])
    rig.cache.step()
    assert rig.cache.lookup(text(1, 17)).restore_tokens == 16
    if ttl_s is None:
        rig.cache.pins.release(pins[1])
    rig.clock.advance(10.0)
    rig.cache.step()
    assert rig.cache.lookup(text(1, 17)).known_tokens == 0
    rig.idle_check()


def test_a_pinned_path_that_is_cut_stays_whole() -> None:
    rig = Rig(FULL, host_pages=64)
    rig.serve(text(1, 17), ttl_s=5.0)
    pin = rig.cache.pins.add(text(1, 17))
    rig.clock.advance(60.0)
    rig.cache.step()
    rig.serve([*text(1, 8), *text(2, 9)], ttl_s=5.0)
    rig.clock.advance(60.0)
    rig.cache.step()
    assert rig.cache.lookup([*text(1, 8), *text(2, 9)]).known_tokens == 8
    assert rig.cache.lookup(text(1, 17)).restore_tokens == 16
    rig.cache.pins.release(pin)
    rig.cache.step()
    assert rig.cache.lookup(text(1, 17)).known_tokens == 0
    rig.idle_check()


def test_a_pin_of_something_unknown_holds_nothing() -> None:
    rig = Rig(HYBRID)
    pin = rig.cache.pins.add(text(1, 17))
    assert pin.tokens == 0
    rig.cache.pins.release(pin)
    with pytest.raises(LeaseError):
        rig.cache.pins.release(pin)


def test_clear_takes_a_pinned_path_and_the_pin_gives_its_pages_back() -> None:
    rig = Rig(HYBRID, host_pages=64)
    rig.serve(text(1, 17))
    pin = rig.cache.pins.add(text(1, 17))
    rig.cache.clear()
    rig.cache.audit()
    assert rig.restore(text(1, 17)) == 0
    rig.cache.pins.release(pin)
    rig.cache.audit()
    assert rig.cache.stats().tier(Tier.DEVICE).used_bytes == rig.cache.stats().tier(Tier.HOST).used_bytes == 0


def test_what_a_request_computes_after_a_clear_is_for_itself_alone() -> None:
    """After new weights, say: a request that began with the old ones must not feed the cache any more."""
    rig = Rig(HYBRID, host_pages=64)
    rig.serve(text(1, 17))
    lease = rig.ready([*text(1, 17), *text(2, 8)])
    rig.cache.clear()
    rig.prefill(lease)
    rig.decode(lease, text(3, 5))
    rig.engine.check(lease)
    assert rig.cache.lookup([*text(1, 17), *text(2, 8)]).known_tokens == 0
    rig.cache.release(lease)
    rig.idle_check()
    assert rig.cache.stats().tier(Tier.DEVICE).used_bytes == rig.cache.stats().tier(Tier.HOST).used_bytes == 0


def test_time_to_live_counts_from_the_last_use() -> None:
    rig = Rig(HYBRID, host_pages=64)
    rig.serve(text(1, 17), ttl_s=10.0)
    rig.clock.advance(8.0)
    rig.serve(text(1, 17), ttl_s=10.0)
    rig.clock.advance(8.0)
    rig.cache.step()
    assert rig.restore(text(1, 17)) == 16
    rig.clock.advance(2.0)
    rig.cache.step()
    assert rig.restore(text(1, 17)) == 0
    why = rig.cache.explain(text(1, 17))
    assert why.cause is Cause.EXPIRED and why.at_s == 18.0
    assert rig.cache.stats().tier(Tier.DEVICE).used_bytes == rig.cache.stats().tier(Tier.HOST).used_bytes == 0


def test_a_use_without_a_limit_lifts_it() -> None:
    rig = Rig(FULL)
    rig.serve(text(1, 17), ttl_s=10.0)
    rig.serve(text(1, 17))
    rig.clock.advance(1000.0)
    rig.cache.step()
    assert rig.restore(text(1, 17)) == 16


def test_a_shorter_limit_never_cuts_a_longer_one_short() -> None:
    rig = Rig(FULL)
    for ttl_s in (10.0, 50.0, 10.0):
        rig.serve(text(1, 17), ttl_s=ttl_s)
    rig.clock.advance(20.0)
    rig.cache.step()
    assert rig.restore(text(1, 17)) == 16
    rig.clock.advance(30.0)
    rig.cache.step()
    assert rig.restore(text(1, 17)) == 0


def test_a_shared_trunk_lives_as_long_as_its_longest_branch() -> None:
    rig = Rig(FULL)
    rig.serve([*text(1, 8), *text(2, 9)], ttl_s=10.0)
    rig.serve([*text(1, 8), *text(3, 9)], ttl_s=50.0)
    rig.clock.advance(20.0)
    rig.cache.step()
    rig.cache.audit()
    assert rig.restore([*text(1, 8), *text(2, 9)]) == 8
    assert rig.restore([*text(1, 8), *text(3, 9)]) == 16


def test_what_expires_under_a_request_stays_the_requests() -> None:
    rig = Rig(HYBRID)
    lease = rig.ready(text(1, 17), ttl_s=5.0)
    rig.prefill(lease, 16)
    rig.clock.advance(6.0)
    rig.cache.step()
    rig.cache.audit()
    rig.engine.check(lease)
    rig.prefill(lease)
    rig.cache.release(lease)
    rig.idle_check()


@pytest.mark.parametrize("write", list(WritePolicy))
def test_higher_priority_is_given_up_last(write: WritePolicy) -> None:
    rig = Rig(FULL, device_pages=24, write=write)
    rig.serve(text(1, 17), priority=5)
    for name in range(2, 12):
        rig.clock.advance(60.0)
        rig.serve(text(name, 17))
    assert rig.restore(text(1, 17)) == 16


@pytest.mark.parametrize("eviction", EVICTIONS)
def test_a_priority_fades_so_that_nobody_has_the_tier_for_ever(eviction: str) -> None:
    """Six urgent prompts fill the device. An hour and a half later they are as good as any others, and those have hits again."""
    rig = Rig(FULL, device_pages=24, tuning=replace(SMALL_PAGES, eviction=EVICTIONS[eviction]))
    for name in range(6):
        rig.serve(text(name, 17), priority=8)
    others = [text(name, 17) for name in range(10, 13)]
    hits = []
    for _ in range(12):
        rig.clock.advance(600.0)
        hits.append(sum(rig.serve(other).device for other in others))
    assert hits[-4:] == [16 * len(others)] * 4, hits


def test_a_visit_of_no_priority_does_not_renew_an_old_one() -> None:
    rig = Rig(FULL)
    rig.serve(text(1, 17), priority=3)
    (node,) = rig.cache.lookup(text(1, 17)).path
    until_s = node.urgent_until
    assert until_s == rig.clock.now() + 3 * PRIORITY_STEP_S
    rig.clock.advance(PRIORITY_STEP_S)
    rig.serve(text(1, 17))
    assert node.urgent_until == until_s
    rig.serve(text(1, 17), priority=3)
    assert node.urgent_until == until_s + PRIORITY_STEP_S


def test_each_step_of_priority_doubles_the_worth_and_is_lost_in_its_time() -> None:
    reuse = ReuseModel(PAGE)
    value = Expected(reuse)
    visit = Visit(0.0, end=1)

    def worth(priority: int, at_s: float) -> float:
        reuse.arrive(at_s, known=0, end=1, passed=(), goes_on=False, lost=None)
        group, since = value.due(0.0, priority * PRIORITY_STEP_S, visit)
        return value.worth(group, value.level(PAGE, 64, 0, 0, deferred=False), since)

    assert [worth(steps, 0.0) / worth(0, 0.0) for steps in (0, 1, 2, MAX_PRIORITY)] == [1, 2, 4, 2**MAX_PRIORITY]
    assert worth(3, PRIORITY_STEP_S) / worth(0, PRIORITY_STEP_S) == pytest.approx(4)
    assert worth(3, 3 * PRIORITY_STEP_S) == worth(0, 3 * PRIORITY_STEP_S)


def test_a_priority_counts_from_when_it_was_given_whenever_the_visit_was() -> None:
    reuse = ReuseModel(PAGE)
    value = Expected(reuse)
    for late_s, priority in ((0.001, 1), (0.001, 10), (200.0, 3), (7200.0, 10)):  # from the visit to the commit
        given_s = reuse._now_s + late_s
        visit = Visit(reuse._now_s, end=1)
        reuse.arrive(given_s, known=0, end=1, passed=(), goes_on=False, lost=None)
        level = value.level(PAGE, 64, 0, 0, deferred=False)
        (group, since), (plain, _) = (
            value.due(given_s, until_s, visit) for until_s in (given_s + priority * PRIORITY_STEP_S, 0.0)
        )
        octaves = log2(value.worth(group, level, since) / value.worth(plain, level, since))
        assert abs(octaves - priority) <= 0.5, (late_s, priority, octaves)


@pytest.mark.parametrize("spec", [FULL, HYBRID])
def test_the_upper_half_of_a_path_that_a_visit_cut_runs_out_too(spec: ModelSpec) -> None:
    """A visit to part of a path cuts its node where the known text ends, past where it resumes; both halves leave in time."""
    rig = Rig(spec)
    rig.serve(text(1, 33), ttl_s=10.0)
    rig.cache.release(rig.ready(text(1, 16), ttl_s=1.0))  # and is gone before it computes anything
    assert len(rig.cache.lookup(text(1, 33)).path) > 1, "nothing was cut"
    rig.clock.advance(10.5)
    rig.cache.step()
    assert rig.cache.lookup(text(1, 33)).known_tokens == 0
    rig.idle_check()


def test_a_pin_that_ran_out_is_left_quietly() -> None:
    rig = Rig(FULL)
    rig.serve(text(1, 17))
    with rig.cache.pins.add(text(1, 17), ttl_s=5.0) as pin:
        rig.clock.advance(6.0)
        rig.cache.step()
        assert not pin.held
    with pytest.raises(LeaseError, match="released already, or has expired"):
        rig.cache.pins.release(pin)
    rig.idle_check()


@pytest.mark.parametrize("request_", [{"priority": -1}, {"priority": MAX_PRIORITY + 1}, {"ttl_s": 0.0}, {"ttl_s": -3.0}])
def test_impossible_wishes_are_refused(request_: dict[str, float]) -> None:
    rig = Rig(HYBRID)
    with pytest.raises(ConfigError, match="priority must be 0 to 10 and ttl_s positive"):
        rig.open(text(1, 17), **request_)
    with pytest.raises(ConfigError, match="ttl_s must be positive"):
        rig.cache.pins.add(text(1, 17), ttl_s=-1.0)
    rig.idle_check()
