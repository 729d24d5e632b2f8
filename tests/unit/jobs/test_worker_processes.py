"""Processes of ranks that are killed, stopped, silent or talk nonsense are found, named and ended, with all others."""

from __future__ import annotations

import os
import select
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from functools import partial
from time import monotonic

import pytest

from stepwell.jobs.channel import Message
from stepwell.jobs.processes import GOING_S, Processes, RankLost
from waiting import wait_until

ECHO = """
import socket, sys
from stepwell.jobs.channel import Channel, ChannelClosed, Message
channel = Channel(socket.socket(fileno=int(sys.argv[-1])))
channel.send(Message(kind="ready"))
try:
    while True:
        channel.wait(3600)
        for message in channel.receive():
            if message.kind == "exit":
                sys.exit(int(message.fields["status"]))
            if message.kind == "garbage":
                channel._socket.sendall(b"\\x03\\0\\0\\0abc")
                continue
            channel.send(Message(kind="pong" if message.kind == "ping" else message.kind, fields=message.fields))
except ChannelClosed:
    pass
"""
DYING = """
import os, signal, socket, sys, time
from stepwell.jobs.channel import Channel, Message
channel = Channel(socket.socket(fileno=int(sys.argv[-1])))
channel.send(Message(kind="ready"))
channel.wait(3600)
channel.close()
time.sleep(1)
os.kill(os.getpid(), signal.SIGKILL)
"""
LAST_WORDS = """
import socket, sys
from stepwell.jobs.channel import Channel, Message
channel = Channel(socket.socket(fileno=int(sys.argv[-1])))
channel.send(Message(kind="failed"))
sys.exit(1)
"""
DEAF = "import socket, sys, time; s = socket.socket(fileno=int(sys.argv[-1])); s.sendall(bytes.fromhex('%s')); time.sleep(3600)"


@pytest.fixture
def start() -> Iterator[Callable[..., Processes]]:
    made: list[Processes] = []

    def begin(*scripts: str, silent_s: float = 60.0) -> Processes:
        processes = Processes(silent_s=silent_s)
        made.append(processes)
        environment = {**os.environ, "PYTHONPATH": os.pathsep.join(each for each in sys.path if each)}
        for script in scripts:
            processes.start([sys.executable, "-c", script], environment=environment)
        return processes

    yield begin
    for each in made:
        each.end()


def hear(processes: Processes, count: int) -> list[tuple[int, Message]]:
    said: list[tuple[int, Message]] = []
    wait_until(lambda: said.extend(processes.poll(0.1)) or len(said) >= count, f"{count} messages")
    return said


def lost(processes: Processes) -> RankLost:
    def is_lost() -> bool:
        try:
            processes.poll(0.1)
        except RankLost:
            return True
        return False

    wait_until(is_lost, "the loss of a rank")
    assert processes.lost is not None
    return processes.lost


def test_all_ranks_are_told_and_answer(start: Callable[..., Processes]) -> None:
    processes = start(ECHO, ECHO)
    assert sorted(rank for rank, _ in hear(processes, 2)) == [0, 1]
    processes.send_all(Message(kind="word", fields={"a": 1}))
    assert sorted((rank, each.kind) for rank, each in hear(processes, 2)) == [(0, "word"), (1, "word")]
    pids = processes.pids
    processes.end(within_s=60.0)
    assert not any(os.path.exists(f"/proc/{pid}") for pid in pids) and not processes.pids


def test_while_one_worker_is_waited_for_others_wake_nobody_and_are_heard_with_it(start: Callable[..., Processes]) -> None:
    processes = start(*[ECHO.replace("argv[-1]", "argv[-2]")] * 2)
    hear(processes, 2)
    processes.send(1, Message(kind="word"), work=True)
    wait_until(lambda: bool(processes._polled(None).poll(0)), "an answer of rank 1")
    assert not processes._polled(0).poll(0), "nor does it end a wait for rank 0"
    processes.send(0, Message(kind="word"), work=True)
    wait_until(lambda: bool(processes._polled(0).poll(0)), "an answer of rank 0")
    assert [(rank, each.kind) for rank, each in processes.poll(60.0, worker=0)] == [(0, "word"), (1, "word")]
    processes.send(1, Message(kind="word"), work=True)
    wait_until(lambda: bool(processes._polled(1).poll(0)), "an answer of rank 1")
    assert [rank for rank, _ in processes.poll(0.0, worker=0)] == [1], "what others said is heard at the latest when time is up"


