"""Random schedules for an engine of two ranks: requests, aborts, a store, and one rank that is killed, stopped or delayed at some
moment. A seed says what is asked and what goes wrong; what it meets depends on how fast the machine is.

    moment      idle, in a pass, in a copy, in an operation of the store, while new ranks start
    fault       kill, stop (SIGSTOP), pause (SIGSTOP, and SIGCONT a while later), delay (many short pauses)

Whatever happens: a request ends with the tokens of one rank, or fails with the rank that was lost; nothing hangs; the cache
audits clean and has every page back; and what was kept before is found on the host or in the store, not computed again.
"""

from __future__ import annotations

import os
import random
import signal
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from enum import Enum
from pathlib import Path
from threading import Thread
from typing import Any

from engine.worker_engines import open_engine
from stepwell.base.config import PrefetchPolicy, StoreConfig
from stepwell.engine import Delta, Finish, GenerateRequest, Sampling
from stepwell.engine.workers.messages import COPY
from stepwell.engine.workers.pass_arrays import RUN
from stepwell.engine.workers.rank_workers import RankWorkers
from stepwell.engine.workers.ranked_runner import RankedRunner
from stepwell.engine.workers.worker_setup import WorkerLimits
from stepwell.jobs.channel import Message
from waiting import settle

RANKS = 2
FAMILIES = ("qwen3_next", "gemma3", "deepseek_v32", "deepseek_v4", "llama")
BLOCK = 50  # seeds in a row of one family, and of one engine as long as it lives
LIMITS = WorkerLimits(silent_s=5.0, pass_s=120.0, start_s=300.0)
FETCHED = StoreConfig(prefetch=PrefetchPolicy.WAIT_COMPLETE, recompute_tokens_per_s=1.0, checkpoint_delay_s=0)
STEP_S = 60.0  # that one step may take, on a machine that is busy too: a rank is silent for 5 s at most
SCHEDULE_S = 300.0
KEPT_TOKENS = 300  # of the prompt that is asked again and again
MOST_TOKENS = 12


class Moment(Enum):
    IDLE = "idle"
    PASS = "pass"
    COPY = "copy"
    STORE = "store"
    STARTING = "starting"


class Harm(Enum):
    KILL = "kill"
    STOP = "stop"
    PAUSE = "pause"
    DELAY = "delay"


@dataclass(frozen=True, slots=True, kw_only=True)
class Asked:
    step: int  # of the schedule, before which it is asked
    tokens: list[int]
    max_tokens: int
    abort_step: int | None


@dataclass(frozen=True, slots=True, kw_only=True)
class Schedule:
    seed: int
    rank: int
    moment: Moment
    harm: Harm
    skip: int  # the number of such moments that pass before it
    after_s: float  # the moment has begun
    pause_s: float
    asked: tuple[Asked, ...]

    @classmethod
    def of(cls, seed: int) -> Schedule:
        rng = random.Random(f"ranks {seed}")
        asked = tuple(_asked(rng) for _ in range(rng.randint(1, 5)))
        moment = rng.choices(list(Moment), weights=[2, 4, 4, 4, 1])[0]
        return cls(
            seed=seed,
            rank=rng.randrange(RANKS),
            moment=moment,
            harm=rng.choices(list(Harm), weights=[35, 5, 25, 35])[0],
            skip=rng.choice([0, 0, 1, 2, 5, 10]),
            after_s=rng.uniform(0, 8)
            if moment is Moment.STARTING
            else rng.choice([0.0, rng.uniform(0, 0.005), rng.uniform(0, 0.1)]),
            pause_s=rng.uniform(0.05, 1.5),
            asked=asked,
        )


def _asked(rng: random.Random) -> Asked:
    prefix = _text(rng.randrange(6), 240)[: rng.choice([0, 50, 130, 240])]
    step = rng.randrange(30)
    return Asked(
        step=step,
        tokens=[*prefix, *(rng.randrange(128) for _ in range(rng.randint(5, 80)))],
        max_tokens=rng.randint(1, MOST_TOKENS),
        abort_step=step + rng.randrange(1, 30) if rng.random() < 0.2 else None,
    )


def _text(number: int, length: int) -> list[int]:
    rng = random.Random(f"text {number}")
    return [rng.randrange(128) for _ in range(length)]


@dataclass(slots=True, eq=False)
class Outcome:
    """What came of one request."""

    asked: Asked
    tokens: list[int] = field(default_factory=list)
    finish: Finish | None = None
    error: str | None = None
    cached_tokens: int | None = None


