"""Prometheus metrics of requests: outcomes, durations, and the sources of their tokens; also under vLLM's names on request.

`progress.py` counts here on the engine's thread. Metrics of the cache are in `engine_metrics.py`. With `--vllm-metrics` the page
repeats the most used series under vLLM's names, each as a sum over one of these, for autoscalers, gateways and dashboards made
for vLLM; series without a counterpart are left out.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, Metric, ProcessCollector, generate_latest

from stepwell import __version__
from stepwell.engine.loop import EngineLoop
from stepwell.engine.requests.request import Delta, Finish
from stepwell.server.monitoring.engine_metrics import EngineCollector

SOURCES = ("device", "host", "store", "computed")
_SECONDS = (
    0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 120.0, 300.0, 600.0, 1200.0, 3600.0,
)  # fmt: skip
_TOKEN_SECONDS = (
    0.001, 0.0025, 0.005, 0.01, 0.015, 0.02, 0.03, 0.04, 0.05, 0.075, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0,
)  # fmt: skip
_TOKENS = tuple(2**power for power in range(21))
_STATUSES = (400, 401, 404, 405, 408, 413, 421, 500, 502, 503, 504)  # errors that this server sends
_ANY = ""  # label of requests without a tenant, and of all if tenants are not named


class Metrics:
    """Metrics of one server, in a registry of its own. Any thread."""

    def __init__(self, loop: EngineLoop, model: str, *, name_tenants: bool, vllm_names: bool = False) -> None:
        """`name_tenants` labels series by tenant. `vllm_names` adds series under vLLM's names."""
        self._name_tenants = name_tenants
        self._vllm_model = model if vllm_names else None
        self._registry = CollectorRegistry()
        self._registry.register(EngineCollector(loop))  # first: it waits for the engine, which has then counted its last step
        ProcessCollector(registry=self._registry)
        build = Gauge("stepwell_build_info", "1, labelled with version and model.", ["version", "model"], registry=self._registry)
        build.labels(__version__, model).set(1)
        self._requests = self._counter("stepwell_requests", "Answers that ended, by outcome.", "outcome", "tenant")
        self._errors = self._counter("stepwell_http_errors", "Errors sent to clients, by status.", "status")
        self._prompt = self._counter(
            "stepwell_prompt_tokens", "Prompt tokens restored or computed, by where they came from.", "source", "tenant"
        )
        self._generated = self._counter("stepwell_generated_tokens", "Generated tokens.", "tenant")
        self._drafted = self._counter("stepwell_draft_tokens", "Tokens proposed by a draft, by outcome.", "outcome")
        self._preemptions = self._counter("stepwell_preemptions", "Requests preempted for want of memory.")
        self._first = self._histogram("stepwell_time_to_first_token_seconds", "From arrival at the server to the first token.")
        self._queued = self._histogram("stepwell_queue_seconds", "From arrival at the server to the start of its computation.")
        self._lasted = self._histogram("stepwell_request_duration_seconds", "From arrival at the server to the end.")
        self._per_token = self._histogram(
            "stepwell_time_per_output_token_seconds", "Mean time between tokens of an answer.", _TOKEN_SECONDS
        )
        self._prompt_length = self._histogram("stepwell_request_prompt_tokens", "Length of a prompt.", _TOKENS)
        self._answer_length = self._histogram("stepwell_request_generated_tokens", "Length of an answer.", _TOKENS)
        self.begin_at_zero([])

    def begin_at_zero(self, tenants: Iterable[str]) -> None:
        """Exports counters as 0 before the first event: `rate` misses an event with which a series begins."""
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
        """Counts an answer that ended with `delta`."""
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
        """The page in Prometheus' text format. Waits up to 2 s for the engine's thread, so do not call it on the event loop."""
        return generate_latest(self)  # it needs only `collect`

    def collect(self) -> Iterator[Metric]:
        """The families of the page, without `_created` series, which would double its size."""
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


