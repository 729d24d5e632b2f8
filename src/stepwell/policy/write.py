"""When something on the device should also be saved below it. Pure."""

from __future__ import annotations

from stepwell.base.config import WritePolicy


def save_on_commit(policy: WritePolicy) -> bool:
    return policy is WritePolicy.THROUGH


def save_on_use(policy: WritePolicy, uses: int) -> bool:
    """Whether the `uses`-th use of something cached is reason to save it."""
    return policy is WritePolicy.THROUGH or (policy is WritePolicy.SELECTIVE and uses >= 2)


def save_on_eviction(policy: WritePolicy) -> bool:
    return policy is WritePolicy.BACK
