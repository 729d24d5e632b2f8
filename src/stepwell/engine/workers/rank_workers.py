"""The scheduler's side: worker processes for all ranks, passes and copies on them, and what happens when one is lost.

    starting    every rank loads its shard, then gets memory for its pages
    running     passes and copies
    down        a rank was lost, and all were ended. With restart_workers, new ones are started

Every wait for a worker has a limit: one that exited, is stopped, or does not answer a pass in time is lost. All on the engine's
thread.
"""

from __future__ import annotations

import logging
import tempfile
from collections.abc import Mapping, Sequence
from contextlib import suppress
from enum import Enum
from math import inf
from pathlib import Path
from shutil import rmtree
from time import monotonic, sleep

from stepwell.base.errors import ConfigError
from stepwell.engine.ops.guarded import Report
from stepwell.engine.running.runner import PassesLost, PassFailed, RanksReport
from stepwell.engine.workers.messages import BROKE, COPY, MEMORY, ChosenTokens, read_chosen, read_kernels
from stepwell.engine.workers.pass_answers import PassAnswers
from stepwell.engine.workers.pass_arrays import Pass, PassPacker
from stepwell.engine.workers.ranked_copies import RankedCopies
from stepwell.engine.workers.worker_setup import WorkerLimits, WorkerSetup
from stepwell.jobs.channel import Message
from stepwell.jobs.processes import END_S, Processes, RankLost

log = logging.getLogger(__name__)

