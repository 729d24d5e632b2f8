"""A run says at its end what did not run, and how to have it run, also where its tests run in several processes."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

import not_run
from waiting import PATIENCE_S

SKIPPING = """
import pytest

@pytest.mark.parametrize("number", range(3))
def test_on_a_device(number):
    pytest.skip("no device here: run it elsewhere")

@pytest.mark.skip(reason="takes minutes: run `make slow`")
def test_slow():
    pass

def test_with_a_package():
    pytest.importorskip("there_is_no_such_package")

def test_that_runs():
    pass
"""


@pytest.mark.parametrize("workers", ["0", "2"])
def test_skips_are_grouped_by_reason_with_the_way_to_run_them(workers: str, tmp_path: Path) -> None:
    (tmp_path / "test_skipping.py").write_text(SKIPPING)
    command = [sys.executable, "-m", "pytest", "-q", "-p", "xdist", "-p", "not_run", "-n", workers, str(tmp_path)]
    alone = {"PYTEST_ADDOPTS": "", "PYTHONPATH": str(Path(not_run.__file__).parent), "PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1"}
    done = subprocess.run(command, cwd=tmp_path, env=os.environ | alone, capture_output=True, text=True, timeout=PATIENCE_S)
    assert done.returncode == 0, done.stdout + done.stderr
    _, *said = done.stdout[done.stdout.index("= not run =") :].splitlines()
    assert said[0] == "3 tests: no device here: run it elsewhere"
    assert said[1].startswith("1 test: could not import 'there_is_no_such_package'") and said[1].endswith(f"({not_run.INSTALL})")
    assert said[2] == "1 test: takes minutes: run `make slow`"
    assert "1 passed, 5 skipped" in said[3]


def test_a_run_without_skips_says_nothing_of_them() -> None:
    assert not_run.not_run([]) == []
