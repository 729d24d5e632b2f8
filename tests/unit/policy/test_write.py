"""When something on the device is saved below."""

from __future__ import annotations

from stepwell import WritePolicy
from stepwell.policy.write import save_on_commit, save_on_eviction, save_on_use


def test_each_policy_saves_at_its_own_moment() -> None:
    assert [save_on_commit(policy) for policy in WritePolicy] == [True, False, False]
    assert [save_on_eviction(policy) for policy in WritePolicy] == [False, False, True]
    assert [save_on_use(WritePolicy.SELECTIVE, uses) for uses in (1, 2, 3)] == [False, True, True]
    assert [save_on_use(WritePolicy.BACK, uses) for uses in (1, 2, 3)] == [False, False, False]
    assert save_on_use(WritePolicy.THROUGH, 1)
