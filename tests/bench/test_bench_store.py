"""The store benchmark on a few small values: every contender has a row, and what is read is checked."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

sys.path.append(str(Path(__file__).parents[2] / "benchmarks"))

import bench_store
from store import contenders, many_values
from store.contenders import Load


def test_every_contender_is_measured(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(contenders, "SEGMENT_BYTES", 4 << 20)
    rows = list(bench_store.measure(Load(4096, 2), tmp_path, rounds=1))
    operations, names = ("write", "cold read", "warm read"), ("plain", "plain direct", "log", "shared log, client")
    assert [row.what for row in rows] == [f"4 KiB, {what}, {name}" for what in operations for name in names]
    assert all(min(row.figures.values()) > 0 for row in rows)
    assert [row.goal is not None for row in rows] == 3 * [False, False, True, False]


def test_other_bytes_are_noticed() -> None:
    load = Load(4096, 1)
    for source, target in zip(load.views(0, target=False), load.views(0, target=True), strict=True):
        target[:] = source
    load.check_targets()
    load.views(0, target=True)[3][:1] = b"?"
    with pytest.raises(AssertionError, match="other bytes"):
        load.check_targets()


def test_a_full_log_is_measured_by_its_number_of_values(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in (("COUNTS", (2_000, 4_000)), ("PUTS", 5), ("RECLAIMED", 3)):
        monkeypatch.setattr(many_values, name, value)
    *rows, put, choice = many_values.measure(tmp_path, print)
    assert len(rows) == 2 and all(row.figures[many_values.PUT] > 0 < row.figures[many_values.CHOICE] for row in rows)
    assert put.goal is not None is not choice.goal
