"""How much of each memory tier the cached state of each tenant takes, and which tenants are over their quota. Evicts nothing.

A tenant has one account for all its namespaces. It counts the bytes of every page that the tree keeps for the tenant, in use,
pinned or not, each once. Pages that requests hold outside the tree are not counted.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from weakref import WeakValueDictionary

import numpy as np

from stepwell.base.ids import CACHED_TIERS, Kind, Tier
from stepwell.base.tasks import PageIds
from stepwell.memory.arena import Arena
from stepwell.memory.row_pages import ABSENT, RowPages


class Account:
    """What one tenant uses of each tier, and its quota; None if it has no quota."""

    __slots__ = ("__weakref__", "quota_bytes", "tenant", "used_bytes")

    def __init__(self, tenant: str | None, quota_bytes: tuple[int, ...] | None = None) -> None:
        self.tenant = tenant
        self.quota_bytes = quota_bytes  # by tier
        self.used_bytes = [0] * len(CACHED_TIERS)

    def excess_bytes(self, tier: Tier, coming_bytes: int = 0) -> int:
        """By how much it exceeds its quota, or would with `coming_bytes` more; 0 if it does not."""
        return max(self.used_bytes[tier] + coming_bytes - self.quota_bytes[tier], 0) if self.quota_bytes is not None else 0

    def __repr__(self) -> str:
        return f"Account({self.tenant}, {self.used_bytes} of {self.quota_bytes})"


class Accounts:
    """The accounts of one tree. One thread."""

    def __init__(self, arenas: Mapping[Tier, Arena], quotas: Mapping[str, float], row_pages: RowPages | None) -> None:
        """`quotas` are shares of each tier, by tenant."""
        self._tiers = tuple(arenas)
        # Lists by tier, because dictionaries keyed by tier are several times slower, and every page is counted here.
        strides = [arenas[tier].layout.strides if tier in arenas else {} for tier in CACHED_TIERS]
        self._page_bytes = [each.get(Kind.PREFIX, 0) for each in strides]
        self._row_bytes = strides[Tier.DEVICE].get(Kind.ROWS, 0)
        self._row_pages = row_pages
        sizes = [arenas[tier].layout.size_bytes if tier in arenas else 0 for tier in CACHED_TIERS]
        self.limited = {tenant: Account(tenant, tuple(int(share * size) for size in sizes)) for tenant, share in quotas.items()}
        self._known: WeakValueDictionary[str | None, Account] = (
            WeakValueDictionary()
        )  # those without a quota while nodes have them
        for tenant, account in self.limited.items():
            self._known[tenant] = account
        # The accounts over their quota, by tier, the one that has been for longest first. Callers may read it.
        self.are_over: list[dict[Account, None]] = [{} for _ in CACHED_TIERS]

    # ---- questions --------------------------------------------------------------------------------

    def __iter__(self) -> Iterator[Account]:
        """Every account that uses memory or has a quota."""
        return iter([each for each in self._known.values() if each.quota_bytes is not None or any(each.used_bytes)])

    # ---- orders -----------------------------------------------------------------------------------

    def of(self, tenant: str | None) -> Account:
        """A tenant's account, created at first use."""
        account = self._known.get(tenant)
        if account is None:
            account = self._known[tenant] = Account(tenant)
        return account

    def add_pages(self, account: Account, tier: Tier, ids: PageIds) -> None:
        """Counts prefix pages that the tree took over."""
        account.used_bytes[tier] += len(ids) * self._page_bytes[tier]
        if account.quota_bytes is not None:
            self._note_over(account, tier)
        if self._row_pages is not None and tier is Tier.DEVICE:
            self.charge(account, tier, self._num_bound(ids) * self._row_bytes)

    def remove_pages(self, account: Account, tier: Tier, ids: PageIds) -> None:
        """Stops counting prefix pages that leave the tree. Must be called while they still have their rows."""
        account.used_bytes[tier] -= len(ids) * self._page_bytes[tier]
        if account.quota_bytes is not None:
            self._note_over(account, tier)
        if self._row_pages is not None and tier is Tier.DEVICE:
            self.charge(account, tier, -self._num_bound(ids) * self._row_bytes)

    def shed_rows(self, account: Account, count: int) -> None:
        """Stops counting the rows of `count` device pages, which are only on the host from now on."""
        self.charge(account, Tier.DEVICE, -count * self._row_bytes)

    def charge(self, account: Account, tier: Tier, size_bytes: int) -> None:
        """Adds `size_bytes`, which may be negative."""
        account.used_bytes[tier] += size_bytes
        if account.quota_bytes is not None:
            self._note_over(account, tier)

    def _note_over(self, account: Account, tier: Tier) -> None:
        if account.excess_bytes(tier):
            self.are_over[tier].setdefault(account)
        else:
            self.are_over[tier].pop(account, None)

    def _num_bound(self, ids: PageIds) -> int:
        """The number of these device pages that have their rows on the device."""
        assert self._row_pages is not None
        return int(np.count_nonzero(self._row_pages.rows[ids] != ABSENT))

    # ---- self-check -------------------------------------------------------------------------------

    def audit(self, found: Mapping[tuple[Account, Tier], int]) -> None:
        """Asserts that the counts equal `found` by a walk of the tree, and that the accounts over their quota are known."""
        accounts = {*self._known.values(), *(account for account, _ in found)}
        for tier in self._tiers:
            for account in accounts:
                used, walked = account.used_bytes[tier], found.get((account, tier), 0)
                assert used == walked, f"{account} is counted {used} bytes of {tier.label}, and has {walked}"
                over = account.excess_bytes(tier) > 0
                assert (account in self.are_over[tier]) == over, (
                    f"{account} is {'not ' if over else ''}known to be over its quota"
                )
        by_name = [account.tenant for account in accounts]
        assert len(set(by_name)) == len(by_name), f"a tenant has two accounts: {sorted(map(str, by_name))}"
