"""The eviction orders of tenants with quotas: the candidates of each in a tier, in addition to the tier's order. Decides nothing.

An entry here has the number that the tier's order gave its victim, so both entries are live or both are stale. An order may not
be used for a long time, while its tenant is within its quota or idle. It is therefore also swept whenever an entry becomes stale,
which limits it to a few times its live entries; it is emptied when its tenant has nothing left in the tier.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import NamedTuple

from stepwell.base.ids import Tier
from stepwell.policy.value import ValuePolicy
from stepwell.tree.accounts import Account
from stepwell.tree.eviction_order import EvictionOrder, Standing
from stepwell.tree.node import Run, Victim

SWEPT = 6  # entries, whenever one may have become stale; with less than 4 the number of stale entries would be unlimited
MOST_PER_LIVE, MOST_AT_LEAST = 4, 8  # an order has at most MOST_PER_LIVE entries for each live one, and MOST_AT_LEAST more


class Orders(NamedTuple):
    """The candidates of one tier, or of one tenant in it."""

    runs: EvictionOrder
    checkpoints: EvictionOrder

    def of(self, victim: Victim) -> EvictionOrder:
        return self.runs if isinstance(victim, Run) else self.checkpoints


class OwnOrders:
    """A pair of orders for each tenant with a quota and each tier."""

    def __init__(self, accounts: Iterable[Account], tiers: Iterable[Tier], value: ValuePolicy) -> None:
        tiers = tuple(tiers)
        self._orders = {(each, tier): Orders(EvictionOrder(value), EvictionOrder(value)) for each in accounts for tier in tiers}
        # Accounts that may have candidates, by sort, so that one over its quota without candidates is not tried for each victim.
        self._having = {tier: (set[Account](), set[Account]()) for tier in tiers}

    # ---- questions --------------------------------------------------------------------------------

    def __getitem__(self, key: tuple[Account, Tier]) -> Orders:
        return self._orders[key]

    def having(self, accounts: Iterable[Account], tier: Tier, *, runs: bool, checkpoints: bool) -> Iterator[Account]:
        """The accounts among these that may have a candidate of the wanted sorts."""
        with_runs, with_checkpoints = self._having[tier]
        return (each for each in accounts if (runs and each in with_runs) or (checkpoints and each in with_checkpoints))

    # ---- orders -----------------------------------------------------------------------------------

    def push(self, victim: Victim, standing: Standing, account: Account) -> None:
        """Queues a victim that its tier's order has just queued."""
        order = self._orders[account, victim.tier].of(victim)
        order.push(victim, standing, number=victim.entry)
        order.sweep(SWEPT)
        self._having[victim.tier][not isinstance(victim, Run)].add(account)

    def note_stale(self, victim: Victim, account: Account) -> None:
        """Notes that the victim's entry is stale. If it left its tier, its account must not count it any more."""
        orders = self._orders[account, victim.tier]
        if account.used_bytes[victim.tier]:
            orders.of(victim).sweep(SWEPT)
        else:
            for order in orders:
                order.clear()

    def note_asked(self, account: Account, tier: Tier) -> None:
        """Notes that an account's orders were tried: if one is empty, it is not tried again until something is queued."""
        for order, having in zip(self._orders[account, tier], self._having[tier], strict=True):
            if not order:
                having.discard(account)

    # ---- self-check -------------------------------------------------------------------------------

    def audit(self, queued: Iterable[tuple[Account, Victim]]) -> None:
        """Asserts that each tenant's orders contain its `queued` victims, and not many stale entries."""
        expected: dict[tuple[Account, Tier, bool], set[Victim]] = {}
        for account, victim in queued:
            expected.setdefault((account, victim.tier, isinstance(victim, Run)), set()).add(victim)
        for (account, tier), orders in self._orders.items():
            for order, having in zip(orders, self._having[tier], strict=True):
                live, wanted = list(order.live()), expected.get((account, tier, order is orders.runs), set())
                assert len(live) == len(set(live)), f"{account} has a victim twice in its order of {tier.label}"
                assert set(live) == wanted, (
                    f"{account} has {len(live)} victims in its order of {tier.label}, and {len(wanted)} are queued"
                )
                most = MOST_PER_LIVE * len(live) + MOST_AT_LEAST
                assert len(order) <= most, f"{account}: {len(order)} entries for {len(live)} victims of {tier.label}"
                assert not live or account in having, f"{account} is not known to have something queued in {tier.label}"
