"""Servers in processes of their own, and smg in front of them, all on this machine's own address."""

from __future__ import annotations

import os
import re
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import httpx
import pytest

from demo_cluster.parts import PAIRS, TAKEN_FOR
from stepwell.jobs.children import start_child
from waiting import PATIENCE_S, wait_until

ROOT = Path(__file__).parents[2]
SMG = Path(os.environ.get("STEPWELL_SMG", ROOT / ".venv-smg" / "bin" / "smg"))
installed = pytest.mark.skipif(not SMG.is_file(), reason="behind a router: run `make test-routers`")

NAME = "tiny"
SERVER = (
    "--model", "random-hybrid", "--served-model-name", NAME, "--device", "cpu", "--device-memory", "32MiB",
    "--host-memory", "32MiB", "--page-tokens", "16", "--hide-version",
)  # fmt: skip
_SAID = re.compile(r"^address\s+(http://\S+)", re.MULTILINE)


class Program:
    """A process, what it says, and where it can be asked."""

    def __init__(self, process: subprocess.Popen[bytes], log: Path) -> None:
        self._process, self._log = process, log
        self.address = ""

    def said(self) -> str:
        return re.sub(r"\x1b\[[0-9;]*m", "", self._log.read_text(errors="replace"))

    def get(self, path: str, **more: Any) -> httpx.Response:
        return httpx.get(self.address + path, timeout=PATIENCE_S, **more)

    def post(self, path: str, **more: Any) -> httpx.Response:
        return httpx.post(self.address + path, timeout=PATIENCE_S, **more)

    def answers(self, path: str) -> bool:
        try:
            return self.get(path).is_success
        except httpx.TransportError:
            assert self._process.poll() is None, f"it ended:\n{self.said()[-3000:]}"
            return False

    def send_signal(self, number: signal.Signals) -> None:
        self._process.send_signal(number)

    def wait(self) -> int:
        return self._process.wait(PATIENCE_S)


@contextmanager
def program(command: Sequence[str | Path], log: Path) -> Iterator[Program]:
    """Killed at the end."""
    with log.open("wb") as out, start_child([str(each) for each in command], stdout=out, stderr=out) as process:
        try:
            yield Program(process, log)
        finally:
            process.kill()


@contextmanager
def server(log: Path, *options: str) -> Iterator[Program]:
    with program([sys.executable, "-m", "stepwell", "serve", "--port", "0", *SERVER, *options], log) as made:

        def address() -> str:
            found = _SAID.search(made.said())
            assert found or made._process.poll() is None, made.said()
            return found[1] if found else ""

        made.address = wait_until(address, pause_s=0.05)
        wait_until(lambda: made.answers("/ready"), pause_s=0.05)
        yield made


@contextmanager
def router(log: Path, servers: Sequence[Program], *options: str) -> Iterator[Program]:
    with _smg(log, "--worker-urls", *(each.address for each in servers), *options) as made:
        wait_until(lambda: num_healthy(made) == len(servers), pause_s=0.05)
        yield made


@contextmanager
def pairing_router(log: Path, prefill: Program, decodes: Sequence[Program]) -> Iterator[Program]:
    """Has prompts computed on one server and answered on others. They are named one by one: what it should take them for
    cannot be said in its options."""
    servers = {prefill: "prefill"} | dict.fromkeys(decodes, "decode")
    with _smg(log, *PAIRS) as made:
        for each, role in servers.items():
            made.post("/workers", json={"url": each.address, "worker_type": role, **TAKEN_FOR}).raise_for_status()
        wait_until(lambda: num_healthy(made) == len(servers), pause_s=0.05)
        yield made


@contextmanager
def _smg(log: Path, *options: str) -> Iterator[Program]:
    port, metrics_port = _free_ports(2)
    command = [SMG, "launch", "--host", "127.0.0.1", "--port", str(port)]
    command += ["--prometheus-host", "127.0.0.1", "--prometheus-port", str(metrics_port), "--policy", "cache_aware"]
    command += ["--health-check-interval-secs", "2", "--health-check-endpoint", "/ready", "--log-level", "info"]
    with program([*command, *options], log) as made:
        made.address = f"http://127.0.0.1:{port}"
        wait_until(lambda: made.answers("/health"), pause_s=0.05)
        yield made


def num_healthy(behind: Program) -> int:
    return int(behind.get("/readiness").json().get("healthy_workers", 0))


@contextmanager
def fleet(folder: Path, *options: str, router_options: Sequence[str] = ()) -> Iterator[tuple[Program, list[Program]]]:
    """Two servers behind a router."""
    with ExitStack() as stack:
        servers = [stack.enter_context(server(folder / f"server{number}.log", *options)) for number in (1, 2)]
        yield stack.enter_context(router(folder / "smg.log", servers, *router_options)), servers


def _free_ports(count: int) -> list[int]:
    with ExitStack() as stack:
        taken = [stack.enter_context(socket.socket()) for _ in range(count)]
        for each in taken:
            each.bind(("127.0.0.1", 0))
        return [each.getsockname()[1] for each in taken]
