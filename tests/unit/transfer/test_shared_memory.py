"""Memory that processes share by name: made by one, opened by another, gone from the file system then."""

from __future__ import annotations

import gc
import mmap
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from stepwell import ConfigError
from stepwell.transfer import shared_memory
from stepwell.transfer.shared_memory import SharedBlock

CHILD = """
import sys; from pathlib import Path; from stepwell.transfer.shared_memory import SharedBlock
block = SharedBlock.open("b", 8192, root=Path(sys.argv[1])); block.view[7:11] = b"from"
"""
KILLED = """
import os, signal, sys; from pathlib import Path; from stepwell.transfer.shared_memory import SharedBlock
block = SharedBlock.make("killed", 8192, meaning="", root=Path(sys.argv[1])); os.kill(os.getpid(), signal.SIGKILL)
"""

FAULTS = """
import mmap, resource, sys; from stepwell.transfer.shared_memory import SharedBlock
view = SharedBlock.open(sys.argv[1], 16 << 20).view
faults = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
for page in range(0, 16 << 20, mmap.PAGESIZE): view[page] = 1
print(resource.getrusage(resource.RUSAGE_SELF).ru_minflt - faults)
"""


def test_two_processes_see_the_same_bytes_and_leave_no_name(tmp_path: Path) -> None:
    block = SharedBlock.make("b", 8192, meaning="rows", root=tmp_path)
    assert os.stat(tmp_path / "stepwell-b").st_mode & 0o777 == 0o600
    subprocess.run([sys.executable, "-c", CHILD, str(tmp_path)], check=True)
    assert bytes(block.view[7:11]) == b"from" and len(block.view) == 8192
    assert not list(tmp_path.iterdir())


def test_memory_is_mapped_when_it_is_opened_and_does_not_fault_under_a_request() -> None:
    name = f"faults-{os.getpid()}"
    block = SharedBlock.make(name, 16 << 20, meaning="")
    done = subprocess.run([sys.executable, "-c", FAULTS, name], check=True, capture_output=True, text=True)
    assert bytes(block.view[:1]) == b"\1"
    assert int(done.stdout) < (16 << 20) // mmap.PAGESIZE // 8


def test_a_note_says_what_bytes_mean_and_how_far_copies_came(tmp_path: Path) -> None:
    made = SharedBlock.make("b", 4096, meaning="rows", root=tmp_path)
    found = SharedBlock.open("b", 4096, root=tmp_path)
    assert found.ended_job == 0 and found.meaning == made.meaning
    made.note_ended(12)
    assert found.ended_job == 12
    assert SharedBlock.make("c", 4096, meaning="columns", root=tmp_path).meaning != made.meaning


def test_a_block_that_nobody_opened_goes_with_its_maker(tmp_path: Path) -> None:
    block = SharedBlock.make("b", 4096, meaning="", root=tmp_path)
    assert len(list(tmp_path.iterdir())) == 1
    del block
    gc.collect()
    assert not list(tmp_path.iterdir())


def test_an_old_maker_leaves_the_block_alone_that_took_its_name(tmp_path: Path) -> None:
    old = SharedBlock.make("b", 4096, meaning="", root=tmp_path)
    new = SharedBlock.make("b", 4096, meaning="", root=tmp_path)
    del old
    gc.collect()
    SharedBlock.open("b", 4096, root=tmp_path).view[:3] = b"new"
    assert bytes(new.view[:3]) == b"new"


def test_blocks_of_makers_that_were_killed_are_removed_and_those_of_the_living_are_not(tmp_path: Path) -> None:
    killed = subprocess.run([sys.executable, "-c", KILLED, str(tmp_path)], check=False)
    assert killed.returncode == -signal.SIGKILL and [path.name for path in tmp_path.iterdir()] == ["stepwell-killed"]
    mine = SharedBlock.make("mine", 4096, meaning="", root=tmp_path)
    other = SharedBlock.make("other", 4096, meaning="", root=tmp_path)
    assert {path.name for path in tmp_path.iterdir()} == {"stepwell-mine", "stepwell-other"}
    assert mine.meaning == other.meaning


def test_what_was_left_under_a_name_is_replaced(tmp_path: Path) -> None:
    target = tmp_path / "precious"
    target.write_bytes(b"x" * 100)
    (tmp_path / "stepwell-b").symlink_to(target)
    SharedBlock.make("b", 4096, meaning="", root=tmp_path)
    assert target.read_bytes() == b"x" * 100


@pytest.mark.parametrize("what", ["missing", "short", "link"])
def test_what_no_worker_made_is_refused(tmp_path: Path, what: str) -> None:
    if what == "short":
        (tmp_path / "stepwell-b").write_bytes(b"x")
    elif what == "link":
        (tmp_path / "stepwell-b").symlink_to(tmp_path / "elsewhere")
    with pytest.raises(ConfigError, match=r"all workers of an|remove it and start again"):
        SharedBlock.open("b", 4096, root=tmp_path)


def test_more_than_there_is_room_for_is_refused_before_it_is_taken(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="--shm-size"):
        SharedBlock.make("b", 1 << 60, meaning="", root=tmp_path)
    assert not list(tmp_path.iterdir()) and Path("/dev/shm") == shared_memory.SHARED_ROOT
