"""Connections that send nothing or half a request, and more requests than a server takes: others, probes first, still get in."""

from __future__ import annotations

import resource
import socket
import threading
from collections.abc import Iterator
from contextlib import ExitStack

import httpx
import pytest

from server.serving import KEY, NAME, Held, Running, running
from stepwell.server.access import admission, connections
from waiting import PATIENCE_S, wait_until

MANY = 1200
ASKED = {"model": NAME, "prompt": "Deep.", "max_tokens": 2}


def connected(served: Running) -> socket.socket:
    host, port = served.address.removeprefix("http://").split(":")
    return socket.create_connection((host, int(port)), timeout=PATIENCE_S)


def waiting(served: Running) -> int:
    return len(served.server._server.server_state.connections)


@pytest.fixture
def fresh() -> Iterator[Running]:
    with running() as made:
        yield made


def test_half_sent_headers_keep_nobody_out(fresh: Running) -> None:
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if hard != resource.RLIM_INFINITY and hard < 4 * MANY:
        pytest.skip(f"both ends of {MANY} connections need {4 * MANY} open files, and this machine allows {hard}")
    resource.setrlimit(resource.RLIMIT_NOFILE, (max(soft, 4 * MANY), hard))
    with ExitStack() as stack:
        for number in range(MANY):
            half = stack.enter_context(connected(fresh))
            if number % 2:
                half.sendall(b"GET /he")
        wait_until(lambda: waiting(fresh) >= connections.MOST_IDLE)
        with httpx.Client(base_url=fresh.address, timeout=PATIENCE_S) as http:
            assert [http.get(path).status_code for path in ("/health", "/ready", "/metrics", "/v1/models")] == [200] * 4
            assert http.post("/v1/completions", json=ASKED).status_code == 200
        wait_until(lambda: waiting(fresh) <= connections.MOST_IDLE + 1)


@pytest.mark.parametrize("sent", [b"", b"GET /he", b"GET /health HTTP/1.1\r\nHost: x\r\n"])
@pytest.mark.parametrize("second", [False, True], ids=["the first request", "a later request"])
def test_headers_that_do_not_come_close_the_connection(sent: bytes, second: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(connections, "HEADERS_S", 0.2)
    with running() as served, connected(served) as raw:
        if second:
            raw.sendall(b"GET /health HTTP/1.1\r\nHost: x\r\n\r\n" + sent[:1])
            assert raw.recv(1 << 16).startswith(b"HTTP/1.1 200 OK")
            raw.sendall(sent[1:] or b"G")
        else:
            raw.sendall(sent)
        reported = b"".join(iter(lambda: raw.recv(1 << 16), b""))  # to the end of the connection
        page = httpx.get(f"{served.address}/metrics", timeout=PATIENCE_S).text
    if sent or second:
        assert b"HTTP/1.1 408 " in reported and b'"code": "headers_timeout"' in reported
        assert 'stepwell_http_errors_total{status="408"} 1.0' in page
    else:
        assert reported == b"", "nothing was asked"


def test_an_answer_that_takes_long_is_not_late(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(connections, "HEADERS_S", 0.05)
    with (
        running() as served,
        Held(served) as held,
        httpx.Client(base_url=served.address, timeout=PATIENCE_S) as http,
        http.stream("POST", "/v1/completions", json=ASKED | {"stream": True}) as response,
    ):
        served.settle(lambda engine: engine.num_open == 1)
        with connected(served) as silent:
            assert silent.recv(1) == b"", "a deadline has passed"
        held.let_go()
        assert "data: [DONE]" in list(response.iter_lines())


def test_what_is_not_http_is_an_error_as_all_others_are(fresh: Running) -> None:
    with connected(fresh) as raw:
        raw.sendall(b"\x16\x03\x01 and so on: TLS\r\n\r\n")
        reported = b"".join(iter(lambda: raw.recv(1 << 16), b""))
    assert reported.startswith(b"HTTP/1.1 400 ") and b'"code": "invalid_http"' in reported
    assert 'stepwell_http_errors_total{status="400"} 1.0' in httpx.get(f"{fresh.address}/metrics", timeout=PATIENCE_S).text


def test_a_full_server_refuses_requests_as_openai_does_and_still_answers_probes(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("INFO", logger="stepwell")
    monkeypatch.setattr(admission, "MOST_INSIDE", 2)
    with running() as served, Held(served) as held:
        post = {"json": ASKED, "timeout": PATIENCE_S}
        threads = [threading.Thread(target=httpx.post, args=(f"{served.address}/v1/completions",), kwargs=post) for _ in range(2)]
        for thread in threads:
            thread.start()
        wait_until(lambda: served.inside == 2)
        with httpx.Client(base_url=served.address, timeout=PATIENCE_S) as http:
            refused = http.post("/v1/completions", json=ASKED)
            assert (refused.status_code, refused.json()["error"]["code"]) == (503, "overloaded")
            assert int(refused.headers["Retry-After"]) > 0
            assert [http.get(path).status_code for path in ("/health", "/ready", "/metrics")] == [200] * 3
            assert 'stepwell_http_errors_total{status="503"} 1.0' in http.get("/metrics").text
        held.let_go()
        for thread in threads:
            thread.join(PATIENCE_S)
    (line,) = [record.fields for record in caplog.records if record.getMessage() == "error sent"]  # type: ignore[attr-defined]
    assert line["status"] == 503 and line["client"] == "127.0.0.1"


def test_a_request_keeps_the_id_that_its_client_gave_it(fresh: Running, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level("INFO", logger="stepwell")
    with fresh.client(KEY) as client:
        named = client.completions.create(model=NAME, prompt="x", max_tokens=1, extra_headers={"X-Request-Id": "mine-7"})
        assert named._request_id == "mine-7"
        unnamed = client.completions.create(model=NAME, prompt="x", max_tokens=1)
        odd = client.completions.create(model=NAME, prompt="x", max_tokens=1, extra_headers={"X-Request-Id": "a b"})
    assert unnamed._request_id and odd._request_id not in (None, "a b")
    lines = [record.fields for record in caplog.records if record.getMessage() == "request ended"]  # type: ignore[attr-defined]
    assert [line["request_id"] for line in lines] == [each._request_id for each in (named, unnamed, odd)]
    assert all((line["client"], line["path"]) == ("127.0.0.1", "/v1/completions") for line in lines)
    assert "x-request-id" in httpx.get(f"{fresh.address}/nothing", timeout=PATIENCE_S).headers
