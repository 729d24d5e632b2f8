"""A child ends with the process that started it, however that ends, and not with the thread that asked for it."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
from contextlib import suppress
from pathlib import Path
from threading import Thread

import pytest

from stepwell.jobs.children import start_child
from waiting import wait_until

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="only Linux ends children with their parent")

READY = "print('ready', flush=True); import time; time.sleep(3600)"
PARENT = f"""
import signal, sys, time
from stepwell.jobs.children import start_child
signal.signal(signal.SIGINT, signal.default_int_handler)  # a shell's background jobs ignore it
child = start_child([sys.executable, "-c", {READY!r}], start_new_session=True)
print(child.pid, flush=True)
if sys.argv[1] == "waits":
    time.sleep(3600)
"""


def runs(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


@pytest.mark.parametrize("end", [signal.SIGKILL, signal.SIGINT, None], ids=["kill -9", "Ctrl-C", "the last line"])
def test_a_child_ends_with_its_parent(end: signal.Signals | None) -> None:
    command = [sys.executable, "-c", PARENT, "ends" if end is None else "waits"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL) as parent:
        assert parent.stdout is not None
        said = [parent.stdout.readline(), parent.stdout.readline()]  # one of the child, in either order
        pid = next(int(line) for line in said if line.strip().isdigit())
        try:
            if end is not None:
                assert runs(pid)
                parent.send_signal(end)
            parent.wait()
            wait_until(lambda: not runs(pid), "the child has ended")
        finally:
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)


def test_a_child_outlives_the_thread_that_asked_for_it_and_has_the_id_of_its_command() -> None:
    started: list[subprocess.Popen[bytes]] = []
    command = [sys.executable, "-c", "import os; print(os.getpid(), flush=True); input()"]
    thread = Thread(target=lambda: started.append(start_child(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE)))
    thread.start()
    thread.join()
    with started[0] as child:
        assert child.stdout is not None and int(child.stdout.readline()) == child.pid
        child.communicate(b"\n")
        assert child.returncode == 0, "it was not killed"


def test_a_program_that_is_not_there_is_named(tmp_path: Path) -> None:
    with start_child([str(tmp_path / "gone")], stderr=subprocess.PIPE, text=True) as child:
        assert "gone" in child.communicate()[1] and child.returncode


def test_tests_benchmarks_and_commands_start_no_process_in_another_way() -> None:
    root = Path(__file__).parents[3]
    alone = {Path(__file__).name, "bench_engines_gpu.py"}  # which runs without this package
    files = [path for folder in ("tests", "benchmarks", "examples", "src/stepwell/cli") for path in (root / folder).rglob("*.py")]
    assert not [path for path in files if path.name not in alone and re.search(r"\bPopen\(", path.read_text())]
