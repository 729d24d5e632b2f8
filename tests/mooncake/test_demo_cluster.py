"""`make demo-cluster` shows what it says: a decode server dies in an answer, and all answers are those of one server."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

pytest.importorskip("fastapi")

from demo_cluster.play import main
from routers.fleet import SMG, installed

pytestmark = [pytest.mark.routers, installed]


def test_a_killed_decode_server_changes_no_answer(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    table = tmp_path / "demo.json"
    options = ["--model", "random-hybrid", "--turns", "1", "--answer", "200", "--router", str(SMG), "--json", str(table)]
    assert main(["--this-network", *options]) == 0
    first, second = json.loads(table.read_text())["turns"]
    assert (first["asked"], second["asked"]) == (1, 2), "the second answer was cut off, and came when it was asked for again"
    assert {first["answered_by"], second["answered_by"]} <= {"decode 1", "decode 2"}
    for row in (first, second):
        assert row["identical"] and row["alone"]["text"]
        assert row["alone"]["computed"] == row["alone"]["prompt_tokens"]
        assert row["many"]["store"] > 0, "the prefill server computed it"
    assert first["new"]["store"] > 0.9 * first["new"]["prompt_tokens"], "nothing is in memory yet, so it came from Mooncake"
    said = capsys.readouterr().out
    assert all(f"{life}: " in said and f"{life} 2/2: " in said for life in ("one server", "the cluster", "last server"))
