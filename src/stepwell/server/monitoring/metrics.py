"""What Prometheus is told of requests: what became of them, how long they took, and where their tokens came from.

Answers are counted on the engine's thread as they end. The state of the cache is in `engine_metrics.py`. Decides nothing.
"""

from __future__ import annotations

from collections.abc import Sequence

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest

from stepwell import __version__
from stepwell.engine.loop import EngineLoop
from stepwell.engine.requests.request import Delta, Finish
from stepwell.server.monitoring.engine_metrics import EngineCollector

SOURCES = ("device", "host", "store", "computed")
_SECONDS = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 120.0)
_TOKEN_SECONDS = (0.001, 0.0025, 0.005, 0.01, 0.015, 0.02, 0.03, 0.04, 0.05, 0.075, 0.1, 0.25, 0.5, 1.0, 2.5)


class Metrics:
    """A registry of its own, so that two servers in one process do not meet. Any thread."""

    def __init__(self, loop: EngineLoop, model: str, *, name_tenants: bool) -> None:
        """`name_tenants`: whoever may see this may know who they are."""
        self._name_tenants = name_tenants
        self._registry = CollectorRegistry()
        build = Gauge(
            "stepwell_build_info", "1, for the version and the model that run.", ["version", "model"], registry=self._registry
        )
        build.labels(__version__, model).set(1)
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
        self._lasted = self._seconds("stepwell_request_duration_seconds", "From arrival at the server to the end of the answer.")
        self._per_token = self._seconds(
            "stepwell_time_per_output_token_seconds", "Between tokens of an answer, on average.", bounds=_TOKEN_SECONDS
        )
        self._hits = Counter(
            "stepwell_hit_tokens",
            "Prompt tokens that were cached, by tier and tenant.",
            ["tier", "tenant"],
            registry=self._registry,
        )
        self._registry.register(EngineCollector(loop))
        self._begin_at_zero()

    def _begin_at_zero(self) -> None:
        """What has not happened yet is told as 0, or the first time that it does looks to a board as if it had always been so."""
        for outcome in Finish:
            self._requests.labels(outcome.value)
        for source in SOURCES:
            self._prompt.labels(source)
        for guessed in ("accepted", "rejected"):
            self._drafted.labels(guessed)

    def _seconds(self, name: str, meaning: str, bounds: Sequence[float] = _SECONDS) -> Histogram:
        return Histogram(name, meaning, buckets=bounds, registry=self._registry)

    def ended(self, delta: Delta, tenant: str | None = None) -> None:
        """Counts an answer. `delta` is its last. Where there are no tenants, or they are not named, that label is empty."""
        usage = delta.usage
        assert delta.finish is not None, f"an answer without an end: {delta}"
        self._requests.labels(delta.finish.value).inc()
        if usage is None or not usage.completion_tokens:
            return  # it never came so far that its prompt had sources
        for source in SOURCES:
            tokens = getattr(usage.sources, source)
            self._prompt.labels(source).inc(tokens)
            if source != "computed":
                self._hits.labels(source, (self._name_tenants and tenant) or "").inc(tokens)
        self._generated.inc(usage.completion_tokens)
        self._drafted.labels("accepted").inc(usage.accepted_tokens)
        self._drafted.labels("rejected").inc(usage.proposed_tokens - usage.accepted_tokens)
        self._preemptions.inc(usage.preemptions)
        self._first.observe(usage.first_token_s)
        self._queued.observe(usage.queued_s)
        self._lasted.observe(usage.total_s)
        if usage.completion_tokens > 1:
            self._per_token.observe((usage.total_s - usage.first_token_s) / (usage.completion_tokens - 1))

    def refused(self, status: int) -> None:
        self._errors.labels(str(status)).inc()

    def page(self) -> bytes:
        """All of it in Prometheus' text form. Waits for the engine's thread: not for the event loop."""
        return generate_latest(self._registry)
