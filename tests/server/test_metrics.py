"""What `/metrics` says after requests: conventions, figures that agree with answers, and the dashboard made of them."""

from __future__ import annotations

import hashlib
import json
import re
import runpy
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
from prometheus_client import Metric
from prometheus_client.parser import text_string_to_metric_families

from server.serving import ADMIN, NAME, Held, Running, running, tiny_draft
from stepwell import __version__
from stepwell.engine import Limits
from stepwell.server.access.tenants import Principal, Tenant
from stepwell.server.monitoring import engine_metrics, metrics
from waiting import PATIENCE_S, wait_until

KEY = "a key of alice, and hers"
ALICE = Tenant(principal=Principal(name="alice"), key_sha256=hashlib.sha256(KEY.encode()).digest())
REFERENCE = (Path(__file__).parents[2] / "docs" / "reference" / "metrics.md").read_text()
GRAFANA = Path(__file__).parents[2] / "deploy" / "grafana"
PROMPT = "How many steps lead down to the water, and how many lead back up again?"


@pytest.fixture(scope="module")
def served() -> Iterator[Running]:
    options = {"budget": "1MiB"}
    with running(tenants=[ALICE], draft=tiny_draft(), store="memory:", store_options=options) as made:
        with made.client(KEY) as client:
            for _ in range(2):
                client.completions.create(model=NAME, prompt=PROMPT, max_tokens=6, temperature=0)
        assert httpx.get(f"{made.address}/v1/models", timeout=PATIENCE_S).status_code == 401  # an error, to be counted
        made.settle(lambda engine: not engine.cache.stats().pending)
        yield made


@pytest.fixture
def families(served: Running) -> dict[str, Metric]:
    page = httpx.get(f"{served.address}/metrics", headers={"Authorization": f"Bearer {ADMIN}"}, timeout=PATIENCE_S).text
    return {family.name: family for family in text_string_to_metric_families(page)}


def value(families: dict[str, Metric], sample: str, **labels: str) -> float:
    found = [
        each.value
        for family in families.values()
        for each in family.samples
        if each.name == sample and labels.items() <= each.labels.items()
    ]
    assert found, f"{sample} {labels} is not exported"
    return sum(found)


def test_every_name_has_one_unit_and_a_meaning(families: dict[str, Metric]) -> None:
    ours = {name: family for name, family in families.items() if not name.startswith("process_")}
    for name, family in ours.items():
        assert re.fullmatch(r"stepwell_[a-z_]+", name) and family.documentation, name
        assert not re.search(r"_(ms|us|kb|mb|gib|percent|total)$", name), name  # a counter's _total is on its samples
        if family.type == "histogram":
            assert name.endswith(("_seconds", "_tokens")), name


def test_counters_of_the_cache_stand_by_their_unit(families: dict[str, Metric]) -> None:
    for unit in ("tokens", "bytes", "pages", "checkpoints", "jobs"):
        events = {each.labels["event"] for each in families[f"stepwell_cache_{unit}"].samples}
        assert events and all(unit in event for event in events), (unit, events)
    assert all("bytes" not in each.labels["event"] for each in families["stepwell_cache_events"].samples)


def test_a_page_has_the_process_and_no_times_of_creation(families: dict[str, Metric]) -> None:
    assert value(families, "process_resident_memory_bytes") > 0 and value(families, "process_open_fds") > 0
    assert not [each.name for family in families.values() for each in family.samples if each.name.endswith("_created")]


def test_latencies_are_those_of_both_answers(families: dict[str, Metric]) -> None:
    for name in ("request_duration", "time_to_first_token", "time_per_output_token", "queue"):
        assert value(families, f"stepwell_{name}_seconds_count") == 2, name
    first, whole = (value(families, f"stepwell_{name}_seconds_sum") for name in ("time_to_first_token", "request_duration"))
    assert 0 < first < whole
    assert value(families, "stepwell_time_per_output_token_seconds_sum") == pytest.approx((whole - first) / 5)


def test_requests_and_tokens_are_counted_by_tenant(families: dict[str, Metric]) -> None:
    hits = value(families, "stepwell_prompt_tokens_total", source="device", tenant="alice")
    assert 0 < hits == value(families, "stepwell_prompt_tokens_total", source="device")
    assert value(families, "stepwell_requests_total", outcome="length", tenant="alice") == 2
    assert value(families, "stepwell_generated_tokens_total", tenant="alice") == 12
    assert value(families, "stepwell_request_generated_tokens_sum") == 12
    assert value(families, "stepwell_request_prompt_tokens_sum") == 2 * (len(PROMPT) + 1)


