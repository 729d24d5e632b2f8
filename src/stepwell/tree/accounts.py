"""Whose cached state takes how much of each memory tier, and who has more there than its quota. Counts; evicts nothing.

An account is a tenant's, over all its namespaces. It counts the bytes of every page that the tree keeps for it, in use, pinned or
not, each once. What requests hold that the tree does not have is nobody's here.
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
    """What one tenant has in each tier, and what it may have; None where nothing limits it."""

    __slots__ = ("__weakref__", "quota_bytes", "tenant", "used_bytes")

    def __init__(self, tenant: str | None, quota_bytes: tuple[int, ...] | None = None) -> None:
        self.tenant = tenant
        self.quota_bytes = quota_bytes  # by tier
        self.used_bytes = [0] * len(CACHED_TIERS)

    def excess_bytes(self, tier: Tier, coming_bytes: int = 0) -> int:
        """How much more than its quota it has, or would have with what is coming; 0 for none."""
        return max(self.used_bytes[tier] + coming_bytes - self.quota_bytes[tier], 0) if self.quota_bytes is not None else 0

    def __repr__(self) -> str:
        return f"Account({self.tenant}, {self.used_bytes} of {self.quota_bytes})"


class Accounts:
    """The accounts of one tree. One thread."""

    def __init__(self, arenas: Mapping[Tier, Arena], quotas: Mapping[str, float], row_pages: RowPages | None) -> None:
        """`quotas` are shares of each tier, by tenant."""
        self._tiers = tuple(arenas)
        # Lists by tier: dictionaries take several times as long with tiers for keys, and every page comes by here.
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
        # Who is over its quota, by tier; who has been for longest comes first. Read it freely.
        self.are_over: list[dict[Account, None]] = [{} for _ in CACHED_TIERS]

    # ---- questions --------------------------------------------------------------------------------

    def __iter__(self) -> Iterator[Account]:
        """Everybody who has something or a quota."""
        return iter([each for each in self._known.values() if each.quota_bytes is not None or any(each.used_bytes)])

    # ---- orders -----------------------------------------------------------------------------------

    def of(self, tenant: str | None) -> Account:
        """A tenant's account, made when it is first asked for."""
        account = self._known.get(tenant)
        if account is None:
            account = self._known[tenant] = Account(tenant)
        return account

    def add_pages(self, account: Account, tier: Tier, ids: PageIds) -> None:
        """Prefix pages are the tree's from now on."""
        account.used_bytes[tier] += len(ids) * self._page_bytes[tier]
        if account.quota_bytes is not None:
            self._note_over(account, tier)
        if self._row_pages is not None and tier is Tier.DEVICE:
            self.charge(account, tier, self._num_bound(ids) * self._row_bytes)

    def remove_pages(self, account: Account, tier: Tier, ids: PageIds) -> None:
        """They are not any more. Called while they still have their rows."""
        account.used_bytes[tier] -= len(ids) * self._page_bytes[tier]
        if account.quota_bytes is not None:
            self._note_over(account, tier)
        if self._row_pages is not None and tier is Tier.DEVICE:
            self.charge(account, tier, -self._num_bound(ids) * self._row_bytes)

    def shed_rows(self, account: Account, count: int) -> None:
        """So many of its pages on the device have their rows on the host alone from now on."""
        self.charge(account, Tier.DEVICE, -count * self._row_bytes)

    def charge(self, account: Account, tier: Tier, size_bytes: int) -> None:
        """So much more is the tree's, or less."""
        account.used_bytes[tier] += size_bytes
        if account.quota_bytes is not None:
            self._note_over(account, tier)

    def _note_over(self, account: Account, tier: Tier) -> None:
        if account.excess_bytes(tier):
            self.are_over[tier].setdefault(account)
        else:
            self.are_over[tier].pop(account, None)

    def _num_bound(self, ids: PageIds) -> int:
        """How many of these device pages have their rows beside them."""
        assert self._row_pages is not None
        return int(np.count_nonzero(self._row_pages.rows[ids] != ABSENT))

    # ---- self-check -------------------------------------------------------------------------------

    def audit(self, found: Mapping[tuple[Account, Tier], int]) -> None:
        """Asserts that the counts are `found`, by a walk of the tree, and that who is over its quota is known."""
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
