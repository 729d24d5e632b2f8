"""`stepwell replay` and `stepwell trace`, as a user meets them."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from stepwell.cli.main import main

MODEL = ("--spec", "qwen3-next-80b")
DEVICE_ONLY = ("--host-memory", "none", "--store-budget", "none")


@pytest.fixture
def trace(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> Path:
    path = tmp_path / "agents.jsonl.gz"
    assert main(["trace", "generate", "agents", str(path), "--sessions", "2", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["requests"] > 20
    return path


def test_replay_writes_every_figure(trace: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out, page = tmp_path / "out.json", tmp_path / "out.html"
    tiers = ("--device-memory", "4GiB", "--host-memory", "16GiB", "--store-budget", "4TiB")
    assert main(["replay", str(trace), *MODEL, *tiers, "--json", str(out), "--html", str(page)]) == 0
    figures = json.loads(out.read_text())
    by_source = [figures[f"{name}_tokens"] for name in ("device", "host", "store", "computed")]
    assert sum(by_source) == figures["prompt_tokens"] > 0
    assert 0 < figures["hit_rate"] <= figures["ceiling"] < 1
    for tier in ("device", "host", "store"):
        assert figures[f"{tier}_written_bytes"] >= 0 and figures[f"{tier}_read_bytes"] >= 0
    assert min(figures["checkpoints_made"], figures["checkpoints_used"]) > 0 <= figures["checkpoints_evicted"]
    assert 0 < figures["ttft_p50_s"] <= figures["ttft_p95_s"] <= figures["ttft_p99_s"]
    assert figures["wall_s"] > 0
    assert "<rect" in page.read_text()
    assert "agents.jsonl.gz" in capsys.readouterr().out


def test_compare_replays_with_every_policy(trace: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["replay", str(trace), *MODEL, *DEVICE_ONLY, "--device-memory", "2GiB", "--compare", "--json", "-"]) == 0
    rows = json.loads(capsys.readouterr().out)["replays"]
    assert [row["policy"] for row in rows] == ["value", "lru"]
    assert len({row["prompt_tokens"] for row in rows}) == 1


def test_kv_dtype_and_warm_up_are_used(trace: Path, capsys: pytest.CaptureFixture[str]) -> None:
    def replayed(*more: str) -> dict[str, float]:
        assert main(["replay", str(trace), *MODEL, *DEVICE_ONLY, "--device-memory", "1GiB", "--json", "-", *more]) == 0
        return json.loads(capsys.readouterr().out)

    plain = replayed()
    assert replayed("--kv-dtype", "fp8")["hit_rate"] > plain["hit_rate"]
    assert replayed("--warm-up", "10")["requests"] == plain["requests"] - 10


def test_the_first_requests_can_be_replayed_alone_and_any_tier_left_out(trace: Path, capsys: pytest.CaptureFixture[str]) -> None:
    sizes = ("--device-memory", "2GiB", "--host-memory", "none", "--store-budget", "0")
    argv = ["replay", str(trace), *MODEL, *sizes, "--write-policy", "back", "--whole-blocks"]
    assert main([*argv, "--requests", "5"]) == 0
    shown = capsys.readouterr().out
    assert "where prompts came from" in shown and "written: to host / store" in shown
    assert main([*argv, "--requests", "5", "--json", "-"]) == 0
    figures = json.loads(capsys.readouterr().out)
    assert (figures["requests"], figures["host_size_bytes"]) == (5, 0)


def test_requests_longer_than_a_server_takes_are_left_out(trace: Path, capsys: pytest.CaptureFixture[str]) -> None:
    def replayed(*more: str) -> dict[str, int]:
        assert main(["replay", str(trace), *MODEL, "--json", "-", *more]) == 0
        return json.loads(capsys.readouterr().out)

    every = replayed()
    mean = (every["prompt_tokens"] + every["output_tokens"]) // every["requests"]
    shorter = replayed("--max-model-len", str(mean))
    assert 0 < shorter["requests"] < every["requests"]
    assert shorter["prompt_tokens"] + shorter["output_tokens"] <= mean * shorter["requests"]
    assert replayed("--max-model-len", str(10**9))["requests"] == every["requests"]


def test_a_converted_trace_replays_alike(trace: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    other = tmp_path / "plain.jsonl"
    assert main(["trace", "convert", str(trace), str(other)]) == 0
    capsys.readouterr()
    rows = []
    for path in (trace, other):
        assert main(["trace", "describe", str(path), "--json"]) == 0
        rows.append(json.loads(capsys.readouterr().out) | {"trace": ""})
    assert rows[0] == rows[1]
    assert main(["trace", "describe", str(trace)]) == 0
    assert "distinct blocks" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("argv", "complaint"),
    [
        (("--policy", "best"), "no policy is called 'best'"),
        (("--device-memory", "lots"), "not an amount of memory"),
        (("--host-memory", "0"), "give --host-memory, or set --store-budget to none"),
        (("--hardware", "warp=9"), "hardware has no 'warp'"),
        (("--warm-up", "-1"), "--warm-up"),
        (("--requests", "0"), "--requests must be 1 or more"),
        (("--max-model-len", "0"), "--max-model-len must be 1 or more"),
        (("--policy", "lru", "--compare"), "not allowed with argument --policy"),
        (("--device-memory", "1MiB"), "cannot hold one page"),
    ],
)
def test_mistakes_are_one_line(trace: Path, argv: tuple[str, ...], complaint: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["replay", str(trace), *MODEL, *argv]) == 2
    assert complaint in capsys.readouterr().err


def test_a_file_that_is_no_trace_is_named(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "notes.txt"
    path.write_text("hello\n")
    assert main(["replay", str(path), *MODEL]) == 2
    assert "notes.txt, line 1: not valid JSON" in capsys.readouterr().err
