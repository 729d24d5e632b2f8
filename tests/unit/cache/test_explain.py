"""Explanations: the state that limits, the tier, the reason, the time."""

from __future__ import annotations

from stepwell import Cause, Tier
from stepwell.tree.checkpoints import drop_residency
from stepwell.tree.node import LossReason
from toys import FULL, FULL_WINDOW, HYBRID, Rig, text

PROMPT = text(1, 17)


def test_complete() -> None:
    rig = Rig(HYBRID)
    rig.serve(PROMPT)
    why = rig.cache.explain(PROMPT)
    assert why.cause is Cause.COMPLETE and why.states == () and why.restore_tokens == why.usable_tokens == 16
    assert str(why).startswith("resumes at token 16 of 17")


def test_never_stored() -> None:
    why = Rig(HYBRID).cache.explain(PROMPT)
    assert why.cause is Cause.NEVER_STORED and why.states == ("kv",) and why.tier is None


def test_another_namespace_has_it() -> None:
    rig = Rig(HYBRID)
    rig.serve(PROMPT)
    why = rig.cache.explain(PROMPT, namespace=rig.cache.namespace_for(adapter="other"))
    assert why.cause is Cause.OTHER_NAMESPACE


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
    assert str(why).endswith("limited by kv in the device tier: it was evicted to make room at t=42.000 s")


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
    drop_residency(rig.tree, residency, rig.core.loss(LossReason.EVICTED, Tier.DEVICE))
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
