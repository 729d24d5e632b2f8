"""Worker processes, one for each rank: started, watched, and ended together. Knows their numbers, never what they compute.

    start    a process of its own for each rank, with its ends of two channels, and what else it is to inherit
    poll     what they have said; pings them, and finds out who has ended, or is silent though asked
    end      kills them all and waits until they are gone

One that is lost is everybody's loss: collectives of the others would wait for it. A process that is stopped (SIGSTOP) does not
end, so each is asked for a sign of life now and then. One thread.

Of the two channels one is for what is answered whatever a process computes; what it computes, one after the other, has the other
for itself, so that the thread which does can read it, and no other has to wake for it.
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
END_S = 5.0  # that a process has to end by itself when it is asked to
GONE_S = 60.0  # that one which was killed has to be gone
GOING_S = 5.0  # the same of those whose end of the channel is gone already: their status follows
SOON_S = 0.5  # in which the end of a rank's channel follows what another one complains of, where that is the reason


class RankLost(Exception):
    """A rank is not there any more, and with it all of them. `rank` says which was lost first."""

    def __init__(self, rank: int, why: str) -> None:
        super().__init__(f"rank {rank} was lost: {why}")
        self.rank, self.why = rank, why


@dataclass(slots=True, kw_only=True, eq=False)
class _Process:
    running: subprocess.Popen[bytes]
    channel: Channel
    work: Channel
    pinged_s: float | None = None  # when it was asked for a sign of life that has not come
    late_s: float | None = None  # when that was first seen to be late
    spoke: bool = False  # it is not asked before it has said something: it may take long to start

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
        """What has come on the channels that are ready. Raises ChannelClosed where nothing more will: not before it has given
        what was said on the one before the other ended.
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
    """Those of all ranks. `silent_s` without a sign of life, and one is lost; whoever knows what they do may change it."""

    def __init__(self, *, silent_s: float, clock: Callable[[], float] = monotonic) -> None:
        self.silent_s = silent_s
        self._clock = clock
        self._ranks: list[_Process] = []
        self._polls: dict[int | None, select.poll] = {}  # by who is waited for: making one takes longer than to ask it
        self.lost: RankLost | None = None

    def __len__(self) -> int:
        return len(self._ranks)

    @property
    def pids(self) -> list[int]:
        return [each.running.pid for each in self._ranks]

    def start(self, command: Sequence[str], *, inherit: Sequence[int] = (), environment: Mapping[str, str] | None = None) -> int:
        """One rank more; its number. The descriptors of its ends are added to the command: that for work, then the other."""
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
        """Something to be answered at once, or `work` behind what it was given before. Raises RankLost."""
        self._send(rank, packed(message), work=work)

    def send_all(self, message: Message, *, work: bool = False) -> None:
        """The same to all of them."""
        frame = packed(message)
        for rank in range(len(self._ranks)):
            self._send(rank, frame, work=work)

    def poll(self, timeout_s: float = 0.0, *, worker: int | None = None) -> list[tuple[int, Message]]:
        """What they have said, with who said it. Waits for so long at most until one says something. Raises RankLost.

        Of `worker` its next answer to work is waited for, or the end of any: what others say meanwhile wakes nobody, and is told
        with it.
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
                    return said  # maybe one of them knows better why; it is still closed when asked again
                raise self._lose(rank, str(error)) from None
            for message in messages:
                process.pinged_s = process.late_s = None
                if message.kind != PONG:
                    said.append((rank, message))
            process.spoke |= bool(messages)
            self._ask(rank, process, now)
        return said

    def lose(self, rank: int, why: str) -> RankLost:
        """Says that a rank is of no more use, for a reason that only its user can see."""
        return self._lose(rank, why, says_why=True)

    def end(self, *, within_s: float = 0.0) -> None:
        """Ends them all: asks them to, by the end of their channel, waits for so long, and kills who is still there.

        Raises RuntimeError for one that does not go even so, and may still write to memory that it shares.
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
                raise RuntimeError(f"rank {rank}, process {each.running.pid}, was killed and is still there") from None
        self._ranks = []
        self._polls.clear()
        self.lost = None

    # ---- inside -----------------------------------------------------------------------------------

    def _wait(self, timeout_s: float, worker: int | None) -> set[int]:
        """Until something comes; descriptors of channels on which it did, or may have. Sends what could not be sent before."""
        waiting = [channel for process in self._ranks for channel in process.channels if channel.wanted & select.POLLOUT]
        for channel in waiting:
            with suppress(ChannelClosed):  # whoever is gone has no more to say the next time
                channel.flush()
        polled = self._polled(None) if waiting else self._polls.get(worker)
        if polled is None:
            polled = self._polls[worker] = self._polled(worker)
        found = polled.poll(max(timeout_s, 0.0) * 1000)
        ready = {at for at, events in found if events & ~select.POLLOUT}
        if worker is not None:  # others may have said something too; and nobody but it was listened to for all that time
            for process in self._ranks:
                ready.update(channel.fileno() for channel in process.channels[bool(found) :])
        return ready

    def _polled(self, worker: int | None) -> select.poll:
        polled = select.poll()
        for rank, process in enumerate(self._ranks):
            for channel in process.channels:
                is_heard = worker is None or (rank == worker and channel is process.work)
                polled.register(channel.fileno(), channel.wanted if is_heard else 0)  # its end is heard all the same
        return polled

    def _send(self, rank: int, frame: bytes, *, work: bool) -> None:
        channel = self._ranks[rank].channels[work]
        try:
            channel.send_packed(frame)
        except ChannelClosed as error:
            if channel.closed is not None:  # else `poll` hears what it said last, and then its end
                raise self._lose(rank, str(error)) from None

    def _ask(self, rank: int, process: _Process, now: float) -> None:
        """For a sign of life, where it has given none for a while. Its last quarter of the time begins when somebody looks: this
        process may have been stopped itself, and all ranks with it.
        """
        quarter_s = self.silent_s / 4
        if process.late_s is not None:
            if now - process.late_s > quarter_s:
                why = f"it gave no sign of life for {self.silent_s:g} s{_state_of(process.running.pid)}"
                raise self._lose(rank, why, says_why=True)
        elif process.pinged_s is not None:
            if now - process.pinged_s > 3 * quarter_s:
                process.late_s = now
        elif process.spoke and now - process.heard_s > quarter_s:
            process.pinged_s = now
            self.send(rank, Message(kind=PING))

    def _lose(self, rank: int, why: str, *, says_why: bool = False) -> RankLost:
        """The first loss counts. One that was killed is the one to name: those that wait for it in a collective fail later,
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
        """Of any rank but one. One that is killed closes its sockets one by one, and maybe those to others first."""
        polled = select.poll()
        for rank, each in enumerate(self._ranks):
            for channel in each.channels if rank != but else ():
                polled.register(channel, 0)
        polled.poll(SOON_S * 1000)

    def _wait_for_ends(self, ranks: Sequence[int]) -> None:
        """Of those whose channels have ended: they are gone in a moment, but nobody waits longer than that for all of them."""
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
    """A word on why, where the system knows."""
    try:
        with open(f"/proc/{pid}/stat", "rb") as file:
            state = file.read().rpartition(b")")[2].split()[0]
    except (OSError, IndexError):
        return ""
    return " (it is stopped)" if state in (b"T", b"t") else ""
