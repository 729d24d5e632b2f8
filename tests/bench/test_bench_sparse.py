"""The benchmark of sparse decode on small shapes and no GPU: it runs, and what it writes can be read."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest

pytest.importorskip("torch")
sys.path.append(str(Path(__file__).parents[2] / "benchmarks"))

import bench_sparse


def test_misses_and_times_of_a_tiny_shape_are_measured(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "found.json"
    assert bench_sparse.main(["--tiny", "--json", str(file)]) == 0
    found = json.loads(file.read_text())
    assert found["tiny"] and "written to found.json" in capsys.readouterr().out
    assert {name: len(rows) for name, rows in found["parts"].items()} == {"misses": 12, "times": 5}
    assert all(row["figures"]["belady, %"] > 0 for row in found["parts"]["misses"])
    assert all(row["figures"]["rows"] > 0 for row in found["parts"]["times"][1:])
