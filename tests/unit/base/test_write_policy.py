"""When something on the device is saved below."""

from __future__ import annotations

from stepwell import WritePolicy


def test_each_policy_saves_at_its_own_moment() -> None:
    assert [policy for policy in WritePolicy if policy.saves_on_commit] == [WritePolicy.THROUGH]
    assert [policy for policy in WritePolicy if policy.saves_into_free_room] == [WritePolicy.ADAPTIVE]
    assert [policy for policy in WritePolicy if policy.saves_on_eviction] == [WritePolicy.BACK, WritePolicy.ADAPTIVE]
    assert [WritePolicy.SELECTIVE.saves_on_use(uses) for uses in (1, 2, 3)] == [False, True, True]
    assert [WritePolicy.BACK.saves_on_use(uses) for uses in (1, 2, 3)] == [False, False, False]
    assert WritePolicy.THROUGH.saves_on_use(1)
