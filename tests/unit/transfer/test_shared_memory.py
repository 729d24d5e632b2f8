"""Memory that two processes share by name: made by one, opened by the other, and gone with the last of them."""

from __future__ import annotations

import gc
import mmap
import os
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from uuid import uuid4

import pytest

from stepwell import ConfigError
from stepwell.jobs.children import start_child
from stepwell.transfer import shared_memory
from stepwell.transfer.shared_memory import NOTE_BYTES, SharedBlock
from waiting import wait_until

CHILD = """
import sys; from stepwell.transfer.shared_memory import SharedBlock
block = SharedBlock.open(sys.argv[1], 8192); block.view[7:11] = b"from"
"""
MAKER = """
import sys; from stepwell.transfer.shared_memory import SharedBlock
block = SharedBlock.make(sys.argv[1], 8192, meaning="rows"); block.view[:4] = b"made"; print("made", flush=True); sys.stdin.read()
"""
FAULTS = """
import mmap, resource, sys; from stepwell.transfer.shared_memory import SharedBlock
view = SharedBlock.open(sys.argv[1], 16 << 20).view
faults = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
for page in range(0, 16 << 20, mmap.PAGESIZE): view[page] = 1
print(resource.getrusage(resource.RUSAGE_SELF).ru_minflt - faults)
"""


@pytest.fixture
def name() -> str:
    return uuid4().hex


@contextmanager
def maker(name: str) -> Iterator[subprocess.Popen[str]]:
    """A process that has made a block."""
    process = start_child([sys.executable, "-c", MAKER, name], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None and process.stdout.readline() == "made\n"
    try:
        yield process
    finally:
        process.kill()
        process.communicate()


def sockets(name: str) -> list[str]:
    with open("/proc/net/unix") as lines:
        return [line for line in lines if name in line]


def test_two_processes_see_the_same_bytes(name: str) -> None:
    block = SharedBlock.make(name, 8192, meaning="rows")
    subprocess.run([sys.executable, "-c", CHILD, name], check=True)
    assert bytes(block.view[7:11]) == b"from" and len(block.view) == 8192


def test_nothing_is_left_in_dev_shm_and_the_name_is_free_when_it_was_opened(name: str) -> None:
    before = set(os.listdir("/dev/shm"))
    made = SharedBlock.make(name, 8192, meaning="rows")
    opened = SharedBlock.open(name, 8192)
    wait_until(lambda: not sockets(name))
    assert set(os.listdir("/dev/shm")) <= before
    again = SharedBlock.make(name, 8192, meaning="rows")
    again.view[:1] = b"2"
    made.view[:1] = b"1"
    assert bytes(opened.view[:1]) == b"1" and bytes(SharedBlock.open(name, 8192).view[:1]) == b"2"


def test_memory_is_mapped_when_it_is_opened_and_does_not_fault_under_a_request(name: str) -> None:
    block = SharedBlock.make(name, 16 << 20, meaning="")
    done = subprocess.run([sys.executable, "-c", FAULTS, name], check=True, capture_output=True, text=True)
    assert bytes(block.view[:1]) == b"\1"
    assert int(done.stdout) < (16 << 20) // mmap.PAGESIZE // 8


def test_a_note_says_what_bytes_mean_and_how_far_copies_came(name: str) -> None:
    made = SharedBlock.make(name, 4096, meaning="rows")
    found = SharedBlock.open(name, 4096)
    assert found.ended_job == 0 and found.meaning == made.meaning
    made.note_ended(12)
    assert found.ended_job == 12
    assert SharedBlock.make(f"{name} c", 4096, meaning="columns").meaning != made.meaning


def test_a_block_that_was_never_opened_goes_with_its_maker(name: str) -> None:
    block = SharedBlock.make(name, 4096, meaning="")
    assert sockets(name)
    del block
    gc.collect()
    wait_until(lambda: not sockets(name))
    with pytest.raises(ConfigError, match="not offered"):
        SharedBlock.open(name, 4096)


def test_a_maker_that_is_killed_leaves_nothing_and_what_was_opened_goes_on(name: str) -> None:
    with maker(name) as process:
        os.kill(process.pid, signal.SIGKILL)
        process.wait()
        assert not sockets(name)
    with maker(name) as process:
        block = SharedBlock.open(name, 8192)
        os.kill(process.pid, signal.SIGKILL)
        process.wait()
        assert bytes(block.view[:4]) == b"made" and not sockets(name)


def test_two_blocks_of_one_name_at_once_are_refused(name: str) -> None:
    first = SharedBlock.make(name, 4096, meaning="")
    with pytest.raises(ConfigError, match="one StepwellConnector"):
        SharedBlock.make(name, 4096, meaning="")
    first.view[:5] = b"first"
    assert bytes(SharedBlock.open(name, 4096).view[:5]) == b"first"


def test_memory_of_another_size_is_refused(name: str) -> None:
    made = SharedBlock.make(name, 8192, meaning="")
    with pytest.raises(ConfigError, match=f"shares {8192 + NOTE_BYTES} bytes"):
        SharedBlock.open(name, 4096)
    assert made.size_bytes == 8192


@pytest.mark.parametrize("side", ["maker", "opener"])
def test_processes_of_other_users_are_neither_answered_nor_believed(
    name: str, side: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    made = SharedBlock.make(name, 4096, meaning="")
    made.view[:4] = b"made"
    seen: list[int] = []

    def user_of(connected: socket.socket) -> int:
        is_maker = connected.getsockname() == f"\0stepwell-{name}".encode()
        seen.append(is_maker)
        return os.geteuid() + (is_maker == (side == "maker"))

    monkeypatch.setattr(shared_memory, "_user_of", user_of)
    with pytest.raises(ConfigError, match=r"another user's process|a worker ended"):
        SharedBlock.open(name, 4096)
    monkeypatch.undo()
    assert seen


def test_more_than_there_is_memory_for_is_refused_before_it_is_taken(name: str) -> None:
    with pytest.raises(ConfigError, match="set a smaller host_memory"):
        SharedBlock.make(name, 1 << 60, meaning="")
    assert not sockets(name)
