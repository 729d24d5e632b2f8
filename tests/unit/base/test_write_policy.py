"""When something on the device is saved below."""

from __future__ import annotations

import pytest

from stepwell import WritePolicy


def test_each_policy_saves_at_its_own_moment() -> None:
    assert [policy for policy in WritePolicy if policy.saves_on_commit] == [WritePolicy.THROUGH]
    assert [policy for policy in WritePolicy if policy.is_exclusive] == [WritePolicy.EXCLUSIVE]
    assert [WritePolicy.SELECTIVE.saves_on_use(uses) for uses in (1, 2, 3)] == [False, True, True]
    assert [WritePolicy.EXCLUSIVE.saves_on_use(uses) for uses in (1, 2, 3)] == [False, False, False]
    assert WritePolicy.THROUGH.saves_on_use(1)


def test_names_of_other_engines_are_known() -> None:
    names = ("write_through", "write_through_selective", "write_back", "inclusive", "exclusive", "adaptive", "back")
    assert [WritePolicy(name).value for name in names] == ["through", "selective", "exclusive", "through", *["exclusive"] * 3]
    with pytest.raises(ValueError, match="sideways"):
        WritePolicy("sideways")
