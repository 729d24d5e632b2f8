"""`stepwell demo` shows what it says: a server is killed, another resumes from its disk, and the answers are the same."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from stepwell.cli.demo.script import opening, turns
from stepwell.cli.main import main

pytest.importorskip("fastapi")


def test_the_second_life_resumes_from_what_the_first_had_stored_when_it_was_killed(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    table, picture = tmp_path / "demo.json", tmp_path / "demo.html"
    assert main(["demo", "--model", "random-hybrid", "--turns", "2", "--json", str(table), "--html", str(picture)]) == 0
    rows = json.loads(table.read_text())["turns"]
    assert [(row["person"], row["turn"]) for row in rows] == [("Asha", 1), ("Bo", 1), ("Asha", 2), ("Bo", 2)]
    assert rows[0]["second"]["store"] > 0.9 * rows[0]["second"]["prompt_tokens"], "nothing is in memory yet, so it came from disk"
    for row in rows:
        assert row["identical"] and row["cold"]["text"]
        assert row["cold"]["computed"] == row["cold"]["prompt_tokens"]
        for life in ("cold", "first", "second"):
            reply = row[life]
            assert reply["device"] + reply["host"] + reply["store"] + reply["computed"] == reply["prompt_tokens"]
    assert picture.read_text().count("<rect") > 3 * len(rows)
    said = capsys.readouterr().out  # not a terminal: a line for every step
    assert "Asha: How far down is the water" in said and "median time to the first word" in said
    for life in ("first life", "cold", "second life"):
        assert f"{life}: " in said and all(f"{life} {number}/4: " in said for number in range(1, 5))


def test_everybody_begins_alike_and_goes_on_differently() -> None:
    said = list(turns(3))
    assert opening()["content"].count("search_library") == 1
    assert [len(turn.new) for turn in said] == [1, 1, 2, 2, 2, 2]
    assert len({turn.new[-1]["content"] for turn in said}) == len(said)