def test_what_everybody_may_see_names_no_tenants() -> None:
    with running(tenants=[ALICE], serving={"open_metrics": True}) as made:
        with made.client(KEY) as client:
            for _ in range(2):
                client.completions.create(model=NAME, prompt=PROMPT, max_tokens=1)
        page = httpx.get(f"{made.address}/metrics", timeout=PATIENCE_S).text
    assert 'stepwell_prompt_tokens_total{source="device",tenant=""}' in page and "alice" not in page


def test_what_has_not_happened_yet_is_told_as_zero(families: dict[str, Metric]) -> None:
    for outcome in ("abort", "error"):
        assert value(families, "stepwell_requests_total", outcome=outcome) == 0
    with running() as made:
        page = httpx.get(f"{made.address}/metrics", timeout=PATIENCE_S).text
    for reported in (
        'requests_total{outcome="stop",tenant=""}',
        'prompt_tokens_total{source="host",tenant=""}',
        'http_errors_total{status="500"}',
        'draft_tokens_total{outcome="accepted"}',
    ):
        assert f"stepwell_{reported} 0.0" in page


def test_tiers_add_up(families: dict[str, Metric]) -> None:
    for tier in ("device", "host"):
        capacity, used, free = (
            value(families, f"stepwell_tier_{what}_bytes", tier=tier) for what in ("capacity", "used", "free")
        )
        assert 0 < used < capacity == used + free
        assert value(families, "stepwell_evictions_total", tier=tier, what="pages") == 0


def test_the_store_says_how_full_and_how_quick_it_is(families: dict[str, Metric]) -> None:
    used, budget = (value(families, f"stepwell_store_{what}_bytes") for what in ("used", "budget"))
    assert 0 < used <= budget == 2**20
    assert value(families, "stepwell_store_transferred_bytes_total", direction="stored") > 0
    puts = value(families, "stepwell_store_operation_seconds_count", operation="put")
    assert 0 < puts == value(families, "stepwell_store_operation_seconds_bucket", operation="put", le="+Inf")
    assert value(families, "stepwell_store_breaker_state", state="closed") == 1 == value(families, "stepwell_store_breaker_state")
    assert value(families, "stepwell_store_errors_total") == 0


def test_the_build_is_named(families: dict[str, Metric]) -> None:
    assert value(families, "stepwell_build_info", version=__version__, model=NAME) == 1


def test_every_name_on_the_dashboard_is_exported(families: dict[str, Metric]) -> None:
    exported = {sample.name for family in families.values() for sample in family.samples}
    board = json.loads((GRAFANA / "stepwell.json").read_text())
    expressions = [target["expr"] for panel in board["panels"] for target in panel.get("targets", [])]
    queries = [each["query"]["query"] for each in board["templating"]["list"] if each["type"] == "query"]
    named = set(re.findall(r"stepwell_\w+", " ".join(expressions + queries)))
    named = {each for each in named if not each.startswith("stepwell_sparse_")}  # see test_sparse_serving.py
    assert len(expressions) > 20 and not named - exported, named - exported


def test_the_dashboard_is_what_its_list_makes() -> None:
    made: dict[str, Any] = runpy.run_path(str(GRAFANA / "make_dashboard.py"))
    assert (GRAFANA / "stepwell.json").read_text() == made["text"](), "run python deploy/grafana/make_dashboard.py"


def page_of(made: Running) -> dict[str, Metric]:
    page = httpx.get(f"{made.address}/metrics", timeout=PATIENCE_S).text
    return {family.name: family for family in text_string_to_metric_families(page)}


def test_tokens_are_counted_as_they_come_and_not_when_an_answer_ends() -> None:
    """A prompt of several chunks, then an answer that goes on: looked at in the middle of both."""
    prompt = "Step by step, down to the water. " * 12
    limits = Limits(max_running=4, chunk_tokens=64)
    with running(limits=limits) as made, httpx.Client(base_url=made.address, timeout=PATIENCE_S) as http:
        scheduler, plan = made.engine.scheduler, made.engine.scheduler.plan
        passes = [0, 2]  # those that were planned, and how many may be

        def some() -> Any:
            chunks = plan() if passes[0] < passes[1] else []
            passes[0] += bool(chunks)
            return chunks

        scheduler.plan = some  # type: ignore[method-assign]
        scheduler.plan_ahead = list  # type: ignore[method-assign,assignment]
        body = {"model": NAME, "prompt": prompt, "max_tokens": 50, "stream": True, "ignore_eos": True}
        with http.stream("POST", "/v1/completions", json=body) as response:
            lines = response.iter_lines()
            wait_until(lambda: value(page_of(made), "stepwell_prompt_tokens_total", source="computed") == 128)
            assert value(page_of(made), "stepwell_time_to_first_token_seconds_count") == 0
            assert value(page_of(made), "stepwell_queue_seconds_count") == 1, "it has begun"
            history = httpx.get(f"{made.address}/cache/history", timeout=PATIENCE_S).json()
            assert sum(history["prompt_tokens"]["computed"]) == 128, "so has the page"
            passes[1] += 20
            wait_until(lambda: value(page_of(made), "stepwell_generated_tokens_total") >= 5)
            families = page_of(made)
            assert value(families, "stepwell_time_to_first_token_seconds_count") == 1
            assert value(families, "stepwell_prompt_tokens_total") == len(prompt) + 1
            assert value(families, "stepwell_requests_total") == 0, "and it has not ended"
            passes[1] = 10**6
            assert "data: [DONE]" in list(lines)
        families = page_of(made)
        assert value(families, "stepwell_generated_tokens_total") == 50
        assert value(families, "stepwell_prompt_tokens_total") == len(prompt) + 1


