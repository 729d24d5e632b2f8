"""Runs errands on every rank's store hands and brings home what came of them. Decides nothing, applies nothing.

Questions, reads and writes have threads of their own, so that no request waits behind a backup, nor a question behind the
reads of somebody else. Writes of a rank run in order, on one thread by default: parents before children. A thread before
that one seals what comes next.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from enum import Enum
from functools import partial
from queue import SimpleQueue
from threading import Condition, Thread
from typing import Protocol

from stepwell.base.clock import Clock
from stepwell.base.errand import Ask, Errand, Fate, Outcome, PutCheckpoint, PutPages, Reply, joint, num_items
from stepwell.base.ids import JobId
from stepwell.transfer.store_hands import StoreHands


class Porter(Protocol):
    """Takes errands and gives back replies. Called on the brain's thread; only `answer` and `drain` wait."""

    def submit(self, errand: Errand) -> None: ...

    def replies(self) -> list[Reply]:
        """Everything that was answered since the last call, each errand once."""
        ...

    def answer(self, job: JobId, timeout_s: float) -> Reply | None:
        """One errand's reply, before its turn: waits at most so long for it, then None. `replies` will not have it again."""
        ...

    def withdraw(self, job: JobId) -> bool:
        """Takes back an errand that no rank has begun: it will not be answered. False when one has, or all have."""
        ...

    def drain(self, timeout_s: float) -> None:
        """Waits until everything submitted was answered, or for so long."""
        ...

    def close(self) -> None:
        """Takes no more and lets its threads end; does not wait for one that hangs."""
        ...


class _Workers:
    """Daemon threads over one queue: a store that hangs for ever must not keep the process from ending."""

    def __init__(self, count: int, name: str) -> None:
        self._queue: SimpleQueue[Callable[[], None] | None] = SimpleQueue()
        self._threads = [Thread(target=self._live, name=f"stepwell-{name}", daemon=True) for _ in range(count)]
        for thread in self._threads:
            thread.start()

    def submit(self, work: Callable[[], None]) -> None:
        self._queue.put(work)

    def close(self) -> None:
        for _ in self._threads:
            self._queue.put(None)

    def _live(self) -> None:
        while (work := self._queue.get()) is not None:
            work()


class _Stage(Enum):
    WAITING = "waiting"
    BEGUN = "begun"
    ANSWERED = "answered"


class _Tally:
    """Where every rank stands with an errand, and what those that answered said."""

    def __init__(self, errand: Errand, ranks: int) -> None:
        self.errand = errand
        self.stages = [_Stage.WAITING] * ranks
        self.outcomes: list[Outcome] = []
        self.took_s = 0.0

    def answer(self, rank: int, outcome: Outcome) -> None:
        self.stages[rank] = _Stage.ANSWERED
        self.outcomes.append(outcome)


