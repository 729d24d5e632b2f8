"""Frames over a Unix socket in the log's directory, between processes of one user, with deadlines. Does not know values.

The socket is reached through the directory's descriptor, so its path is never too long. Only this user may connect: the file's
mode is 0600, and both sides check the other's user with the kernel.
"""

from __future__ import annotations

import os
import select
import socket
import struct
import time
from array import array
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

from stepwell.store.shared.wire import HEADER, Kind, Malformed, pack_frame, parse_header

SOCKET_NAME = "socket"
_MODE = 0o600
_BACKLOG = 128
_CREDENTIALS = struct.Struct("iII")  # process, user, group
_PAUSE_S = 0.01  # while too many others are connecting
_ANCILLARY_BYTES = socket.CMSG_SPACE(array("i").itemsize)


class Gone(Exception):
    """The other side closed the connection, or never existed."""


class Recovering(Gone):
    """The other side has the log, and is still recovering it."""


class Late(Exception):
    """The other side did not answer in time."""


class Stranger(Exception):
    """The other side is another user's process."""


class Deadline:
    """The moment at which waiting ends."""

    def __init__(self, seconds: float) -> None:
        self._at_s = time.monotonic() + seconds

    @property
    def left_s(self) -> float:
        return max(self._at_s - time.monotonic(), 0.0)


@dataclass(frozen=True, slots=True, kw_only=True)
class Frame:
    kind: Kind
    body: bytes
    fd: int | None = None  # sent with it: the receiver of the frame closes it


class Connection:
    """One side of a connection. One thread uses it at a time; any thread may call `stop_hearing` and `close`."""

    def __init__(self, connected: socket.socket) -> None:
        """Raises Stranger, and closes the socket, if the other side belongs to another user."""
        self._socket = connected
        self._poll = select.poll()
        self._poll.register(connected, 0)  # only hang-ups, which are always reported
        self.process, user, _ = _CREDENTIALS.unpack(
            connected.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _CREDENTIALS.size)
        )
        if user != os.geteuid():
            connected.close()
            raise Stranger(f"process {self.process} belongs to user {user}, and this one to {os.geteuid()}")

    def send(self, kind: Kind, body: bytes = b"", *, fd: int | None = None, deadline: Deadline | None = None) -> None:
        """Raises Gone or Late; the connection is unusable then."""
        frame = memoryview(pack_frame(kind, body))
        with self._limited(deadline):
            if fd is not None:
                frame = frame[socket.send_fds(self._socket, [frame], [fd]) :]
            self._socket.sendall(frame)

    def receive(self, *, deadline: Deadline | None = None) -> Frame:
        """Raises Gone, Late or Malformed; the connection is unusable then."""
        fds: list[int] = []
        try:
            header = parse_header(self._exactly(HEADER.size, fds, deadline))
            _must_belong(fds, header.kind)
            body = self._exactly(header.body_bytes, fds, deadline)
            _must_belong(fds, header.kind)
            return Frame(kind=header.kind, body=body, fd=fds.pop() if fds else None)
        finally:
            for fd in fds:
                os.close(fd)

    def ask(self, kind: Kind, body: bytes, deadline: Deadline, *, fd: int | None = None) -> Frame:
        self.send(kind, body, fd=fd, deadline=deadline)
        return self.receive(deadline=deadline)

    def is_gone(self) -> bool:
        """Whether the other side has closed the connection. Does not wait."""
        return bool(self._poll.poll(0))

    def stop_hearing(self) -> None:
        """Stops receiving: the next read sees the end of the stream; requests received before can still be answered."""
        with suppress(OSError):
            self._socket.shutdown(socket.SHUT_RD)

    def hang_up(self) -> None:
        """Ends the connection for both sides, and wakes a thread that waits in it."""
        with suppress(OSError):
            self._socket.shutdown(socket.SHUT_RDWR)

    def close(self) -> None:
        """Closes only this process's end: a fork does not affect the other side."""
        self._socket.close()

    def _exactly(self, size: int, fds: list[int], deadline: Deadline | None) -> bytes:
        """Exactly this many bytes, and the one descriptor that may come with a frame. Raises like `receive`."""
        parts: list[bytes] = []
        while size:
            with self._limited(deadline):
                part, ancillary, _, _ = self._socket.recvmsg(size, _ANCILLARY_BYTES, socket.MSG_CMSG_CLOEXEC)
            for level, kind, data in ancillary:
                if (level, kind) == (socket.SOL_SOCKET, socket.SCM_RIGHTS):
                    fds += array("i", data[: len(data) // array("i").itemsize * array("i").itemsize])
            if len(fds) > 1:  # a slow sender must not keep many open
                raise Malformed("more than one descriptor")
            if not part:
                raise Gone("the connection was closed")
            parts.append(part)
            size -= len(part)
        return b"".join(parts)

    @contextmanager
    def _limited(self, deadline: Deadline | None) -> Iterator[None]:
        """Maps errors of the system to ours."""
        try:
            if deadline is not None:
                self._socket.settimeout(max(deadline.left_s, 1e-3))
            yield
        except TimeoutError:
            raise Late("no answer in time") from None
        except OSError as error:
            raise Gone(f"the connection failed: {error}") from None


def _must_belong(fds: Sequence[int], kind: Kind) -> None:
    if fds and kind is not Kind.MEMORY:
        raise Malformed("a descriptor with a frame that has none")


# ---- where it is ----------------------------------------------------------------------------------


def listen(directory: Path) -> socket.socket:
    """A listening socket in the directory, in place of a stale one: only for the holder of the lock. Raises OSError."""
    listening = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    try:
        os.fchmod(listening.fileno(), _MODE)  # set before the file exists: other users never see it open
        with _address(directory) as address:
            remove(directory)
            listening.bind(address)
        listening.listen(_BACKLOG)
    except BaseException:
        listening.close()
        raise
    return listening


def identity(directory: Path) -> tuple[int, int] | None:
    """Which file the socket in the directory is; None if there is none."""
    try:
        found = (directory / SOCKET_NAME).lstat()
    except OSError:
        return None
    return found.st_dev, found.st_ino


def remove(directory: Path) -> None:
    with suppress(FileNotFoundError):
        (directory / SOCKET_NAME).unlink()


def connect(directory: Path, deadline: Deadline) -> Connection:
    """Raises Gone if no process listens there, Late if it does not accept in time, Stranger if it is another user's."""
    connecting = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    try:
        with _address(directory) as address:
            while not _try_to_connect(connecting, address, deadline):
                time.sleep(_PAUSE_S)
    except TimeoutError:
        connecting.close()
        raise Late("no answer in time") from None
    except OSError as error:
        connecting.close()
        raise Gone(f"no process listens in {directory}: {error}") from None
    except BaseException:
        connecting.close()
        raise
    return Connection(connecting)


def _try_to_connect(connecting: socket.socket, address: str, deadline: Deadline) -> bool:
    """False when too many others wait to be accepted. Raises OSError; TimeoutError when no time is left."""
    connecting.settimeout(max(deadline.left_s, 1e-3))
    try:
        connecting.connect(address)
    except BlockingIOError:
        if not deadline.left_s:
            raise TimeoutError from None
        return False
    return True


@contextmanager
def _address(directory: Path) -> Iterator[str]:
    fd = os.open(directory, os.O_PATH | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        yield f"/proc/self/fd/{fd}/{SOCKET_NAME}"
    finally:
        os.close(fd)
