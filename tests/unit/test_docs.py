"""What the docs name is there: files, tests that are said to hold something, targets of make that take what is given."""

from __future__ import annotations

import argparse
import re
import runpy
import tomllib
from collections.abc import Iterator
from pathlib import Path

import pytest

from stepwell.cli.main import build_parser

ROOT = Path(__file__).parents[2]
PAGES = sorted([*ROOT.glob("*.md"), *(ROOT / "docs").rglob("*.md")])
FOLDERS = ("src", "tests", "benchmarks", "examples", "deploy", "docs", "install", "tools", ".ci", ".github")
FILES = [path for folder in FOLDERS for path in (ROOT / folder).rglob("*") if path.is_file() and "__pycache__" not in path.parts]
README = (ROOT / "README.md").read_text()
OF_THE_PAST = ("CHANGELOG.md", "progress.md")
FOREIGN = """
--build-arg --cb-failure-threshold --cb-timeout-duration-secs --context-length --dcp-size --decode
--enable-hierarchical-cache --enable-unified-cache-external-linker --health-check-endpoint
--health-check-interval-secs --health-failure-threshold --hicache-io-backend --hicache-mem-layout
--hicache-storage-backend --hicache-storage-backend-extra-config --hicache-storage-prefetch-policy
--kv-events-config --kv-transfer-config --max-tree-size --model-path --page-size --pd-disaggregation --pp-size
--prefill --prometheus-host --unified-cache-external-linker-backend --unified-cache-external-linker-config
--vllm-pd-disaggregation --worker-urls
"""  # flags of other programs that pages name
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


# ---- links and flags --------------------------------------------------------------------------------


def test_links_of_the_readme_lead_to_files_of_the_repository() -> None:
    urls = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["urls"]
    home = re.escape(urls["Homepage"])
    raw = home.replace("github", "raw.githubusercontent", 1)
    for page in ("README.md", "SECURITY.md"):
        text = (ROOT / page).read_text()
        links = re.findall(rf"(?:{home}/(?:blob|tree)|{raw})/main/([\w./-]+)", text)
        assert links and not [link for link in links if not (ROOT / link).exists()], page
        assert not re.findall(r"\]\((?!https?://|#)[^)]*\)", text), f"{page} is read outside of the repository: absolute links"
    used, defined = (set(re.findall(pattern, README, re.MULTILINE)) for pattern in (r"\]\[(\w+)\]", r"^\[(\w+)\]: "))
    assert used == defined


@pytest.mark.parametrize("page", [page for page in PAGES if page.name not in OF_THE_PAST], ids=lambda page: page.name)
def test_flags_that_a_page_names_exist(page: Path) -> None:
    parsers = dict(commands())
    ours = {word for parser in parsers.values() for action in parser._actions for word in action.option_strings}
    code = " ".join(re.findall(r"```.*?```|`[^`]+`", page.read_text(), re.DOTALL))
    code = re.sub(r'ARGS="[^"]*"|^.*python benchmarks/.*$', "", code, flags=re.MULTILINE)  # of a benchmark, not of a command
    named = set(re.findall(r"(?<![\w-])--[a-z][a-z0-9-]+", code))
    assert not named - ours - set(FOREIGN.split()), (
        f"{page.name}: a flag of no command of ours (if it is a foreign one, add it to FOREIGN)"
    )


def commands() -> Iterator[tuple[str, argparse.ArgumentParser]]:
    yield from runpy.run_path(str(ROOT / "tools" / "reference.py"))["commands"](build_parser(), "stepwell")


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


# ---- size -----------------------------------------------------------------------------------------


def written() -> list[Path]:
    """Documents that people write: all but the reference, which is made from the code."""
    return [page for page in PAGES if page.parent.name != "reference" and page.name not in OF_THE_PAST]


def test_the_documents_stay_short() -> None:
    words = {page: len(page.read_text().split()) for page in PAGES if page.parent.name != "reference"}
    assert words[ROOT / "README.md"] <= 900
    assert sum(count for page, count in words.items() if page.is_relative_to(ROOT / "docs")) <= 30_000
    decisions = {page.name: count for page, count in words.items() if page.parent.name == "decisions" and page.name != "index.md"}
    assert len(decisions) >= 20 and max(decisions.values()) <= 200, decisions


@pytest.mark.parametrize("page", written(), ids=lambda page: page.name)
def test_tables_and_lines_of_a_page_can_be_read(page: Path) -> None:
    lines = page.read_text().splitlines()
    cells = [cell for line in lines if line.startswith("|") for cell in re.split(r"(?<!\\)\|", line)]
    assert not [cell for cell in cells if len(cell.split()) > 25]
    assert not [line for line in lines if len(line) > 200]


def test_every_page_is_in_the_menu_of_the_site() -> None:
    menu = set(re.findall(r"([\w/-]+\.md)$", (ROOT / "mkdocs.yml").read_text(), re.MULTILINE))
    assert menu == {page.relative_to(ROOT / "docs").as_posix() for page in PAGES if page.is_relative_to(ROOT / "docs")}
