"""`stepwell demo` shows what it says: a process killed without warning, and another that resumes from its disk."""

from __future__ import annotations

import json
from pathlib import Path

from stepwell.cli.main import main


def test_the_second_life_resumes_from_what_the_first_had_stored_when_it_was_killed(tmp_path: Path) -> None:
    table = tmp_path / "demo.json"
    assert main(["demo", "--users", "2", "--turns", "2", "--json", str(table)]) == 0
    turns = json.loads(table.read_text())
    first = [turn for turn in turns if turn["life"] == "first"]
    second = [turn for turn in turns if turn["life"] == "second"]
    assert len(first) == len(second) == 4
    assert second[0]["store"] > 0.7 * second[0]["prompt_tokens"], "nothing is in memory yet, so it came from disk"
    for turn in turns:
        assert turn["device"] + turn["host"] + turn["store"] + turn["computed"] == turn["prompt_tokens"]
        assert turn["bytes_checked"] > 0
