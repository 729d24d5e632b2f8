"""One of Mooncake's transfer engines, in its own process, over inherited host memory. The one file that imports it.

    serve   shows the memory to engines of other machines, which read from it. The memory is mapped read-only, so
            attempts to write to it fail and change nothing
    pull    reads from the memory of another machine into this one, one batch for each message, until its parent hangs up

This is a process because killing it is the only way to end a failed transfer: the engine goes on writing after it reported the
failure. Also, an engine that waits for an unresponsive machine blocks all users of the same engine.
Exchanges packets with its parent (`lane.py`) over an inherited socket, and ends with it.
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
MAX_ENTRIES = 1024  # of a batch: 2,048 worked in a test, and 4,096 failed in part
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
    # Only the side that is read from registers its memory with its engine. The other side must not: any client that reaches an
    # engine's port may read and write registered memory. RDMA would need both, and Mooncake takes any unknown protocol for TCP.
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
    os._exit(status)  # engines cannot always shut down cleanly, and there is nothing to keep
