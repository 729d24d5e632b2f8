"""The scheduler's side: worker processes for all ranks, passes and copies on them, and what happens when one is lost.

    starting    every rank loads its shard, then gets memory for its pages
    running     passes and copies
    down        a rank was lost, and all were ended. New ones are started, where that was asked for

Nothing here waits for a worker without an end: one that ended, is stopped, or does not come back from a pass is lost. All on the
engine's thread.
"""

from __future__ import annotations

import logging
import os
import sys
import tempfile
from collections import deque
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass
from enum import Enum
from math import inf
from pathlib import Path
from shutil import rmtree
from time import monotonic, sleep
from typing import Any

from stepwell.base.errors import ConfigError
from stepwell.base.ids import JobId
from stepwell.base.inherited_block import InheritedBlock
from stepwell.base.tasks import Completion, Plan
from stepwell.engine.runner import PassesLost, RanksReport
from stepwell.engine.sampling import Chosen
from stepwell.engine.workers.messages import (
    MEMORY,
    SETUP,
    Pass,
    pack_pass,
    pack_plan,
    read_chosen,
)  # fmt: skip
from stepwell.jobs.channel import Message
from stepwell.jobs.processes import END_S, Processes, RankLost

log = logging.getLogger(__name__)

MOST_STARTS = 3  # in a row that come to nothing: then it stays down
_BEGIN = "import os, sys; sys.path[:] = sys.argv[1].split(os.pathsep); from stepwell.engine.workers.worker import main; main()"
_LOOK_S = 0.25  # between two looks at who lives, while a pass is waited for
_START_LOOK_S = 0.02


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkerLimits:
    """How long ranks are waited for, in seconds."""

    silent_s: float = 20.0  # without a sign of life though asked, a rank is lost
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


class _Stage(Enum):
    STARTING = "starting"
    RUNNING = "running"
    DOWN = "down"


