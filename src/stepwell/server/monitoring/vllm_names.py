"""The same figures in vLLM's names, for autoscalers, gateways and dashboards that were made for vLLM (`--vllm-metrics`).

Each series is a sum over one of ours. Figures that have no counterpart here are left out. Decides nothing.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field

from prometheus_client import Metric

_ENDS = {"stop": "stop", "length": "length", "abort": "abort", "timeout": "abort", "error": "error"}


@dataclass(frozen=True, slots=True, kw_only=True)
class _Series:
    """`ours`, summed over all labels but `le`, and `label` where that is given: its values there, by ours."""

    ours: str
    theirs: str
    where: Mapping[str, tuple[str, ...]] = field(default_factory=dict)  # values of labels that count
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
    """Of device memory, the share that requests hold: what is cached and could be evicted is free to vLLM too."""
    name = "vllm:kv_cache_usage_perc"
    made = Metric(name, "Share of device memory that requests hold. 1 is all of it.", "gauge")
    size, free = (
        next((each.value for each in of.samples if each.labels["tier"] == "device"), 0.0) for of in (capacity, available)
    )
    made.add_sample(name, _labels(model), (size - free) / size if size else 0.0)
    return made


def _labels(model: str) -> dict[str, str]:
    return {"model_name": model, "engine": "0"}