MOST_STARTS = 3  # failed starts in a row, after which the ranks stay down
_LOOK_S = 0.25  # between liveness checks, while waiting for a pass
_START_LOOK_S = 0.02
_STARTS_SLOWLY = 3  # factor on `silent_s` during a start: loading libraries stops all threads of a rank
IN_STEP_S = 5.0  # for the other ranks to answer after one failed: without an answer they wait for it in a collective


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
        self._packer = PassPacker()
        self._answers = PassAnswers(setup.size)  # to the latest pass
        self._device_bytes: int | None = None
        self._vocab_size: int | None = None
        self.kernels = Report()  # what runs each operation, over all ranks
        self.copies = RankedCopies(self)
        self.losses = 0
        self.last_loss: str | None = None

    @property
    def size(self) -> int:
        return self._setup.size

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
    def vocab_size(self) -> int:
        assert self._vocab_size is not None, "no rank was loaded yet"
        return self._vocab_size

    # ---- starting and ending ------------------------------------------------------------------------

    def start(self) -> None:
        """Starts all ranks, and waits until they have loaded. Raises ConfigError with a rank's error, and leaves none running."""
        try:
            self._begin()
            while not self.poll():
                sleep(_START_LOOK_S)
        except PassesLost as error:
            self.close()
            raise ConfigError(f"the workers of {self.size} ranks did not start: {error}") from None
        except BaseException:
            self.close()
            raise

    def poll(self) -> bool:
        """Reads messages; returns whether passes can run. Raises PassesLost once per loss."""
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
        """After a loss: ends all ranks, so that their memory can be freed. Raises RuntimeError if one does not end."""
        came_up = self.running
        self._stop(within_s=0.0)
        self._failed_starts = 0 if came_up else self._failed_starts + 1

    def restart(self) -> bool:
        """Starts new ranks if restarting is enabled; returns whether it did. Does not wait. The old state must be dropped."""
        if self._restart and self._failed_starts < MOST_STARTS:
            log.warning("%s; all ranks are restarted", self.last_loss)
            try:
                self._begin()
                return True
            except OSError as error:
                log.error("the ranks cannot be restarted: %s", error)
                self._stop(within_s=0.0)
        log.error("%s; nothing can be computed any more%s", self.last_loss, "" if self._restart else " (see --restart-workers)")
        return False

    def close(self) -> None:
        self._stop(within_s=END_S)

    def _begin(self) -> None:
        self._folder = Path(tempfile.mkdtemp(prefix="stepwell-ranks-"))
        setup, environment = self._setup, self._setup.environment()
        self._loaded, self._ready = {}, set()
        self._answers.drop()
        self._packer.reset()
        self._start_deadline_s = monotonic() + self._limits.start_s
        self._stage = _Stage.STARTING
        self._processes.silent_s = _STARTS_SLOWLY * self._limits.silent_s
        for rank in range(self.size):
            self._processes.start(setup.command, inherit=setup.inherit, environment=environment)
            message = setup.message(rank, meeting=self._folder / "meeting", timeout_s=self._limits.pass_s)
            with suppress(RankLost):  # the next `poll` reports it
                self._processes.send(rank, message, work=True)

    def _stop(self, *, within_s: float) -> None:
        self._processes.end(within_s=within_s)
        self._stage = _Stage.DOWN
        if self._folder is not None:
            rmtree(self._folder, ignore_errors=True)
            self._folder = None

    # ---- messages from workers --------------------------------------------------------------------

    def take(self, timeout_s: float = 0.0, *, worker: int | None = None) -> None:
        """Reads messages of workers. Waits at most `timeout_s` for one, or for one of `worker`. Raises RankLost."""
        for rank, message in self._processes.poll(timeout_s, worker=worker):
            try:
                self._take(rank, message)
            except (ValueError, TypeError, OverflowError) as error:
                raise self._processes.lose(rank, f"it sent an invalid message: {error}") from None

    def _take(self, rank: int, message: Message) -> None:
        match message.kind:
            case "loaded" if self._stage is _Stage.STARTING and rank not in self._loaded:
                if message.text("digest") != self._setup.digest:
                    raise self._processes.lose(rank, "it loaded other weights than before")
                self._loaded[rank] = message
                if len(self._loaded) == self.size:
                    self._all_loaded([self._loaded[each] for each in range(self.size)])
            case "ready" if len(self._loaded) == self.size and rank not in self._ready:
                self._ready.add(rank)
                if len(self._ready) == self.size:
                    self._stage = _Stage.RUNNING
                    self._processes.silent_s = self._limits.silent_s
                    self.copies.send_waiting()
            case "chosen" | "broke":
                self._answers.add(rank, message)
                if message.fields or message.kind == BROKE:
                    self._take_words(rank, message)
            case "copied":
                self.copies.answered(rank, message)
            case "failed":
                raise self._processes.lose(rank, f"it failed: {message.text('error')}")
            case _:
                raise ValueError(f"{message.kind!r:.40} was not requested")

    def _take_words(self, rank: int, message: Message) -> None:
        """Reads the fields of an answer: kernels that failed, and errors. Raises ValueError for a failure without its reason."""
        for name, why in read_kernels(message, "failed").items():
            self.kernels.failed.setdefault(name, f"rank {rank}: {why}")
        self.kernels.left |= {name: [what] for name, what in read_kernels(message, "left").items()}
        if message.kind == BROKE:
            message.text("error")

    def _all_loaded(self, loaded: Sequence[Message]) -> None:
        sizes = {each.number("vocab_size") for each in loaded} | ({self._vocab_size} - {None})
        if len(sizes) != 1:
            raise ValueError(f"vocabularies of {sizes} tokens")
        self._vocab_size = loaded[0].number("vocab_size")
        self.kernels = _merged([read_kernels(each, "kernels") for each in loaded])
        if self._device_bytes is None:
            self._device_bytes = self._setup.device_bytes(min(each.number("free_bytes") for each in loaded))
        self.send_all(Message(kind=MEMORY, fields={"device_bytes": self._device_bytes}))

    def send_all(self, message: Message) -> None:
        """Copies run while ranks compute. Raises RankLost."""
        self._processes.send_all(message, work=message.kind != COPY)

    def compute(self, given: Pass) -> ChosenTokens:
        """One pass on all ranks. Raises PassesLost, or PassFailed if they can run the next one."""
        answers = self._answers
        assert not answers.open, f"pass {answers.number} is not answered yet"
        answers.number += 1
        message = self._packer.pack(given, answers.number)
        went_well = False
        try:
            self._give_out(message)
            self._packer.look_ahead()
            self._await_answers()
            self._must_have_gone_well()
            chosen = read_chosen(answers.of(0), vocab_size=self.vocab_size)
            if len(chosen.tokens) != len(given.choosing):
                raise self._processes.lose(0, f"it chose {len(chosen.tokens)} tokens instead of {len(given.choosing)}")
            went_well = True
            return chosen
        except ValueError as error:
            raise self._lost(self._processes.lose(0, f"it sent an invalid message: {error}")) from None
        except RankLost as lost:
            raise self._lost(lost) from None
        finally:
            if not went_well:
                self._packer.reset()  # the wait may have been interrupted: unknown which ranks could read it

    def _give_out(self, message: Message) -> None:
        """Raises RankLost, or PassFailed if the pass is too long for a message: then no rank received any of it."""
        self._answers.begin()
        try:
            self.send_all(message)
        except ValueError as error:
            self._answers.drop()
            raise PassFailed(f"it cannot be sent: {error}") from None

    def wait(self) -> None:
        """Waits for a pass whose wait was interrupted: until ranks finish it, they write to its pages."""
        if self.running:
            with suppress(RankLost):  # the next `poll` reports it
                self._await_answers()

    def _await_answers(self) -> None:
        """Waits for one rank after the other: rank 0 has most to do, so that this process wakes once. Raises RankLost."""
        answers, deadline_s = self._answers, monotonic() + self._limits.pass_s
        while answers.open:
            self.take(_LOOK_S, worker=answers.first_missing)
            broke = answers.broke
            if broke:
                deadline_s = min(deadline_s, monotonic() + IN_STEP_S)
            if answers.open and monotonic() > deadline_s:
                if broke:
                    raise self._processes.lose(broke[0], f"it failed: {answers.of(broke[0]).text('error')}")
                why = f"it did not answer a pass within {self._limits.pass_s:g} s"
                raise self._processes.lose(answers.first_missing, why)

    def _must_have_gone_well(self) -> None:
        """Raises PassFailed if a rank failed and all are in step, so that the next pass can run; RankLost if they are not."""
        broke = self._answers.broke
        if broke:
            why = self._answers.of(broke[0]).text("error")
            if not self._answers.in_step:
                raise self._processes.lose(broke[0], f"it failed: {why}")
            raise PassFailed(f"rank {broke[0]}: {why}")


def _merged(ranks: Sequence[Mapping[str, str]]) -> Report:
    """What runs each operation on rank 0, and on ranks that differ."""
    merged = Report()
    for name, library in ranks[0].items():
        others = [f"rank {rank}: {each.get(name)}" for rank, each in enumerate(ranks) if each.get(name) != library]
        merged.chosen[name] = "; ".join([library, *others])
        if others:
            log.warning("ranks run %s by different libraries: %s", name, merged.chosen[name])
    return merged
