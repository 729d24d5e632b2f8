"""What the vLLM connector counts reaches vLLM's log line and Prometheus, as hits by tier, traffic and failures."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from prometheus_client import CollectorRegistry, Counter, Gauge
from toy_runs import Make, computed_by, text
from toy_vllm import ToyEngine

from stepwell import Tier


def taken(engine: ToyEngine) -> dict[str, Any]:
    """All that is new, carried as vLLM carries it: as plain values."""
    stats = engine.connector.get_kv_connector_stats()
    return {"tokens": {}} if stats is None else stats.to_dict() if hasattr(stats, "to_dict") else stats.data


def prometheus(engine: ToyEngine, registry: CollectorRegistry) -> Any:
    def of(kind: Any) -> Any:
        return lambda name, documentation, labelnames, **more: kind(name, documentation, labelnames, registry=registry, **more)

    types = {"counter": of(Counter), "gauge": of(Gauge)}
    return type(engine.connector).build_prom_metrics(None, types, ["model_name", "engine"], {0: ["toy", "0"], 1: ["toy", "1"]})


def test_hits_are_counted_by_tier_and_everything_else_by_name(make: Make, tmp_path: Path) -> None:
    store = {"store": f"log:{tmp_path}", "store_budget": "64MiB", "prefetch": "wait_complete"}
    first, prompt = make(**store), text(1, 45)
    computed_by(first, prompt)
    assert taken(first)["tokens"] == {}
    first.close()
    engine, registry = make(**store), CollectorRegistry()
    metrics = prometheus(engine, registry)
    for source in ("store", "host"):
        computed_by(engine, prompt)
        data = taken(engine)
        assert data["tokens"] == {source: 44}
        metrics.observe(data, 1)
    labels = {"model_name": "toy", "engine": "1"}
    value = registry.get_sample_value
    for source in ("store", "host"):
        assert value("vllm:stepwell_loaded_tokens_total", labels | {"source": source}) == 44
    assert value("vllm:stepwell_cache_events_total", labels | {"event": "load_jobs"}) == 2
    used = engine.connector._scheduler.cache.stats().tiers[Tier.HOST].used_bytes
    assert value("vllm:stepwell_tier_used_bytes", labels | {"tier": "host"}) == used > 0
    assert value("vllm:stepwell_store_state", labels | {"state": "attached"}) == 1
    assert value("vllm:stepwell_store_state", labels | {"state": "detached"}) == 0
    assert value("vllm:stepwell_loaded_tokens_total", labels | {"engine": "0", "source": "host"}) is None


def test_failed_loads_are_counted_and_logged(make: Make) -> None:
    engine, prompt = make(), text(1, 45)
    computed_by(engine, prompt)
    earlier = engine.connector.get_kv_connector_stats()
    engine.submit(prompt)
    engine.step()
    (job,) = engine.copies[0].pending
    engine.copies[0].answer(job, error="fails on purpose")
    engine.run()
    stats = type(engine.connector).build_kv_connector_stats(taken(engine))
    assert stats.data["events"]["load_failures"] == 1
    both = earlier.aggregate(stats)
    assert both.data["events"]["save_jobs"] > stats.data["events"]["save_jobs"] and both.data["store"] == "detached"
    line = both.reduce()
    assert line["Stepwell load_failures"] == 1 and "Stepwell tokens from host" not in line
    computed_by(engine, prompt)
    assert engine.connector.get_kv_connector_stats().reduce()["Stepwell tokens from host"] == 44


def test_tokens_count_as_loaded_when_their_load_has_ended_well(make: Make) -> None:
    engine, prompt = make(ranks=2), text(1, 45)
    computed_by(engine, prompt)
    taken(engine)
    for ends_well in (False, True):
        engine.submit(prompt)
        engine.step()
        first, second = engine.copies
        first.finish_all()
        engine.step()
        assert taken(engine)["tokens"] == {}, "the second rank has not answered"
        (job,) = second.pending
        second.answer(job, error=None if ends_well else "fails on purpose")
        engine.run()
        assert taken(engine)["tokens"] == ({"host": 44} if ends_well else {})
    assert not engine.connector._scheduler._loading


def test_gauges_of_several_server_processes_say_what_was_said_last(make: Make) -> None:
    made: dict[str, str | None] = {}

    def gauge(name: str, documentation: str, labelnames: list[str], multiprocess_mode: str | None = None) -> Any:
        made[name] = multiprocess_mode

    types = {"counter": lambda **more: None, "gauge": gauge}
    type(make().connector).build_prom_metrics(None, types, [], {})
    assert made and set(made.values()) == {"mostrecent"}


def test_a_step_in_which_nothing_happened_says_nothing(make: Make) -> None:
    engine = make()
    computed_by(engine, text(1, 45))
    assert not engine.connector.get_kv_connector_stats().is_empty()
    assert engine.connector.get_kv_connector_stats() is None
    assert engine.workers[0].get_kv_connector_stats() is None
    empty = type(engine.connector).build_kv_connector_stats()
    assert empty.is_empty() and empty.reduce() == {}
