"""SGLang's real tree, controller and host pools over Stepwell's store and over SGLang's own files, in processes that follow each
other: what was saved comes back with every byte, and what is damaged or of another shape does not.

Runs with `make test-sglang`, which installs SGLang in an environment of its own. Prints a table of both backends.
"""

from __future__ import annotations

import shutil
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
from processes_of_sglang import asked_for, life

TOKENS, PAGE, CHUNK, LEAVES_AT = 1024, 64, 256, 700
FLIPPED = 9  # the page that a bit is flipped in
KINDS = {"full": "MHA", "mla": "MLA", "dsa": "MLA and index (DSA)", "swa": "MHA and window", "mamba": "MHA and Mamba state"}

pytestmark = asked_for


def flip(directory: Path, piece: bytes) -> None:
    """Changes one bit, where these bytes lie."""
    (file,) = [path for path in directory.rglob("*") if path.is_file() and piece in path.read_bytes()]
    content = bytearray(file.read_bytes())
    content[content.index(piece) + 100] ^= 1
    file.write_bytes(content)


@pytest.fixture(scope="module")
def outcomes(tmp_path_factory: pytest.TempPathFactory) -> Mapping[str, Any]:
    """Saved by one process, damaged here, and resumed by another."""
    root = tmp_path_factory.mktemp("sglang")
    piece = bytes.fromhex(life("life.py", "save", root)["piece"])
    for backend in ("stepwell", "file"):
        shutil.copytree(root / f"{backend}-full", root / f"{backend}-flipped")
        flip(root / f"{backend}-flipped", piece)
    found = life("life.py", "resume", root)
    sys.stdout.write("\n".join(["", *table(found), ""]))
    return found


def table(found: Mapping[str, Any]) -> list[str]:
    """What both backends did, as in docs/sglang.md."""

    def tokens(outcome: list[Any]) -> str:
        return f"{outcome[0]} tokens, {'every byte equal' if outcome[1] else '**bytes differ**'}"

    def pages(count: int) -> str:
        return f"{count} pages" if not count else f"**{count} pages** as if they were its own"

    rows = [(f"{label}, resumed", *(tokens(found[f"{b} {kind}"]) for b in ("stepwell", "file"))) for kind, label in KINDS.items()]
    rows += [
        (f"{label}, leaving at token {LEAVES_AT}", *(tokens(found[f"{b} {kind} branch"]) for b in ("stepwell", "file")))
        for kind, label in KINDS.items()
    ]
    rows.append((f"MHA, one bit of page {FLIPPED} flipped", *(tokens(found[f"{b} flipped"]) for b in ("stepwell", "file"))))
    for case, label in (("layout", "MHA, asked for in another layout"), ("dtype", "MHA, asked for in another dtype")):
        rows.append((label, *(pages(found[f"{b} {case}"]) for b in ("stepwell", "file"))))
    return ["| case | Stepwell | SGLang's files |", "| --- | --- | --- |", *(f"| {' | '.join(row)} |" for row in rows)]


@pytest.mark.parametrize("kind", KINDS)
def test_a_new_process_resumes_with_every_byte(outcomes: Mapping[str, Any], kind: str) -> None:
    assert outcomes[f"stepwell {kind}"] == [TOKENS, True]


@pytest.mark.parametrize("kind", KINDS)
def test_a_prompt_that_leaves_the_path_resumes_where_all_pools_can(outcomes: Mapping[str, Any], kind: str) -> None:
    deepest = LEAVES_AT // CHUNK * CHUNK if kind == "mamba" else LEAVES_AT // PAGE * PAGE  # state is at ends of chunks only
    assert outcomes[f"stepwell {kind} branch"] == [deepest, True]


def test_a_flipped_bit_ends_the_prompt_before_it(outcomes: Mapping[str, Any]) -> None:
    assert outcomes["stepwell flipped"] == [FLIPPED * PAGE, True]
    assert outcomes["file flipped"] == [TOKENS, False]  # the check that the bit was flipped where it matters


def test_pages_of_another_layout_or_dtype_are_misses(outcomes: Mapping[str, Any]) -> None:
    assert outcomes["stepwell layout"] == outcomes["stepwell dtype"] == 0
    assert outcomes["stepwell same"] == TOKENS // PAGE


def test_ranks_that_must_share_are_told_how(outcomes: Mapping[str, Any]) -> None:
    assert "ConfigError" in outcomes["ranks"] and "shared-log:" in outcomes["ranks"]


def test_the_stand_in_is_what_sglang_is(tmp_path: Path) -> None:
    assert life("life.py", "signatures", tmp_path) == {"wrong": [], "abstract": []}
