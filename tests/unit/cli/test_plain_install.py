"""Every command where nothing but a plain install is there: it works, or says what to install. Never a traceback."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from stepwell.base.extras import install
from stepwell.cli.main import COMMANDS, main

PLAIN = """
import sys
from importlib.abc import MetaPathFinder
ALWAYS = {*sys.stdlib_module_names, "stepwell", "numpy", "rich", "xxhash", "markdown_it", "mdurl", "pygments"}

class OnlyWhatAPlainInstallHas(MetaPathFinder):
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] not in ALWAYS and not name.startswith("_"):
            raise ModuleNotFoundError(f"No module named {name!r}", name=name)

sys.meta_path.insert(0, OnlyWhatAPlainInstallHas())
from stepwell.cli.main import main
sys.exit(main(sys.argv[1:]))
"""
NEEDS_MORE = {
    "build-kernels": (["build-kernels"], "cuda"),
    "demo": (["demo"], "serve"),
    "serve": (["serve", "--model", "random-hybrid"], "serve"),
}
WORKS = {
    "doctor": ["doctor"],
    "explain": ["explain", "--spec", "gemma-3-270m", "TRACE"],
    "plan": ["plan", "--spec", "gemma-3-270m", "--requests", "5", "--jobs", "1", "TRACE"],
    "replay": ["replay", "--spec", "gemma-3-270m", "--device", "1GiB", "TRACE"],
    "spec": ["spec", "gemma-3-270m"],
    "store": ["store", "new-key", "KEY"],
    "trace": ["trace", "describe", "TRACE"],
}


def plain(*arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run([sys.executable, "-c", PLAIN, *arguments], capture_output=True, text=True, check=False)


def test_every_command_is_tried() -> None:
    assert NEEDS_MORE.keys() | WORKS.keys() == {command.name for command in COMMANDS}


@pytest.mark.parametrize("name", NEEDS_MORE)
def test_a_command_that_needs_more_names_it_and_how_to_install_it(name: str) -> None:
    arguments, extra = NEEDS_MORE[name]
    done = plain(*arguments)
    assert done.returncode == 2 and "Traceback" not in done.stderr, done.stderr
    assert f"stepwell {name} needs torch, which is not installed: {install(extra)}" in done.stderr


@pytest.mark.parametrize("name", WORKS)
def test_every_other_command_works(name: str, tmp_path: Path) -> None:
    places = {"TRACE": str(tmp_path / "trace.jsonl"), "KEY": str(tmp_path / "key")}
    assert main(["trace", "generate", "chat", places["TRACE"], "--sessions", "2"]) == 0
    done = plain(*(places.get(each, each) for each in WORKS[name]))
    assert "Traceback" not in done.stderr and "No module named" not in done.stderr, done.stderr
    assert done.returncode == 0 or name == "doctor", done.stderr  # which reports what is missing
