"""What a server does when its engine or a body is broken: everybody is answered, soon, and with the reason."""

from __future__ import annotations

import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from typing import Any

import httpx

from engine.server.serving import ADMIN, CONTEXT, NAME, Running, running
from stepwell.base.errors import StepwellError

LONG = {"model": NAME, "prompt": "Go on and on.", "max_tokens": CONTEXT - 100, "ignore_eos": True}


def test_an_engine_that_breaks_ends_open_answers_with_the_reason() -> None:
    with suppress(StepwellError), running() as served, ThreadPoolExecutor(2) as pool:  # the last look at it is refused
        where = f"{served.address}/v1/completions"
        asked = [pool.submit(httpx.post, where, json=LONG | {"stream": stream}, timeout=30) for stream in (True, False)]
        while served.engine.num_open < 2:
            time.sleep(0.01)
        step = served.engine.cache.step
        served.engine.cache.step = _broken  # type: ignore[method-assign]
        streamed, whole = (each.result(30) for each in asked)
        assert "error" in streamed.text and whole.status_code == 500
        deadline = time.monotonic() + 30
        while httpx.get(f"{served.address}/health").status_code != 503:
            assert time.monotonic() < deadline, "a server without an engine calls itself healthy"
            time.sleep(0.02)
        assert httpx.post(where, json=LONG, timeout=30).status_code in (500, 503)
        served.engine.cache.step = step  # type: ignore[method-assign]
        served.engine.close()


def _broken() -> Any:
    raise RuntimeError("nobody knows")


def test_a_body_of_a_million_mistakes_costs_little(served: Running) -> None:
    body = b'{"model":"tiny","prompt":[' + b"1," * 200_000 + b'"x"]}'
    started = time.perf_counter()
    reply = httpx.post(f"{served.address}/v1/completions", content=body, headers={"Content-Type": "application/json"}, timeout=30)
    assert reply.status_code == 400 and len(reply.content) < 10_000
    assert time.perf_counter() - started < 3


def test_arguments_of_tools_may_be_nested_beyond_reason(served: Running) -> None:
    call = {"id": "1", "type": "function", "function": {"name": "f", "arguments": "[" * 100_000}}
    messages = [{"role": "user", "content": "x"}, {"role": "assistant", "content": None, "tool_calls": [call]}]
    reply = httpx.post(
        f"{served.address}/v1/chat/completions", json={"model": NAME, "messages": messages, "max_tokens": 2}, timeout=30
    )
    assert reply.status_code in (200, 400)


def test_a_misspelt_order_changes_nothing(served: Running) -> None:
    headers = {"Authorization": f"Bearer {ADMIN}"}
    assert httpx.post(f"{served.address}/cache/flush", json={"salt": "x"}, headers=headers).status_code == 400
    assert httpx.post(f"{served.address}/cache/store", json={"store": "memory:\0"}, headers=headers).status_code == 400