class Striker:
    """Harms a rank of a schedule once, when its moment has come so often."""

    def __init__(self, schedule: Schedule, workers: RankWorkers) -> None:
        self._schedule, self._workers = schedule, workers
        self._left = schedule.skip
        self._thread: Thread | None = None
        self.struck = False

    def moment(self, moment: Moment) -> None:
        """Something begins. From any thread."""
        if moment is self._schedule.moment and not self.struck:
            self._left -= 1
            if self._left < 0:
                self.strike()

    def strike(self) -> None:
        self.struck = True
        ranks = self._workers._processes._ranks
        if self._schedule.rank < len(ranks):  # they may just have ended
            running = ranks[self._schedule.rank].running  # it signals no other process once that one is gone
            self._thread = Thread(target=self._harm, args=(running.send_signal,))
            self._thread.start()

    def _harm(self, send: Callable[[int], None]) -> None:
        time.sleep(self._schedule.after_s)
        match self._schedule.harm:
            case Harm.KILL:
                send(signal.SIGKILL)
            case Harm.STOP:
                send(signal.SIGSTOP)
            case Harm.PAUSE:
                self._pause(send, self._schedule.pause_s)
            case Harm.DELAY:
                for _ in range(10):
                    self._pause(send, self._schedule.pause_s / 20)
                    time.sleep(self._schedule.pause_s / 20)

    @staticmethod
    def _pause(send: Callable[[int], None], seconds: float) -> None:
        send(signal.SIGSTOP)
        time.sleep(seconds)
        send(signal.SIGCONT)

    def join(self) -> None:
        if self._thread is not None:
            self._thread.join()


