"""The GPU benchmark on tiny models and no GPU: it runs, and what it writes can be read. Its arithmetic of limits."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest

pytest.importorskip("torch")
pytest.importorskip("transformers")
sys.path.append(str(Path(__file__).parents[2] / "benchmarks"))

import torch

import bench_gpu
from gpu import bench, decode, full_device, prefill
from gpu.limits import file_bytes_per_s, state_bytes, weight_bytes
from gpu.shapes import LLAMA, make
from report import Goal, Row
from stepwell import ModelSpec, Point, Prefix, StateSpec, Window


def state(name: str, shape: Prefix | Window | Point, row_bytes: int) -> StateSpec:
    return StateSpec(name=name, shape=shape, layers=2, row_bytes=row_bytes, dtype="u8")


def test_prompts_and_decode_steps_of_a_tiny_model_are_measured(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(prefill, "DENSE", (LLAMA,))
    monkeypatch.setattr(decode, "GOALS", {LLAMA: 0.5})
    file = tmp_path / "found.json"
    asked = ["--tiny", "--only", "prefill,decode", "--json", str(file), "--dir", str(tmp_path)]
    assert bench_gpu.main(asked) == 0
    said, found = capsys.readouterr().out, json.loads(file.read_text())
    assert "Traceback" not in said and found["tiny"] and found["machine"]["gpu"] is None
    assert {name: len(part["rows"]) for name, part in found["parts"].items()} == {"prefill": 4, "decode": 6}
    for part in found["parts"].values():
        assert all(row["goal"]["value"] > 0 and not row["note"] for row in part["rows"])


def test_answers_that_follow_a_grammar_are_measured(tmp_path: Path) -> None:
    pytest.importorskip("llguidance")
    file = tmp_path / "found.json"
    assert bench_gpu.main(["--tiny", "--only", "guided", "--json", str(file), "--dir", str(tmp_path)]) == 0
    rows = json.loads(file.read_text())["parts"]["guided"]["rows"]
    assert len(rows) == 4 and all(row["figures"]["step, ms"] > 0 and not row["note"] for row in rows)


def test_prompts_on_a_full_device_are_measured_under_two_write_policies(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(full_device, "MODELS", (LLAMA,))
    monkeypatch.setattr(bench, "LEAST_TIER_BYTES", 1 << 20)
    file = tmp_path / "found.json"
    assert bench_gpu.main(["--tiny", "--only", "full", "--json", str(file), "--dir", str(tmp_path)]) == 0
    rows = json.loads(file.read_text())["parts"]["full"]["rows"]
    assert len(rows) == 3 and all(row["figures"]["exclusive, ms"] > 0 and not row["note"] for row in rows)


def test_parts_of_an_earlier_run_stay_in_the_file(tmp_path: Path) -> None:
    file = tmp_path / "found.json"
    file.write_text(json.dumps({"parts": {"decode": {"rows": []}}}))
    bench_gpu.main(["--tiny", "--only", "copies", "--json", str(file)])
    assert [*json.loads(file.read_text())["parts"]] == ["decode", "copies"]


def test_without_cuda_nothing_is_measured(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert bench_gpu.main(["--json", str(tmp_path / "none.json")]) == 0
    assert not (tmp_path / "none.json").exists()


def test_a_step_reads_what_each_shape_keeps() -> None:
    spec = ModelSpec(
        name="mixed",
        states=(
            state("kv", Prefix(), 10),
            state("c4", Prefix(ratio=4), 10),
            state("swa", Window(tokens=8), 10),
            state("ssm", Point(), 100),
        ),
    )
    assert state_bytes(spec, 64, {}) == 2 * (640 + 160 + 80 + 200)
    assert state_bytes(spec, 64, {"c4": 4}) == 2 * (640 + 40 + 80 + 200)
    assert state_bytes(spec, 4, {}) == 2 * (40 + 10 + 40 + 200)


def test_tied_weights_are_read_once() -> None:
    made = make(LLAMA, "cpu", tiny=True)
    assert weight_bytes(made, 1) == sum(tensor.nbytes for tensor in made.model.parameters())


def test_goals_are_at_least_or_at_most() -> None:
    assert Goal(value=1.0, limit=1.0).met and not Goal(value=0.9, limit=1.0).met
    assert Goal(value=0.02, limit=0.03, most=True).met and not Goal(value=0.04, limit=0.03, most=True).met
    assert Row(what="one", goal=Goal(value=2.0, limit=1.0)).as_json()["met"]


def test_plain_reading_leaves_no_file(tmp_path: Path) -> None:
    assert all(speed > 0 for speed in file_bytes_per_s(tmp_path, 10 << 20).values())
    assert not [*tmp_path.iterdir()]
