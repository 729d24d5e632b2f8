"""What workers are started with: the command, the environment, and the first message to each of them. Starts nothing."""

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
    """How long ranks are waited for, in seconds."""

    silent_s: float = 20.0  # without a sign of life though asked, a rank is lost; three times as long while it starts
    pass_s: float = 300.0  # for one pass, and for one collective
    start_s: float = 900.0  # for a shard to be loaded


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkerSetup:
    """What workers are told at their start. `devices` has one for each rank."""

    model: str
    digest: str
    dtype: str
    kv_dtype: str | None
    kernels: str
    page_tokens: int
    devices: tuple[str, ...]
    backend: str
    host: InheritedBlock | None  # everybody's host memory
    alignment: int
    device_bytes: Callable[[int], int]  # from what is free on the rank that has least, to what each takes
    threads: int | None = None
    module: str = "stepwell.engine.workers.worker"  # whose `main` a process runs

    @property
    def size(self) -> int:
        return len(self.devices)

    @property
    def command(self) -> list[str]:
        """Imports as this process does, and from nowhere else."""
        where = os.pathsep.join(os.path.abspath(each) for each in sys.path)
        return [sys.executable, "-I", "-c", _BEGIN.format(module=self.module), where]

    @property
    def inherit(self) -> list[int]:
        return [] if self.host is None else [self.host.fd]

    def environment(self) -> dict[str, str]:
        environment = dict(os.environ)
        if self.backend == "nccl":
            environment["NCCL_SOCKET_IFNAME"] = "lo"  # ranks are on one machine, and listen to nobody else
        return environment

    def message(self, rank: int, *, meeting: Path, timeout_s: float) -> Message:
        """The first that a rank gets. `meeting` is where ranks find each other, and `timeout_s` is for one collective."""
        fields = {
            "rank": rank, "size": self.size, "model": self.model, "dtype": self.dtype, "kv_dtype": self.kv_dtype,
            "kernels": self.kernels, "page_tokens": self.page_tokens, "device": self.devices[rank], "backend": self.backend,
            "meeting": str(meeting), "timeout_s": int(timeout_s), "threads": self.threads,
            "host_fd": None if self.host is None else self.host.fd,
            "host_bytes": 0 if self.host is None else self.host.size_bytes, "alignment": self.alignment,
        }  # fmt: skip
        return Message(kind=SETUP, fields=fields)