class RankWorkers:
    """All ranks of an engine."""

    def __init__(self, setup: WorkerSetup, limits: WorkerLimits, *, restart: bool) -> None:
        self._setup = setup
        self._limits = limits
        self._restart = restart
        self._processes = Processes(silent_s=limits.silent_s)
        self._stage = _Stage.DOWN
        self._folder: Path | None = None
        self._loaded: dict[int, Message] = {}
        self._ready: set[int] = set()
        self._start_deadline_s = inf
        self._failed_starts = 0
        self._pass = 0  # the number of the last one
        self._under_way = False  # it was given out, and not every rank has answered
        self._answers: dict[int, Message] = {}  # to it
        self._device_bytes: int | None = None
        self.copies = RankedCopies(self)
        self.losses = 0
        self.last_loss: str | None = None

    @property
    def size(self) -> int:
        return len(self._setup.devices)

    @property
    def pids(self) -> list[int]:
        """The processes, in the order of ranks; none while they are down."""
        return self._processes.pids

    @property
    def running(self) -> bool:
        return self._stage is _Stage.RUNNING

    @property
    def report(self) -> RanksReport:
        return RanksReport(state=self._stage.value, pids=tuple(self.pids), losses=self.losses, last_loss=self.last_loss)

    @property
    def device_bytes(self) -> int:
        assert self._device_bytes is not None, "no rank was loaded yet"
        return self._device_bytes

    @property
    def facts(self) -> Mapping[str, Any]:
        """What the first rank said of its model."""
        return self._loaded[0].fields

    # ---- starting and ending ------------------------------------------------------------------------

    def start(self) -> None:
        """Starts them all, and waits until they have loaded. Raises ConfigError with what one says is wrong, and leaves none."""
        try:
            self._begin()
            while not self.tend():
                sleep(_START_LOOK_S)
        except PassesLost as error:
            self.close()
            raise ConfigError(f"the workers of {self.size} ranks did not start: {error}") from None
        except BaseException:
            self.close()
            raise

    def tend(self) -> bool:
        """Whether passes can run. Takes what workers said. Raises PassesLost once for every time that one is lost."""
        if self._stage is _Stage.DOWN:
            return False
        try:
            self.take()
            if self._stage is _Stage.STARTING and monotonic() > self._start_deadline_s:
                late = next(rank for rank in range(self.size) if rank not in self._ready)
                raise self._processes.lose(late, f"it was not ready after {self._limits.start_s:g} s")
        except RankLost as lost:
            raise self._lost(lost) from None
        return self.running

    def _lost(self, lost: RankLost) -> PassesLost:
        self.losses += 1
        self.last_loss = str(lost)
        return PassesLost(str(lost), rank=lost.rank)

    def end(self) -> None:
        """After a loss: nothing of them is left when this returns, so that what they wrote to is nobody's. Raises RuntimeError
        where one does not go.
        """
        came_up = self.running
        self._stop(within_s=0.0)
        self._failed_starts = 0 if came_up else self._failed_starts + 1

    def restart(self) -> bool:
        """Once nobody believes in what they had: whether new ones are to be, and were started. Does not wait for them."""
        if self._restart and self._failed_starts < MOST_STARTS:
            log.warning("%s; all ranks are started anew", self.last_loss)
            try:
                self._begin()
                return True
            except OSError as error:
                log.error("they cannot be started: %s", error)
                self._stop(within_s=0.0)
        log.error("%s; nothing can be computed any more%s", self.last_loss, "" if self._restart else " (see --restart-workers)")
        return False

    def close(self) -> None:
        self._stop(within_s=END_S)

    def _begin(self) -> None:
        self._folder = Path(tempfile.mkdtemp(prefix="stepwell-ranks-"))
        given, inherit = self._setup, [] if self._setup.host is None else [self._setup.host.fd]
        where = os.pathsep.join(os.path.abspath(each) for each in sys.path)  # as this process imports, and from nowhere else
        command, environment = [sys.executable, "-I", "-c", _BEGIN, where], dict(os.environ)
        if given.backend == "nccl":
            environment["NCCL_SOCKET_IFNAME"] = "lo"  # ranks are on one machine, and listen to nobody else
        self._loaded, self._ready, self._answers, self._under_way = {}, set(), {}, False
        self._start_deadline_s = monotonic() + self._limits.start_s
        self._stage = _Stage.STARTING
        for rank, device in enumerate(given.devices):
            self._processes.start(command, inherit=inherit, environment=environment)
            fields = {
                "rank": rank, "size": self.size, "model": given.model, "dtype": given.dtype, "kv_dtype": given.kv_dtype,
                "kernels": given.kernels, "page_tokens": given.page_tokens, "device": device, "backend": given.backend,
                "meeting": str(self._folder / "meeting"), "timeout_s": int(self._limits.pass_s), "threads": given.threads,
                "host_fd": None if given.host is None else given.host.fd,
                "host_bytes": 0 if given.host is None else given.host.size_bytes, "alignment": given.alignment,
            }  # fmt: skip
            with suppress(RankLost):  # found again, and told, when it is next looked at
                self._processes.send(rank, Message(kind=SETUP, fields=fields))

    def _stop(self, *, within_s: float) -> None:
        self._processes.end(within_s=within_s)
        self._stage = _Stage.DOWN
        if self._folder is not None:
            rmtree(self._folder, ignore_errors=True)
            self._folder = None

    # ---- what is told -----------------------------------------------------------------------------

    def take(self, timeout_s: float = 0.0) -> None:
        """Takes what workers have said. Waits for so long at most until one says something. Raises RankLost."""
        for rank, message in self._processes.poll(timeout_s):
            try:
                self._take(rank, message)
            except (ValueError, TypeError, OverflowError) as error:
                raise self._processes.lose(rank, f"it says what makes no sense: {error}") from None

    def _take(self, rank: int, message: Message) -> None:
        match message.kind:
            case "loaded":
                if message.text("digest") != self._setup.digest:
                    raise self._processes.lose(rank, "the weights that it loaded are not those of before")
                self._loaded[rank] = message
                if len(self._loaded) == self.size:
                    if self._device_bytes is None:
                        self._device_bytes = self._setup.device_bytes(min(m.number("free_bytes") for m in self._loaded.values()))
                    self._processes.send_all(Message(kind=MEMORY, fields={"device_bytes": self._device_bytes}))
            case "ready":
                self._ready.add(rank)
                if len(self._ready) == self.size:
                    self._stage = _Stage.RUNNING
                    self.copies.send_waiting()
            case "chosen":
                if message.number("pass") != self._pass or not self._under_way:
                    raise ValueError(f"what came of pass {message.number('pass')}, and it is at {self._pass}")
                self._answers[rank] = message
                self._under_way = len(self._answers) < self.size
            case "copied":
                self.copies.answered(rank, message)
            case "failed":
                raise self._processes.lose(rank, f"it failed: {message.text('error')}")
            case _:
                raise ValueError(f"{message.kind!r:.40}")

    def send_all(self, message: Message) -> None:
        """Raises RankLost."""
        self._processes.send_all(message)

    def compute(self, given: Pass) -> list[Chosen | None]:
        """One pass on all ranks. Raises PassesLost."""
        self._pass += 1
        message = pack_pass(given, self._pass)
        try:
            assert not self._under_way, f"pass {self._pass} before the one before it is answered"
            self._answers, self._under_way = {}, True
            self.send_all(message)
            self._await_answers()
            chosen = read_chosen(self._answers[0])
            if len(chosen) != len(given.choosing):
                raise self._processes.lose(0, f"it chose {len(chosen)} tokens in place of {len(given.choosing)}")
            return chosen
        except ValueError as error:
            raise self._lost(self._processes.lose(0, f"it says what makes no sense: {error}")) from None
        except RankLost as lost:
            raise self._lost(lost) from None

    def wait(self) -> None:
        """Until a pass that somebody stopped waiting for is answered: ranks finish it, and write to its pages till then."""
        if self.running:
            with suppress(RankLost):  # the next `tend` tells
                self._await_answers()

    def _await_answers(self) -> None:
        """Raises RankLost."""
        deadline_s = monotonic() + self._limits.pass_s
        while self._under_way:
            self.take(_LOOK_S)
            if self._under_way and monotonic() > deadline_s:
                late = next(rank for rank in range(self.size) if rank not in self._answers)
                raise self._processes.lose(late, f"it did not come back from a pass within {self._limits.pass_s:g} s")


