"""What routers and orchestrators ask before they send requests: health, readiness, load, and what the server is."""

from __future__ import annotations

import hashlib
import threading
from concurrent.futures import ThreadPoolExecutor
from functools import partial

import httpx
import pytest

from server.serving import ADMIN, CONTEXT, KEY, NAME, Held, Running, running
from stepwell import Tier, __version__
from stepwell.server.access.tenants import Principal, Tenant
from stepwell.server.monitoring.activity import _Recent
from waiting import PATIENCE_S, wait_until

LOAD_FIELDS = {
    "dp_rank", "num_running_reqs", "num_waiting_reqs", "num_total_reqs", "num_used_tokens", "max_total_num_tokens", "token_usage",
    "gen_throughput", "cache_hit_rate", "utilization", "max_running_requests",
}  # fmt: skip
BODY = {"model": NAME, "prompt": "How deep is the well, and what is at the bottom of it?", "max_tokens": 4, "temperature": 0}


def load_of(http: httpx.Client) -> dict[str, float]:
    answer = http.get("/v1/loads?include=core,disagg,queues,memory").json()  # as smg asks
    assert answer.keys() == {"timestamp", "dp_rank_count", "loads"} and answer["dp_rank_count"] == 1
    assert isinstance(answer["timestamp"], str)
    (load,) = answer["loads"]
    assert load.keys() == LOAD_FIELDS
    return load  # type: ignore[no-any-return]


def test_a_server_that_answers_lives_and_is_ready(http: httpx.Client) -> None:
    assert http.get("/health").json() == {"status": "ok", "model": NAME}
    assert http.get("/ready").json() == {"status": "ready", "model": NAME}


def test_a_probe_may_ask_for_no_body(http: httpx.Client) -> None:
    for path in ("/health", "/ready"):
        (asked, answered) = http.head(path), http.get(path)  # on one connection: a body would be taken for the next answer
        assert (asked.status_code, asked.content, answered.status_code) == (200, b"", 200)
        assert asked.headers.keys() == answered.headers.keys()
        assert asked.headers["content-length"] == answered.headers["content-length"]
    assert http.head("/metrics").status_code == 200
    assert http.head("/v1/models").status_code == 405


def test_an_idle_server_has_no_load(http: httpx.Client, served: Running) -> None:
    served.audit()
    wait_until(lambda: load_of(http)["num_used_tokens"] == 0)
    load = load_of(http)
    assert load["num_running_reqs"] == load["num_waiting_reqs"] == load["num_total_reqs"] == load["utilization"] == 0
    assert load["token_usage"] == 0 and load["max_running_requests"] == served.engine.limits.max_running
    size_bytes = served.on_engine(lambda engine: engine.cache.stats().tier(Tier.DEVICE).size_bytes)
    assert load["max_total_num_tokens"] == int(size_bytes / served.engine.footprint.bytes_per_token)


def test_requests_that_run_and_wait_are_counted_while_a_pass_runs() -> None:
    with running() as made, httpx.Client(base_url=made.address, timeout=PATIENCE_S) as http, ThreadPoolExecutor(3) as threads:
        ask = partial(httpx.post, f"{made.address}/v1/completions", json=BODY | {"max_tokens": 200}, timeout=PATIENCE_S)
        over = threading.Event()
        with Held(made) as held:
            asked = [threads.submit(ask)]
            wait_until(lambda: load_of(http)["num_running_reqs"] == 1)
            wait_until(lambda: load_of(http)["num_used_tokens"] > 0)
            assert 0 < load_of(http)["token_usage"] < 1 and load_of(http)["utilization"] > 0
            made.server.served.loop.call(lambda engine: over.wait(PATIENCE_S))  # as a long pass does
            asked += [threads.submit(ask) for _ in range(2)]
            wait_until(lambda: load_of(http)["num_waiting_reqs"] == 2)
            over.set()
            held.let_go()
        assert all(each.result(PATIENCE_S).status_code == 200 for each in asked)
        wait_until(lambda: load_of(http)["num_total_reqs"] == 0)
        assert made.server.served.loop.num_arriving == 0


