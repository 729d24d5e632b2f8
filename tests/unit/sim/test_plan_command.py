"""`stepwell plan`, as a user meets it."""

from __future__ import annotations

import json
import signal
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from groups import started, tell, wait_for_members, wait_until_gone
from stepwell.cli.main import main
from waiting import PATIENCE_S, wait_until

MODEL = ("--spec", "qwen3-next-80b")
SMALL = ("--device-memory", "4GiB", "--host-memory", "8GiB", "--store-budget", "none", "--requests", "12")


@pytest.fixture
def trace(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> Path:
    path = tmp_path / "agents.jsonl.gz"
    assert main(["trace", "generate", "agents", str(path), "--sessions", "2", "--json"]) == 0
    capsys.readouterr()
    return path


def test_plan_writes_every_figure(trace: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out, page = tmp_path / "out.json", tmp_path / "out.html"
    files = ("--json", str(out), "--html", str(page), "--price", "device=10,host=2")
    assert main(["plan", str(trace), *MODEL, *SMALL, "--jobs", "2", *files]) == 0
    figures = json.loads(out.read_text())
    assert figures["requests"] == 12
    assert set(figures["curves"]) == set(figures["knees"]) == {"device", "host"} == set(figures["sessions"]["fitting"])
    for tier, curve in figures["curves"].items():
        sizes = [point[f"{tier}_size_bytes"] for point in curve]
        assert sizes == sorted(sizes) and len(sizes) == 5
        for point in curve:
            assert 0 <= point["hit_rate"] <= figures["ceiling"] < 1
            assert point["speed_up"] == pytest.approx(figures["uncached_prefill_s"] / point["prefill_s"])
        assert curve[2] | {"wall_s": 0} == figures["base"] | {"wall_s": 0}
    chosen = figures["next_gigabyte"]
    assert chosen["by"] == "money" and {step["tier"] for step in chosen["steps"]} == {"device", "host"}
    assert figures["hardware"]["prefill_tokens_per_s"] == 20_000
    assert page.read_text().count("<svg") == 2
    captured = capsys.readouterr()
    assert "agents.jsonl.gz" in captured.out and "The next gigabyte" in captured.out
    assert "points replayed; about" in captured.err


def test_checkpoints_in_eight_bits_make_room_below_the_device(trace: Path, tmp_path: Path) -> None:
    fitting, out = {}, tmp_path / "out.json"
    for name, more in (("exact", ()), ("int8", ("--checkpoint-dtype", "int8"))):
        assert main(["plan", str(trace), *MODEL, *SMALL, "--jobs", "2", "--json", str(out), *more]) == 0
        fitting[name] = json.loads(out.read_text())["sessions"]
    assert fitting["int8"]["fitting"]["device"] == fitting["exact"]["fitting"]["device"]
    assert fitting["exact"]["cached_median_bytes"] == fitting["exact"]["median_bytes"] == fitting["int8"]["median_bytes"]
    assert fitting["int8"]["cached_median_bytes"] == fitting["exact"]["median_bytes"] - (77_856_768 - 21_270_528)


@pytest.mark.parametrize(
    ("argv", "complaint"),
    [
        (("--jobs", "0"), "--jobs must be 1 or more"),
        (("--requests", "0"), "--requests must be 1 or more"),
        (("--policy", "best"), "no policy is called 'best'"),
        (("--device-memory", "lots"), "not an amount of memory"),
        (("--device-memory", "none"), "--device-memory must be more than 0"),
        (("--host-memory", "none"), "give --host-memory, or set --store-budget to none"),
        (("--device-memory", "1MiB"), "cannot hold one page"),
        (("--store-budget", "1KiB"), "--store-budget of 1.0 KiB cannot hold one page: it must be at least"),
        (("--price", "device=1"), "host, store is missing"),
        (("--price", "tape=1"), "not 'tape'"),
        (("--price", "device=cheap"), "must be a number"),
        (("--price", "device=0"), "more than 0"),
        (("--spec", "gpt-9"), "gpt-9"),
        (("--hardware", "warp=9"), "hardware has no 'warp'"),
    ],
)
def test_mistakes_are_one_line(trace: Path, argv: tuple[str, ...], complaint: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["plan", str(trace), *MODEL, *argv]) == 2
    error = capsys.readouterr().err
    assert complaint in error and error.count("\n") == 1


@pytest.mark.parametrize("command", ["plan", "explain"])
def test_a_trace_that_is_not_there_or_has_no_requests_is_named(
    command: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main([command, str(tmp_path / "gone.jsonl"), *MODEL]) == 2
    assert "gone.jsonl" in capsys.readouterr().err
    empty = tmp_path / "empty.jsonl"
    empty.write_text('{"format": "stepwell-trace", "version": 1, "block_tokens": 64}\n')
    assert main([command, str(empty), *MODEL]) == 2
    assert "empty.jsonl has no requests" in capsys.readouterr().err


def test_a_trace_that_breaks_off_in_a_worker_is_one_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "torn.jsonl"
    path.write_text('{"format": "stepwell-trace", "version": 1, "block_tokens": 64}\n{"t": 0, "in": 64, "runs": [[1, 1]]}\n{"t"')
    assert main(["plan", str(path), *MODEL]) == 2
    assert "torn.jsonl, line 3" in capsys.readouterr().err


def test_an_interrupt_ends_every_process(tmp_path: Path) -> None:
    trace = tmp_path / "long.jsonl.gz"  # long enough not to be done before it is interrupted
    assert main(["trace", "generate", "agents", str(trace), "--sessions", "40", "--json"]) == 0
    argv = ("-m", "stepwell", "plan", str(trace), *MODEL, "--device-memory", "4GiB", "--host-memory", "8GiB", "--jobs", "2")
    with started(*argv) as process:
        wait_for_members(process, 3)  # a worker is among them
        tell(process, signal.SIGINT)  # as a terminal does: everybody hears it
        out, error = process.communicate(timeout=PATIENCE_S)
        assert process.returncode == 130
        assert b"Traceback" not in error and not out
        wait_until_gone(process)  # what watches over shared memory leaves a moment later


def test_interrupts_that_are_ignored_from_the_start_are_ignored_to_the_end(trace: Path) -> None:
    with started("-m", "stepwell", "plan", str(trace), *MODEL, *SMALL, "--jobs", "2", ignoring=True) as process:

        def ended() -> bool:
            tell(process, signal.SIGINT)
            return process.poll() is not None

        with ThreadPoolExecutor(1) as reader:
            said = reader.submit(process.communicate)
            wait_until(ended, "the plan is made")
            out, error = said.result()
        assert process.returncode == 0
        assert b"Traceback" not in error and b"The next gigabyte" in out
