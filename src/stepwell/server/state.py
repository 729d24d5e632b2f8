"""The state of engine and cache as plain values, read on the engine's thread. Changes nothing."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from stepwell.base.ids import CACHED_TIERS, Tier
from stepwell.cache.link import LinkState
from stepwell.engine.engine import Engine


@dataclass(frozen=True, slots=True, kw_only=True)
class TierState:
    used_bytes: int
    available_bytes: int


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineState:
    waiting: int
    active: int
    passes: int
    pending: int  # copies and store errands under way, and paths that wait to be backed up
    resting: int  # checkpoints that will be stored later, if nothing supersedes them
    tiers: Mapping[Tier, TierState]  # those that exist
    store: LinkState
    counters: Mapping[str, int]


def read_state(engine: Engine) -> EngineState:
    cache = engine.cache
    sizes = {tier: (cache.used_bytes(tier), cache.available_bytes(tier)) for tier in CACHED_TIERS}
    return EngineState(
        waiting=len(engine.scheduler.waiting),
        active=len(engine.scheduler.active),
        passes=engine.passes,
        pending=cache.pending,
        resting=cache.resting,
        tiers={tier: TierState(used_bytes=used, available_bytes=free) for tier, (used, free) in sizes.items() if used or free},
        store=cache.store_state,
        counters=cache.counters.snapshot(),
    )
