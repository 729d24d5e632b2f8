"""What `/metrics` says after requests: conventions, figures that agree with answers, and the dashboard made of them."""

from __future__ import annotations

import hashlib
import json
import re
import runpy
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
from prometheus_client import Metric
from prometheus_client.parser import text_string_to_metric_families

from server.serving import ADMIN, NAME, Running, running, tiny_draft
from stepwell import __version__
from stepwell.server.access.principals import Principal, Tenant
from waiting import PATIENCE_S

KEY = "a key of alice, and hers"
ALICE = Tenant(principal=Principal(name="alice"), key_sha256=hashlib.sha256(KEY.encode()).digest())
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
    for name, family in families.items():
        assert re.fullmatch(r"stepwell_[a-z_]+", name) and family.documentation, name
        assert not re.search(r"_(ms|us|kb|mb|gib|percent|total)$", name), name  # a counter's _total is on its samples
        if family.type == "histogram":
            assert name.endswith("_seconds"), name


def test_latencies_are_those_of_both_answers(families: dict[str, Metric]) -> None:
    for name in ("request_duration", "time_to_first_token", "time_per_output_token", "queue"):
        assert value(families, f"stepwell_{name}_seconds_count") == 2, name
    first, whole = (value(families, f"stepwell_{name}_seconds_sum") for name in ("time_to_first_token", "request_duration"))
    assert 0 < first < whole
    assert value(families, "stepwell_time_per_output_token_seconds_sum") == pytest.approx((whole - first) / 5)


def test_hits_are_counted_by_tier_and_tenant(families: dict[str, Metric]) -> None:
    hits = value(families, "stepwell_hit_tokens_total", tier="device", tenant="alice")
    assert 0 < hits == value(families, "stepwell_prompt_tokens_total", source="device")


def test_what_everybody_may_see_names_no_tenants() -> None:
    with running(tenants=[ALICE], serving={"open_metrics": True}) as made:
        with made.client(KEY) as client:
            for _ in range(2):
                client.completions.create(model=NAME, prompt=PROMPT, max_tokens=1)
        page = httpx.get(f"{made.address}/metrics", timeout=PATIENCE_S).text
    assert 'stepwell_hit_tokens_total{tenant="",tier="device"}' in page and "alice" not in page


def test_what_has_not_happened_yet_is_told_as_zero(families: dict[str, Metric]) -> None:
    for outcome in ("abort", "error"):
        assert value(families, "stepwell_requests_total", outcome=outcome) == 0
    with running() as made:
        page = httpx.get(f"{made.address}/metrics", timeout=PATIENCE_S).text
    for told in (
        'requests_total{outcome="stop"}',
        'prompt_tokens_total{source="host"}',
        'draft_tokens_total{outcome="accepted"}',
    ):
        assert f"stepwell_{told} 0.0" in page


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
