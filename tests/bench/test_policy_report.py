"""The policy report on a small trace: its working set, its cells, and that a stopped run continues."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest

from stepwell.base.errors import ConfigError
from stepwell.sim.files import TraceFile, write_trace
from stepwell.sim.generate import Shape, generate

sys.path.append(str(Path(__file__).parents[2] / "benchmarks"))

import policy_report
from policy_report import NAMES, main, num_pages

FEW = ("--specs", "qwen3-next-80b", "qwen3-8b", "--budgets", "40", "--requests", "60", "--jobs", "1")


@pytest.fixture
def trace(tmp_path: Path) -> Path:
    path = tmp_path / "agents.jsonl.gz"
    write_trace(path, generate("agents", Shape(sessions=4)), block_tokens=64, source="test")
    return path


@pytest.mark.parametrize("page_tokens", [32, 64, 256])
def test_the_working_set_is_every_distinct_page(trace: Path, page_tokens: int) -> None:
    seen: set[tuple[int, ...]] = set()
    for request in list(TraceFile(trace))[:10]:
        tokens = [(block, at) for block in request.blocks.tolist() for at in range(64)][: request.prompt_tokens - 1]
        ends = range(page_tokens, len(tokens) + 1, page_tokens)
        seen |= {tokens[end - 1] for end in ends}  # equal ids have equal history
    assert num_pages(trace, page_tokens, 10) == len(seen)


def test_every_policy_has_a_column_and_a_stopped_run_continues(
    trace: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def in_this_process(work, tasks, *, jobs, on_result, on_progress):
        for place, task in enumerate(tasks):
            on_result(place, work(task, lambda: None))

    monkeypatch.setattr(policy_report, "run_all", in_this_process)
    file = tmp_path / "found.json"
    asked = ["--traces", str(trace), *FEW, "--json", str(file)]
    assert main(asked) == 0
    found = json.loads(file.read_text())
    assert [cell["policy"] for cell in found] == [*NAMES, *(name for name in NAMES if not name.startswith("every-"))]
    assert all(0 < cell["hit_rate"] <= cell["ceiling"] for cell in found)
    assert len({cell["hit_rate"] for cell in found[: len(NAMES)]}) > 2, "policies differ"
    assert "40 %" in capsys.readouterr().out
    file.write_text(json.dumps(found[1:]))
    assert main(asked) == 0
    assert "9 cells, 8 of them done before" in capsys.readouterr().out
    assert {cell["key"]: cell for cell in json.loads(file.read_text())} == {cell["key"]: cell for cell in found}


def test_a_trace_without_a_whole_page_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "short.jsonl"
    path.write_text('{"tokens": [1, 2, 3]}\n')
    with pytest.raises(ConfigError, match="nothing to cache"):
        main(["--traces", str(path), *FEW, "--json", str(tmp_path / "x.json")])
