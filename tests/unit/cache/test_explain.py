"""Explanations: the state that limits, the tier, the reason, the time."""

from __future__ import annotations

from datetime import UTC, datetime, timedelta

import pytest

from stepwell import Cause, Kind, Tier
from stepwell.base.meters import SystemClock
from stepwell.tree.checkpoints import drop_residency
from stepwell.tree.node import LossReason
from toys import FULL, FULL_WINDOW, HYBRID, PAGE, SPILLING, Rig, text

PROMPT = text(1, 17)


def test_complete() -> None:
    rig = Rig(HYBRID)
    rig.serve(PROMPT)
    why = rig.cache.explain(PROMPT)
    assert why.cause is Cause.COMPLETE and why.states == () and why.restore_tokens == why.usable_tokens == 16
    assert (why.device_tokens, why.host_tokens) == (16, 0)
    assert str(why).startswith("resumes at token 16 of 17, 16 from the device (")


def test_tokens_are_told_by_the_tier_that_has_their_rows() -> None:
    """On the host alone, or with their index on the device and their rows on the host: either is from the host."""
    rig = Rig(SPILLING, device_pages=120, host_pages=400, hot_rows=4)
    rig.serve(text(1, 41))
    rig.evict_all(Tier.DEVICE)
    why = rig.cache.explain(text(1, 41))
    assert (why.restore_tokens, why.device_tokens, why.host_tokens) == (40, 0, 40)
    lease = rig.ready(text(1, 41))
    rig.prefill(lease)
    assert (rig.cache.explain(text(1, 41)).device_tokens, lease.sources.host) == (40, 40)
    free, need = rig.state.arena(Tier.DEVICE), 1
    while free.fits({Kind.ROWS: need + 1}):
        need += 1
    assert rig.state.spill is not None and rig.state.spill({Kind.ROWS: need + 3})
    assert rig.cache.row_pages is not None
    away = int(rig.cache.row_pages.backed(lease.prefix_pages).sum()) * PAGE
    why = rig.cache.explain(text(1, 41))
    assert away > 0 and (why.device_tokens, why.host_tokens) == (40 - away, away) and why.cause is Cause.COMPLETE
    assert str(why).startswith(f"resumes at token 40 of 41, {40 - away} from the device, {away} from the host (")
    again = rig.ready(text(1, 41))
    assert (again.sources.device, again.sources.host, again.sources.computed) == (40 - away, away, 1)
    for each in (lease, again):
        rig.cache.release(each)
    rig.idle_check()


def test_never_stored() -> None:
    why = Rig(HYBRID).cache.explain(PROMPT)
    assert why.cause is Cause.NEVER_STORED and why.states == ("kv",) and why.tier is None


def test_another_adapter_has_it() -> None:
    rig = Rig(HYBRID)
    rig.serve(PROMPT)
    why = rig.cache.explain(PROMPT, namespace=rig.cache.namespace_for(adapter="other"))
    assert why.cause is Cause.OTHER_NAMESPACE


@pytest.mark.parametrize("mine", [{}, {"salt": "mine"}, {"tenant": "mine"}, {"salt": "mine", "adapter": "other"}])
def test_nobody_learns_what_another_salt_or_tenant_holds(mine: dict[str, str]) -> None:
    rig = Rig(HYBRID)
    for theirs in ({"salt": "theirs"}, {"tenant": "theirs"}, {"salt": "theirs", "adapter": "other"}):
        lease = rig.cache.acquire(rig.cache.lookup(PROMPT, namespace=rig.cache.namespace_for(**theirs)))
        rig.compute(lease, 16)
        rig.cache.release(lease)
    assert rig.cache.explain(PROMPT, namespace=rig.cache.namespace_for(**mine)).cause is Cause.NEVER_STORED


def test_the_same_salt_under_another_adapter_is_told() -> None:
    rig = Rig(HYBRID)
    lease = rig.cache.acquire(rig.cache.lookup(PROMPT, namespace=rig.cache.namespace_for(salt="mine", adapter="a")))
    rig.compute(lease, 16)
    rig.cache.release(lease)
    asked = rig.cache.namespace_for(salt="mine", adapter="b")
    assert rig.cache.explain(PROMPT, namespace=asked).cause is Cause.OTHER_NAMESPACE


