"""Worker processes, one for each rank: started, watched, and ended together. Knows their numbers, never what they compute.

    start    starts a process for each rank, with its ends of two channels, and the descriptors that it inherits
    poll     returns their messages; pings them, and detects processes that have ended, or do not respond
    end      kills them all and waits until they are gone

If one is lost, all are: collectives of the others would wait for it. A process that is stopped (SIGSTOP) does not end, so each is
pinged now and then. One thread.

One of the two channels is for messages that are answered at any time; the other is for the work in sequence, which the computing
thread reads itself, so that no other thread has to wake for it.
"""

from __future__ import annotations

import select
import signal
import subprocess
from collections.abc import Callable, Container, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from time import monotonic

from stepwell.jobs.channel import Channel, ChannelClosed, Message, packed

PING, PONG = "ping", "pong"
END_S = 5.0  # in which a process must end by itself when it is asked to
GONE_S = 60.0  # in which a killed process must be gone
GOING_S = 5.0  # the same for processes whose end of the channel is closed already: their status follows
SOON_S = 0.5  # in which the hang-up of a rank follows the complaint of another rank, if that is the cause


class RankLost(Exception):
    """A rank is lost, and with it all of them. `rank` is the one that was lost first."""

    def __init__(self, rank: int, why: str) -> None:
        super().__init__(f"rank {rank} was lost: {why}")
        self.rank, self.why = rank, why


@dataclass(slots=True, kw_only=True, eq=False)
class _Process:
    running: subprocess.Popen[bytes]
    channel: Channel
    work: Channel
    pinged_s: float | None = None  # when it was pinged without an answer yet
    late_s: float | None = None  # when the ping was first seen to be late
    spoke: bool = False  # it is not pinged before its first message: it may take long to start

    @property
    def channels(self) -> tuple[Channel, Channel]:
        return self.channel, self.work

    @property
    def heard_s(self) -> float:
        return max(self.channel.heard_s, self.work.heard_s)

    @property
    def hung_up(self) -> bool:
        return self.channel.hung_up or self.work.hung_up

    def hear(self, ready: Container[int]) -> list[Message]:
        """The messages on the channels that are ready. Raises ChannelClosed only after it has returned the messages that were
        sent on one channel before the other ended.
        """
        messages: list[Message] = []
        ended: ChannelClosed | None = None
        for channel in self.channels:
            if channel.closed is None and channel.fileno() not in ready:
                continue
            try:
                messages += channel.receive()
            except ChannelClosed as error:
                ended = ended or error
        if ended is not None and not messages:
            for channel in self.channels:
                with suppress(ChannelClosed):
                    messages += channel.receive()
            if not messages:
                raise ended
        return messages


