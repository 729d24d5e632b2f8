"""What Prometheus is told: what became of requests, where their tokens came from, and the state of the cache when it asks.

Answers are counted on the engine's thread as they end; the rest is read there when `/metrics` is asked for. Decides nothing.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from concurrent.futures import TimeoutError as FutureTimeout

from prometheus_client import CollectorRegistry, Counter, Histogram, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from stepwell.base.errors import StepwellError
from stepwell.engine.loop import EngineLoop
from stepwell.engine.passes.spilling import SpillReport
from stepwell.engine.request import Delta
from stepwell.server.state import EngineState, read_state
from stepwell.store_tier.link import LinkState

SOURCES = ("device", "host", "store", "computed")
_SECONDS = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 120.0)
_READ_TIMEOUT_S = 10.0


class Metrics:
    """A registry of its own, so that two servers in one process do not meet. Any thread."""

    def __init__(self, loop: EngineLoop) -> None:
        self._registry = CollectorRegistry()
        self._requests = Counter("stepwell_requests", "Answers that ended, by how.", ["outcome"], registry=self._registry)
        self._errors = Counter("stepwell_http_errors", "Errors sent to clients, by status.", ["status"], registry=self._registry)
        self._prompt = Counter(
            "stepwell_prompt_tokens", "Prompt tokens, by where they came from.", ["source"], registry=self._registry
        )
        self._generated = Counter("stepwell_generated_tokens", "Tokens of answers.", registry=self._registry)
        self._drafted = Counter(
            "stepwell_draft_tokens", "Tokens a draft guessed, by outcome.", ["outcome"], registry=self._registry
        )
        self._preemptions = Counter("stepwell_preemptions", "Requests put back to wait for room.", registry=self._registry)
        self._first = self._seconds("stepwell_time_to_first_token_seconds", "From arrival at the server to the first token.")
        self._queued = self._seconds("stepwell_queue_seconds", "From arrival at the server to the beginning.")
        self._registry.register(_EngineCollector(loop))

    def _seconds(self, name: str, meaning: str) -> Histogram:
        return Histogram(name, meaning, buckets=_SECONDS, registry=self._registry)

    def ended(self, delta: Delta) -> None:
        """Counts an answer. `delta` is its last."""
        usage = delta.usage
        assert delta.finish is not None, f"an answer without an end: {delta}"
        self._requests.labels(delta.finish.value).inc()
        if usage is None or not usage.completion_tokens:
            return  # it never came so far that its prompt had sources
        for source in SOURCES:
            self._prompt.labels(source).inc(getattr(usage.sources, source))
        self._generated.inc(usage.completion_tokens)
        self._drafted.labels("accepted").inc(usage.accepted_tokens)
        self._drafted.labels("rejected").inc(usage.proposed_tokens - usage.accepted_tokens)
        self._preemptions.inc(usage.preemptions)
        self._first.observe(usage.first_token_s)
        self._queued.observe(usage.queued_s)

    def refused(self, status: int) -> None:
        self._errors.labels(str(status)).inc()

    def page(self) -> bytes:
        """All of it in Prometheus' text form. Waits for the engine's thread: not for the event loop."""
        return generate_latest(self._registry)


class _EngineCollector(Collector):
    def __init__(self, loop: EngineLoop) -> None:
        self._loop = loop

    def describe(self) -> Iterable[Metric]:
        return ()  # so that registering asks nothing of an engine that may not run yet

    def collect(self) -> Iterator[Metric]:
        up = GaugeMetricFamily("stepwell_engine_up", "Whether the engine answers.")
        try:
            state = self._loop.call(read_state).result(timeout=_READ_TIMEOUT_S)
        except (StepwellError, FutureTimeout):
            up.add_metric([], 0)
            yield up
            return
        up.add_metric([], 1)
        yield up
        yield from _families(state)


def _families(state: EngineState) -> Iterator[Metric]:
    requests = GaugeMetricFamily("stepwell_requests_open", "Requests that wait or run.", labels=["state"])
    requests.add_metric(["waiting"], state.waiting)
    requests.add_metric(["active"], state.active)
    yield requests
    yield CounterMetricFamily("stepwell_passes", "Passes of the model.", value=state.passes)
    used = GaugeMetricFamily("stepwell_tier_used_bytes", "Bytes of a tier that hold something.", labels=["tier"])
    available = GaugeMetricFamily("stepwell_tier_available_bytes", "Bytes that are free or could be.", labels=["tier"])
    for tier, sizes in state.tiers.items():
        used.add_metric([tier.label], sizes.used_bytes)
        available.add_metric([tier.label], sizes.available_bytes)
    yield used
    yield available
    store = GaugeMetricFamily("stepwell_store_state", "1 for the state the store is in.", labels=["state"])
    for each in LinkState:
        store.add_metric([each.name.lower()], each is state.store)
    yield store
    events = CounterMetricFamily("stepwell_cache_events", "Every counter of the cache, by name.", labels=["event"])
    for name, count in state.counters.items():
        events.add_metric([name], count)
    yield events
    if state.spilling is not None:
        yield from _spilling(state.spilling)


def _spilling(found: SpillReport) -> Iterator[Metric]:
    selected = CounterMetricFamily(
        "stepwell_sparse_rows", "Selected rows, by where they were. A miss is fetched, or read through.", labels=["found"]
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
        "stepwell_sparse_pages", "Pages whose rows are on the host alone, and pages of hot rows.", labels=["pages"]
    )
    pages.add_metric(["host"], found.host_pages)
    pages.add_metric(["hot"], found.hot_pages)
    yield pages
