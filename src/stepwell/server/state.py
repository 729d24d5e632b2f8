"""The state of engine and cache as plain values, read on the engine's thread. Changes nothing."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from stepwell.base.ids import Tier
from stepwell.base.meters import Durations
from stepwell.cache.report import TenantStats, TierStats
from stepwell.engine.engine import Engine
from stepwell.engine.passes.spilling import SpillReport
from stepwell.policy.store_use import BreakerState
from stepwell.store.api import Store
from stepwell.store_tier.link import LinkState


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineState:
    waiting: int
    oldest_waiting_s: float  # since the arrival of the request that has waited longest; 0 where none waits
    active: int
    passes: int
    pending: int  # copies and store operations under way, and paths that wait to be backed up
    deferred: int  # checkpoints that will be stored later, if nothing supersedes them
    tiers: Mapping[Tier, TierStats]  # those that exist
    tenants: Mapping[str, Mapping[Tier, TenantStats]]  # those that have something cached, or a quota
    store: LinkState
    breaker: BreakerState | None  # None without a store
    store_times: Mapping[str, Durations]  # by operation
    stores: tuple[Store, ...]  # that are open; to be asked their size on another thread
    counters: Mapping[str, int]
    spilling: SpillReport | None  # None where rows do not spill

    @property
    def attached(self) -> Store | None:
        """The store in use, if there is one."""
        return self.stores[-1] if self.stores and self.store is not LinkState.DETACHED else None


def read_state(engine: Engine) -> EngineState:
    stats, waiting = engine.cache.stats(), engine.scheduler.waiting.values()
    now_s = engine.clock.now()
    return EngineState(
        waiting=len(waiting),
        oldest_waiting_s=max((now_s - each.arrived_s for each in waiting), default=0.0),
        active=len(engine.scheduler.active),
        passes=engine.passes,
        pending=stats.pending,
        deferred=stats.deferred,
        tiers=stats.tiers,
        tenants=engine.cache.tenants(),
        store=stats.store,
        breaker=stats.breaker,
        store_times=stats.store_times,
        stores=tuple(engine.stores),
        counters=stats.counters,
        spilling=engine.spilling,
    )
