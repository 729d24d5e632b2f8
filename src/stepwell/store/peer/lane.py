"""Host memory that child processes inherit, and the two kinds of children through which machines read from each other.

    Shown    our memory, for others to read from
    Lane     from one other machine into our memory. It serves that machine alone, so a stalled machine delays no other

When a lane is lost, its process has been killed and is gone: a failed transfer writes nothing more, and its pages may be
reused at once. `Unfenced` reports the exception: a process that could not be ended.
"""

from __future__ import annotations

import os
import socket
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import dataclass

from stepwell.base.errors import StoreError
from stepwell.base.inherited_block import InheritedBlock
from stepwell.store.peer.engine_process import MAX_ENTRIES, PACKET_BYTES, READ, pack_batch

START_S = 60.0  # for a process to start: it loads the wheel, on a machine that may be busy
GONE_S = 10.0  # for a killed process to end
BATCH_BYTES = 32 * 2**20  # between two progress messages
Entry = tuple[int, int, int]  # offset in our memory, address in theirs, bytes


class LaneLost(Exception):
    """A transfer failed, and the process that ran it is gone: nothing more will be written."""


class Unfenced(Exception):
    """A transfer failed, and the process that ran it could not be ended: its memory may still be written."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Wire:
    """How engines reach each other: the host name under which others know this machine."""

    host: str


class SharedHost:
    """The host tier's memory, which child processes inherit. Allocated once its size is known."""

    def __init__(self) -> None:
        self._block: InheritedBlock | None = None

    def make(self, size_bytes: int) -> InheritedBlock:
        """Raises ConfigError if the memory cannot be allocated."""
        assert self._block is None, "the memory is allocated once"
        self._block = InheritedBlock(size_bytes)
        return self._block

    @property
    def fd(self) -> int:
        return -1 if self._block is None else self._block.fd

    @property
    def size_bytes(self) -> int:
        return 0 if self._block is None else self._block.size_bytes


class _EngineProcess:
    """A child that runs `engine_process.py`. Used by one thread at a time."""

    def __init__(self, mode: str, memory: SharedHost, wire: Wire) -> None:
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        command = [
            sys.executable, "-m", "stepwell.store.peer.engine_process", mode, str(memory.fd), str(memory.size_bytes),
            str(theirs.fileno()), wire.host,
        ]  # fmt: skip
        environment = {name: value for name, value in os.environ.items() if not name.startswith("STEPWELL_")}  # keys, tokens
        try:
            with theirs:
                self._process = subprocess.Popen(
                    command, pass_fds=(memory.fd, theirs.fileno()), stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL,
                    env=environment, start_new_session=True,  # Ctrl-C is for the server, which ends the child when it has drained
                )  # fmt: skip
        except OSError as error:
            ours.close()
            raise StoreError(f"a process for Mooncake's transfer engine cannot be started: {error}") from error
        self._socket = ours
        self.pid = self._process.pid
        said = self.hear(START_S).decode(errors="replace").split()
        if said[:1] != ["ready"]:
            self.kill()
            raise StoreError(f"Mooncake's transfer engine did not start: {' '.join(said) or 'its process ended'}")
        self.session, self.address = said[1], int(said[2])

    @property
    def alive(self) -> bool:
        return self._process.poll() is None

    def say(self, packet: bytes) -> None:
        self._socket.send(packet)

    def hear(self, limit_s: float) -> bytes:
        """The next packet; empty when the process has ended, or sends nothing within the limit."""
        self._socket.settimeout(limit_s)
        try:
            return self._socket.recv(PACKET_BYTES)
        except OSError:  # also too late
            return b""

    def kill(self) -> bool:
        """Kills the process; returns whether it is gone."""
        self._process.kill()
        try:
            self._process.wait(GONE_S)
        except subprocess.TimeoutExpired:
            return False
        finally:
            self._socket.close()
        return True


class Shown:
    """Our memory, from which engines of other machines may read until `close`."""

    def __init__(self, memory: SharedHost, wire: Wire) -> None:
        """Raises StoreError if no engine can be started."""
        self._process = _EngineProcess("serve", memory, wire)

    @property
    def session(self) -> str:
        """The name under which other engines reach it."""
        return self._process.session

    @property
    def address(self) -> int:
        """The address at which the memory begins, for other engines."""
        return self._process.address

    @property
    def pid(self) -> int:
        return self._process.pid

    @property
    def alive(self) -> bool:
        return self._process.alive

    def close(self) -> None:
        self._process.kill()


class Lane:
    """The path from one other machine into our memory. Used by one thread at a time."""

    def __init__(self, memory: SharedHost, wire: Wire) -> None:
        """Raises StoreError if no engine can be started."""
        self._process = _EngineProcess("pull", memory, wire)

    @property
    def pid(self) -> int:
        return self._process.pid

    def read(self, session: str, entries: Sequence[Entry], *, stall_s: float) -> None:
        """Fills our memory, or raises LaneLost or Unfenced; the lane has ended then. A batch may take at most `stall_s`."""
        for batch in _batches(entries):
            try:
                self._process.say(pack_batch(session, batch))
            except OSError:
                self._lose("its process has ended")
            heard = self._process.hear(stall_s)
            if heard != READ:
                self._lose(
                    "the engine could not read it" if heard else f"it sent nothing for {stall_s:g} s, or its process has ended"
                )

    def close(self) -> None:
        self._process.kill()

    def _lose(self, why: str) -> None:
        if not self._process.kill():
            raise Unfenced(why)
        raise LaneLost(why)


def _batches(entries: Sequence[Entry]) -> list[list[Entry]]:
    batches: list[list[Entry]] = []
    size = 0
    for entry in entries:
        if not batches or len(batches[-1]) == MAX_ENTRIES or size + entry[2] > BATCH_BYTES:
            batches.append([])
            size = 0
        batches[-1].append(entry)
        size += entry[2]
    return batches
