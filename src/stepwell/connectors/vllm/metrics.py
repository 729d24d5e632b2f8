"""The connector's counters, through vLLM's statistics: its log line and its Prometheus endpoint.

The scheduler's side counts, and vLLM carries new counts to the process that serves metrics. Names begin with `vllm:`, by which
vLLM removes them before the next engine of a process starts.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field
from typing import Any

from vllm.distributed.kv_transfer.kv_connector.v1.metrics import KVConnectorPromMetrics, KVConnectorStats

from stepwell.base.ids import Tier
from stepwell.cache.facade import Cache
from stepwell.store_tier.link import LinkState

TOKENS, EVENTS = "tokens", "events"  # sums, by source and by counter
USED, AVAILABLE, STORE = "used_bytes", "available_bytes", "store"  # current values: by tier; the state's name
LOGGED = ("load_failures", "save_failures", "store_ops_failed", "store_switched_off", "fetched_pages", "backup_pages")


@dataclass
class StepwellStats(KVConnectorStats):  # type: ignore[misc]
    """Counts since the last report."""

    def reset(self) -> None:
        self.data: dict[str, Any] = {}

    def is_empty(self) -> bool:
        return not self.data

    def aggregate(self, other: KVConnectorStats) -> KVConnectorStats:
        """Adds newer statistics: sums are added, and current values replaced."""
        newer: dict[str, Any] = other.data
        for name in (TOKENS, EVENTS):
            self.data[name] = dict(Counter(self.data.get(name, {})) + Counter(newer.get(name, {})))
        self.data |= {name: value for name, value in newer.items() if name not in (TOKENS, EVENTS)}
        return self

    def reduce(self) -> dict[str, int | float]:
        """One line for the log: hits by tier, traffic and failures."""
        tokens, events = self.data.get(TOKENS, {}), self.data.get(EVENTS, {})
        found = {f"Stepwell tokens from {source}": count for source, count in tokens.items()}
        return found | {f"Stepwell {name}": events[name] for name in LOGGED if name in events}


@dataclass
class Meter:
    """Collects statistics on the scheduler's side. One thread."""

    cache: Cache
    _reported: dict[str, int] = field(default_factory=dict)

    def take(self, loaded: dict[Tier, int]) -> StepwellStats | None:
        """Counts since the last call, with the loaded tokens by source; None without any."""
        counts = dict(self.cache.counters.snapshot())
        events = {
            name: count - self._reported.get(name, 0) for name, count in counts.items() if count != self._reported.get(name, 0)
        }
        if not events and not loaded:
            return None
        stats, self._reported = self.cache.stats(), counts
        return StepwellStats(
            data={
                TOKENS: {tier.label: count for tier, count in loaded.items()},
                EVENTS: events,
                USED: {tier.label: sizes.used_bytes for tier, sizes in stats.tiers.items()},
                AVAILABLE: {tier.label: sizes.available_bytes for tier, sizes in stats.tiers.items()},
                STORE: stats.store.name.lower(),
            }
        )


class StepwellPromMetrics(KVConnectorPromMetrics):  # type: ignore[misc]
    """Prometheus metrics in the process that serves them."""

    def __init__(
        self, vllm_config: Any, metric_types: Any, labelnames: list[str], per_engine_labelvalues: dict[int, list[object]]
    ) -> None:
        super().__init__(vllm_config, metric_types, labelnames, per_engine_labelvalues)
        counter, gauge = self._counter_cls, self._gauge_cls
        self._metrics = {
            TOKENS: counter(
                name="vllm:stepwell_loaded_tokens", documentation="Loaded prompt tokens, by source.",
                labelnames=[*labelnames, "source"],
            ),
            EVENTS: counter(
                name="vllm:stepwell_cache_events", documentation="Counters of the cache, by name.",
                labelnames=[*labelnames, "event"],
            ),
            USED: gauge(
                name="vllm:stepwell_tier_used_bytes", documentation="Used bytes of a tier, of one rank.",
                labelnames=[*labelnames, "tier"], multiprocess_mode="mostrecent",
            ),
            AVAILABLE: gauge(
                name="vllm:stepwell_tier_available_bytes", documentation="Free or evictable bytes of a tier, of one rank.",
                labelnames=[*labelnames, "tier"], multiprocess_mode="mostrecent",
            ),
            STORE: gauge(
                name="vllm:stepwell_store_state", documentation="1 for the state the store is in.",
                labelnames=[*labelnames, "state"], multiprocess_mode="mostrecent",
            ),
        }  # fmt: skip

    def observe(self, transfer_stats_data: dict[str, Any], engine_idx: int = 0) -> None:
        labels = self.per_engine_labelvalues[engine_idx]
        for name in (TOKENS, EVENTS):
            for label, count in transfer_stats_data.get(name, {}).items():
                self._metrics[name].labels(*labels, label).inc(count)
        for name in (USED, AVAILABLE):
            for label, value in transfer_stats_data.get(name, {}).items():
                self._metrics[name].labels(*labels, label).set(value)
        if STORE in transfer_stats_data:
            for each in LinkState:
                label = each.name.lower()
                self._metrics[STORE].labels(*labels, label).set(label == transfer_stats_data[STORE])
