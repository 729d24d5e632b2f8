"""The eviction orders of tenants with quotas: what each of them has in a tier, beside the tier's own order. Decides nothing.

An entry here has the number that the tier's order gave its victim, so both count or neither does. An order may not be asked for
long: its tenant keeps to its quota, or is quiet. So it is swept whenever an entry of it dies too, and stays within a few times
its live entries; it is empty when its tenant has nothing left in the tier.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import NamedTuple

from stepwell.base.ids import Tier
from stepwell.policy.value import ValuePolicy
from stepwell.tree.accounts import Account
from stepwell.tree.eviction_order import EvictionOrder, Standing
from stepwell.tree.node import Run, Victim

SWEPT = 6  # whenever an entry may have died; with less than 4 the dead could be any number of times the live
MOST_PER_LIVE, MOST_AT_LEAST = 4, 8  # entries of an order: so many for each live one, and so many more


class Orders(NamedTuple):
    """Candidates of one tier, or of one tenant in it."""

    runs: EvictionOrder
    checkpoints: EvictionOrder

    def of(self, victim: Victim) -> EvictionOrder:
        return self.runs if isinstance(victim, Run) else self.checkpoints


class OwnOrders:
    """One pair of orders for each tenant with a quota and each tier."""

    def __init__(self, accounts: Iterable[Account], tiers: Iterable[Tier], value: ValuePolicy) -> None:
        tiers = tuple(tiers)
        self._orders = {(each, tier): Orders(EvictionOrder(value), EvictionOrder(value)) for each in accounts for tier in tiers}
        # Who may have something queued, by sort. Who has too much and nothing idle is not asked for every victim.
        self._having = {tier: (set[Account](), set[Account]()) for tier in tiers}

    # ---- questions --------------------------------------------------------------------------------

    def __getitem__(self, key: tuple[Account, Tier]) -> Orders:
        return self._orders[key]

    def having(self, accounts: Iterable[Account], tier: Tier, *, runs: bool, checkpoints: bool) -> Iterator[Account]:
        """Those of the accounts that may have a candidate of the wanted sorts."""
        with_runs, with_checkpoints = self._having[tier]
        return (each for each in accounts if (runs and each in with_runs) or (checkpoints and each in with_checkpoints))

    # ---- orders -----------------------------------------------------------------------------------

    def push(self, victim: Victim, standing: Standing, account: Account) -> None:
        """Queues what its tier's order has just queued."""
        order = self._orders[account, victim.tier].of(victim)
        order.push(victim, standing, number=victim.entry)
        order.sweep(SWEPT)
        self._having[victim.tier][not isinstance(victim, Run)].add(account)

    def note_death(self, victim: Victim, account: Account) -> None:
        """Its entry no longer counts. If it left its tier, its account does not count it any more."""
        orders = self._orders[account, victim.tier]
        if account.used_bytes[victim.tier]:
            orders.of(victim).sweep(SWEPT)
        else:
            for order in orders:
                order.clear()

    def note_asked(self, account: Account, tier: Tier) -> None:
        """It was asked for a candidate: if its orders are empty, it need not be again until something is queued."""
        for order, having in zip(self._orders[account, tier], self._having[tier], strict=True):
            if not order:
                having.discard(account)

    # ---- self-check -------------------------------------------------------------------------------

    def audit(self, queued: Iterable[tuple[Account, Victim]]) -> None:
        """Asserts that each tenant's orders have what is `queued` of it, and not much more."""
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
