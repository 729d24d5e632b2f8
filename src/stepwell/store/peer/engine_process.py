"""One of Mooncake's transfer engines, in a process of its own, over host memory that it inherits. The one file that imports it.

    serve   shows the memory to engines of other machines, which read from it. It is mapped for reading alone, so whoever
            tries to write to it is refused and changes nothing
    pull    reads from the memory of another machine into this one, a batch for each message, until its parent hangs up

A process, because killing it is the only end of a transfer that failed: the engine goes on writing after it has said so. And
because one engine that waits for a machine that does not answer makes everybody wait who uses the same engine.
Speaks packets with its parent (`lane.py`) over a socket that it inherits, and ends with it.
"""

from __future__ import annotations

import mmap
import os
import socket
import struct
import sys
from importlib import import_module
from typing import Any

import numpy as np

ENTRY = struct.Struct("<QQQ")  # offset in this memory, address in the other one, bytes
MAX_ENTRIES = 1024  # of a batch: 2,048 were seen to work, and 4,096 to fail in part
PACKET_BYTES = MAX_ENTRIES * ENTRY.size + 1024
READ, FAILED = b"r", b"f"
_NAME_BYTES = struct.Struct("<H")


def pack_batch(session: str, entries: list[tuple[int, int, int]]) -> bytes:
    name = session.encode()
    return _NAME_BYTES.pack(len(name)) + name + b"".join([ENTRY.pack(*entry) for entry in entries])


def main(argv: list[str]) -> int:
    mode, memory_fd, size_bytes, socket_fd, host = argv
    parent = socket.socket(fileno=int(socket_fd))
    access = mmap.PROT_READ if mode == "serve" else mmap.PROT_READ | mmap.PROT_WRITE
    memory = mmap.mmap(int(memory_fd), int(size_bytes), prot=access)
    address = _address(memory)
    engine: Any = import_module("mooncake.engine").TransferEngine()
    if engine.initialize(host, "P2PHANDSHAKE", "tcp", "") != 0:
        parent.send(b"the engine does not start")
        return 1
    # Only the side that is read from has to be known to its engine. The other must not be: whoever reaches an engine's port may
    # read and write what it knows. RDMA would need both, and Mooncake takes any name of a protocol for TCP: so TCP it is.
    if mode == "serve" and engine.register_memory(address, int(size_bytes)) != 0:
        parent.send(b"the engine does not take the memory")
        return 1
    parent.send(f"ready {host}:{engine.get_rpc_port()} {address}".encode())
    while packet := parent.recv(PACKET_BYTES):
        parent.send(_pull(engine, address, int(size_bytes), packet))
    return 0


def _pull(engine: Any, address: int, size_bytes: int, packet: bytes) -> bytes:
    (length,) = _NAME_BYTES.unpack_from(packet)
    session = packet[_NAME_BYTES.size : _NAME_BYTES.size + length].decode()
    entries = list(ENTRY.iter_unpack(packet[_NAME_BYTES.size + length :]))
    assert 0 < len(entries) <= MAX_ENTRIES, f"a batch of {len(entries)} entries"
    assert all(at + size <= size_bytes for at, _, size in entries), "an entry outside the memory"
    here, there, sizes = zip(*entries, strict=True)
    answer = engine.batch_transfer_sync_read(session, [address + at for at in here], list(there), list(sizes))
    return READ if answer == 0 else FAILED


def _address(memory: mmap.mmap) -> int:
    """Where a mapping lies, writable or not."""
    return int(np.frombuffer(memory, dtype=np.uint8).__array_interface__["data"][0])


if __name__ == "__main__":
    status = main(sys.argv[1:])
    os._exit(status)  # engines are not always able to end in order, and there is nothing to keep
