"""What a server does when its engine or a body is broken: everybody is answered, soon, and with the reason."""

from __future__ import annotations

import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from functools import partial
from threading import Event
from typing import Any

import httpx
import pytest

from server.serving import ADMIN, CONTEXT, NAME, Running, running
from stepwell.base.errors import StepwellError, StoreError
from stepwell.server import cache_routes, stores
from stepwell.store.memory import MemoryStore
from waiting import PATIENCE_S, wait_until

LONG = {"model": NAME, "prompt": "Go on and on.", "max_tokens": CONTEXT - 100, "ignore_eos": True}


def test_an_engine_that_breaks_ends_open_answers_and_tells_clients_no_more() -> None:
    with suppress(StepwellError), running() as served, ThreadPoolExecutor(2) as pool:  # the last look at it is refused
        where = f"{served.address}/v1/completions"
        asked = [pool.submit(httpx.post, where, json=LONG | {"stream": stream}, timeout=PATIENCE_S) for stream in (True, False)]
        wait_until(lambda: served.engine.num_open == 2)
        step = served.engine.cache.step
        served.engine.cache.step = _broken  # type: ignore[method-assign]
        streamed, whole = (each.result() for each in asked)
        assert "error" in streamed.text and whole.status_code == 500
        health = partial(httpx.get, f"{served.address}/health", timeout=PATIENCE_S)
        wait_until(lambda: health().status_code == 503, "a server without an engine that calls itself broken")
        late = httpx.post(where, json=LONG, timeout=PATIENCE_S)
        assert late.status_code in (500, 503)
        assert not any("an inner detail" in each.text for each in (streamed, whole, late, health()))
        served.engine.cache.step = step  # type: ignore[method-assign]
        served.engine.close()


def _broken() -> Any:
    raise RuntimeError("an inner detail")


def test_a_body_of_a_million_mistakes_costs_little(served: Running) -> None:
    body = b'{"model":"tiny","prompt":[' + b"1," * 200_000 + b'"x"]}'
    started = time.process_time()  # of this process, where the server runs too: others may be busy
    reply = httpx.post(
        f"{served.address}/v1/completions", content=body, headers={"Content-Type": "application/json"}, timeout=PATIENCE_S
    )
    assert reply.status_code == 400 and len(reply.content) < 10_000
    assert time.process_time() - started < 3


def test_arguments_of_tools_may_be_nested_beyond_reason(served: Running) -> None:
    call = {"id": "1", "type": "function", "function": {"name": "f", "arguments": "[" * 100_000}}
    messages = [{"role": "user", "content": "x"}, {"role": "assistant", "content": None, "tool_calls": [call]}]
    reply = httpx.post(
        f"{served.address}/v1/chat/completions", json={"model": NAME, "messages": messages, "max_tokens": 2}, timeout=PATIENCE_S
    )
    assert reply.status_code in (200, 400)


def test_a_misspelt_order_changes_nothing(served: Running) -> None:
    with httpx.Client(base_url=served.address, timeout=PATIENCE_S, headers={"Authorization": f"Bearer {ADMIN}"}) as admin:
        assert admin.post("/cache/flush", json={"salt": "x"}).status_code == 400
        assert admin.post("/cache/store", json={"store": "memory:\0"}).status_code == 400


class Reluctant(MemoryStore):
    """Fails to close, once the test releases it."""

    def __init__(self) -> None:
        super().__init__()
        self.let_go = Event()

    def close(self) -> None:
        assert self.let_go.wait(PATIENCE_S), "the test never released it"
        raise StoreError("the disk hangs")


def test_a_store_that_fails_to_close_after_its_detacher_has_gone_is_a_line_in_the_log(
    served: Running, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """The exception was never retrieved, and was reported only when its task was collected."""
    store = Reluctant()
    monkeypatch.setattr(stores, "open_store", lambda where, options: store)
    monkeypatch.setattr(cache_routes, "_DETACH_WAIT_S", 0.01)
    with httpx.Client(base_url=served.address, timeout=PATIENCE_S, headers={"Authorization": f"Bearer {ADMIN}"}) as admin:
        assert admin.post("/cache/store", json={"store": "memory:"}).status_code == 200
        left = admin.delete("/cache/store")
        assert (left.status_code, left.json()) == (202, {"state": "closing"})
        store.let_go.set()
        wait_until(lambda: "failed to close: the disk hangs" in caplog.text, "a line in the log")
