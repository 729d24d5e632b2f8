"""A `stepwell serve` process for the demo, and the few requests that the demo makes of it. Knows nothing of what is said."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from urllib.error import HTTPError
from urllib.request import ProxyHandler, Request, build_opener

from stepwell.base.errors import StepwellError
from stepwell.jobs.children import start_child

START_S, REQUEST_S, QUIET_S = 600.0, 300.0, 60.0  # for a busy machine; a server that ends is reported at once
_LOCAL = build_opener(ProxyHandler({}))  # no proxy knows this machine's own address
_ADDRESS = re.compile(r"^address\s+(http://\S+)")


@dataclass(frozen=True, slots=True, kw_only=True)
class Reply:
    """One answer: its text, when its first word came, and where its prompt's tokens came from."""

    text: str
    first_token_s: float
    prompt_tokens: int
    device: int
    host: int
    store: int

    @property
    def computed(self) -> int:
        return self.prompt_tokens - self.device - self.host - self.store


@contextmanager
def serving(arguments: Sequence[str], log: Path) -> Iterator[Server]:
    """A server on a free port, killed at the end without warning. What it says goes to `log`. Raises StepwellError."""
    command = [sys.executable, "-m", "stepwell", "serve", "--port", "0", *arguments]
    environment = {name: value for name, value in os.environ.items() if not name.startswith("STEPWELL_")}
    with log.open("w") as out, start_child(command, stdout=out, stderr=out, env=environment) as process:
        try:
            yield Server(_address(process, log), process)
        finally:
            process.kill()


class Chat:
    """An address that answers chats: a server, or a router in front of several."""

    def __init__(self, address: str) -> None:
        self.address = address

    def ask(
        self, messages: Sequence[dict[str, Any]], *, max_tokens: int, salt: str | None = None,
        at_first_word: Callable[[], None] = lambda: None,
    ) -> Reply:  # fmt: skip
        """One answer of a chat, greedy and streamed. With a new `salt` nothing is cached for it."""
        body = {
            "model": "demo", "messages": list(messages), "max_tokens": max_tokens, "temperature": 0, "stream": True,
            "stream_options": {"include_usage": True}, "ignore_eos": True, **({"cache_salt": salt} if salt else {}),
        }  # fmt: skip
        started, first, text, usage = time.monotonic(), 0.0, "", None
        for event in self._events("/v1/chat/completions", body):
            if event.get("error"):
                raise StepwellError(f"the server answered: {event['error']['message']}")
            usage = event.get("usage") or usage
            for choice in event.get("choices", ()):
                content = choice["delta"].get("content")
                if content and not text:
                    first = time.monotonic() - started
                    at_first_word()
                text += content or ""
        if usage is None:
            raise StepwellError("the server ended an answer early")
        details = usage["prompt_tokens_details"]
        return Reply(
            text=text, first_token_s=first, prompt_tokens=usage["prompt_tokens"], device=details["device_tokens"],
            host=details["host_tokens"], store=details["store_tokens"],
        )  # fmt: skip

    def _events(self, path: str, body: dict[str, Any]) -> Iterator[dict[str, Any]]:
        request = Request(self.address + path, json.dumps(body).encode(), {"Content-Type": "application/json"})
        try:
            with _LOCAL.open(request, timeout=REQUEST_S) as response:
                for line in response:
                    data = line.decode().removeprefix("data:").strip()
                    if data and data != "[DONE]":
                        yield dict(json.loads(data))
        except HTTPError as error:
            raise StepwellError(f"the server answered {error.code}: {error.read(1000).decode(errors='replace')}") from None


class Server(Chat):
    """A server that was started here."""

    def __init__(self, address: str, process: subprocess.Popen[bytes]) -> None:
        super().__init__(address)
        self.process = process

    def kill(self) -> None:
        """Without warning (-9). Returns when it is gone."""
        self.process.kill()
        self.process.wait()

    def wait_until_stored(self) -> None:
        """Waits until no copy or store operation is in flight."""
        deadline = time.monotonic() + QUIET_S
        while self.state()["pending"]:
            if time.monotonic() > deadline:
                raise StepwellError(f"copies to the store did not end within {QUIET_S:g} s")
            time.sleep(0.02)

    def state(self) -> dict[str, Any]:
        return fetch(f"{self.address}/cache")

    def is_answering(self) -> bool:
        """Whether a request runs."""
        return bool(fetch(f"{self.address}/v1/loads")["loads"][0]["num_running_reqs"])


def fetch(address: str, body: dict[str, Any] | None = None) -> dict[str, Any]:
    """What is answered in JSON: to a GET, or to a POST where there is a body. Raises OSError."""
    data = None if body is None else json.dumps(body).encode()
    with _LOCAL.open(Request(address, data, {"Content-Type": "application/json"}), timeout=REQUEST_S) as response:
        return dict(json.load(response))


def _address(process: subprocess.Popen[bytes], log: Path) -> str:
    deadline = time.monotonic() + START_S
    while time.monotonic() < deadline and process.poll() is None:
        found = [match for line in log.read_text().splitlines() if (match := _ADDRESS.match(line))]
        if found:
            return found[0][1]
        time.sleep(0.05)
    raise StepwellError(f"the server did not start; it said:\n{log.read_text()[-2000:]}")
