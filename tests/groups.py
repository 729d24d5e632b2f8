"""Programs in a process group of their own, to be interrupted as by a terminal. None is left, however a test ends.

A program inherits whether interrupts are ignored, and a shell that runs something in the background has them ignored. So
it is always said which of the two a program starts with: a test must not depend on how its run was started.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from stepwell.jobs.children import start_child
from waiting import wait_until

START = """
import os, signal, sys
signal.signal(signal.SIGINT, signal.Handlers(int(sys.argv[1])))
os.write(1, b"!")
os.execv(sys.argv[2], sys.argv[2:])
"""


@contextmanager
def started(*arguments: str, ignoring: bool = False) -> Iterator[subprocess.Popen[bytes]]:
    """Python with these arguments, at the head of its group, which is killed at the end. It imports what this process can."""
    interrupts = signal.SIG_IGN if ignoring else signal.SIG_DFL
    argv = [sys.executable, "-c", START, str(int(interrupts)), sys.executable, *arguments]
    env = os.environ | {"PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
    with start_child(argv, stdout=subprocess.PIPE, stderr=subprocess.PIPE, start_new_session=True, env=env) as process:
        try:
            assert process.stdout is not None
            assert os.read(process.stdout.fileno(), 1) == b"!", process.communicate()
            yield process
        finally:
            tell(process, signal.SIGKILL)


def tell(process: subprocess.Popen[bytes], number: signal.Signals) -> None:
    """Sends a signal to every process of its group, if any is left."""
    with suppress(ProcessLookupError):
        os.killpg(process.pid, number)


def members(process: subprocess.Popen[bytes]) -> list[int]:
    """Who is in its group, but for those that have ended."""
    found = []
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            try:
                state, _, group = (entry / "stat").read_text().rpartition(")")[2].split()[:3]
            except OSError:
                continue
            if int(group) == process.pid and state != "Z":
                found.append(int(entry.name))
    return found


def wait_until_gone(process: subprocess.Popen[bytes]) -> None:
    wait_until(lambda: not members(process), "everybody has left")


def wait_for_members(process: subprocess.Popen[bytes], least: int) -> None:
    """Until the group has `least` members, or the program has ended."""
    wait_until(lambda: len(members(process)) >= least or process.poll() is not None, f"{least} processes have been started")
