"""What Prometheus reads of requests: what became of them, how long they took, and where their tokens came from.

`progress.py` counts here as it happens, on the engine's thread. The state of the cache is in `engine_metrics.py`.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, Metric, ProcessCollector, generate_latest

from stepwell import __version__
from stepwell.engine.loop import EngineLoop
from stepwell.engine.requests.request import Delta, Finish
from stepwell.server.monitoring.engine_metrics import EngineCollector
from stepwell.server.monitoring.vllm_names import in_names_of_vllm

SOURCES = ("device", "host", "store", "computed")
_SECONDS = (
    0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 120.0, 300.0, 600.0, 1200.0, 3600.0,
)  # fmt: skip
_TOKEN_SECONDS = (
    0.001, 0.0025, 0.005, 0.01, 0.015, 0.02, 0.03, 0.04, 0.05, 0.075, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0,
)  # fmt: skip
_TOKENS = tuple(2**power for power in range(21))
_STATUSES = (400, 401, 404, 405, 408, 413, 421, 500, 502, 503, 504)  # of errors that this server sends
_ANY = ""  # the tenant where there are none, or they are not named


class Metrics:
    """A registry of its own, so that two servers in one process do not meet. Any thread."""

    def __init__(self, loop: EngineLoop, model: str, *, name_tenants: bool, vllm_names: bool = False) -> None:
        """`name_tenants`: whether those who may read this may know the tenants. `vllm_names` adds series in vLLM's names."""
        self._name_tenants = name_tenants
        self._vllm_model = model if vllm_names else None
        self._registry = CollectorRegistry()
        self._registry.register(EngineCollector(loop))  # first: it waits for the engine, which then has counted what it sent
        ProcessCollector(registry=self._registry)
        build = Gauge(
            "stepwell_build_info", "1, for the version and the model that run.", ["version", "model"], registry=self._registry
        )
        build.labels(__version__, model).set(1)
        self._requests = self._counter("stepwell_requests", "Answers that ended, by how.", "outcome", "tenant")
        self._errors = self._counter("stepwell_http_errors", "Errors sent to clients, by status.", "status")
        self._prompt = self._counter(
            "stepwell_prompt_tokens", "Prompt tokens restored or computed, by where they came from.", "source", "tenant"
        )
        self._generated = self._counter("stepwell_generated_tokens", "Tokens of answers.", "tenant")
        self._drafted = self._counter("stepwell_draft_tokens", "Tokens a draft guessed, by outcome.", "outcome")
        self._preemptions = self._counter("stepwell_preemptions", "Requests put back to wait for memory.")
        self._first = self._histogram("stepwell_time_to_first_token_seconds", "From arrival at the server to the first token.")
        self._queued = self._histogram("stepwell_queue_seconds", "From arrival at the server to the beginning.")
        self._lasted = self._histogram("stepwell_request_duration_seconds", "From arrival at the server to the end.")
        self._per_token = self._histogram(
            "stepwell_time_per_output_token_seconds", "Between tokens of an answer, on average.", _TOKEN_SECONDS
        )
        self._prompt_length = self._histogram("stepwell_request_prompt_tokens", "Length of a prompt.", _TOKENS)
        self._answer_length = self._histogram("stepwell_request_generated_tokens", "Length of an answer.", _TOKENS)
        self.begin_at_zero([])

    def begin_at_zero(self, tenants: Iterable[str]) -> None:
        """Exports as 0 what has not happened yet: of a counter that begins at 1, `rate` would miss the first event."""
        for tenant in {_ANY, *map(self._label, tenants)}:
            for outcome in Finish:
                self._requests.labels(outcome.value, tenant)
            for source in SOURCES:
                self._prompt.labels(source, tenant)
            self._generated.labels(tenant)
        for guessed in ("accepted", "rejected"):
            self._drafted.labels(guessed)
        for status in _STATUSES:
            self._errors.labels(str(status))

    def began(self, queued_s: float) -> None:
        self._queued.observe(queued_s)

    def prompt(self, count: int, source: str, tenant: str | None) -> None:
        self._prompt.labels(source, self._label(tenant)).inc(count)

    def first_token(self, after_s: float) -> None:
        self._first.observe(after_s)

    def generated(self, count: int, tenant: str | None) -> None:
        self._generated.labels(self._label(tenant)).inc(count)

    def ended(self, delta: Delta, tenant: str | None) -> None:
        """Counts an answer that has ended. `delta` is its last."""
        usage = delta.usage
        assert delta.finish is not None, f"an answer without an end: {delta}"
        self._requests.labels(delta.finish.value, self._label(tenant)).inc()
        if usage is None or not usage.completion_tokens:
            return
        self._prompt_length.observe(usage.prompt_tokens)
        self._answer_length.observe(usage.completion_tokens)
        self._drafted.labels("accepted").inc(usage.accepted_tokens)
        self._drafted.labels("rejected").inc(usage.proposed_tokens - usage.accepted_tokens)
        self._preemptions.inc(usage.preemptions)
        self._lasted.observe(usage.total_s)
        if usage.completion_tokens > 1:
            self._per_token.observe((usage.total_s - usage.first_token_s) / (usage.completion_tokens - 1))

    def refused(self, status: int) -> None:
        self._errors.labels(str(status)).inc()

    def page(self) -> bytes:
        """All of it in Prometheus' text form. Waits up to 2 s for the engine's thread: not for the event loop."""
        return generate_latest(self)  # all that it asks for is `collect`

    def collect(self) -> Iterator[Metric]:
        """The families of the page, without the times of creation that would double it."""
        families = []
        for family in self._registry.collect():
            family.samples = [each for each in family.samples if not each.name.endswith("_created")]
            families.append(family)
        yield from families
        if self._vllm_model is not None:
            yield from in_names_of_vllm(families, self._vllm_model)

    # ---- inside -----------------------------------------------------------------------------------

    def _label(self, tenant: str | None) -> str:
        return (self._name_tenants and tenant) or _ANY

    def _counter(self, name: str, meaning: str, *labels: str) -> Counter:
        return Counter(name, meaning, labels, registry=self._registry)

    def _histogram(self, name: str, meaning: str, bounds: Sequence[float] = _SECONDS) -> Histogram:
        return Histogram(name, meaning, buckets=bounds, registry=self._registry)
