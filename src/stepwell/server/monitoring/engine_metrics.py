"""Prometheus metrics of engine, cache and store, collected on request. The engine's thread reads everything except the store's
size.

`EngineState` is that state as plain values; `/cache` and `/ui` read it too.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from concurrent.futures import TimeoutError as FutureTimeout
from dataclasses import dataclass
from itertools import accumulate

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily, Metric
from prometheus_client.registry import Collector

from stepwell.base.errors import StepwellError
from stepwell.base.ids import Tier
from stepwell.base.meters import Durations
from stepwell.base.tasks import ItemStatus
from stepwell.cache.report import TenantStats, TierStats
from stepwell.engine.engine import Engine
from stepwell.engine.loop import EngineLoop
from stepwell.engine.passes.spilling import SpillReport
from stepwell.policy.store_use import BreakerState
from stepwell.store.api import Store, size_of
from stepwell.store_tier.link import LinkState


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineState:
    waiting: int
    oldest_waiting_s: float  # age of the request that has waited longest, or 0
    active: int
    passes: int
    pending: int  # copies and store operations in flight, and paths waiting for backup
    deferred: int  # checkpoints to be stored later unless superseded
    tiers: Mapping[Tier, TierStats]  # existing tiers
    tenants: Mapping[str, Mapping[Tier, TenantStats]]  # with cached pages or a quota
    store: LinkState
    breaker: BreakerState | None  # None without a store
    store_times: Mapping[str, Durations]  # by operation
    stores: tuple[Store, ...]  # open stores; query their size on another thread
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


_READ_TIMEOUT_S = 2.0  # below Prometheus' scrape timeout, so that a scrape can report an engine that hangs
_UNITS = ("tokens", "bytes", "pages", "checkpoints", "values", "nodes", "jobs", "events")
_OTHER_UNITS = {"store_pages_held": "pages", "backup_skipped_missing_pages": "events"}  # where the name does not end in the unit
_STORE_ERRORS = ("ops_failed", *(each.name.lower() for each in ItemStatus if each.is_damage or each is ItemStatus.FAILED))
_STORE_BYTES = {"fetched": "fetched_bytes", "stored": "backup_bytes"}  # counters, by direction


class EngineCollector(Collector):
    def __init__(self, loop: EngineLoop) -> None:
        self._loop = loop

    def describe(self) -> Iterable[Metric]:
        return ()  # registering must not query an engine that may not run yet

    def collect(self) -> Iterator[Metric]:
        up = GaugeMetricFamily("stepwell_engine_up", "1 if the engine responds.")
        asked = self._loop.call(read_state)
        try:
            state = asked.result(timeout=_READ_TIMEOUT_S)
        except (StepwellError, FutureTimeout):
            asked.cancel()
            up.add_metric([], 0)
            yield up
            return
        up.add_metric([], 1)
        yield up
        yield from _families(state)


def _families(state: EngineState) -> Iterator[Metric]:
    requests = GaugeMetricFamily("stepwell_requests_open", "Open requests, waiting or active.", labels=["state"])
    requests.add_metric(["waiting"], state.waiting)
    requests.add_metric(["active"], state.active)
    yield requests
    yield GaugeMetricFamily(
        "stepwell_oldest_waiting_seconds",
        "Age of the request that has waited longest.",
        value=state.oldest_waiting_s,
    )
    yield CounterMetricFamily("stepwell_passes", "Forward passes of the model.", value=state.passes)
    yield from _tiers(state)
    yield from _store(state)
    yield from _counters(state.counters)
    if state.spilling is not None:
        yield from _spilling(state.spilling)


def _counters(counts: Mapping[str, int]) -> Iterator[Metric]:
    """All counters of the cache, one family per unit."""
    for unit in _UNITS:
        family = CounterMetricFamily(f"stepwell_cache_{unit}", f"Counters of the cache that count {unit}.", labels=["event"])
        for name, count in counts.items():
            if unit_of(name) == unit:
                family.add_metric([name], count)
        yield family


def unit_of(counter: str) -> str:
    """The unit of a counter of the cache, from its name."""
    if counter in _OTHER_UNITS:
        return _OTHER_UNITS[counter]
    first, last = counter.partition("_")[0], counter.rpartition("_")[2]
    return next((unit for unit in _UNITS if unit in (first, last)), "events")


def _tiers(state: EngineState) -> Iterator[Metric]:
    capacity = GaugeMetricFamily("stepwell_tier_capacity_bytes", "Size of a tier.", labels=["tier"])
    used = GaugeMetricFamily("stepwell_tier_used_bytes", "Bytes in use.", labels=["tier"])
    free = GaugeMetricFamily("stepwell_tier_free_bytes", "Free bytes.", labels=["tier"])
    available = GaugeMetricFamily("stepwell_tier_available_bytes", "Bytes that are free or evictable.", labels=["tier"])
    for tier, sizes in state.tiers.items():
        capacity.add_metric([tier.label], sizes.size_bytes)
        used.add_metric([tier.label], sizes.used_bytes)
        free.add_metric([tier.label], sizes.size_bytes - sizes.used_bytes)
        available.add_metric([tier.label], sizes.available_bytes)
    yield from (capacity, used, free, available)
    evictions = CounterMetricFamily("stepwell_evictions", "Pages and checkpoints evicted.", labels=["tier", "what"])
    for tier in (Tier.DEVICE, Tier.HOST):
        for what in ("pages", "checkpoints"):
            evictions.add_metric([tier.label, what], state.counters.get(f"evicted_{tier.label}_{what}", 0))
    yield evictions


def _store(state: EngineState) -> Iterator[Metric]:
    link = GaugeMetricFamily("stepwell_store_state", "1 for the state the store is in.", labels=["state"])
    for each in LinkState:
        link.add_metric([each.name.lower()], each is state.store)
    yield link
    breaker = GaugeMetricFamily(
        "stepwell_store_breaker_state", "1 for the state of the circuit breaker before a failing store.", labels=["state"]
    )
    for position in BreakerState:
        breaker.add_metric([position.value], position is state.breaker)
    yield breaker
    moved = CounterMetricFamily("stepwell_store_transferred_bytes", "Bytes to and from the store.", labels=["direction"])
    for direction, counter in _STORE_BYTES.items():
        moved.add_metric([direction], state.counters.get(counter, 0))
    yield moved
    errors = CounterMetricFamily("stepwell_store_errors", "Failed operations and unusable values, by cause.", labels=["cause"])
    for cause in _STORE_ERRORS:
        errors.add_metric([cause], state.counters.get(f"store_{cause}", 0))
    yield errors
    took = HistogramMetricFamily("stepwell_store_operation_seconds", "Duration of store operations.", labels=["operation"])
    for operation, times in state.store_times.items():
        took.add_metric([operation], _buckets(times), times.total_s)
    yield took
    yield from _store_size(state)


def _store_size(state: EngineState) -> Iterator[Metric]:
    """Empty for a store that does not know its size, or was closed meanwhile."""
    used = GaugeMetricFamily("stepwell_store_used_bytes", "Bytes of values in the store, if it knows them.")
    budget = GaugeMetricFamily("stepwell_store_budget_bytes", "The store's budget, if it has one.")
    full = GaugeMetricFamily("stepwell_store_disk_full", "1 if the disk is too full for the store's budget.")
    try:
        size = size_of(state.attached) if state.attached is not None else None
    except StepwellError:
        size = None
    if size is not None:
        used.add_metric([], size.used_bytes)
        full.add_metric([], size.disk_full)
    if size is not None and size.budget_bytes is not None:
        budget.add_metric([], size.budget_bytes)
    yield from (used, budget, full)


def _buckets(times: Durations) -> list[tuple[str, float]]:
    bounds = [*(str(bound) for bound in times.BOUNDS_S), "+Inf"]
    return list(zip(bounds, map(float, accumulate(times.counts)), strict=True))


def _spilling(found: SpillReport) -> Iterator[Metric]:
    yield CounterMetricFamily("stepwell_sparse_steps", "Passes that looked up rows on the host.", value=found.steps)
    selected = CounterMetricFamily(
        "stepwell_sparse_rows", "Selected rows, by where they were found. A miss is fetched or read through.", labels=["found"]
    )
    for name in ("resident", "hits", "misses", "read_through"):
        selected.add_metric([name], getattr(found, name))
    yield selected
    copied = CounterMetricFamily(
        "stepwell_sparse_bytes", "Bytes of rows copied from the host: for steps, and for prompts.", labels=["purpose"]
    )
    copied.add_metric(["fetched"], found.fetched_bytes)
    copied.add_metric(["staged"], found.staged_bytes)
    yield copied
    pages = GaugeMetricFamily(
        "stepwell_sparse_pages", "Pages whose rows are only on the host, and pages of hot rows.", labels=["pages"]
    )
    pages.add_metric(["host"], found.host_pages)
    pages.add_metric(["hot"], found.hot_pages)
    yield pages