@pytest.mark.parametrize("tokens", [1, 3, 4])
def test_a_prompt_shorter_than_a_page_is_called_that(tokens: int) -> None:
    rig = Rig(HYBRID)
    rig.serve(PROMPT)
    why = rig.cache.explain(PROMPT[:tokens])
    assert why.cause is Cause.TOO_SHORT and "reuse begins with 5 tokens" in str(why)
    assert rig.cache.explain(PROMPT[:5]).cause is not Cause.TOO_SHORT


def test_times_are_times_of_day() -> None:
    clock = SystemClock()
    rig = Rig(FULL, clock=clock)  # type: ignore[arg-type]
    rig.serve(PROMPT)
    before = datetime.now(UTC)
    rig.evict_all(Tier.DEVICE)
    why = rig.cache.explain(PROMPT)
    assert why.at is not None and before - timedelta(seconds=1) <= why.at <= datetime.now(UTC) + timedelta(seconds=1)
    assert f"at {why.at.year}-" in str(why) and str(why).endswith("Z")


def test_no_checkpoint_names_the_states_that_lack_one() -> None:
    rig = Rig(HYBRID)
    lease = rig.ready(PROMPT)
    rig.compute(lease, 17)  # ran past its stop
    rig.cache.release(lease)
    why = rig.cache.explain(PROMPT)
    assert why.cause is Cause.NO_CHECKPOINT and why.states == ("swa", "ssm")
    assert (why.known_tokens, why.arrived_tokens, why.restore_tokens) == (16, 16, 0)
    assert "limited by swa, ssm" in str(why)


def test_evicted_pages_with_time_and_tier() -> None:
    rig = Rig(FULL)
    rig.serve(PROMPT)
    rig.clock.advance(42.0)
    rig.evict_all(Tier.DEVICE)
    why = rig.cache.explain(PROMPT)
    assert (why.cause, why.tier, why.at_s, why.states) == (Cause.EVICTED, Tier.DEVICE, 42.0, ("kv",))
    assert str(why).endswith("limited by kv in the device tier: it was evicted to free memory at 1970-01-01T00:00:42Z")


def test_evicted_tail_only() -> None:
    rig = Rig(FULL, device_pages=8)
    rig.serve(PROMPT)
    rig.shrink(Tier.DEVICE, 2)
    why = rig.cache.explain(PROMPT)
    assert why.cause is Cause.EVICTED and why.restore_tokens == 8


def test_evicted_checkpoint() -> None:
    rig = Rig(FULL_WINDOW)
    rig.serve(PROMPT)
    holder = rig.ready(text(1, 18))
    rig.compute(holder, 18)
    rig.clock.advance(7.0)
    residency = holder.restored
    assert residency is not None
    drop_residency(rig.tree, residency, rig.state.loss(LossReason.EVICTED, Tier.DEVICE))
    why = rig.cache.explain(PROMPT)
    assert (why.cause, why.states, why.at_s) == (Cause.EVICTED, ("swa",), 7.0)
    rig.cache.release(holder)
    rig.idle_check()


def test_arriving_and_failed() -> None:
    rig = Rig(HYBRID, host_pages=64)
    rig.serve(PROMPT)
    rig.evict_all(Tier.DEVICE)
    lease = rig.open(PROMPT)
    assert rig.cache.explain(PROMPT).cause is Cause.COMPLETE  # the host copy is still there
    rig.fail_all()
    rig.cache.release(lease)
    why = rig.cache.explain(PROMPT)
    assert why.cause is Cause.FAILED and why.tier is Tier.HOST


def test_cleared() -> None:
    rig = Rig(HYBRID)
    rig.serve(PROMPT)
    rig.cache.clear()
    assert rig.cache.explain(PROMPT).cause is Cause.CLEARED


def test_explaining_changes_nothing() -> None:
    rig = Rig(HYBRID, host_pages=64)
    rig.serve(PROMPT)
    version, counters = rig.tree.version, rig.cache.counters.snapshot()
    for tokens in (PROMPT, text(2, 5), PROMPT[:9]):
        rig.cache.explain(tokens)
    assert rig.tree.version == version and rig.cache.counters.snapshot() == counters
