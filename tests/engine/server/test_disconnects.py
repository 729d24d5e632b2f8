"""Clients that leave: their answers end with them, and cost nothing more."""

from __future__ import annotations

import json
import socket
from concurrent.futures import ThreadPoolExecutor

import httpx
import openai
import pytest

from engine.server.serving import CONTEXT, NAME, Running, running
from waiting import PATIENCE_S

HEAD = b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\n"
LONG = {"model": NAME, "prompt": "Go on and on.", "max_tokens": CONTEXT - 100, "ignore_eos": True}


def aborted(served: Running) -> float:
    with httpx.Client(base_url=served.address, timeout=PATIENCE_S) as http:
        lines = http.get("/metrics").text.splitlines()
    return next((float(line.split()[-1]) for line in lines if line.startswith('stepwell_requests_total{outcome="abort"}')), 0.0)


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


def test_leaving_in_the_middle_of_a_body_harms_nobody(served: Running, client: openai.OpenAI) -> None:
    with connected(served) as raw:
        raw.sendall(HEAD + b'Content-Length: 99\r\n\r\n{"mod')
    assert client.completions.create(model=NAME, prompt="Still there?", max_tokens=3).usage is not None
    served.audit()


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


def test_a_pass_that_fails_ends_its_answers_with_the_reason(monkeypatch: pytest.MonkeyPatch) -> None:
    with running() as made, made.client() as client:
        runner = made.engine._runner

        def fail(chunks: object) -> None:
            raise RuntimeError("out of luck")

        with monkeypatch.context() as patched:
            patched.setattr(runner, "run", fail)
            with pytest.raises(openai.InternalServerError, match="out of luck") as caught:
                client.completions.create(model=NAME, prompt="x")
            assert caught.value.code == "engine_error"
            stream = client.completions.create(model=NAME, prompt="x", stream=True)
            with pytest.raises(openai.APIError, match="out of luck"):
                list(stream)
        assert client.completions.create(model=NAME, prompt="x", max_tokens=2).usage is not None