_ENDS = {"stop": "stop", "length": "length", "abort": "abort", "timeout": "abort", "error": "error"}


@dataclass(frozen=True, slots=True, kw_only=True)
class _Series:
    """`ours` summed over all labels except `le` and `label`."""

    ours: str
    theirs: str
    where: Mapping[str, tuple[str, ...]] = field(default_factory=dict)  # only samples with these label values
    label: tuple[str, str, Mapping[str, str]] | None = None  # ours, theirs, and values by ours


_ALIASES: Sequence[_Series] = (
    _Series(ours="stepwell_requests_open", theirs="vllm:num_requests_running", where={"state": ("active",)}),
    _Series(ours="stepwell_requests_open", theirs="vllm:num_requests_waiting", where={"state": ("waiting",)}),
    _Series(ours="stepwell_preemptions", theirs="vllm:num_preemptions"),
    _Series(ours="stepwell_prompt_tokens", theirs="vllm:prompt_tokens"),
    _Series(ours="stepwell_generated_tokens", theirs="vllm:generation_tokens"),
    _Series(ours="stepwell_prompt_tokens", theirs="vllm:prefix_cache_queries"),
    _Series(
        ours="stepwell_prompt_tokens", theirs="vllm:prefix_cache_hits", where={"source": ("device", "host", "store")}
    ),
    _Series(ours="stepwell_requests", theirs="vllm:request_success", label=("outcome", "finished_reason", _ENDS)),
    _Series(ours="stepwell_time_to_first_token_seconds", theirs="vllm:time_to_first_token_seconds"),
    _Series(ours="stepwell_time_per_output_token_seconds", theirs="vllm:request_time_per_output_token_seconds"),
    _Series(ours="stepwell_request_duration_seconds", theirs="vllm:e2e_request_latency_seconds"),
    _Series(ours="stepwell_queue_seconds", theirs="vllm:request_queue_time_seconds"),
    _Series(ours="stepwell_request_prompt_tokens", theirs="vllm:request_prompt_tokens"),
    _Series(ours="stepwell_request_generated_tokens", theirs="vllm:request_generation_tokens"),
)  # fmt: skip


def in_names_of_vllm(families: Iterable[Metric], model: str) -> Iterator[Metric]:
    by_name = {family.name: family for family in families}
    for series in _ALIASES:
        if series.ours in by_name:
            yield _renamed(by_name[series.ours], series, model)
    if "stepwell_tier_used_bytes" in by_name:
        yield _used_share(by_name["stepwell_tier_capacity_bytes"], by_name["stepwell_tier_available_bytes"], model)


def _renamed(ours: Metric, series: _Series, model: str) -> Metric:
    made = Metric(series.theirs, ours.documentation, ours.type)
    sums: defaultdict[tuple[str, tuple[tuple[str, str], ...]], float] = defaultdict(float)
    for sample in ours.samples:
        if any(sample.labels[name] not in values for name, values in series.where.items()):
            continue
        kept = {"le": sample.labels["le"]} if "le" in sample.labels else {}
        if series.label is not None:
            name, their_name, values = series.label
            kept[their_name] = values[sample.labels[name]]
        sums[sample.name.removeprefix(series.ours), tuple(kept.items())] += sample.value
    for (suffix, labels), value in sums.items():
        made.add_sample(series.theirs + suffix, {**_labels(model), **dict(labels)}, value)
    return made


def _used_share(capacity: Metric, available: Metric, model: str) -> Metric:
    """The share of device memory that requests hold. vLLM also counts cached pages without references as free."""
    name = "vllm:kv_cache_usage_perc"
    made = Metric(name, "Share of device memory that requests hold. 1 is all of it.", "gauge")
    size, free = (
        next((each.value for each in of.samples if each.labels["tier"] == "device"), 0.0) for of in (capacity, available)
    )
    made.add_sample(name, _labels(model), (size - free) / size if size else 0.0)
    return made


def _labels(model: str) -> dict[str, str]:
    return {"model_name": model, "engine": "0"}