def test_the_end_of_another_wakes_who_waits_for_one_worker(start: Callable[..., Processes]) -> None:
    processes = start(ECHO, ECHO)
    hear(processes, 2)
    os.kill(processes.pids[1], signal.SIGKILL)
    wait_until(lambda: bool(processes._polled(0).poll(0)), "the end of rank 1")
    with pytest.raises(RankLost, match="rank 1 was lost: it was ended by SIGKILL"):
        processes.poll(60.0, worker=0)


def test_one_that_is_killed_is_named_with_its_signal(start: Callable[..., Processes]) -> None:
    processes = start(ECHO, ECHO)
    hear(processes, 2)
    os.kill(processes.pids[1], signal.SIGKILL)
    assert str(lost(processes)) == "rank 1 was lost: it was ended by SIGKILL"
    with pytest.raises(RankLost, match="rank 1"):
        processes.poll()


@pytest.mark.parametrize("end", ["-1", "-2"])
@pytest.mark.parametrize("meanwhile", ["spoken to", "not spoken to"])
def test_last_words_are_heard_before_the_end_is_seen(meanwhile: str, end: str, start: Callable[..., Processes]) -> None:
    """Also where a message was sent to it after it was gone, and where another was gone before; on either channel."""
    processes = start(*[LAST_WORDS.replace("argv[-1]", f"argv[{end}]")] * 2)
    for pid in processes.pids:
        os.waitid(os.P_PID, pid, os.WEXITED | os.WNOWAIT)
    if meanwhile == "spoken to":
        processes.send_all(Message(kind="word"), work=end == "-2")
    assert [(rank, each.kind) for rank, each in hear(processes, 2)] == [(0, "failed"), (1, "failed")]
    assert str(lost(processes)) == "rank 0 was lost: it ended with status 1"


def test_what_one_said_is_heard_though_another_is_gone(start: Callable[..., Processes]) -> None:
    processes = start(ECHO, ECHO)
    hear(processes, 2)
    processes.send(0, Message(kind="word"))
    processes.send(1, Message(kind="exit", fields={"status": 3}))
    os.waitid(os.P_PID, processes.pids[1], os.WEXITED | os.WNOWAIT)
    wait_until(lambda: bool(select.select([processes._ranks[0].channel], [], [], 0)[0]), "an answer of rank 0")
    assert [(rank, each.kind) for rank, each in processes.poll()] == [(0, "word")]
    assert str(lost(processes)) == "rank 1 was lost: it ended with status 3"


def test_the_killed_one_is_named_though_another_complains_first(start: Callable[..., Processes]) -> None:
    processes = start(ECHO, ECHO)
    hear(processes, 2)
    os.kill(processes.pids[1], signal.SIGKILL)
    os.waitid(os.P_PID, processes.pids[1], os.WEXITED | os.WNOWAIT)
    assert str(processes.lose(0, "its collective failed")) == "rank 1 was lost: it was ended by SIGKILL"


def test_the_killed_one_is_named_though_its_status_comes_last(start: Callable[..., Processes]) -> None:
    """Sockets of a process that is killed close before it counts as ended: others may see that first."""
    processes = start(ECHO, DYING)
    hear(processes, 2)
    processes.send(1, Message(kind="die"))
    wait_until(lambda: processes._ranks[1].channel.hung_up, "the end of the channel")
    assert str(processes.lose(0, "its collective failed")) == "rank 1 was lost: it was ended by SIGKILL"


