"""A prefill and two decode servers behind smg, which pairs them by vLLM's `kv_transfer_params`. The last test kills one."""

from __future__ import annotations

import json
import signal
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import httpx
import pytest

pytest.importorskip("fastapi")

from routers.fleet import NAME, Program, installed, num_healthy, pairing_router, server
from waiting import PATIENCE_S, wait_until

pytestmark = [pytest.mark.routers, installed]
TOKEN = ("--peer-token", "a-token-for-all-of-them")


class Behind:
    """The router, and what is behind it."""

    def __init__(self, folder: Path, lives: ExitStack) -> None:
        self.prefill = lives.enter_context(server(folder / "prefill.log", *TOKEN, "--role", "prefill"))
        peer = (*TOKEN, "--role", "decode", "--peer", self.prefill.address.removeprefix("http://"))
        decode = (*peer, "--prefetch-policy", "wait_complete")
        self.decodes = [lives.enter_context(server(folder / f"decode{number}.log", *decode)) for number in (1, 2)]
        self.router = lives.enter_context(pairing_router(folder / "smg.log", self.prefill, self.decodes))


@pytest.fixture(scope="module")
def behind(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Behind]:
    with ExitStack() as lives:
        yield Behind(tmp_path_factory.mktemp("behind"), lives)


def body_of(what: str, max_tokens: int, **more: Any) -> dict[str, Any]:
    prompt = f"What has been known about {what} before anybody decides anything at all? " * 6
    return {"model": NAME, "prompt": prompt, "max_tokens": max_tokens, "temperature": 0, "ignore_eos": True, **more}


def ask(asked: Program, what: str, **more: Any) -> tuple[str, int]:
    """The answer, and how many tokens of its prompt another server had computed."""
    response = asked.post("/v1/completions", json=body_of(what, 12, **more))
    assert response.status_code == 200, response.text
    answer = response.json()
    return answer["choices"][0]["text"], answer["usage"]["prompt_tokens_details"]["store_tokens"]


def is_running(each: Program) -> bool:
    return bool(each.get("/v1/loads").json()["loads"][0]["num_running_reqs"])


def test_prompts_are_computed_on_one_server_and_answered_on_another(behind: Behind) -> None:
    for what in ("rivers", "locks", "bridges"):
        answer, handed = ask(behind.router, what)
        assert handed > 200
        assert answer == ask(behind.prefill, what, cache_salt="computed anew")[0]


def test_a_decode_server_killed_in_an_answer_costs_that_answer_and_no_later_one(behind: Behind) -> None:
    lines = []
    stream = httpx.stream(
        "POST", f"{behind.router.address}/v1/completions", json=body_of("doors", 2000, stream=True), timeout=PATIENCE_S
    )
    with stream as response:
        for line in response.iter_lines():
            lines.append(line.removeprefix("data:").strip())
            if len(lines) == 2:
                (killed,) = (each for each in behind.decodes if is_running(each))
                killed.send_signal(signal.SIGKILL)
                killed.wait()
    assert "error" in json.loads([line for line in lines if line.startswith("{")][-1])
    for what in ("doors", "endings", "beginnings", "middles"):
        answer, handed = ask(behind.router, what)
        assert handed > 0 and answer == ask(behind.prefill, what, cache_salt="computed anew")[0]
    wait_until(lambda: num_healthy(behind.router) == 2, pause_s=0.1)