class Processes:
    """The processes of all ranks. One that is silent for `silent_s` is lost; the caller may change the limit."""

    def __init__(self, *, silent_s: float, clock: Callable[[], float] = monotonic) -> None:
        self.silent_s = silent_s
        self._clock = clock
        self._ranks: list[_Process] = []
        self._polls: dict[int | None, select.poll] = {}  # by the rank waited for: creating one takes longer than polling it
        self.lost: RankLost | None = None

    def __len__(self) -> int:
        return len(self._ranks)

    @property
    def pids(self) -> list[int]:
        return [each.running.pid for each in self._ranks]

    def start(self, command: Sequence[str], *, inherit: Sequence[int] = (), environment: Mapping[str, str] | None = None) -> int:
        """Starts one more rank; returns its number. Adds its descriptors to the command: the end for work, then the other."""
        channel, theirs = Channel.pair()
        work, its_work = Channel.pair()
        with theirs, its_work:
            ends = its_work.fileno(), theirs.fileno()
            running = subprocess.Popen(
                [*command, *map(str, ends)], pass_fds=(*ends, *inherit), stdin=subprocess.DEVNULL,
                env=None if environment is None else dict(environment), start_new_session=True,
            )  # fmt: skip
        self._ranks.append(_Process(running=running, channel=channel, work=work))
        self._polls.clear()
        return len(self._ranks) - 1

    def send(self, rank: int, message: Message, *, work: bool = False) -> None:
        """Sends a message to be answered at once, or `work` behind earlier work. Raises RankLost."""
        self._send(rank, packed(message), work=work)

    def send_all(self, message: Message, *, work: bool = False) -> None:
        """Sends a message to all ranks."""
        frame = packed(message)
        for rank in range(len(self._ranks)):
            self._send(rank, frame, work=work)

    def poll(self, timeout_s: float = 0.0, *, worker: int | None = None) -> list[tuple[int, Message]]:
        """The messages of all ranks, with their senders. Waits at most this long for the first one. Raises RankLost.

        With `worker` it waits for that rank's next answer to work, or the end of any rank: messages of others do not end the
        wait, and are returned with the answer.
        """
        if self.lost is not None:
            raise self.lost
        ready, now = self._wait(min(timeout_s, self.silent_s / 4), worker), self._clock()
        said: list[tuple[int, Message]] = []
        for rank, process in enumerate(self._ranks):
            try:
                messages = process.hear(ready)
            except ChannelClosed as error:
                if said:
                    return said  # another rank may know the cause better; this channel is still closed next time
                raise self._lose(rank, str(error)) from None
            for message in messages:
                process.pinged_s = process.late_s = None
                if message.kind != PONG:
                    said.append((rank, message))
            process.spoke |= bool(messages)
            self._ask(rank, process, now)
        return said

    def lose(self, rank: int, why: str) -> RankLost:
        """Reports that a rank is unusable, for a reason that only its user can see."""
        return self._lose(rank, why, says_why=True)

    def end(self, *, within_s: float = 0.0) -> None:
        """Ends them all: asks them to end by closing their channels, waits this long, and kills the others.

        Raises RuntimeError for one that survives even that, and may still write to memory that it shares.
        """
        for each in self._ranks:
            for channel in each.channels:
                channel.close()
        deadline_s = self._clock() + within_s
        for each in self._ranks:
            with suppress(subprocess.TimeoutExpired):
                each.running.wait(max(deadline_s - self._clock(), 0.0))
        for each in self._ranks:
            if each.running.poll() is None:
                each.running.kill()  # one that is stopped ends too
        for rank, each in enumerate(self._ranks):
            try:
                each.running.wait(GONE_S)
            except subprocess.TimeoutExpired:
                raise RuntimeError(f"rank {rank}, process {each.running.pid}, was killed and still exists") from None
        self._ranks = []
        self._polls.clear()
        self.lost = None

    # ---- inside -----------------------------------------------------------------------------------

    def _wait(self, timeout_s: float, worker: int | None) -> set[int]:
        """Waits for input; returns the descriptors of channels that have or may have some. Sends buffered output."""
        waiting = [channel for process in self._ranks for channel in process.channels if channel.wanted & select.POLLOUT]
        for channel in waiting:
            with suppress(ChannelClosed):  # a lost rank is reported by the next poll
                channel.flush()
        polled = self._polled(None) if waiting else self._polls.get(worker)
        if polled is None:
            polled = self._polls[worker] = self._polled(worker)
        found = polled.poll(max(timeout_s, 0.0) * 1000)
        ready = {at for at, events in found if events & ~select.POLLOUT}
        if worker is not None:  # others may have sent messages too, and were not polled in all that time
            for process in self._ranks:
                ready.update(channel.fileno() for channel in process.channels[bool(found) :])
        return ready

    def _polled(self, worker: int | None) -> select.poll:
        polled = select.poll()
        for rank, process in enumerate(self._ranks):
            for channel in process.channels:
                is_heard = worker is None or (rank == worker and channel is process.work)
                polled.register(channel.fileno(), channel.wanted if is_heard else 0)  # its hang-up is always reported
        return polled

    def _send(self, rank: int, frame: bytes, *, work: bool) -> None:
        channel = self._ranks[rank].channels[work]
        try:
            channel.send_packed(frame)
        except ChannelClosed as error:
            if channel.closed is not None:  # else `poll` returns its last messages, and then its end
                raise self._lose(rank, str(error)) from None

    def _ask(self, rank: int, process: _Process, now: float) -> None:
        """Pings a process that has been silent for a while. The last quarter of the limit begins when this is noticed: this
        process may have been stopped itself, together with all ranks.
        """
        quarter_s = self.silent_s / 4
        if process.late_s is not None:
            if now - process.late_s > quarter_s:
                why = f"it did not respond for {self.silent_s:g} s{_state_of(process.running.pid)}"
                raise self._lose(rank, why, says_why=True)
        elif process.pinged_s is not None:
            if now - process.pinged_s > 3 * quarter_s:
                process.late_s = now
        elif process.spoke and now - process.heard_s > quarter_s:
            process.pinged_s = now
            self.send(rank, Message(kind=PING))

    def _lose(self, rank: int, why: str, *, says_why: bool = False) -> RankLost:
        """Only the first loss counts. A killed process is the one to report: those that wait for it in a collective fail later,
        though maybe before the system has its status.
        """
        if self.lost is None:
            if says_why:
                self._wait_for_hang_up(but=rank)
            gone = [at for at, each in enumerate(self._ranks) if each.running.poll() is not None or each.hung_up]
            self._wait_for_ends(gone)
            killed = [at for at in gone if (self._ranks[at].running.poll() or 0) < 0]
            if killed and rank not in killed:
                rank, says_why = killed[0], False
            code = None if says_why or rank not in gone else self._ranks[rank].running.poll()
            self.lost = RankLost(rank, why if code is None else _ended(code))
        return self.lost

    def _wait_for_hang_up(self, *, but: int) -> None:
        """Waits for a hang-up of any other rank. A killed process closes its sockets one by one, in any order."""
        polled = select.poll()
        for rank, each in enumerate(self._ranks):
            for channel in each.channels if rank != but else ():
                polled.register(channel, 0)
        polled.poll(SOON_S * 1000)

    def _wait_for_ends(self, ranks: Sequence[int]) -> None:
        """Waits for processes whose channels have ended: they are gone in a moment. One time limit applies to all of them."""
        deadline_s = self._clock() + GOING_S
        for rank in ranks:
            with suppress(subprocess.TimeoutExpired):
                self._ranks[rank].running.wait(max(deadline_s - self._clock(), 0.0))


def _ended(code: int) -> str:
    if code >= 0:
        return f"it ended with status {code}"
    known = {each.value for each in signal.Signals}
    return f"it was ended by {signal.Signals(-code).name if -code in known else f'signal {-code}'}"


def _state_of(pid: int) -> str:
    """The reason, if the system knows it."""
    try:
        with open(f"/proc/{pid}/stat", "rb") as file:
            state = file.read().rpartition(b")")[2].split()[0]
    except (OSError, IndexError):
        return ""
    return " (it is stopped)" if state in (b"T", b"t") else ""