class ThreadPorter:
    """Worker threads for each rank."""

    def __init__(self, ranks: Sequence[StoreHands], clock: Clock, *, readers: int = 4, writers: int = 1) -> None:
        assert ranks, "a porter needs at least one rank's hands"
        self._ranks = ranks
        self._clock = clock
        self._asking = [_Workers(1, f"ask{i}") for i in range(len(ranks))]
        self._reading = [_Workers(readers, f"read{i}") for i in range(len(ranks))]
        self._sealing = [_Workers(1, f"seal{i}") for i in range(len(ranks))]
        self._writing = [_Workers(writers, f"write{i}") for i in range(len(ranks))]
        self._changed = Condition()
        self._tallies: dict[JobId, _Tally] = {}
        self._done: deque[Reply] = deque()

    def submit(self, errand: Errand) -> None:
        with self._changed:
            self._tallies[errand.job] = _Tally(errand, len(self._ranks))
        for rank, hands in enumerate(self._ranks):
            if isinstance(errand.task, (PutPages, PutCheckpoint)):
                self._sealing[rank].submit(partial(self._seal, rank, errand))
            else:
                workers = self._asking if isinstance(errand.task, Ask) else self._reading
                workers[rank].submit(partial(self._run, rank, errand, partial(attempt, hands, errand)))

    def replies(self) -> list[Reply]:
        return [self._done.popleft() for _ in range(len(self._done))]

    def answer(self, job: JobId, timeout_s: float) -> Reply | None:
        with self._changed:
            self._changed.wait_for(lambda: job not in self._tallies, timeout_s)
            reply = next((each for each in self._done if each.job == job), None)
            if reply is not None:
                self._done.remove(reply)
            return reply

    def withdraw(self, job: JobId) -> bool:
        with self._changed:
            tally = self._tallies.get(job)
            if tally is None:
                return False
            if all(stage is _Stage.WAITING for stage in tally.stages):
                del self._tallies[job]
                self._changed.notify_all()
                return True
            for rank, stage in enumerate(tally.stages):  # those behind a rank that hangs need not be waited for
                if stage is _Stage.WAITING:
                    tally.answer(rank, _called_off(tally.errand))
            self._settle(job, tally)
            return False

    def drain(self, timeout_s: float) -> None:
        with self._changed:
            self._changed.wait_for(lambda: not self._tallies, timeout_s)

    def close(self) -> None:
        for sealing, writing in zip(self._sealing, self._writing, strict=True):
            sealing.submit(writing.close)  # behind everything that is still to be written
        for workers in (*self._asking, *self._reading, *self._sealing):
            workers.close()

    def _seal(self, rank: int, errand: Errand) -> None:
        """The first half of a put. With it the errand has not begun: nothing has to be waited for if it is taken back."""
        with self._changed:
            if errand.job not in self._tallies:
                return  # withdrawn
        started_s = self._clock.now()
        put = sealed(self._ranks[rank], errand)
        self._writing[rank].submit(partial(self._run, rank, errand, put, self._clock.now() - started_s))

    def _run(self, rank: int, errand: Errand, work: Callable[[], Outcome], before_s: float = 0.0) -> None:
        with self._changed:
            tally = self._tallies.get(errand.job)
            if tally is None or tally.stages[rank] is not _Stage.WAITING:
                return  # withdrawn
            tally.stages[rank] = _Stage.BEGUN
        started_s = self._clock.now()
        outcome = work()
        took_s = self._clock.now() - started_s + before_s
        with self._changed:
            tally.answer(rank, outcome)
            tally.took_s = max(tally.took_s, took_s)
            self._settle(errand.job, tally)

    def _settle(self, job: JobId, tally: _Tally) -> None:
        """With the last rank's answer the errand is answered."""
        if len(tally.outcomes) == len(self._ranks):
            del self._tallies[job]
            self._done.append(Reply(job=job, outcome=joint(tally.outcomes), took_s=tally.took_s))
            self._changed.notify_all()


def attempt(hands: StoreHands, errand: Errand) -> Outcome:
    """One rank's try at an errand. Whatever goes wrong comes home as an outcome."""
    return _safely(errand, lambda: hands.run(errand.namespace, errand.task, errand.cancelled))


def sealed(hands: StoreHands, errand: Errand) -> Callable[[], Outcome]:
    """The first half of one rank's try at a put; what is returned is the other. Both bring home what goes wrong."""
    task, found = errand.task, []
    assert isinstance(task, (PutPages, PutCheckpoint)), f"nothing of {task} is to be sealed"

    def first() -> Outcome:
        found.append(hands.seal(errand.namespace, task))
        return Outcome(fates=())

    went_wrong = _safely(errand, first)
    return lambda: _safely(errand, lambda: hands.put(found[0], errand.cancelled)) if found else went_wrong


def _safely(errand: Errand, work: Callable[[], Outcome]) -> Outcome:
    if errand.cancelled():
        return _called_off(errand)
    try:
        return work()
    except Exception as error:  # the edge to somebody else's code: a failure comes home as a value
        return Outcome(fates=(Fate.FAILED,) * num_items(errand.task), error=f"{type(error).__name__}: {error}")


def _called_off(errand: Errand) -> Outcome:
    return Outcome(fates=(Fate.CANCELLED,) * num_items(errand.task))
