"""A block of host memory that two processes of this machine map: one creates it under a name, the other opens it, once.

    |---------------- size_bytes, for pages ----------------|-- note: 4 KiB --|

    maker    memfd, and a socket of that name   <--  connects   opener
                                                -->  the descriptor

The memory is a `memfd` and the name that of an abstract socket: neither is a file. The kernel frees both when the last process
that has them ends, so killed processes leave nothing behind, and `/dev/shm` may be of any size. Only processes of the same user
are answered or trusted. The name is free again as soon as the block has been opened.

The note is a message from the maker to the opener: what the bytes mean, and the last job whose copies had ended when it closed.
"""

from __future__ import annotations

import mmap
import os
import socket
import struct
import weakref
from contextlib import suppress
from hashlib import blake2b
from threading import Thread

from stepwell.base.errors import ConfigError
from stepwell.base.inherited_block import InheritedBlock
from stepwell.base.units import format_bytes
from stepwell.transfer.copy_engine import free_bytes, map_now, touch

NOTE_BYTES = 4096
MEANING_BYTES = 32
ANSWER_S = 10.0  # until the maker, whose thread only waits for this, must have answered
_CREDENTIALS = struct.Struct("iII")  # process, user, group


class SharedBlock:
    """Memory of `size_bytes`, mapped for as long as this object exists."""

    def __init__(self, memory: memoryview, size_bytes: int) -> None:
        self._memory = memory
        self.size_bytes = size_bytes

    @classmethod
    def make(cls, name: str, size_bytes: int, *, meaning: str) -> SharedBlock:
        """New memory, allocated completely now, for the one process that opens this name. Raises ConfigError if there is too
        little, or while another block of this name waits to be opened.
        """
        if size_bytes + NOTE_BYTES > (free := free_bytes()):
            raise ConfigError(
                f"{format_bytes(size_bytes)} of host memory cannot be allocated ({format_bytes(free)} are free): set a smaller "
                "host_memory"
            )
        memory = InheritedBlock(size_bytes + NOTE_BYTES)
        block = cls(memory.view, size_bytes)
        touch(block._memory)
        block._note(8, _digest(meaning))
        weakref.finalize(block, _withdraw, _offered(name, memory), os.getpid())
        return block

    @classmethod
    def open(cls, name: str, size_bytes: int) -> SharedBlock:
        """The memory that another process of this machine created under a name. Raises ConfigError if it is not available."""
        fd = _fetched(name)
        try:
            found = os.fstat(fd).st_size
            if found != size_bytes + NOTE_BYTES:
                raise ConfigError(
                    f"a worker shares {found} bytes of memory, and {size_bytes + NOTE_BYTES} are expected: restart vLLM"
                )
            mapped = mmap.mmap(fd, found)
        finally:
            os.close(fd)
        map_now(mapped)
        return cls(memoryview(mapped), size_bytes)

    @property
    def view(self) -> memoryview:
        """The part that is for pages."""
        return self._memory[: self.size_bytes]

    @property
    def meaning(self) -> str:
        """A digest of the meaning that the maker gave for its bytes."""
        start = self.size_bytes + 8
        return bytes(self._memory[start : start + MEANING_BYTES]).hex()

    @property
    def ended_job(self) -> int:
        """The last job up to which all copies had succeeded when its maker closed; 0 before."""
        return int.from_bytes(self._memory[self.size_bytes : self.size_bytes + 8], "little")

    def note_ended(self, job: int) -> None:
        self._note(0, job.to_bytes(8, "little"))

    def _note(self, offset: int, data: bytes) -> None:
        start = self.size_bytes + offset
        self._memory[start : start + len(data)] = data


def _offered(name: str, memory: InheritedBlock) -> socket.socket:
    """A socket of this name whose thread sends the descriptor to the first process of this user that connects, and ends."""
    offer = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    try:
        offer.bind(_address(name))
    except OSError as error:
        offer.close()
        raise ConfigError(
            f"host memory of this name is offered already ({error.strerror}): one engine can have one StepwellConnector, and two "
            "engines need two engine_ids in --kv-transfer-config"
        ) from error
    offer.listen()
    Thread(target=_hand_over, args=(offer, memory), name=f"shared-memory-{name}", daemon=True).start()
    return offer


def _hand_over(offer: socket.socket, memory: InheritedBlock) -> None:
    """Keeps `memory`, and with it its descriptor, until it was sent or withdrawn."""
    with offer:
        while True:
            try:
                asking, _ = offer.accept()
            except OSError:
                return  # withdrawn
            with asking:
                if _user_of(asking) == os.geteuid():
                    try:
                        socket.send_fds(asking, [b"\0"], [memory.fd])
                        return
                    except OSError:
                        pass  # the connecting process has ended


def _withdraw(offer: socket.socket, maker: int) -> None:
    """Ends the thread that waits for an opener. Does nothing in a forked process, which has no such thread."""
    if os.getpid() == maker:
        with suppress(OSError):  # it was opened already, so the socket is closed
            offer.shutdown(socket.SHUT_RDWR)


def _fetched(name: str) -> int:
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as asking:
        asking.settimeout(ANSWER_S)
        try:
            asking.connect(_address(name))
            if _user_of(asking) != os.geteuid():
                raise ConfigError(
                    f"another user's process offers the memory {name!r} of this engine's worker: choose another engine_id"
                )
            _, fds, _, _ = socket.recv_fds(asking, 1, 1)
        except OSError as error:
            raise ConfigError(
                f"the host memory that a worker shares with the scheduler is not offered ({error}): all workers of an engine "
                "must run on one machine, and in one network namespace (in one container)"
            ) from error
        if not fds:
            raise ConfigError("a worker ended while the scheduler opened the host memory that they share: see the worker's log")
        return int(fds[0])


def _user_of(connected: socket.socket) -> int:
    _, user, _ = _CREDENTIALS.unpack(connected.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _CREDENTIALS.size))
    return int(user)


def _address(name: str) -> str:
    return f"\0stepwell-{name}"


def _digest(meaning: str) -> bytes:
    return blake2b(meaning.encode(), digest_size=MEANING_BYTES).digest()
