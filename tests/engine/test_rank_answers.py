"""What ranks say is believed where it answers what they were asked, and once. No processes: what they would say is made up."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, NoReturn

import numpy as np
import pytest

from stepwell.base.ids import JobId, Kind, Tier
from stepwell.base.tasks import Copy, Plan, Purpose, Span
from stepwell.engine.running.runner import PassesLost, PassFailed
from stepwell.engine.workers.messages import ChosenTokens, pack_chosen
from stepwell.engine.workers.pass_arrays import Pass
from stepwell.engine.workers.rank_workers import RankWorkers
from stepwell.engine.workers.worker_setup import WorkerLimits, WorkerSetup
from stepwell.jobs.channel import Message, packed
from stepwell.jobs.processes import Processes, RankLost

NOTHING = Pass(rows=[], choosing=[])
LOADED = {"digest": "d", "vocab_size": 8, "free_bytes": 0, "kernels": {"attend": "torch"}}


class Said(Processes):
    """Ranks that are no processes: `say` is what the next poll hears, and `orders` what they were sent."""

    def __init__(self) -> None:
        super().__init__(silent_s=20.0)
        self.say: list[tuple[int, Message]] = []
        self.orders: list[Message] = []
        self.answers: list[tuple[int, Message]] = []  # said to the next pass

    def send_all(self, message: Message, *, work: bool = False) -> None:
        self.orders.append(message)
        if message.kind == "run":
            self.say += self.answers

    def poll(self, timeout_s: float = 0.0, *, worker: int | None = None) -> list[tuple[int, Message]]:
        if self.lost is not None:
            raise self.lost
        said, self.say = self.say, []
        return said

    def _lose(self, rank: int, why: str, *, says_why: bool = False) -> RankLost:
        self.lost = self.lost or RankLost(rank, why)
        return self.lost


@pytest.fixture
def said() -> Said:
    return Said()


@pytest.fixture
def started(said: Said, monkeypatch: pytest.MonkeyPatch) -> Iterator[RankWorkers]:
    """Two ranks that have been started and have said nothing yet."""
    setup = WorkerSetup(
        model="", digest="d", dtype="fp32", kv_dtype=None, kernels="torch", page_tokens=16, devices=("cpu", "cpu"),
        backend="gloo", host=None, alignment=64, device_bytes=lambda free: 1,
    )  # fmt: skip
    workers = RankWorkers(setup, WorkerLimits(), restart=False)
    workers._processes = said
    monkeypatch.setattr(said, "start", lambda *args, **more: 0)
    monkeypatch.setattr(said, "send", lambda rank, message, **more: None)
    workers._begin()
    yield workers
    workers.close()


@pytest.fixture
def workers(started: RankWorkers, said: Said) -> RankWorkers:
    assert said.silent_s == 60.0, "libraries that are loaded stop all threads of a process"
    said.say = [(rank, Message(kind="loaded", fields=LOADED)) for rank in (0, 1)]
    assert not started.poll()
    said.say = [(rank, Message(kind="ready")) for rank in (0, 1)]
    assert started.poll() and said.silent_s == 20.0
    return started


def chose(calls: int = 3, number: int = 1, **more: Any) -> Message:
    return Message(kind="chosen", numbers=(number, calls), fields=more, arrays=pack_chosen(ChosenTokens([])))


def broke(calls: int = 3, **more: Any) -> Message:
    return Message(kind="broke", numbers=(1, calls), fields={"error": "ValueError: no", **more})


@pytest.mark.parametrize("kind", ["loaded", "ready"])
def test_ranks_that_run_do_not_take_their_memory_anew(workers: RankWorkers, said: Said, kind: str) -> None:
    before = len(said.orders)
    said.say = [(1, Message(kind=kind, fields=LOADED))] * 2
    with pytest.raises(PassesLost, match=f"rank 1 was lost: it sent an invalid message: '{kind}' was not requested"):
        workers.poll()
    assert len(said.orders) == before


def test_a_rank_is_not_ready_before_it_has_memory(started: RankWorkers, said: Said) -> None:
    said.say = [(0, Message(kind="loaded", fields=LOADED)), (0, Message(kind="ready"))]
    with pytest.raises(PassesLost, match="'ready' was not requested"):
        started.poll()


def test_ranks_that_failed_in_step_go_on(workers: RankWorkers, said: Said) -> None:
    said.answers = [(0, chose()), (1, broke())]
    with pytest.raises(PassFailed, match="rank 1: ValueError: no"):
        workers.compute(NOTHING)
    said.answers = [(0, chose(number=2)), (1, chose(number=2))]
    assert workers.compute(NOTHING).tokens == []
    assert said.orders[-1].numbers[1] == 0, "one of them has maybe not read the pass before"


def test_a_pass_too_long_for_a_message_fails_and_no_rank_is_lost_for_it(
    workers: RankWorkers, said: Said, monkeypatch: pytest.MonkeyPatch
) -> None:
    with monkeypatch.context() as patched:
        patched.setattr("stepwell.jobs.channel.MOST_BYTES", 8)
        patched.setattr(said, "send_all", lambda message, *, work=False: packed(message))
        with pytest.raises(PassFailed, match="longer than 8"):
            workers.compute(NOTHING)
    said.answers = [(0, chose(number=2)), (1, chose(number=2))]
    assert workers.compute(NOTHING).tokens == [] and workers.running and not workers.losses


def test_nobody_goes_on_from_a_pass_whose_answers_nobody_judged(
    workers: RankWorkers, said: Said, monkeypatch: pytest.MonkeyPatch
) -> None:
    def interrupted(timeout_s: float = 0.0, *, worker: int | None = None) -> NoReturn:
        raise KeyboardInterrupt

    with monkeypatch.context() as patched:
        patched.setattr(said, "poll", interrupted)
        with pytest.raises(KeyboardInterrupt):
            workers.compute(NOTHING)
    said.say = [(0, chose()), (1, broke())]
    workers.wait()
    said.answers = [(0, chose(number=2)), (1, chose(number=2))]
    assert workers.compute(NOTHING).tokens == []
    assert said.orders[-1].numbers[1] == 0
    said.answers = [(0, chose(number=3)), (1, chose(number=3))]
    workers.compute(NOTHING)
    assert said.orders[-1].numbers[1] == 2, "and goes on from one that went well"


@pytest.mark.parametrize(
    "wrong",
    [
        [(0, broke(2)), (1, chose(3))],  # another number of collectives
        [(0, broke(2)), (1, broke(3))],
        [(1, chose()), (1, chose())],  # twice, and the other rank not at all
        [(0, chose(number=2))],
        [(0, chose(calls=-1))],
        [(0, broke(error=None))],
    ],
)  # fmt: skip
def test_answers_that_leave_doubt_lose_the_rank(workers: RankWorkers, said: Said, wrong: list[tuple[int, Message]]) -> None:
    said.answers = wrong
    with pytest.raises(PassesLost, match=f"rank {wrong[0][0]} was lost"):
        workers.compute(NOTHING)


def a_copy() -> Plan:
    ids = np.array([0], np.int32)
    copy = Copy(source=Span(tier=Tier.HOST, kind=Kind.PREFIX, ids=ids), target=Span(tier=Tier.DEVICE, kind=Kind.PREFIX, ids=ids))
    return Plan(job=JobId(7), purpose=Purpose.LOAD, copies=(copy,))


def copied(**more: Any) -> Message:
    return Message(kind="copied", fields={"job": 7, "error": None, **more})


def test_a_copy_is_done_when_all_ranks_say_so_and_failed_when_one_does(workers: RankWorkers, said: Said) -> None:
    for error in (None, "OSError: no"):
        workers.copies.submit(a_copy())
        said.say = [(1, copied(error=error))]
        assert workers.copies.answers() == []
        said.say = [(0, copied())]
        (done,) = workers.copies.answers()
        assert (done.job, done.error) == (7, error and f"rank 1: {error}")


@pytest.mark.parametrize("wrong", [copied(job=8), copied(job=None), copied(error=3)])
def test_copies_that_were_not_requested_and_errors_without_text_lose_the_rank(
    workers: RankWorkers, said: Said, wrong: Message
) -> None:
    workers.copies.submit(a_copy())
    said.say = [(1, wrong)]
    assert workers.copies.answers() == []
    with pytest.raises(PassesLost, match="rank 1 was lost"):
        workers.poll()


def test_a_copy_that_was_not_sent_yet_is_not_answered(started: RankWorkers, said: Said) -> None:
    started.copies.submit(a_copy())
    said.say = [(0, copied())]
    with pytest.raises(PassesLost, match="a copy that was not requested"):
        started.poll()
