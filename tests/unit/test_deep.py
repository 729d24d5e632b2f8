"""Which tests are deep: the lists name tests that exist, and the rules leave each test a quick case."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

import deep

TESTS = Path(deep.__file__).parent

RULES = """
import pytest

@pytest.mark.parametrize("family", ["llama", "gemma3", "falcon_h1", "qwen3_next"])
def test_of_families(family):
    pass

@pytest.mark.parametrize("family", ["mamba2", "kimi_linear"])
def test_without_a_quick_family(family):
    pass

@pytest.mark.parametrize("seed", range(9))
def test_of_seeds(seed):
    pass

@pytest.mark.parametrize("size", range(5))
def test_of_sizes(size):
    pass
"""


@pytest.mark.parametrize("place", [*deep.DEEP, *deep.ONE_CASE])
def test_what_is_listed_exists(place: str) -> None:
    path, _, name = place.partition("::")
    assert (TESTS / path).exists()
    if name:
        assert re.search(rf"\bdef {name}\(", (TESTS / path).read_text()), "the test was renamed: rename it in the list"


@pytest.mark.parametrize("workers", ["0", "2"])
def test_a_quick_run_takes_some_cases_of_each_test_and_counts_the_others(workers: str, tmp_path: Path) -> None:
    engine = tmp_path / "tests" / "engine"
    engine.mkdir(parents=True)
    (engine / "test_rules.py").write_text(RULES)
    (tmp_path / "pytest.ini").write_text("[pytest]\nmarkers = deep: slow\n")
    (tmp_path / "tests" / "conftest.py").write_text((TESTS / "conftest.py").read_text())
    command = [sys.executable, "-m", "pytest", "-v", "-p", "no:cacheprovider", "-n", workers, "-m", "not deep", "tests"]
    env = {"PYTHONPATH": str(TESTS), "PATH": "/usr/bin:/bin"}
    said = subprocess.run(command, cwd=tmp_path, env=env, capture_output=True, text=True, timeout=120).stdout
    passed = set(re.findall(r"(?:::|PASSED .*::)(test_\w+\[\w+\])", said))
    assert passed == {
        "test_of_families[gemma3]", "test_of_families[qwen3_next]", "test_without_a_quick_family[mamba2]", "test_of_sizes[0]",
        "test_of_seeds[0]",
    }  # fmt: skip
    assert "15 deep tests" in said and "make test-all" in said


def _faults() -> list[tuple[str, str]]:
    return re.findall(r"\| `(\S+::\w+)` \| (\w*) ?\|", (TESTS / "FAULTS.md").read_text())


@pytest.mark.parametrize(("place", "mark"), _faults())
def test_every_fault_has_a_test_and_says_whether_make_test_runs_it(place: str, mark: str) -> None:
    path, _, name = place.partition("::")
    assert re.search(rf"\bdef {name}\(", (TESTS / path).read_text()), "the test was renamed or deleted: see tests/FAULTS.md"
    assert (mark == "deep") == deep.is_listed(place)


def test_the_list_of_faults_is_read() -> None:
    assert len(_faults()) > 50
