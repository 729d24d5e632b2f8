"""What a cache says of itself: what one step found, and how it stands."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace

from stepwell.base.ids import Tier
from stepwell.base.meters import Durations
from stepwell.memory.arena import Arena
from stepwell.policy.store_use import BreakerState
from stepwell.store.api import Store
from stepwell.store_tier.link import LinkState
from stepwell.tiers.lease import Lease
from stepwell.tree.tree import Tree


@dataclass(frozen=True, slots=True, kw_only=True)
class TierStats:
    """How full a memory tier is, for one rank."""

    size_bytes: int
    used_bytes: int  # that hold something, padding included
    available_bytes: int  # free, or could be by evicting what no request holds: what admission can count on


@dataclass(frozen=True, slots=True, kw_only=True)
class TenantStats:
    """What one tenant has cached in a tier, in use or not, for one rank."""

    used_bytes: int
    quota_bytes: int | None  # None: no limit


@dataclass(frozen=True, slots=True, kw_only=True)
class Stats:
    """What there is to see of a cache at one moment."""

    tiers: Mapping[Tier, TierStats]
    copying: int  # copies under way between memories
    storing: int  # store operations under way, and paths that wait to be backed up
    deferred: int  # checkpoints on the host that will be stored later, if nothing supersedes them until then
    store: LinkState
    breaker: BreakerState | None  # None without a store
    store_times: Mapping[str, Durations]  # by operation: find, fetch, put
    counters: Mapping[str, int]

    def tier(self, tier: Tier) -> TierStats:
        """One tier's; nothing but zeros for a tier that does not exist."""
        return self.tiers.get(tier) or TierStats(size_bytes=0, used_bytes=0, available_bytes=0)

    @property
    def pending(self) -> int:
        """0 when nothing more will happen by itself, but for deferred checkpoints."""
        return self.copying + self.storing


@dataclass(frozen=True, slots=True, kw_only=True)
class StepReport:
    """What one `step` found."""

    completed: int = 0
    failures: tuple[str, ...] = ()
    ready: tuple[Lease, ...] = ()  # leases that may compute now
    failed: tuple[Lease, ...] = ()  # leases to release and look up again
    finished: tuple[Lease, ...] = ()  # released leases whose last copy to or from the engine's memory has ended
    running: int = 0  # copies still under way
    storing: int = 0  # operations to the store under way, and paths waiting to be backed up
    detached: tuple[Store, ...] = ()  # stores that nothing uses any more: their owner may close them

    def after(self, earlier: StepReport) -> StepReport:
        """This report, with the findings of an earlier one that was not reported yet."""
        return replace(
            self,
            completed=earlier.completed + self.completed,
            failures=earlier.failures + self.failures,
            ready=earlier.ready + self.ready,
            failed=earlier.failed + self.failed,
            finished=earlier.finished + self.finished,
            detached=earlier.detached + self.detached,
        )


def tenant_stats(tree: Tree) -> dict[str, dict[Tier, TenantStats]]:
    """By name; what belongs to no tenant is left out."""
    return {
        account.tenant: {
            tier: TenantStats(
                used_bytes=account.used_bytes[tier],
                quota_bytes=None if account.quota_bytes is None else account.quota_bytes[tier],
            )
            for tier in tree.tiers
        }
        for account in sorted(tree.accounts, key=lambda each: each.tenant or "")
        if account.tenant is not None
    }


def tier_stats(arena: Arena) -> TierStats:
    size = arena.layout.size_bytes
    return TierStats(size_bytes=size, used_bytes=arena.used_bytes, available_bytes=size - arena.busy_bytes)
