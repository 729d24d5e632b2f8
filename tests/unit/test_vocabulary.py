"""Sources and documents are in plain English: a list of words, and no sentence that begins with "Of"."""

from __future__ import annotations

import runpy
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).parents[2]


@pytest.fixture(scope="module")
def tool() -> dict[str, Any]:
    return runpy.run_path(str(ROOT / "tools" / "vocabulary.py"))


def test_no_file_of_a_clean_folder_has_a_word_of_the_list(tool: dict[str, Any]) -> None:
    found = [line for path in tool["files"]() if tool["is_checked"](path) for line in tool["complaints"](path)]
    assert not found, "\n".join(found)


def test_all_documents_are_checked(tool: dict[str, Any]) -> None:
    documents = [*ROOT.glob("*.md"), *(ROOT / "docs").rglob("*.md")]
    unchecked = {path.relative_to(ROOT).as_posix() for path in documents if not tool["is_checked"](path)}
    assert unchecked == {"CHANGELOG.md", *(f"docs/reference/{name}.md" for name in ("flags", "metrics", "http", "python"))}


@pytest.mark.parametrize(
    ("line", "words"),
    [
        ("it was told beside the others", ["told", "beside"]),
        ("a page that nobody has given it back", ["nobody", "given it back"]),
        ("# Of a store it knows little", ["Of ..."]),
        ("It ends. Of every layer one is kept", ["Of ..."]),
        ("no_room, NoRoom and let_go are names", []),
        ("the release of a lease; a kind of page", []),
    ],
)  # fmt: skip
def test_words_are_found_where_they_are_words(tool: dict[str, Any], line: str, words: list[str]) -> None:
    assert [word for word, _ in tool["words_in"](line)] == words


def test_code_in_a_document_is_not_prose(tool: dict[str, Any], tmp_path: Path) -> None:
    page = tmp_path / "page.md"
    page.write_text("`beside` is a name\n```\nnobody\n```\nnobody\n")
    assert list(tool["complaints"](page)) == ["page.md:5: 'nobody': write the request, the engine, the caller"]


def test_names_of_python_are_not_prose(tool: dict[str, Any], tmp_path: Path) -> None:
    page = tmp_path / "page.py"
    page.write_text('beside = file.tell()  # told\n\n\ndef lend(room: int) -> str:\n    """Owes it."""\n    return "a room"\n')
    assert [line.split(":")[1:3] for line in tool["complaints"](page)] == [["1", " 'told'"], ["5", " 'Owes'"], ["6", " 'room'"]]
