"""What `make bench-ranks` measures is there, and messages stay small."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

sys.path.append(str(Path(__file__).parents[2] / "benchmarks"))

import bench_ranks as messages
from stepwell.engine.workers.pass_arrays import PassPacker
from stepwell.jobs.channel import packed


def test_messages_are_measured_over_real_processes(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, count in (("STEPS", 20), ("WARM", 2), ("ROUNDS", 2)):
        monkeypatch.setattr(messages, name, count)
    found, names = messages.run(), [row.name for row in messages.rows()]
    assert all(0 < found[name]["lowest ms"] <= found[name]["p50 ms"] for name in names) and found["added ms"] > 0
    assert all(any(name in line for line in messages.table(found, names)) for name in names)


def test_a_step_sends_ranks_little_of_long_contexts() -> None:
    packer, row = PassPacker(), messages.rows()[1]
    sizes = [len(packed(packer.pack(step, at))) for at, step in enumerate(messages.decode_steps(row, 3), 1)]
    assert sizes[0] > messages.BATCH * row.context // messages.PAGE_TOKENS * 4, "the first sends whole page tables"
    assert max(sizes[1:]) < sizes[0] // 10, sizes
