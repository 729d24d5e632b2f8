"""What the docs name is there: files, tests that are said to hold something, targets of make that take what is given."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PAGES = sorted([*ROOT.glob("*.md"), *(ROOT / "docs").rglob("*.md")])
FOLDERS = ("src", "tests", "benchmarks", "examples", "deploy", "docs", "install", "tools", ".ci", ".github")
FILES = [path for folder in FOLDERS for path in (ROOT / folder).rglob("*") if path.is_file() and "__pycache__" not in path.parts]
TESTS = "\n".join(path.read_text() for path in FILES if path.suffix == ".py" and path.is_relative_to(ROOT / "tests"))


@pytest.mark.parametrize("page", [page for page in PAGES if page.name != "CHANGELOG.md"], ids=lambda page: page.name)
def test_files_and_tests_that_a_page_names_are_there(page: Path) -> None:
    text = page.read_text()
    paths = ["/" + path.relative_to(ROOT).as_posix() for path in [*FILES, *ROOT.glob("*")]]
    named = re.findall(r"`([\w./-]+\.(?:py|md|toml|sh))`", text)
    missing = [name for name in named if not any(path.endswith("/" + name) for path in paths)]
    linked = [name for name in re.findall(r"\]\(([\w./-]+\.md)\)", text) if not (page.parent / name).is_file()]
    tests = re.findall(r"\btest_\w+\b", text)
    gone = [name for name in tests if f"def {name}" not in TESTS and not any(path.endswith(f"/{name}.py") for path in paths)]
    assert not (missing or linked or gone), f"{page.name} names what is not there"


# ---- make -----------------------------------------------------------------------------------------


def recipes() -> dict[str, str]:
    """What each target of the Makefile runs."""
    found = re.findall(r"^([a-z-]+):.*\n((?:\t.*\n)*)", (ROOT / "Makefile").read_text(), re.MULTILINE)
    return dict(found)


def test_targets_that_a_page_or_a_benchmark_names_are_there_and_take_the_arguments_that_it_gives() -> None:
    known, told = recipes(), [*PAGES, *(path for path in FILES if path.suffix == ".py" and "benchmarks" in path.parts)]
    for path in told:
        for target, arguments in re.findall(r"(?:`|^ {4})make ([a-z][a-z-]+)( ARGS=)?", path.read_text(), re.MULTILINE):
            assert target in known, f"{path.name} names make {target}"
            assert not arguments or "$(ARGS)" in known[target], f"{path.name} gives make {target} what it ignores"


def test_every_benchmark_that_takes_arguments_gets_those_of_make() -> None:
    for target, recipe in recipes().items():
        for program, given in re.findall(r"python benchmarks/(\w+\.py)(.*)", recipe):
            assert "ArgumentParser" not in (ROOT / "benchmarks" / program).read_text() or "$(ARGS)" in given, target
