"""What the docs name is there: files, and tests that are said to hold something."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PAGES = sorted([*ROOT.glob("*.md"), *(ROOT / "docs").glob("*.md")])
FOLDERS = ("src", "tests", "benchmarks", "deploy", "docs", ".ci")
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
