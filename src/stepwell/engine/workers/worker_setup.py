"""How workers are started: command, environment, and the first message to each. Starts nothing."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from stepwell.base.inherited_block import InheritedBlock
from stepwell.engine.workers.messages import SETUP
from stepwell.jobs.channel import Message

_BEGIN = "import os, sys; sys.path[:] = sys.argv[1].split(os.pathsep); from {module} import main; main()"


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkerLimits:
    """Time limits for ranks, in seconds."""

    silent_s: float = 20.0  # a rank that answers no ping for this long is lost; three times as long while it starts
    pass_s: float = 300.0  # for one pass, and for one collective
    start_s: float = 900.0  # for loading a shard


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkerSetup:
    """The setup of all workers. `devices` has one for each rank."""

    model: str
    digest: str
    dtype: str
    kv_dtype: str | None
    kernels: str
    page_tokens: int
    devices: tuple[str, ...]
    backend: str
    host: InheritedBlock | None  # host memory that all ranks share
    alignment: int
    device_bytes: Callable[[int], int]  # from the least free memory of any rank to the size that each allocates
    threads: int | None = None
    module: str = "stepwell.engine.workers.worker"  # a process runs its `main`

    @property
    def size(self) -> int:
        return len(self.devices)

    @property
    def command(self) -> list[str]:
        """A worker uses the same import path as this process."""
        where = os.pathsep.join(os.path.abspath(each) for each in sys.path)
        return [sys.executable, "-I", "-c", _BEGIN.format(module=self.module), where]

    @property
    def inherit(self) -> list[int]:
        return [] if self.host is None else [self.host.fd]

    def environment(self) -> dict[str, str]:
        environment = dict(os.environ)
        if self.backend == "nccl":
            environment["NCCL_SOCKET_IFNAME"] = "lo"  # ranks are on one machine and need no other interface
        return environment

    def message(self, rank: int, *, meeting: Path, timeout_s: float) -> Message:
        """The first message to a rank. `meeting`: the rendezvous file of the ranks. `timeout_s`: limit of one collective."""
        fields = {
            "rank": rank, "size": self.size, "model": self.model, "dtype": self.dtype, "kv_dtype": self.kv_dtype,
            "kernels": self.kernels, "page_tokens": self.page_tokens, "device": self.devices[rank], "backend": self.backend,
            "meeting": str(meeting), "timeout_s": int(timeout_s), "threads": self.threads,
            "host_fd": None if self.host is None else self.host.fd,
            "host_bytes": 0 if self.host is None else self.host.size_bytes, "alignment": self.alignment,
        }  # fmt: skip
        return Message(kind=SETUP, fields=fields)
