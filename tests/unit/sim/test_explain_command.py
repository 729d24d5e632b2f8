"""`stepwell explain`, as a user meets it."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from stepwell.cli.main import main

MODEL = ("--spec", "qwen3-next-80b")
SMALL = ("--device-memory", "4GiB", "--host-memory", "8GiB", "--store-budget", "none")


@pytest.fixture
def trace(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> Path:
    path = tmp_path / "agents<b>.jsonl.gz"
    assert main(["trace", "generate", "agents", str(path), "--sessions", "2", "--json"]) == 0
    capsys.readouterr()
    return path


def test_explain_agrees_with_replay_and_adds_up(trace: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out, page = tmp_path / "out.json", tmp_path / "out.html"
    assert main(["explain", str(trace), *MODEL, *SMALL, "--json", str(out), "--html", str(page)]) == 0
    table = capsys.readouterr().out
    figures = json.loads(out.read_text())
    assert main(["replay", str(trace), *MODEL, *SMALL, "--json", "-"]) == 0
    replayed = json.loads(capsys.readouterr().out)
    assert figures["computed_tokens"] == replayed["computed_tokens"] == sum(figures["reasons"].values())
    assert figures["prompt_tokens"] == replayed["prompt_tokens"]
    assert figures["computed_again_tokens"] == figures["computed_tokens"] - figures["reasons"]["first_use"]
    assert set(figures["reasons"]) == {
        "unused", "checkpoint_evicted", "no_checkpoint", "evicted_prefix", "never_stored", "alignment", "first_use",
    }  # fmt: skip
    for session in figures["worst_sessions"]:
        assert sum(session["reasons"].values()) == session["computed_tokens"]
    assert "evicted prefix" in table and "nothing helps" in table and "agents<b>.jsonl.gz" in table
    html = page.read_text()
    assert "<b>" not in html and "agents&lt;b&gt;.jsonl.gz" in html


def test_several_traces_are_explained_each_on_its_own(trace: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["explain", str(trace), str(trace), *MODEL, *SMALL, "--requests", "5", "--json", "-"]) == 0
    rows = json.loads(capsys.readouterr().out)["traces"]
    assert rows[0] == rows[1] and rows[0]["requests"] == 5


def test_a_larger_device_leaves_less_that_was_evicted(trace: Path, capsys: pytest.CaptureFixture[str]) -> None:
    def evicted(device: str) -> int:
        sizes = ("--device-memory", device, "--host-memory", "none", "--store-budget", "none")
        assert main(["explain", str(trace), *MODEL, *sizes, "--json", "-"]) == 0
        reasons = json.loads(capsys.readouterr().out)["reasons"]
        return int(reasons["evicted_prefix"] + reasons["checkpoint_evicted"])

    assert evicted("2GiB") > evicted("64GiB") == 0


@pytest.mark.parametrize(
    ("argv", "complaint"),
    [
        (("--requests", "0"), "requests must be 1 or more"),
        (("--requests", "-3"), "requests must be 1 or more"),
        (("--policy", "best"), "no policy is called 'best'"),
        (("--host-memory", "none"), "host"),
        (("--spec", "gpt-9"), "gpt-9"),
        (("--html", "/nowhere/x.html", "--requests", "1"), "there is no directory /nowhere"),
    ],
)
def test_mistakes_are_one_line(trace: Path, argv: tuple[str, ...], complaint: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["explain", str(trace), *MODEL, *argv]) == 2
    error = capsys.readouterr().err.strip()
    assert complaint in error and "Traceback" not in error