def test_speed_and_hits_are_those_of_the_last_answers() -> None:
    with running() as made, httpx.Client(base_url=made.address, timeout=PATIENCE_S) as http:
        assert load_of(http)["gen_throughput"] == load_of(http)["cache_hit_rate"] == 0
        first, again = (http.post("/v1/completions", json=BODY).json()["usage"] for _ in range(2))
        prompts = first["prompt_tokens"] + again["prompt_tokens"]
        cached = sum(each["prompt_tokens_details"]["cached_tokens"] for each in (first, again))
        assert cached > 0
        wait_until(lambda: load_of(http)["cache_hit_rate"] == pytest.approx(cached / prompts))
        wait_until(lambda: http.post("/v1/completions", json=BODY).is_success and load_of(http)["gen_throughput"] > 0)


def test_tokens_count_towards_the_speed_for_some_seconds() -> None:
    recent = _Recent(5)
    for second in range(10):
        recent.add(second + 0.5, 10, 1)
        recent.add(second + 0.7, 10)
    assert recent.sums(9.9) == (100, 5) and recent.sums(12) == (40, 2) and recent.sums(100) == (0, 0)


def test_a_server_that_stops_lives_on_but_is_not_ready() -> None:
    with running() as made, Held(made) as held, ThreadPoolExecutor(1) as threads:
        asked = threads.submit(httpx.post, f"{made.address}/v1/completions", json=BODY, timeout=PATIENCE_S)
        made.settle(lambda engine: engine.num_open == 1)
        made.server.stop()
        refused = httpx.get(f"{made.address}/ready")
        assert refused.status_code == 503 and "stopping" in refused.json()["error"]["message"]
        assert httpx.head(f"{made.address}/ready").status_code == 503
        assert httpx.get(f"{made.address}/health").status_code == httpx.head(f"{made.address}/health").status_code == 200
        assert httpx.get(f"{made.address}/v1/loads").json()["loads"][0]["num_total_reqs"] == 1
        held.let_go()
        assert asked.result(PATIENCE_S).status_code == 200


def test_a_server_says_what_it_is_but_not_that_it_is_another(http: httpx.Client) -> None:
    info = http.get("/get_server_info").json()
    assert (info["version"], info["served_model_name"], info["context_length"]) == (__version__, NAME, CONTEXT)
    assert http.get("/model_info").json()["is_generation"] is True
    assert http.get("/version").json() == {"version": __version__}
    assert [http.get(path).status_code for path in ("/server_info", "/loads")] == [404, 404]


def test_the_version_is_hidden_from_routers_that_would_take_us_for_another() -> None:
    with running(serving={"hide_version": True}) as made:
        assert httpx.get(f"{made.address}/version").status_code == 404
        assert httpx.get(f"{made.address}/get_server_info").json()["version"] == __version__


def test_who_may_see_the_load_is_as_with_metrics() -> None:
    alice = Tenant(principal=Principal(name="alice"), key_sha256=hashlib.sha256(b"alice's").digest())
    paths = ("/health", "/ready", "/v1/loads", "/get_server_info", "/model_info", "/version")

    def statuses(made: Running, key: str | None) -> list[int]:
        headers = {} if key is None else {"Authorization": f"Bearer {key}"}
        return [httpx.get(made.address + path, headers=headers).status_code for path in paths]

    with running(api_key=KEY) as made:
        assert statuses(made, None) == [200, 200, 401, 401, 401, 401] and statuses(made, KEY) == [200] * 6
    with running(tenants=[alice]) as made:
        assert statuses(made, "alice's") == [200, 200, 401, 200, 200, 200] and statuses(made, ADMIN) == [200] * 6
    with running(api_key=KEY, serving={"open_metrics": True}) as made:
        assert statuses(made, None) == [200, 200, 200, 401, 401, 401]