def test_requests_that_wait_show_for_how_long() -> None:
    with running(limits=Limits(max_running=1)) as made, Held(made) as held:
        asks = [{"model": NAME, "prompt": f"{number}", "max_tokens": 1} for number in range(2)]
        post = f"{made.address}/v1/completions"
        threads = [threading.Thread(target=httpx.post, args=(post,), kwargs={"json": ask, "timeout": PATIENCE_S}) for ask in asks]
        assert value(page_of(made), "stepwell_oldest_waiting_seconds") == 0
        for thread in threads:
            thread.start()
        wait_until(lambda: value(page_of(made), "stepwell_requests_open", state="waiting") == 1)
        assert value(page_of(made), "stepwell_oldest_waiting_seconds") > 0
        held.let_go()
        for thread in threads:
            thread.join(PATIENCE_S)


def test_a_scrape_says_that_the_engine_hangs() -> None:
    assert engine_metrics._READ_TIMEOUT_S < 3, "Prometheus waits ten seconds at most"
    goes_on = threading.Event()
    with running() as made:
        hangs = made.server.served.loop.call(lambda engine: goes_on.wait(PATIENCE_S))
        families = page_of(made)
        assert not hangs.done() and value(families, "stepwell_engine_up") == 0
        assert value(families, "stepwell_http_errors_total") == 0, "what was counted is still there"
        goes_on.set()
        assert hangs.result(PATIENCE_S)


def test_an_error_is_seen_as_an_increase(families: dict[str, Metric]) -> None:
    assert value(families, "stepwell_http_errors_total", status="401") == 1
    assert value(families, "stepwell_http_errors_total", status="503") == 0


def test_names_of_vllm_say_the_same_where_they_are_wanted() -> None:
    with running(serving={"vllm_metrics": True}) as made, made.client() as client:
        for _ in range(2):
            client.completions.create(model=NAME, prompt=PROMPT, max_tokens=6, temperature=0)
        families = page_of(made)
    same = {
        "vllm:generation_tokens_total": "stepwell_generated_tokens_total",
        "vllm:prompt_tokens_total": "stepwell_prompt_tokens_total",
        "vllm:time_to_first_token_seconds_bucket": "stepwell_time_to_first_token_seconds_bucket",
        "vllm:e2e_request_latency_seconds_sum": "stepwell_request_duration_seconds_sum",
        "vllm:request_generation_tokens_count": "stepwell_request_generated_tokens_count",
    }  # fmt: skip
    for theirs, ours in same.items():
        assert value(families, theirs, model_name=NAME) == value(families, ours) > 0, theirs
    hits = sum(value(families, "stepwell_prompt_tokens_total", source=source) for source in ("device", "host", "store"))
    assert value(families, "vllm:prefix_cache_hits_total") == hits > 0
    assert value(families, "vllm:request_success_total", finished_reason="length") == 2
    assert value(families, "vllm:num_requests_running") == 0 <= value(families, "vllm:kv_cache_usage_perc") <= 1


def test_names_of_vllm_are_documented_and_off_by_default(families: dict[str, Metric]) -> None:
    assert not [name for name in families if name.startswith("vllm:")]
    for series in metrics._ALIASES:
        assert f"`{series.theirs}`" in REFERENCE, series.theirs


def test_every_series_is_in_the_reference(families: dict[str, Metric]) -> None:
    ours = [name + "_total" * (family.type == "counter") for name, family in families.items() if name.startswith("stepwell_")]
    assert len(ours) > 30 and not [name for name in ours if f"| `{name}` |" not in REFERENCE]
