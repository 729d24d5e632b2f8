"""Host memory that processes of ours inherit, and the two kinds of them that let machines read from one another.

    Shown    our memory, for others to read from
    Lane     from one other machine into our memory. Nothing else goes through it, so a machine that stops holds up no other

When a lane is lost, its process has been killed and is gone: whatever a failed transfer had still to write will not be written,
and its pages may be used again at once. Only where a process does not go even then is it said so (`Unfenced`).
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

START_S = 60.0  # for a process to come up: it loads the wheel, on a machine that may be busy
GONE_S = 10.0  # for a process that was killed to be gone
BATCH_BYTES = 32 * 2**20  # between two signs of life
Entry = tuple[int, int, int]  # offset in our memory, address in theirs, bytes


class LaneLost(Exception):
    """A transfer failed, and the process that ran it is gone: nothing more will be written."""


class Unfenced(Exception):
    """A transfer failed, and the process that ran it could not be ended: its memory may still be written."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Wire:
    """How engines reach each other: the host that others know this one by."""

    host: str


class SharedHost:
    """The host tier's memory, which processes of ours inherit. Made once its size is known."""

    def __init__(self) -> None:
        self._block: InheritedBlock | None = None

    def make(self, size_bytes: int) -> InheritedBlock:
        """Raises ConfigError where it cannot be had."""
        assert self._block is None, "the memory is made once"
        self._block = InheritedBlock(size_bytes)
        return self._block

    @property
    def fd(self) -> int:
        return -1 if self._block is None else self._block.fd

    @property
    def size_bytes(self) -> int:
        return 0 if self._block is None else self._block.size_bytes


class _EngineProcess:
    """A child that runs `engine_process.py`. One thread at a time."""

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
                    env=environment, start_new_session=True,  # Ctrl-C is for the server, which ends it when it has drained
                )  # fmt: skip
        except OSError as error:
            ours.close()
            raise StoreError(f"a process for Mooncake's transfer engine cannot be had: {error}") from error
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
        """The next packet; nothing when the process has ended, or says nothing for so long."""
        self._socket.settimeout(limit_s)
        try:
            return self._socket.recv(PACKET_BYTES)
        except OSError:  # too late, too
            return b""

    def kill(self) -> bool:
        """Ends it for good; whether it is gone."""
        self._process.kill()
        try:
            self._process.wait(GONE_S)
        except subprocess.TimeoutExpired:
            return False
        finally:
            self._socket.close()
        return True


class Shown:
    """Our memory, which engines of other machines may read from until `close`."""

    def __init__(self, memory: SharedHost, wire: Wire) -> None:
        """Raises StoreError where no engine can be had."""
        self._process = _EngineProcess("serve", memory, wire)

    @property
    def session(self) -> str:
        """The name by which other engines reach it."""
        return self._process.session

    @property
    def address(self) -> int:
        """Where the memory begins, for them."""
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
    """The way from one other machine into our memory. One thread at a time."""

    def __init__(self, memory: SharedHost, wire: Wire) -> None:
        """Raises StoreError where no engine can be had."""
        self._process = _EngineProcess("pull", memory, wire)

    @property
    def pid(self) -> int:
        return self._process.pid

    def read(self, session: str, entries: Sequence[Entry], *, stall_s: float) -> None:
        """Fills our memory, or raises LaneLost or Unfenced: the lane has ended then. A batch may take `stall_s` at most."""
        for batch in _batches(entries):
            try:
                self._process.say(pack_batch(session, batch))
            except OSError:
                self._lose("its process has ended")
            heard = self._process.hear(stall_s)
            if heard != READ:
                self._lose(
                    "the engine could not read it" if heard else f"nothing came for {stall_s:g} s, or its process has ended"
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
