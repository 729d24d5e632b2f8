"""Two servers behind smg: it finds out what they are, reads their load, keeps prefixes together, and loses no request."""

from __future__ import annotations

import re
import signal
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx
import pytest

pytest.importorskip("fastapi")

from routers.fleet import NAME, Program, fleet, installed, num_healthy
from stepwell import __version__
from waiting import PATIENCE_S, wait_until

pytestmark = [pytest.mark.routers, installed]
STORIES = [f"Story {number} goes like this. " + f"And then came part {number}. " * 20 for number in range(8)]


@pytest.fixture(scope="module")
def behind(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Program, list[Program]]]:
    with fleet(tmp_path_factory.mktemp("fleet")) as made:
        yield made


def ask(router: Program, prompt: Any, **more: Any) -> httpx.Response:
    body = {"model": NAME, "prompt": prompt, "max_tokens": 4, "temperature": 0} | more
    return httpx.post(f"{router.address}/v1/completions", json=body, timeout=PATIENCE_S)


def cached(response: httpx.Response) -> int:
    assert response.status_code == 200, response.text
    return int(response.json()["usage"]["prompt_tokens_details"]["cached_tokens"])


def num_answers(server: Program) -> int:
    found = re.search(r'stepwell_requests_total\{outcome="length",tenant=""\} ([0-9.]+)', server.get("/metrics").text)
    return int(float(found[1])) if found else 0


def test_smg_finds_out_what_servers_are_and_how_busy(behind: tuple[Program, list[Program]]) -> None:
    router, servers = behind
    workers = router.get("/workers").json()["workers"]
    assert {each["url"] for each in workers} == {each.address for each in servers}
    for worker in workers:
        assert (worker["model_id"], worker["runtime_type"], worker["status"]) == (NAME, "generic", "ready")
        assert worker["labels"]["served_model_name"] == NAME and worker["labels"]["version"] == __version__
        assert int(worker["labels"]["max_running_requests"]) > 0 and int(worker["labels"]["context_length"]) > 0

    def loads() -> list[dict[str, Any]]:
        return list(router.get("/get_loads").json()["loads"])

    wait_until(lambda: {each.get("worker") for each in loads()} == {each.address for each in servers}, pause_s=0.1)
    assert all(each["max_total_num_tokens"] > 0 and each["max_running_requests"] > 0 for each in loads())


def test_prefixes_stay_together_and_both_servers_are_used(behind: tuple[Program, list[Program]]) -> None:
    router, servers = behind
    before = [num_answers(each) for each in servers]
    answers = [ask(router, f"{story} Turn {turn}.") for turn in range(4) for story in STORIES]
    share = sum(map(cached, answers)) / sum(each.json()["usage"]["prompt_tokens"] for each in answers)
    assert share > 0.7, f"{share:.3f} of at most 0.75 was cached: turns of a story met different servers"
    assert all(num_answers(each) - was >= 8 for each, was in zip(servers, before, strict=True))


def test_salts_come_through(behind: tuple[Program, list[Program]]) -> None:
    router, _ = behind
    prompt = "Salted. " + STORIES[0]
    first, again, other = (ask(router, prompt, cache_salt=salt) for salt in ("a", "a", "b"))
    assert cached(first) == cached(other) == 0 and cached(again) > 0


def test_fields_that_only_these_servers_know_come_through(behind: tuple[Program, list[Program]]) -> None:
    """A value that a server refuses shows that it has seen it."""
    for field, value in (("priority", 7), ("cache_ttl_s", -1)):
        refused = ask(behind[0], "Hello?", **{field: value})
        assert refused.status_code == 400 and field in refused.text, refused.text


def test_prompts_of_token_ids_do_not_come_through(behind: tuple[Program, list[Program]]) -> None:
    """smg's own limit, which docs/routers.md names: should it fall, say so there."""
    assert ask(behind[0], [1, 2, 3]).status_code == 400


def test_a_server_that_stops_or_dies_costs_no_request(tmp_path: Path) -> None:
    with fleet(tmp_path, "--drain", "60") as (router, (first, second)), ThreadPoolExecutor(4) as threads:
        asked = [threads.submit(ask, router, f"{story} On and on.", max_tokens=64, ignore_eos=True) for story in STORIES[:4]]
        first.send_signal(signal.SIGTERM)
        assert all(each.result(PATIENCE_S).status_code == 200 for each in asked)
        assert all(ask(router, story).status_code == 200 for story in STORIES)
        assert first.wait() == 0
        wait_until(lambda: num_healthy(router) == 1, pause_s=0.1)
        assert second.get("/health").is_success


def test_a_server_that_is_killed_costs_no_later_request(tmp_path: Path) -> None:
    with fleet(tmp_path) as (router, (first, _)):
        for story in STORIES:
            cached(ask(router, story))
        first.send_signal(signal.SIGKILL)
        first.wait()
        assert all(ask(router, story).status_code == 200 for story in STORIES)


def test_with_a_key_the_router_has_it_too(tmp_path: Path) -> None:
    with fleet(tmp_path, "--api-key", "a key", router_options=("--api-key", "a key")) as (router, _):
        refused = ask(router, "Hello?")
        headers = {"Authorization": "Bearer a key"}
        body = {"model": NAME, "prompt": "Hello?", "max_tokens": 1}
        taken = httpx.post(f"{router.address}/v1/completions", json=body, headers=headers, timeout=PATIENCE_S)
        assert (refused.status_code, taken.status_code) == (401, 200)
        wait_until(lambda: len(router.get("/get_loads", headers=headers).json().get("loads", [])) == 2, pause_s=0.1)
