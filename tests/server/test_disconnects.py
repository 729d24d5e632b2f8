"""Clients that leave: their answers end with them, and cost nothing more."""

from __future__ import annotations

import json
import logging
import socket
from concurrent.futures import ThreadPoolExecutor

import httpx
import openai
import pytest

from server.serving import CONTEXT, NAME, Held, Running, running
from waiting import PATIENCE_S, wait_until

HEAD = b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\n"
LONG = {"model": NAME, "prompt": "Go on and on.", "max_tokens": CONTEXT - 100, "ignore_eos": True}


def aborted(served: Running) -> float:
    with httpx.Client(base_url=served.address, timeout=PATIENCE_S) as http:
        lines = http.get("/metrics").text.splitlines()
    return next(
        (float(line.split()[-1]) for line in lines if line.startswith('stepwell_requests_total{outcome="abort",tenant=""}')), 0.0
    )


def connected(served: Running) -> socket.socket:
    host, port = served.address.removeprefix("http://").split(":")
    return socket.create_connection((host, int(port)))


def test_leaving_a_stream_aborts_it(served: Running, client: openai.OpenAI) -> None:
    before = aborted(served)
    stream = client.completions.create(
        model=NAME, prompt="Go on and on.", max_tokens=CONTEXT - 100, n=3, stream=True, extra_body={"ignore_eos": True}
    )
    next(iter(stream))
    served.settle(lambda engine: engine.num_open == 3)
    stream.close()
    served.audit()
    assert aborted(served) == before + 3


def test_leaving_before_the_answer_is_whole_aborts_it(served: Running) -> None:
    before = aborted(served)
    body = json.dumps(LONG).encode()
    with connected(served) as raw:
        raw.sendall(HEAD + b"Content-Length: %d\r\n\r\n" % len(body) + body)
        served.settle(lambda engine: engine.num_open == 1)
    served.audit()
    assert aborted(served) == before + 1


@pytest.mark.parametrize("path", [b"/v1/completions", b"/v1/responses", b"/cache/explain"])
def test_leaving_in_the_middle_of_a_body_harms_nobody_and_is_no_error(
    path: bytes, served: Running, client: openai.OpenAI, caplog: pytest.LogCaptureFixture
) -> None:
    before = served.inside
    with connected(served) as raw:
        raw.sendall(HEAD.replace(b"/v1/completions", path) + b'Content-Length: 99\r\n\r\n{"mod')
        wait_until(lambda: served.inside == before + 1)
    wait_until(lambda: served.inside == before)
    assert client.completions.create(model=NAME, prompt="Still there?", max_tokens=3).usage is not None
    served.audit()
    assert not [record for record in caplog.records if record.levelno >= logging.WARNING]


def test_crowds_that_leave_at_random_moments_leave_nothing_behind(served: Running) -> None:
    def leave(number: int) -> None:
        body = LONG | {"prompt": f"Crowd {number % 4}", "stream": number % 2 == 0}
        with (
            httpx.Client(base_url=served.address, timeout=PATIENCE_S) as http,
            http.stream("POST", "/v1/completions", json=body) as response,
        ):
            for count, _ in enumerate(response.iter_lines()):
                if count >= number % 5:
                    return

    def impatient(number: int) -> None:
        with httpx.Client(base_url=served.address, timeout=0.02 * number + 0.01) as http, pytest.raises(httpx.TimeoutException):
            http.post("/v1/completions", json=LONG)

    with ThreadPoolExecutor(8) as threads:
        waiting = [threads.submit(leave, 2 * number) for number in range(10)]
        waiting += [threads.submit(impatient, number) for number in range(10)]
        for each in waiting:
            each.result()
    served.audit()


def test_stopping_lets_answers_end_and_closes_the_engine() -> None:
    with running() as made, httpx.Client(base_url=made.address, timeout=PATIENCE_S) as http:
        body = LONG | {"stream": True, "max_tokens": 100}
        with http.stream("POST", "/v1/completions", json=body) as response:
            lines = response.iter_lines()
            next(lines)
            made.server.stop()
            assert [line for line in lines if line][-1] == "data: [DONE]"
    assert not made.server.served.loop.alive


def test_while_answers_finish_new_requests_are_sent_elsewhere() -> None:
    body = LONG | {"stream": True, "max_tokens": 50}
    with (
        running() as made,
        Held(made) as held,
        httpx.Client(base_url=made.address, timeout=60) as http,
        http.stream("POST", "/v1/completions", json=body) as response,
    ):
        lines = response.iter_lines()
        made.settle(lambda engine: engine.num_open == 1)
        made.server.stop()
        for path in ("/v1/models", "/ready"):
            refused = httpx.get(made.address + path)
            assert (refused.status_code, refused.json()["error"]["code"]) == (503, "unavailable")
            assert int(refused.headers["Retry-After"]) > 0, "clients try again by it"
        counted = 'stepwell_http_errors_total{status="503"} 2.0'
        assert counted in httpx.get(f"{made.address}/metrics").text  # which still answers
        held.let_go()
        assert [line for line in lines if line][-1] == "data: [DONE]"


@pytest.mark.parametrize("stream", [True, False])
def test_answers_that_take_longer_than_the_drain_are_ended_with_the_reason(stream: bool) -> None:
    with (
        running(serving={"drain_s": 0.2}) as made,
        httpx.Client(base_url=made.address, timeout=60) as http,
        ThreadPoolExecutor(1) as threads,
        Held(made) as held,
    ):
        asked = threads.submit(http.post, "/v1/completions", json=LONG | {"stream": stream})
        made.settle(lambda engine: engine.num_open == 1)
        made.server.stop()
        wait_until(lambda: made.engine.num_open == 0)  # aborted while it could not go on; the engine may have stopped by now
        held.let_go()
        assert "the server is stopping" in asked.result(30).text and asked.result().status_code == (200 if stream else 503)


def test_a_second_call_to_stop_does_not_wait() -> None:
    with running(serving={"drain_s": 1e6}) as made, ThreadPoolExecutor(1) as threads, Held(made) as held:
        asked = threads.submit(httpx.post, f"{made.address}/v1/completions", json=LONG | {"stream": True}, timeout=60)
        made.settle(lambda engine: engine.num_open == 1)
        made.server.stop()
        made.server.stop()
        wait_until(lambda: made.engine.num_open == 0)
        held.let_go()
        assert "the server is stopping" in asked.result(30).text


def test_a_pass_that_fails_ends_its_answers_and_the_log_has_the_reason(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    with running() as made, made.client() as client:
        runner = made.engine._runner

        def fail(chunks: object) -> None:
            raise RuntimeError("out of luck")

        with monkeypatch.context() as patched:
            patched.setattr(runner, "run", fail)
            with pytest.raises(openai.InternalServerError, match="the engine failed on this request; the log says why") as caught:
                client.completions.create(model=NAME, prompt="x")
            assert caught.value.code == "engine_error" and "out of luck" not in str(caught.value)
            stream = client.completions.create(model=NAME, prompt="x", stream=True)
            with pytest.raises(openai.APIError, match="the log says why") as streamed:
                list(stream)
            assert "out of luck" not in str(streamed.value.body)
            assert "RuntimeError: out of luck" in caplog.text
        assert client.completions.create(model=NAME, prompt="x", max_tokens=2).usage is not None
