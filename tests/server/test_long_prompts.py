"""A huge prompt is its own client's trouble: probes are answered and streams go on while it is read, tokenized or refused."""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, replace

import httpx
import pytest

from server.serving import CONFIG, NAME, Running, running, tiny_checkpoint
from waiting import wait_until

COMPLETIONS, CHATS = "/v1/completions", "/v1/chat/completions"
BODY = 32 << 20
ROOM = 1 << 20  # tokens of a server that can hold a megabyte of text
PROBE_S = 0.5


@pytest.fixture(scope="module")
def served() -> Iterator[Running]:
    """Holds 2,048 tokens, and takes bodies of 32 MiB."""
    with running(serving={"max_body_bytes": BODY}) as made:
        yield made


@pytest.fixture(scope="module")
def roomy() -> Iterator[Running]:
    checkpoint = replace(tiny_checkpoint(), config={**CONFIG, "max_position_embeddings": ROOM})
    with running(serving={"max_body_bytes": BODY}, checkpoint=checkpoint, device_memory="300MiB") as made:
        assert made.engine.max_context == ROOM
        yield made


@dataclass(frozen=True, kw_only=True)
class Watched:
    """What others saw while a large request was handled."""

    response: httpx.Response
    took_s: float
    probes: int
    slowest_probe_s: float
    streamed: int  # events of another client's answer


def watch(served: Running, path: str, body: bytes) -> Watched:
    headers = {"content-type": "application/json"}
    stop, streamed = threading.Event(), [0]

    def stream() -> None:
        asked = {"model": NAME, "prompt": "Go on.", "max_tokens": 1900, "ignore_eos": True, "stream": True}
        with httpx.Client(base_url=served.address, timeout=60) as http:
            while not stop.is_set():
                with http.stream("POST", COMPLETIONS, json=asked) as response:
                    for line in response.iter_lines():
                        streamed[0] += bool(line)
                        if stop.is_set():
                            break

    with httpx.Client(base_url=served.address, timeout=120) as http, ThreadPoolExecutor(2) as threads:
        other = threads.submit(stream)
        try:
            wait_until(lambda: streamed[0] > 3)
            before, started = streamed[0], time.perf_counter()
            asked = threads.submit(httpx.post, served.address + path, content=body, headers=headers, timeout=120)
            times = list(_probes(http, asked))
            took_s, seen = time.perf_counter() - started, streamed[0] - before
        finally:
            stop.set()
            other.result(60)
        return Watched(
            response=asked.result(), took_s=took_s, probes=len(times), slowest_probe_s=max(times, default=0.0), streamed=seen
        )


def _probes(http: httpx.Client, until: Future[httpx.Response]) -> Iterator[float]:
    while not until.done():
        started = time.perf_counter()
        assert http.get("/health").status_code == 200
        yield time.perf_counter() - started


def slowness() -> float:
    """How many times longer than alone work takes on this machine, as busy as it is now."""
    text = '"' + "0123456789" * 3_000_000 + '"'
    started_s, used_s = time.perf_counter(), time.thread_time()
    json.loads(text)
    return (time.perf_counter() - started_s) / max(time.thread_time() - used_s, 1e-3)


def patience_s(watched: Watched, slowness: float) -> float:
    """How long a probe may take: half a second on a machine of one's own, and no half of the whole on any."""
    return max(2 * PROBE_S * slowness if slowness > 1.5 else PROBE_S, watched.took_s / 2)


def undisturbed(served: Running, path: str, body: bytes) -> Watched:
    """Watches until no probe took longer than it may, three times at most: something else may take the machine for a moment."""
    for _ in range(3):
        before, watched, after = slowness(), watch(served, path, body), slowness()
        if watched.slowest_probe_s < patience_s(watched, max(before, after)):
            return watched
    raise AssertionError(watched)


@pytest.mark.parametrize("path", [COMPLETIONS, CHATS])
def test_others_go_on_while_a_long_prompt_is_tokenized(roomy: Running, path: str) -> None:
    text = "all the way down " * 60_000  # a million tokens: a second of tokenizing, or more
    prompt = {"prompt": text} if path == COMPLETIONS else {"messages": [{"role": "user", "content": text}]}
    body = json.dumps({"model": NAME, "max_tokens": ROOM // 2} | prompt).encode()
    watched = undisturbed(roomy, path, body)
    error = watched.response.json()["error"]
    assert (watched.response.status_code, error["code"]) == (400, "context_length_exceeded")
    assert "1020" in error["message"], "it was refused by its tokens"
    assert watched.probes > 3 and watched.streamed > 3, watched


@pytest.mark.parametrize(
    ("path", "begin", "piece", "end"),
    [
        (COMPLETIONS, b'{"model": "tiny", "prompt": "', b"0123456789", b'"}'),
        (COMPLETIONS, b'{"model": "tiny", "prompt": "', b"\\u00e9", b'"}'),
        (COMPLETIONS, b'{"model": "tiny", "prompt": [', b"1,", b"1]}"),
        (COMPLETIONS, b'{"model": "tiny", "prompt": [', b"[1],", b"[1]]}"),
        (COMPLETIONS, b'{"model": "tiny", "prompt": [', b'"x",', b'"x"]}'),
        (CHATS, b'{"model": "tiny", "messages": [{"role": "user", "content": "', b"0123456789", b'"}]}'),
        (CHATS, b'{"model": "tiny", "messages": [', b'{"role":"user","content":"x"},', b'{"role":"user","content":"x"}]}'),
        ("/cache/explain", b'{"prompt": "', b"0123456789", b'"}'),
    ],
)
def test_thirty_megabytes_are_refused_and_disturb_nobody(
    served: Running, path: str, begin: bytes, piece: bytes, end: bytes
) -> None:
    body = begin + piece * (30_000_000 // len(piece)) + end
    watched = undisturbed(served, path, body)
    assert watched.response.status_code == 400 and watched.response.json()["error"]["message"]
    assert len(watched.response.content) < 5000
