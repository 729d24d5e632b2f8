"""What each part of a large installation costs for a page, a key or a character: the constants of `docs/scaling.md`."""

from __future__ import annotations

import json
import os
import time
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from random import Random
from tempfile import TemporaryDirectory
from threading import Thread
from typing import Any

from stepwell.base.prompt import pack
from stepwell.cli.demo.server import fetch
from stepwell.cli.demo_cluster.parts import LOCAL, mooncake_master, routing
from stepwell.cli.demo_cluster.private_network import HOST
from stepwell.server.kv_events.messages import BlockStored
from stepwell.server.kv_events.zmq_socket import EventAddresses, ZmqEvents
from stepwell.store.api import Space, Write
from stepwell.store.peer.lane import Lane, SharedHost, Wire
from stepwell.store.peer.listing import Listing, Value
from stepwell.store.registry import open_store
from stepwell.store.seal import seal

PAGE_TOKENS, VOCABULARY = 64, 150_000
CHAIN = 32  # pages that one event tells of
EVENTS, KEYS, ASKED = 200, 40_000, 1024
PROMPTS, PROMPT_CHARACTERS = 300, 64 << 10


def run(*, smg: str) -> dict[str, Any]:
    return {"events": _events(), "handover": _handover(), "master": _master(), "router": _router(smg)}


def _events() -> dict[str, float]:
    """Of a page of 64 tokens, as published."""
    random = Random(0)
    tokens = pack([random.randrange(VOCABULARY) for _ in range(CHAIN * PAGE_TOKENS)])
    hashes = tuple(random.getrandbits(64) for _ in range(CHAIN))
    event = BlockStored(hashes=hashes, parent=hashes[0], tokens=tokens, block_tokens=PAGE_TOKENS, medium="GPU", salt=None)
    socket = ZmqEvents(EventAddresses(publish=f"tcp://{LOCAL}:*", replay=f"tcp://{LOCAL}:*"))
    started = time.process_time()
    for _ in range(EVENTS):
        socket.send([event])
    spent_s = time.process_time() - started
    kept_bytes = socket._kept_bytes
    socket.close()
    return {"bytes a page": kept_bytes / EVENTS / CHAIN, "CPU us a page": spent_s / EVENTS / CHAIN * 1e6}


def _handover() -> dict[str, float]:
    """Of a page that is listed, and of the process that a decode server has for each prefill server."""
    values = [Value(bytes(32), bytes(64), 0, 1)] * 1000
    host = SharedHost()
    host.make(1 << 20)
    lane = Lane(host, Wire(host=HOST))
    resident_bytes = _resident_bytes("engine_process")
    lane.close()
    packed = Listing(space=bytes(32), session="s", values=values).pack()
    return {"bytes a page listed": len(packed) / 1000, "resident MB a lane": resident_bytes / 1e6}


def _master() -> dict[str, float]:
    """Of Mooncake's, for each value that it knows and each that it is asked for."""
    with TemporaryDirectory() as directory, mooncake_master(Path(directory, "master.log")) as address:
        options = {"master_server_address": address, "local_hostname": HOST, "global_segment_size": "512MiB"}
        store = open_store("mooncake:", options=options)
        space = Space(digest=bytes(32))
        keys = [number.to_bytes(32, "little") for number in range(KEYS)]
        data = memoryview(bytes(512))
        before = _resident_bytes("mooncake_master")
        for first in range(0, KEYS, 160):
            some = keys[first : first + 160]
            store.write_from(space, [Write(key=key, data=data, stamp=seal(space, key, data)) for key in some])
        grown = _resident_bytes("mooncake_master") - before
        master_s, started = _cpu_s("mooncake_master"), time.perf_counter()
        for first in range(0, 32 * ASKED, ASKED):
            assert all(store.contains(space, keys[first : first + ASKED]))
        asked_s, master_s = time.perf_counter() - started, _cpu_s("mooncake_master") - master_s
        store.close()
    return {
        "resident bytes a value": grown / KEYS, "us a key, 1,024 at once": asked_s / 32 / ASKED * 1e6,
        "of these CPU of the master": master_s / 32 / ASKED * 1e6,
    }  # fmt: skip


def _router(smg: str) -> dict[str, float]:
    """Of smg with `cache_aware`, for each character of prompts that it has seen."""
    random = Random(0)
    with TemporaryDirectory() as directory, _stand_in() as url:
        options = ("--policy", "cache_aware")
        with routing(smg, [{"url": url}], Path(directory, "smg.log"), *options) as router:
            before = _resident_bytes("smg")
            for _ in range(PROMPTS):
                prompt = random.randbytes(PROMPT_CHARACTERS // 2).hex()
                fetch(f"{router.address}/v1/completions", {"model": "bench", "prompt": prompt, "max_tokens": 1})
            grown = _resident_bytes("smg") - before
    return {"resident MB at start": before / 1e6, "resident bytes a character": grown / PROMPTS / PROMPT_CHARACTERS}


class _Answers(BaseHTTPRequestHandler):
    """A server that computes nothing."""

    protocol_version = "HTTP/1.1"

    def do_GET(self) -> None:
        self._say({"object": "list", "data": [{"id": "bench", "object": "model"}]})

    def do_POST(self) -> None:
        self.rfile.read(int(self.headers["Content-Length"]))
        choice = {"index": 0, "text": "x", "logprobs": None, "finish_reason": "length"}
        self._say({"id": "1", "object": "text_completion", "created": 0, "model": "bench", "choices": [choice]})

    def log_message(self, format: str, *args: Any) -> None: ...

    def _say(self, what: dict[str, Any]) -> None:
        body = json.dumps(what).encode()
        self.send_response(200 if self.path in ("/ready", "/health", "/v1/models", "/v1/completions") else 404)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)


@contextmanager
def _stand_in() -> Iterator[str]:
    with ThreadingHTTPServer((LOCAL, 0), _Answers) as server:
        Thread(target=server.serve_forever, daemon=True).start()
        try:
            yield f"http://{LOCAL}:{server.server_port}"
        finally:
            server.shutdown()


def _resident_bytes(program: str) -> int:
    """Of the largest process below this one whose command line has that word."""
    pages = [int((each / "statm").read_text().split()[1]) for each in _processes(program)]
    return max(pages, default=0) * os.sysconf("SC_PAGE_SIZE")


def _cpu_s(program: str) -> float:
    """That such processes have spent."""
    fields = [(each / "stat").read_text().rpartition(")")[2].split() for each in _processes(program)]
    return sum(int(each[11]) + int(each[12]) for each in fields) / os.sysconf("SC_CLK_TCK")


def _processes(program: str) -> list[Path]:
    """Ids of processes here are not those in /proc, which has seen more than this network's."""
    below = [Path("/proc", pid) for pid in _children(os.readlink("/proc/self"))]
    return [each for each in below if program in (each / "cmdline").read_text()]


def _children(pid: str) -> list[str]:
    found = [each for task in Path("/proc", pid, "task").iterdir() for each in (task / "children").read_text().split()]
    return found + [below for each in found for below in _children(each)]
