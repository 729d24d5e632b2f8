"""Rows of replays are replayed as they say; rows that were not asked for stay what they were."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest

from stepwell.sim.files import write_trace
from stepwell.sim.generate import Shape, generate

sys.path.append(str(Path(__file__).parents[2] / "benchmarks"))

import replay_tiers


def test_rows_that_are_asked_for_are_replayed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    shape = Shape(sessions=10, seed=3)
    count = write_trace(tmp_path / "small.jsonl", generate("chat", shape), block_tokens=shape.block_tokens, source="test")
    sizes = "--device-memory 1GB --host-memory 1GB --store-budget none"
    names = [f"small --spec gpt-oss-120b {sizes} --write-policy {write}" for write in ("exclusive", "through")]
    rows = [{"replay": name, "requests": 0, "hit_rate": -1.0, "wall_s": at} for at, name in enumerate(names)]
    (tmp_path / "rows.json").write_text(json.dumps({"about": "a test", "rows": rows}))
    asked = ["--traces", str(tmp_path), "--rows", str(tmp_path / "rows.json"), "--output", str(tmp_path / "found.json")]
    monkeypatch.setattr(sys, "argv", ["replay_tiers.py", *asked, "--only", "exclusive"])
    assert replay_tiers.main() == 0
    found = json.loads((tmp_path / "found.json").read_text())
    exclusive, through = found["rows"]
    assert found["about"] == "a test" and through == rows[1]
    assert exclusive["replay"] == names[0] and exclusive["requests"] == count and exclusive["hit_rate"] > 0