class World:
    """An engine of two ranks over a store, and a reference engine of one rank. Both live through many schedules."""

    def __init__(self, family: str, root: Path) -> None:
        self.family = family
        self._root = root
        small: dict[str, Any] = {"device_memory": "1MiB", "host_memory": "3MiB"}
        self.alone = open_engine(family, root, 1)
        self.engine = open_engine(
            family, root, RANKS, **small, store="memory:", store_config=FETCHED, restart_workers=True, worker_limits=LIMITS
        )
        runner = self.engine._runner
        assert isinstance(runner, RankedRunner)
        self.workers = runner.workers
        self._moment: Callable[[Moment], None] = lambda moment: None
        self._watch()
        self.kept = _text(99, KEPT_TOKENS)
        self.right: tuple[int, ...] = ()  # what follows it
        self.spoilt = False  # something went wrong here
        self.ask_kept()
        settle(self.engine.cache)
        self.descriptors = _descriptors()

    def close(self) -> None:
        try:
            self.engine.close()
        finally:
            self.alone.close()

    def expected(self, tokens: list[int]) -> tuple[int, ...]:
        return self.alone.generate(tokens, max_tokens=MOST_TOKENS, ignore_eos=True).tokens

    def _watch(self) -> None:
        """Says when something begins: here, before workers know of it, and in the store's threads."""
        send_all, (store,) = self.workers.send_all, self.engine.stores
        moments = {RUN: Moment.PASS, COPY: Moment.COPY}

        def sends(message: Message) -> None:
            if message.kind in moments:
                self._moment(moments[message.kind])
            send_all(message)

        def watched(verb: Callable[..., Any]) -> Callable[..., Any]:
            def call(*args: Any, **more: Any) -> Any:
                self._moment(Moment.STORE)
                return verb(*args, **more)

            return call

        self.workers.send_all = sends  # type: ignore[method-assign]
        for name in ("contains", "read_into", "write_from"):
            setattr(store, name, watched(getattr(store, name)))

    # ---- one schedule -----------------------------------------------------------------------------

    def run(self, schedule: Schedule) -> str:
        """Plays it and checks everything; in a few words, what came of it."""
        expected = [self.expected(each.tokens) for each in schedule.asked]
        losses, before = self.workers.losses, self.workers.pids
        striker = Striker(schedule, self.workers)
        self._moment = striker.moment
        try:
            outcomes = self._play(schedule, striker)
        finally:
            self._moment = lambda moment: None
            striker.join()
        self._step_until(lambda: schedule.harm is not Harm.KILL or self.workers.losses > losses, "a killed rank to be missed")
        lost = self.workers.losses - losses
        for each, right in zip(outcomes, expected, strict=True):
            self._check(schedule, each, right, lost)
        self.ask_kept()
        self._check_cache()
        if lost:
            assert self.workers.pids != before and not any(map(_is_there, set(before) - set(self.workers.pids)))
        ends = [each.finish.value if each.finish is not None else "?" for each in outcomes]
        return f"{self.family} {schedule.moment.value} {schedule.harm.value} rank {schedule.rank}: {lost} lost, {' '.join(ends)}"

    def _play(self, schedule: Schedule, striker: Striker) -> list[Outcome]:
        outcomes = [Outcome(each) for each in schedule.asked]
        numbers: dict[int, Outcome] = {}
        if schedule.moment is Moment.STARTING:
            self._lose_one_first(schedule)
        if schedule.moment in (Moment.STARTING, Moment.IDLE):
            striker.strike()
        step = 0

        def go_on() -> bool:
            nonlocal step
            for each in outcomes:
                if each.asked.step == step:
                    sampling = Sampling(max_tokens=each.asked.max_tokens, ignore_eos=True)
                    numbers[self.engine.submit(GenerateRequest(tokens=each.asked.tokens, sampling=sampling))] = each
                if each.asked.abort_step == step:
                    for number in [number for number, known in numbers.items() if known is each]:
                        self.engine.abort(number)
            for delta in self._step():
                self._take(numbers[delta.request], delta)
            step += 1
            if all(each.finish is not None for each in outcomes):
                return True
            if self.engine.idle:
                time.sleep(0.0005)
            return False

        self._until(go_on, "the end of all requests")
        if not striker.struck:  # its moment has not come
            striker.strike()
            striker.join()
        return outcomes

    def _lose_one_first(self, schedule: Schedule) -> None:
        losses = self.workers.losses
        self.workers._processes._ranks[1 - schedule.rank].running.kill()
        self._step_until(lambda: self.workers.losses > losses, "a killed rank to be missed")

    @staticmethod
    def _take(outcome: Outcome, delta: Delta) -> None:
        assert outcome.finish is None, f"something behind the end: {delta}"
        outcome.tokens += delta.tokens
        outcome.finish, outcome.error = delta.finish, delta.error
        if delta.usage is not None:
            outcome.cached_tokens = delta.usage.prompt_tokens - delta.usage.sources.computed

    def _check(self, schedule: Schedule, outcome: Outcome, right: tuple[int, ...], lost: int) -> None:
        assert tuple(outcome.tokens) == right[: len(outcome.tokens)], f"{outcome} compared with {right}"
        match outcome.finish:
            case Finish.FAILED:
                assert lost and outcome.error is not None, outcome
                named = {schedule.rank, 1 - schedule.rank} if schedule.moment is Moment.STARTING else {schedule.rank}
                named = named if schedule.harm in (Harm.KILL, Harm.STOP) else set(range(RANKS))
                assert any(f"rank {rank}" in outcome.error for rank in named), outcome
                if schedule.harm in (Harm.PAUSE, Harm.DELAY) and schedule.moment is not Moment.STARTING:
                    assert "did not respond" in str(self.workers.last_loss), self.workers.last_loss
            case Finish.ABORTED:
                assert outcome.asked.abort_step is not None, outcome
            case _:
                assert outcome.finish is Finish.LENGTH and len(outcome.tokens) == outcome.asked.max_tokens, outcome

    def ask_kept(self) -> None:
        """What was kept before any loss resumes, with the right tokens. The first time it is computed."""
        number = self.engine.submit(GenerateRequest(tokens=self.kept, sampling=Sampling(max_tokens=4, ignore_eos=True)))
        outcome = Outcome(Asked(step=0, tokens=self.kept, max_tokens=4, abort_step=None))
        first, failed = not self.right, 0

        def ended() -> bool:
            nonlocal number, outcome, failed
            for delta in self._step():
                if delta.request == number:
                    self._take(outcome, delta)
            if outcome.finish is Finish.FAILED and failed < 3:  # by a fault that was not noticed before it was asked
                failed += 1
                number, outcome = (
                    self.engine.submit(GenerateRequest(tokens=self.kept, sampling=Sampling(max_tokens=4, ignore_eos=True))),
                    Outcome(outcome.asked),
                )
            if self.engine.idle:
                time.sleep(0.0005)
            return outcome.finish is not None

        self._until(ended, "what was kept")
        self.right = self.right or self.expected(self.kept)[:4]
        assert (outcome.finish, tuple(outcome.tokens)) == (Finish.LENGTH, self.right), outcome
        cached = outcome.cached_tokens or 0
        assert first or cached >= KEPT_TOKENS // 2, f"{cached} of {KEPT_TOKENS} tokens were found"

    def _check_cache(self) -> None:
        cache = self.engine.cache
        settle(cache)
        cache.audit()
        assert not self.engine.num_open and cache.copying == 0 and len(cache._leases) == 0
        assert not self.workers._answers.open and not self.workers.copies._open
        assert _descriptors() <= self.descriptors, "descriptors of workers that are gone are still open"

    # ---- steps ------------------------------------------------------------------------------------

    def _step(self) -> list[Delta]:
        began_s = time.monotonic()
        deltas = self.engine.step()
        took_s = time.monotonic() - began_s
        assert took_s < STEP_S, f"a step took {took_s:.0f} s"
        return deltas

    def _step_until(self, done: Callable[[], bool], what: str) -> None:
        self._until(lambda: done() or (self._step() and False) or done(), what)

    @staticmethod
    def _until(done: Callable[[], bool], what: str) -> None:
        deadline_s = time.monotonic() + SCHEDULE_S
        while not done():
            assert time.monotonic() < deadline_s, f"{what} did not come within {SCHEDULE_S:g} s"


def _descriptors() -> int:
    return len(os.listdir("/proc/self/fd"))


def _is_there(pid: int) -> bool:
    return os.path.exists(f"/proc/{pid}")
