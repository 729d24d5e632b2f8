"""Writes the Grafana dashboard `stepwell.json`, in the same folder, from the one list of panels below.

    python deploy/grafana/make_dashboard.py

Every name in it is one that a server exports: a test asks one. Change the list, not the file.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

OUT = Path(__file__).with_name("stepwell.json")
ACROSS, WIDTH, HEIGHT = 3, 8, 8  # panels in a row of Grafana's 24 columns
MINE = '{job=~"$job",instance=~"$instance"}'


@dataclass(frozen=True, slots=True, kw_only=True)
class Panel:
    """`lines` are queries with their legends; `@` stands for the labels that choose servers."""

    title: str
    unit: str
    lines: tuple[tuple[str, str], ...]


def _rate(name: str, by: str = "") -> str:
    return f"sum{f' by ({by})' if by else ''} (rate({name}@[$__rate_interval]))"


def _legend(labels: str) -> str:
    return " ".join(f"{{{{{label}}}}}" for label in labels.split(", "))


def _rates(title: str, name: str, by: str = "", unit: str = "short") -> Panel:
    """How much a second, for each value of some labels."""
    return Panel(title=title, unit=unit, lines=((_rate(name, by), _legend(by) if by else "a second"),))


def _a_step(title: str, name: str, by: str, unit: str = "short") -> Panel:
    """How much in each step over rows on the host, for each value of a label."""
    return Panel(title=title, unit=unit, lines=((f"{_rate(name, by)} / on () group_left {_STEPS}", _legend(by)),))


def _now(title: str, name: str, by: str) -> Panel:
    return Panel(title=title, unit="short", lines=((f"sum by ({by}) ({name}@)", _legend(by)),))


def _seconds(title: str, name: str, by: str = "") -> Panel:
    """Quantiles of a histogram."""
    rate, legend = _rate(f"{name}_bucket", f"le, {by}" if by else "le"), f" {_legend(by)}" if by else ""
    lines = tuple((f"histogram_quantile({q}, {rate})", f"p{q * 100:g}{legend}") for q in (0.5, 0.95, 0.99))
    return Panel(title=title, unit="s", lines=lines)


_SOURCES, _PROMPTS = _rate("stepwell_prompt_tokens_total", "source"), _rate("stepwell_prompt_tokens_total")
_USED, _CAPACITY = (f"sum by (tier) (stepwell_tier_{what}_bytes@)" for what in ("used", "capacity"))

_STEPS = _rate("stepwell_sparse_steps_total")

ROWS: tuple[tuple[str, tuple[Panel, ...]], ...] = (
    (
        "Requests",
        (
            _now("Requests", "stepwell_requests_open", "state"),
            _rates("Answers that ended", "stepwell_requests_total", "outcome", "reqps"),
            _rates("Errors sent", "stepwell_http_errors_total", "status", "reqps"),
            _seconds("Time to first token", "stepwell_time_to_first_token_seconds"),
            _seconds("Time per output token", "stepwell_time_per_output_token_seconds"),
            _seconds("End to end", "stepwell_request_duration_seconds"),
            _seconds("Queue", "stepwell_queue_seconds"),
            _now("Longest wait, seconds", "stepwell_oldest_waiting_seconds", "instance"),
            _rates("Answers by tenant", "stepwell_requests_total", "tenant", "reqps"),
            _rates("Output tokens", "stepwell_generated_tokens_total"),
            _rates("Preemptions", "stepwell_preemptions_total"),
        ),
    ),
    (
        "Cache",
        (
            Panel(
                title="Prompts by source",
                unit="percentunit",
                lines=((f"{_SOURCES} / on () group_left {_PROMPTS}", "{{source}}"),),
            ),
            _rates("Prompt tokens by source", "stepwell_prompt_tokens_total", "source"),
            _rates("Prompt tokens by tenant and source", "stepwell_prompt_tokens_total", "tenant, source"),
            Panel(title="Tiers: used", unit="percentunit", lines=((f"{_USED} / {_CAPACITY}", "{{tier}}"),)),
            Panel(
                title="Tiers: free and available",
                unit="bytes",
                lines=(
                    ("sum by (tier) (stepwell_tier_free_bytes@)", "{{tier}} free"),
                    ("sum by (tier) (stepwell_tier_available_bytes@)", "{{tier}} available"),
                ),
            ),
            _rates("Evictions", "stepwell_evictions_total", "tier, what"),
        ),
    ),
    (
        "Store",
        (
            Panel(
                title="Store: bytes",
                unit="bytes",
                lines=(("sum (stepwell_store_used_bytes@)", "used"), ("sum (stepwell_store_budget_bytes@)", "budget")),
            ),
            _rates("Store: traffic", "stepwell_store_transferred_bytes_total", "direction", "Bps"),
            _seconds("Store: latency", "stepwell_store_operation_seconds", "operation"),
            _rates("Store: errors", "stepwell_store_errors_total", "cause"),
            _now("Store: state", "stepwell_store_state", "state"),
            _now("Store: breaker", "stepwell_store_breaker_state", "state"),
        ),
    ),
    (
        "Engine",
        (
            _now("Up", "stepwell_engine_up", "instance"),
            _rates("Passes", "stepwell_passes_total"),
            _rates("Draft tokens", "stepwell_draft_tokens_total", "outcome"),
            _now("Versions", "stepwell_build_info", "version, model"),
        ),
    ),
    (
        "Rows on the host",
        (
            _a_step("Rows a step", "stepwell_sparse_rows_total", "found"),
            _a_step("Bytes a step", "stepwell_sparse_bytes_total", "purpose", "bytes"),
            _now("Pages", "stepwell_sparse_pages", "pages"),
        ),
    ),
)


def dashboard() -> dict[str, Any]:
    panels: list[dict[str, Any]] = []
    top = 0
    for name, row in ROWS:
        panels.append({"type": "row", "title": name, "collapsed": False, "panels": [], "gridPos": _place(top, 0, 24, 1)})
        for at, panel in enumerate(row):
            place = _place(top + 1 + at // ACROSS * HEIGHT, at % ACROSS * WIDTH, WIDTH, HEIGHT)
            panels.append(_panel(panel, place))
        top += 1 + -(-len(row) // ACROSS) * HEIGHT
    return {
        "uid": "stepwell",
        "title": "Stepwell",
        "schemaVersion": 39,
        "editable": True,
        "refresh": "30s",
        "time": {"from": "now-1h", "to": "now"},
        "templating": {"list": [_source(), _choice("job"), _choice("instance")]},
        "panels": [{"id": number, **each} for number, each in enumerate(panels, start=1)],
    }


def _place(top: int, left: int, width: int, height: int) -> dict[str, int]:
    return {"x": left, "y": top, "w": width, "h": height}


def _panel(panel: Panel, place: dict[str, int]) -> dict[str, Any]:
    queries = [
        {"refId": chr(ord("A") + at), "expr": expression.replace("@", MINE), "legendFormat": legend}
        for at, (expression, legend) in enumerate(panel.lines)
    ]
    return {
        "type": "timeseries",
        "title": panel.title,
        "datasource": {"type": "prometheus", "uid": "${source}"},
        "fieldConfig": {"defaults": {"unit": panel.unit, "min": 0}, "overrides": []},
        "gridPos": place,
        "targets": queries,
    }


def _source() -> dict[str, Any]:
    return {"name": "source", "label": "Prometheus", "type": "datasource", "query": "prometheus"}


def _choice(label: str) -> dict[str, Any]:
    return {
        "name": label,
        "type": "query",
        "datasource": {"type": "prometheus", "uid": "${source}"},
        "query": {"query": f"label_values(stepwell_build_info, {label})", "refId": label},
        "refresh": 2,
        "multi": True,
        "includeAll": True,
        "allValue": ".*",
    }


def text() -> str:
    return json.dumps(dashboard(), indent=1) + "\n"


if __name__ == "__main__":
    OUT.write_text(text())
