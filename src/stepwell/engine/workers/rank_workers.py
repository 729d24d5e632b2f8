"""The scheduler's side: worker processes for all ranks, passes and copies on them, and what happens when one is lost.

    starting    every rank loads its shard, then gets memory for its pages
    running     passes and copies
    down        a rank was lost, and all were ended. New ones are started, where that was asked for

Nothing here waits for a worker without an end: one that ended, is stopped, or does not come back from a pass is lost. All on the
engine's thread.
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

MOST_STARTS = 3  # in a row that come to nothing: then it stays down
_LOOK_S = 0.25  # between two looks at who lives, while a pass is waited for
_START_LOOK_S = 0.02
_STARTS_SLOWLY = 3  # times as long may ranks be silent that start: libraries that are loaded stop all threads of theirs
IN_STEP_S = 5.0  # after a pass failed on one rank, for the others to come back from it: else they wait for it in a collective


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
        self._answers = PassAnswers(setup.size)  # to the last pass
        self._device_bytes: int | None = None
        self._vocab_size: int | None = None
        self.kernels = Report()  # what runs each operation, of all ranks
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
        setup, environment = self._setup, self._setup.environment()
        self._loaded, self._ready = {}, set()
        self._answers.drop()
        self._packer.forget()
        self._start_deadline_s = monotonic() + self._limits.start_s
        self._stage = _Stage.STARTING
        self._processes.silent_s = _STARTS_SLOWLY * self._limits.silent_s
        for rank in range(self.size):
            self._processes.start(setup.command, inherit=setup.inherit, environment=environment)
            message = setup.message(rank, meeting=self._folder / "meeting", timeout_s=self._limits.pass_s)
            with suppress(RankLost):  # found again, and told, when it is next looked at
                self._processes.send(rank, message, work=True)

    def _stop(self, *, within_s: float) -> None:
        self._processes.end(within_s=within_s)
        self._stage = _Stage.DOWN
        if self._folder is not None:
            rmtree(self._folder, ignore_errors=True)
            self._folder = None

    # ---- what is told -----------------------------------------------------------------------------

    def take(self, timeout_s: float = 0.0, *, worker: int | None = None) -> None:
        """Takes what workers have said. Waits for so long at most until one says something, or `worker` has answered. Raises
        RankLost.
        """
        for rank, message in self._processes.poll(timeout_s, worker=worker):
            try:
                self._take(rank, message)
            except (ValueError, TypeError, OverflowError) as error:
                raise self._processes.lose(rank, f"it says what makes no sense: {error}") from None

    def _take(self, rank: int, message: Message) -> None:
        match message.kind:
            case "loaded" if self._stage is _Stage.STARTING and rank not in self._loaded:
                if message.text("digest") != self._setup.digest:
                    raise self._processes.lose(rank, "the weights that it loaded are not those of before")
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
                raise ValueError(f"{message.kind!r:.40}, which it was not asked")

    def _take_words(self, rank: int, message: Message) -> None:
        """What an answer says beside what came of its pass. Raises ValueError where it does not say why it failed."""
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
        """Copies are made beside what ranks compute. Raises RankLost."""
        self._processes.send_all(message, work=message.kind != COPY)

    def compute(self, given: Pass) -> ChosenTokens:
        """One pass on all ranks. Raises PassesLost, or PassFailed where they can go on with the next."""
        answers = self._answers
        assert not answers.open, f"pass {answers.number} is not answered, and here comes the next"
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
                raise self._processes.lose(0, f"it chose {len(chosen.tokens)} tokens in place of {len(given.choosing)}")
            went_well = True
            return chosen
        except ValueError as error:
            raise self._lost(self._processes.lose(0, f"it says what makes no sense: {error}")) from None
        except RankLost as lost:
            raise self._lost(lost) from None
        finally:
            if not went_well:
                self._packer.forget()  # somebody may have stopped waiting, and never hear who could read it

    def _give_out(self, message: Message) -> None:
        """Raises RankLost, or PassFailed where it is too long for a message: then no rank has heard of it."""
        self._answers.begin()
        try:
            self.send_all(message)
        except ValueError as error:
            self._answers.drop()
            raise PassFailed(f"it cannot be told: {error}") from None

    def wait(self) -> None:
        """Until a pass that somebody stopped waiting for is answered: ranks finish it, and write to its pages till then."""
        if self.running:
            with suppress(RankLost):  # the next `tend` tells
                self._await_answers()

    def _await_answers(self) -> None:
        """Of one rank after the other: the first one has most to do, and wakes this process for all of them. Raises RankLost."""
        answers, deadline_s = self._answers, monotonic() + self._limits.pass_s
        while answers.open:
            self.take(_LOOK_S, worker=answers.first_missing)
            broke = answers.broke
            if broke:
                deadline_s = min(deadline_s, monotonic() + IN_STEP_S)
            if answers.open and monotonic() > deadline_s:
                if broke:
                    raise self._processes.lose(broke[0], f"it failed: {answers.of(broke[0]).text('error')}")
                why = f"it did not come back from a pass within {self._limits.pass_s:g} s"
                raise self._processes.lose(answers.first_missing, why)

    def _must_have_gone_well(self) -> None:
        """Ranks in step can go on with the next pass. Raises PassFailed or RankLost."""
        broke = self._answers.broke
        if broke:
            why = self._answers.of(broke[0]).text("error")
            if not self._answers.in_step:
                raise self._processes.lose(broke[0], f"it failed: {why}")
            raise PassFailed(f"rank {broke[0]}: {why}")


def _merged(ranks: Sequence[Mapping[str, str]]) -> Report:
    """What runs each operation: on the first rank, and on those where something else does."""
    merged = Report()
    for name, library in ranks[0].items():
        others = [f"rank {rank}: {each.get(name)}" for rank, each in enumerate(ranks) if each.get(name) != library]
        merged.chosen[name] = "; ".join([library, *others])
        if others:
            log.warning("ranks run %s by different libraries: %s", name, merged.chosen[name])
    return merged