@dataclass(slots=True, eq=False)
class _Copying:
    owing: set[int]
    error: str | None = None
    took_s: float = 0.0


class RankedCopies:
    """A CopyExecutor whose ranks are worker processes. What was under way when a rank was lost is taken back, not answered."""

    def __init__(self, workers: RankWorkers) -> None:
        self._workers = workers
        self._open: dict[JobId, _Copying] = {}
        self._waiting: dict[JobId, Plan] = {}  # of those, for ranks to run
        self._done: deque[Completion] = deque()
        self._moved_s = [monotonic()] * workers.size  # when each rank last ended a copy

    @property
    def num_ranks(self) -> int:
        """One, as far as host memory and stores go: all ranks share it."""
        return 1

    def submit(self, plan: Plan) -> None:
        now = monotonic()
        if not self._open:
            self._moved_s = [now] * self._workers.size
        self._open[plan.job] = _Copying(set(range(self._workers.size)))
        if not self._workers.running:
            self._waiting[plan.job] = plan
            return
        with suppress(RankLost):  # whoever runs passes is told, and takes it back
            self._workers.send_all(pack_plan(plan))

    def send_waiting(self) -> None:
        """Ranks run now, and are given what was submitted meanwhile. Raises RankLost."""
        self._moved_s = [monotonic()] * self._workers.size
        while self._waiting:
            job = next(iter(self._waiting))
            self._workers.send_all(pack_plan(self._waiting.pop(job)))

    def answered(self, rank: int, message: Message) -> None:
        """A rank has ended its part. Raises ValueError for what nobody asked it."""
        copying = self._open.get(JobId(message.number("job")))
        if copying is None or rank not in copying.owing:
            raise ValueError("a copy that it was not asked for")
        error, took_s = message.fields.get("error"), message.fields.get("took_s")
        if error is not None:
            copying.error = copying.error or f"rank {rank}: {message.text('error')}"
        copying.took_s = max(copying.took_s, float(took_s) if isinstance(took_s, float | int) else 0.0)
        copying.owing.discard(rank)
        self._moved_s[rank] = monotonic()
        if not copying.owing:
            job = JobId(message.number("job"))
            del self._open[job]
            self._done.append(Completion(job=job, error=copying.error, took_s=copying.took_s))

    def answers(self) -> list[Completion]:
        self._take(0.0)
        return [self._done.popleft() for _ in range(len(self._done))]

    def withdraw(self, job: JobId) -> bool:
        """Only what was not sent, or was sent to ranks that are no more: anything else may have begun."""
        if self._waiting.pop(job, None) is None and self._workers.running:
            return False
        return self._open.pop(job, None) is not None

    def progressed_s(self, job: JobId) -> float:
        copying = None if job in self._waiting else self._open.get(job)
        return monotonic() if copying is None else min(self._moved_s[rank] for rank in copying.owing)

    def drain(self, timeout_s: float) -> None:
        deadline_s = monotonic() + timeout_s
        while self._open and self._workers.running and (left_s := deadline_s - monotonic()) > 0:
            if not self._take(left_s):
                sleep(left_s)  # nothing comes any more, and whoever waits asks again and again

    def close(self) -> None:
        pass  # the workers are closed by whoever has them

    def _take(self, timeout_s: float) -> bool:
        try:
            if self._workers.running:
                self._workers.take(timeout_s)
        except RankLost:
            return False  # whoever runs passes is told
        return True
