"""The processes of the cluster: Mooncake's master, the router, and servers with roles. Each ends, by its own id, with its block.

client --> smg --> prefill        computes prompts, keeps them in Mooncake too
             \\--> decode 1, 2    read what the prefill server computed, and answer
"""

from __future__ import annotations

import secrets
import shutil
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from stepwell.base.errors import ConfigError, StepwellError
from stepwell.base.extras import install
from stepwell.cli.demo.server import START_S, Chat, Server, fetch, serving
from stepwell.jobs.children import start_child

LOCAL = "127.0.0.1"
SEGMENT = "256MiB"  # of the prefill server's memory, for what all prompts left
TAKEN_FOR = {  # by the router, to which servers are `generic` otherwise, and nothing is handed over
    "runtime_type": "vllm", "kv_connector": "NixlConnector", "labels": {"max_running_requests": "32"},
}  # fmt: skip
PAIRS = (  # one server after the other; one that is gone is left out after two failures, for five seconds at a time
    "--pd-disaggregation", "--health-failure-threshold", "1", "--cb-failure-threshold", "2", "--cb-timeout-duration-secs", "5",
)  # fmt: skip


@dataclass(frozen=True, slots=True, kw_only=True)
class Cluster:
    router: Chat
    prefill: Server
    decodes: Sequence[Server]
    store: Sequence[str]  # arguments of a further server over the same Mooncake cluster


@contextmanager
def cluster(arguments: Sequence[str], smg: str, directory: Path) -> Iterator[Cluster]:
    """A master, a prefill server, two decode servers and the router. Raises StepwellError."""
    with ExitStack() as lives:
        store = _store(lives.enter_context(mooncake_master(directory / "master.log")))
        roles = [*arguments, "--peer-token", secrets.token_hex(16)]
        segment = ["--store-option", f"global_segment_size={SEGMENT}"]
        prefill = lives.enter_context(serving([*roles, "--role", "prefill", *store, *segment], directory / "prefill.log"))
        peer = ["--role", "decode", "--peer", prefill.address.removeprefix("http://"), "--prefetch-policy", "wait_complete"]
        decodes = [lives.enter_context(serving([*roles, *peer], directory / f"decode{number}.log")) for number in (1, 2)]
        roles_of = {prefill.address: "prefill"} | {each.address: "decode" for each in decodes}
        described = [{"url": url, "worker_type": role, **TAKEN_FOR} for url, role in roles_of.items()]
        router = lives.enter_context(routing(smg, described, directory / "smg.log", *PAIRS))
        yield Cluster(router=router, prefill=prefill, decodes=decodes, store=[*store, "--store-option", "global_segment_size=0"])


def find_smg(path: str | None) -> str:
    """The router's program. Raises ConfigError."""
    found = shutil.which(path or "smg")
    if found is None:
        raise ConfigError(
            f"there is no router {path or 'smg'!r} here: run `make demo-cluster`, or install smg 1.13.0 and name it"
        )
    return found


def _store(master: str) -> list[str]:
    options = {"master_server_address": master, "local_hostname": LOCAL}
    return ["--store", "mooncake:", *(each for name, value in options.items() for each in ("--store-option", f"{name}={value}"))]


@contextmanager
def mooncake_master(log: Path) -> Iterator[str]:
    """Its address. Raises StepwellError."""
    port, metrics_port = _free_ports(2)
    program = shutil.which("mooncake_master", path=str(Path(sys.executable).parent)) or shutil.which("mooncake_master")
    if program is None:
        raise ConfigError(f"Mooncake is not installed: {install('mooncake')}")
    command = [
        program, f"--rpc_address={LOCAL}", f"--rpc_port={port}", f"--metrics_host={LOCAL}", f"--metrics_port={metrics_port}",
        "--logtostderr=true", "--default_kv_lease_ttl=60000",
    ]  # fmt: skip
    with _running(command, log) as process:
        _wait(lambda: _listens(port), "Mooncake's master", process, log)
        yield f"{LOCAL}:{port}"


@contextmanager
def routing(smg: str, servers: Sequence[dict[str, Any]], log: Path, *options: str) -> Iterator[Chat]:
    """smg in front of servers, each described as its `/workers` wants it. Raises StepwellError."""
    port, metrics_port = _free_ports(2)
    command = [smg, "launch", "--host", LOCAL, "--port", str(port), "--prometheus-host", LOCAL]
    command += ["--prometheus-port", str(metrics_port), "--health-check-interval-secs", "2", "--health-check-endpoint", "/ready"]
    with _running([*command, *options], log) as process:
        _wait(lambda: _listens(port), "the router", process, log)
        router = Chat(f"http://{LOCAL}:{port}")
        for each in servers:
            fetch(f"{router.address}/workers", each)
        _wait(lambda: _num_healthy(router) == len(servers), "the router", process, log)
        yield router


@contextmanager
def _running(command: Sequence[str], log: Path) -> Iterator[subprocess.Popen[bytes]]:
    with log.open("w") as out, start_child(command, stdout=out, stderr=out) as process:
        try:
            yield process
        finally:
            process.kill()


def _wait(ready: Callable[[], bool], what: str, process: subprocess.Popen[bytes], log: Path) -> None:
    deadline = time.monotonic() + START_S
    while not ready():
        if time.monotonic() > deadline or process.poll() is not None:
            raise StepwellError(f"{what} did not start; it said:\n{log.read_text(errors='replace')[-2000:]}")
        time.sleep(0.05)


def _num_healthy(router: Chat) -> int:
    try:
        return int(fetch(f"{router.address}/readiness").get("healthy_workers", 0))
    except OSError:  # not ready is answered with 503
        return 0


def _listens(port: int) -> bool:
    try:
        socket.create_connection((LOCAL, port), timeout=1).close()
    except OSError:
        return False
    return True


def _free_ports(count: int) -> list[int]:
    with ExitStack() as stack:
        taken = [stack.enter_context(socket.socket()) for _ in range(count)]
        for each in taken:
            each.bind((LOCAL, 0))
        return [int(each.getsockname()[1]) for each in taken]
