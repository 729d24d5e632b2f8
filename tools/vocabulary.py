"""Words that this project does not use, looked for in sources and documents.

    python tools/vocabulary.py             all files of the repository
    python tools/vocabulary.py FILE ...    these, as pre-commit calls it

Exit status 1 where a word is found, with file, line and what to write instead. Code in documents is not looked at; in
Python, names are not, but comments, docstrings and texts are. `tests/unit/test_vocabulary.py` runs the check.
"""

from __future__ import annotations

import io
import re
import sys
import tokenize
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
INSTEAD = {  # a pattern, and what to write
    r"beside": "compared with, next to, alongside",
    r"told|tells?|telling": "reported, sent, said",
    r"mend(?:s|ed|ing)?": "fix",
    r"nobody|whoever|somebody": "the request, the engine, the caller",
    r"be it that": "even if",
    r"of which": "whose, or a second sentence",
    r"what is to": "a noun",
    r"(?:is|are) to be": "must",
    r"so many|as many as": "the number, or n",
    r"room": "space, memory, capacity",
    r"lets? go|letting go": "release",
    r"(?:giv(?:e|es|en|ing)|gave) (?:\w+ )?back": "release, return",
    r"(?:tak(?:e|es|en|ing)|took) (?:\w+ )?back": "cancel, undo",
    r"forg(?:et|ets|ot|otten)|forgetting": "evict, drop",
    r"lend(?:s|ing)?|lent": "assign",
    r"ow(?:e|es|ed|ing)": "require",
}
WORDS = re.compile("|".join(rf"(?P<w{number}>\b(?:{word})\b)" for number, word in enumerate(INSTEAD)), re.IGNORECASE)
BEGINS_WITH_OF = re.compile(r"(?:^|[.!?:] |^[-*|] |^#+ )Of ")
FOLDERS = ("src", "tests", "benchmarks", "deploy", "docs", "examples", "install", "tools")
NEVER = {"tools/vocabulary.py", "tests/unit/test_vocabulary.py", "CHANGELOG.md", "LICENSE"}  # the first two name the words

# Folders that are not clean yet, each without the folders below it. Take one off once it is clean; add none.
NOT_YET = frozenset((ROOT / "tools" / "not_yet_clean.txt").read_text().split())


def main(argv: Sequence[str] | None = None) -> int:
    given = sys.argv[1:] if argv is None else argv
    paths = [Path(each).resolve() for each in given] if given else list(files())
    found = [line for path in paths if is_checked(path) for line in complaints(path)]
    print("\n".join(found), end="\n" if found else "")
    return bool(found)


def files() -> Iterator[Path]:
    """Every Python file and document of the repository."""
    yield from ROOT.glob("*.md")
    for folder in FOLDERS:
        for suffix in (".py", ".md"):
            yield from sorted((ROOT / folder).rglob(f"*{suffix}"))


def is_checked(path: Path) -> bool:
    name = path.relative_to(ROOT).as_posix() if path.is_relative_to(ROOT) else path.name
    folder = name.rpartition("/")[0]
    return path.suffix in (".py", ".md") and name not in NEVER and path.parent.name != "reference" and folder not in NOT_YET


def complaints(path: Path) -> Iterator[str]:
    """One line for each word that is found."""
    text = path.read_text()
    name = path.relative_to(ROOT).as_posix() if path.is_relative_to(ROOT) else path.name
    lines = text.splitlines() if path.suffix == ".md" else without_names(text)
    for number, line in enumerate(prose(lines, is_document=path.suffix == ".md"), 1):
        for word, instead in words_in(line):
            yield f"{name}:{number}: {word!r}: write {instead}"


def words_in(line: str) -> Iterator[tuple[str, str]]:
    """The words of a line that are not used here, with what to write instead."""
    for found in WORDS.finditer(line):
        yield found[0], list(INSTEAD.values())[int(str(found.lastgroup)[1:])]
    if BEGINS_WITH_OF.search(line.strip().removeprefix("#").strip().strip('"')):
        yield "Of ...", "the subject first"


def without_names(source: str) -> list[str]:
    """The lines of a Python file, with underscores for its names and keywords."""
    lines = source.splitlines()
    for token in tokenize.generate_tokens(io.StringIO(source).readline):
        if token.type == tokenize.NAME:
            (at, begin), (_, end) = token.start, token.end
            lines[at - 1] = lines[at - 1][:begin] + "_" * (end - begin) + lines[at - 1][end:]
    return lines


def prose(lines: Iterable[str], *, is_document: bool) -> Iterator[str]:
    """Lines without what stands in backticks, and a document without what stands in fences."""
    fenced = False
    for line in lines:
        if is_document and line.lstrip().startswith("```"):
            fenced = not fenced
            yield ""
        elif fenced:
            yield ""
        else:
            yield re.sub(r"`[^`]*`", "", line)


if __name__ == "__main__":
    sys.exit(main())
