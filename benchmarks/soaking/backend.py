"""A server under test, in a process of its own, over and over: each life on a port of its own, over the same store."""

from __future__ import annotations

import asyncio
import os
import signal
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx

from stepwell.cli.demo.server import Server, serving

ADMIN = "soak"
LOG_SUFFIX = ".log"
PATIENCE_S = 300.0  # for what hangs; a busy machine does not meet it


@dataclass(frozen=True, slots=True, kw_only=True)
class Footprint:
    """What a process holds, read from /proc."""

    memory_bytes: int  # its own and shared; not the files it has mapped
    files: int  # except those of the log, whose owner has all segments open
    threads: int
    owns: bool = False  # whether it has files of the log open


class Backend:
    """One server. `life` grows when the process is about to end, so that a client knows whether an error was expected."""

    def __init__(self, name: str, arguments: Sequence[str], directory: Path, store: tuple[str, dict[str, str]]) -> None:
        """`store`: the name and the options that it is started with, and attached again with."""
        self.name = name
        self.life = 0
        self.up = False
        self.logs: list[Path] = []
        self._where, self._options = store
        self._store = self._where.partition(":")[2]  # its directory
        options = [part for option, value in self._options.items() for part in ("--store-option", f"{option}={value}")]
        self._arguments = [*arguments, "--store", self._where, *options, "--admin-token", ADMIN]
        self._directory = directory
        self._stack = ExitStack()
        self._server: Server | None = None
        self._http = httpx.AsyncClient(timeout=PATIENCE_S, headers={"Authorization": f"Bearer {ADMIN}"}, trust_env=False)

    @property
    def address(self) -> str:
        return self._running.address

    @property
    def pid(self) -> int:
        return self._running.process.pid

    @property
    def _running(self) -> Server:
        assert self._server is not None, f"{self.name} is not running"
        return self._server

    async def start(self) -> None:
        """Returns once it answers. Raises StepwellError."""
        self.logs.append(self._directory / f"{self.name}-{self.life}{LOG_SUFFIX}")
        starts = serving(self._arguments, self.logs[-1])
        self._server = await asyncio.to_thread(self._stack.enter_context, starts)
        self.up = True

    async def stop(self) -> int:
        """SIGTERM; how it ended."""
        return await self._end(signal.SIGTERM)

    async def kill(self) -> None:
        await self._end(signal.SIGKILL)

    async def abort(self) -> Path:
        """Ends a server that does not come to rest so that it prints what its threads do; returns its log."""
        await self._end(signal.SIGABRT)
        return self.logs[-1]

    async def pause(self, seconds: float) -> None:
        """Stops the process for a while, as a machine without memory does, or a hypervisor."""
        process = self._running.process
        process.send_signal(signal.SIGSTOP)
        try:
            await asyncio.sleep(seconds)
        finally:
            process.send_signal(signal.SIGCONT)

    async def flush(self) -> None:
        await self._order("POST", "/cache/flush", {})

    async def detach(self) -> None:
        await self._order("DELETE", "/cache/store")

    async def attach(self) -> None:
        await self._order("POST", "/cache/store", {"store": self._where, "options": self._options})

    async def audit(self) -> str | None:
        """What is wrong with its books; None for nothing."""
        audit = await self._order("POST", "/cache/audit")
        return None if audit["clean"] else f"{self.name}: {audit['says']}"

    async def state(self) -> dict[str, Any]:
        return await self._order("GET", "/cache")

    def footprint(self) -> Footprint:
        process = Path("/proc") / str(self._running.process.pid)
        fields = dict(line.split(":", 1) for line in (process / "status").read_text().splitlines() if ":" in line)
        memory = sum(int(fields[name].split()[0]) * 1024 for name in ("RssAnon", "RssShmem"))
        opened = list(_links(process / "fd"))
        of_log = sum(each.startswith(f"{self._store}/") for each in opened)
        return Footprint(memory_bytes=memory, files=len(opened) - of_log, threads=int(fields["Threads"]), owns=of_log > 0)

    async def close(self) -> None:
        self._stack.close()
        await self._http.aclose()

    async def _end(self, number: signal.Signals) -> int:
        self.life, self.up = self.life + 1, False
        process = self._running.process
        process.send_signal(number)
        status = await asyncio.to_thread(process.wait, PATIENCE_S)
        self._stack.close()
        return status

    async def _order(self, method: str, path: str, body: dict[str, Any] | None = None) -> dict[str, Any]:
        response = await self._http.request(method, self.address + path, json=body)
        response.raise_for_status()
        return dict(response.json())


def _links(directory: Path) -> Iterator[str]:
    """What descriptors of a process lead to. Some are closed meanwhile."""
    for name in os.listdir(directory):
        with suppress(FileNotFoundError):
            yield os.readlink(directory / name)
