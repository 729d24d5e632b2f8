"""Tasks in processes of their own: their results, and that no process is left, whatever fails and when."""

from __future__ import annotations

import multiprocessing
import os
import signal
from collections.abc import Iterator
from pathlib import Path

import pytest
from pool_tasks import SERVED, do

from groups import started, wait_for_members, wait_until_gone
from stepwell.base.errors import ConfigError, NoRoom
from stepwell.sim.pool import WorkerTraceback, run_all
from waiting import PATIENCE_S

EVERYWHERE = Path(__file__).with_name("interrupted_everywhere.py")
ENDLESS = """
from pool_tasks import do
from stepwell.sim.pool import run_all


def show(served):
    if served:
        print(served, flush=True)


if __name__ == "__main__":
    run_all(do, ["endless"] * 2, jobs=2, on_result=print, on_progress=show)
"""


@pytest.fixture(autouse=True)
def nobody_left() -> Iterator[None]:
    yield
    assert not multiprocessing.active_children()


def run(*tasks: str, jobs: int = 2) -> tuple[dict[int, str], list[int]]:
    found: dict[int, str] = {}
    progress: list[int] = []
    run_all(do, tasks, jobs=jobs, on_result=found.__setitem__, on_progress=progress.append)
    return found, progress


@pytest.mark.parametrize("jobs", [1, 2, 9])
def test_each_task_is_done_once_and_its_requests_counted(jobs: int) -> None:
    found, progress = run("a", "b", "c", jobs=jobs)
    assert found == {0: "A", 1: "B", 2: "C"}
    assert progress == sorted(progress) and progress[-1] == 3 * SERVED


def test_no_tasks_need_no_process() -> None:
    assert run() == ({}, [])


def test_what_a_task_raises_is_raised_here_with_the_lines_that_led_to_it() -> None:
    with pytest.raises(NoRoom, match="there is none") as raised:
        run("no space", "endless")
    assert raised.value.waiting
    assert isinstance(raised.value.__cause__, WorkerTraceback) and "pool_tasks.py" in str(raised.value.__cause__)


def test_an_error_that_cannot_travel_is_told_in_words() -> None:
    with pytest.raises(RuntimeError, match="Peculiar: this and that"):
        run("peculiar")


@pytest.mark.parametrize(("task", "said"), [("exits", "SystemExit: 3"), ("cannot travel", "pickle")])
def test_what_would_end_a_worker_is_not_called_a_lack_of_memory(task: str, said: str) -> None:
    with pytest.raises(Exception, match=said) as raised:
        run(task, "endless")
    assert not isinstance(raised.value, ConfigError) and isinstance(raised.value.__cause__, WorkerTraceback)


def test_an_end_of_file_is_the_tasks_own() -> None:
    with pytest.raises(EOFError, match="cut off"):
        run("ends early")


def test_a_worker_that_is_killed_is_an_error_of_one_line() -> None:
    with pytest.raises(ConfigError, match="was killed"):
        run("endless", "killed")


def test_an_error_of_the_callers_own_ends_the_workers() -> None:
    with pytest.raises(ZeroDivisionError):
        run_all(do, ["endless"] * 2, jobs=2, on_result=lambda place, result: None, on_progress=lambda served: 1 // 0)


def test_an_interrupt_in_any_place_is_raised_and_leaves_nobody() -> None:
    with started(str(EVERYWHERE)) as process:
        out, error = process.communicate()  # it has a limit of its own for each place
        assert (process.returncode, error) == (0, b""), error.decode()
        assert int(out) > 50
        wait_until_gone(process)


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGKILL])
@pytest.mark.parametrize("under_way", [False, True])
def test_workers_end_when_their_caller_is_killed(under_way: bool, number: signal.Signals, tmp_path: Path) -> None:
    program = tmp_path / "endless.py"
    program.write_text(ENDLESS)
    with started(str(program)) as process:
        assert process.stdout is not None
        if under_way:
            assert process.stdout.readline()
        else:
            wait_for_members(process, 4)  # itself, its two workers, and what multiprocessing starts for them
        os.kill(process.pid, number)
        process.communicate(timeout=PATIENCE_S)
        assert process.returncode == -number
        wait_until_gone(process)