def test_the_killed_one_is_named_though_another_complains_before_anybody_can_see_its_end(
    start: Callable[..., Processes], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("stepwell.jobs.processes.SOON_S", 60.0)
    processes = start(ECHO, DYING)
    hear(processes, 2)
    processes.send(1, Message(kind="die"))
    assert str(processes.lose(0, "its collective failed")) == "rank 1 was lost: it was ended by SIGKILL"


def test_statuses_that_do_not_come_are_waited_for_together(start: Callable[..., Processes]) -> None:
    processes = start(ECHO, *[DYING.replace("sleep(1)", "sleep(3600)")] * 3)
    hear(processes, 4)
    processes.send_all(Message(kind="die"))
    wait_until(lambda: all(each.channel.hung_up for each in processes._ranks[1:]), "the ends of channels")
    now, began = [0.0], processes._clock
    processes._clock = lambda: now[0]
    for each in processes._ranks:
        each.running.wait = partial(overdue, now)  # type: ignore[method-assign]
    assert str(processes.lose(0, "its collective failed")) == "rank 0 was lost: its collective failed"
    assert now[0] == GOING_S
    processes._clock = began
    for each in processes._ranks:
        del each.running.wait


def overdue(now: list[float], timeout: float) -> int:
    """Waits in vain."""
    now[0] += timeout
    raise subprocess.TimeoutExpired("a rank", timeout)


def test_one_that_exits_is_named_with_its_status(start: Callable[..., Processes]) -> None:
    processes = start(ECHO, ECHO)
    hear(processes, 2)
    processes.send(0, Message(kind="exit", fields={"status": 3}))
    assert str(lost(processes)) == "rank 0 was lost: it ended with status 3"


def test_one_that_is_stopped_gives_no_sign_of_life_and_ends_all_the_same(start: Callable[..., Processes]) -> None:
    processes = start(ECHO, ECHO, silent_s=2.0)
    hear(processes, 2)
    os.kill(processes.pids[0], signal.SIGSTOP)
    assert str(lost(processes)) == "rank 0 was lost: it did not respond for 2 s (it is stopped)"
    pids = processes.pids
    processes.end()
    assert not any(os.path.exists(f"/proc/{pid}") for pid in pids)


def test_one_that_only_rests_is_not_lost(start: Callable[..., Processes]) -> None:
    skipped_s = [0.0]
    processes = start(ECHO)
    processes._clock = lambda: monotonic() + skipped_s[0]  # the real one says when it was heard
    hear(processes, 1)
    for _ in range(3):
        skipped_s[0] += 1000.0  # asked, it answers, however long the scheduler has not looked
        processes.poll()
        assert processes._ranks[0].pinged_s is not None
        skipped_s[0] = 0.0
        wait_until(lambda: not processes.poll(0.1) and processes._ranks[0].pinged_s is None, "an answer")
    assert processes.lost is None


def test_nobody_is_taken_for_silent_by_one_who_was_stopped_itself(start: Callable[..., Processes]) -> None:
    """As when a whole machine is held: when it goes on, ranks have as little had the time to answer as it had to listen."""
    skipped_s = [0.0]
    processes = start(ECHO, silent_s=600.0)  # a quarter of it is long, however busy the machine is
    processes._clock = lambda: monotonic() + skipped_s[0]
    hear(processes, 1)
    os.kill(processes.pids[0], signal.SIGSTOP)
    skipped_s[0] += processes.silent_s
    processes.poll()
    assert processes._ranks[0].pinged_s is not None, "it is asked"
    skipped_s[0] += 100 * processes.silent_s
    processes.poll()
    assert processes._ranks[0].late_s is not None, "and has the last quarter of its time from now on"
    os.kill(processes.pids[0], signal.SIGCONT)
    wait_until(lambda: not processes.poll(0.1) and processes._ranks[0].late_s is None, "an answer")
    assert processes.lost is None


def test_one_that_talks_nonsense_is_lost_with_what_is_wrong(start: Callable[..., Processes]) -> None:
    processes = start(ECHO)
    hear(processes, 1)
    processes.send(0, Message(kind="garbage"))
    assert "rank 0 was lost: it sent an invalid message" in str(lost(processes))


def test_one_that_never_reads_is_lost_and_nobody_waits_for_it(start: Callable[..., Processes]) -> None:
    from stepwell.jobs.channel import packed

    processes = start(DEAF % packed(Message(kind="ready")).hex(), silent_s=2.0)
    hear(processes, 1)
    assert "did not respond" in str(lost(processes))
