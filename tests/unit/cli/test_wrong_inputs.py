"""What people get wrong on the command line: one line that names the flag and says what to do, soon, before any work."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from stepwell.base.meters import ManualClock
from stepwell.cli import cases
from stepwell.cli.cases import LINE_S, ProgressLines
from stepwell.cli.command import with_flags
from stepwell.cli.main import main

SERVE = ("serve", "--model", "random-hybrid", "--device", "cpu", "--port", "0")
REPLAY = ("replay", "TMP/agents.jsonl", "--spec", "qwen3-next-80b")
PLAN = ("plan", *REPLAY[1:])
NEW_LOG = ("--device-memory", "8MiB", "--host-memory", "8MiB", "--store", "log:TMP/new")
BUDGET = ("--store-budget", "1GiB")
WITHOUT_TORCH = """
import sys
from stepwell.cli.main import main
status = main(sys.argv[1:])
assert "torch" not in sys.modules
sys.exit(status)
"""


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> Path:
    (tmp_path / "file").write_text("not a store")
    assert main(["trace", "generate", "agents", str(tmp_path / "agents.jsonl"), "--sessions", "1"]) == 0
    capsys.readouterr()
    return tmp_path


def complaint(folder: Path, capsys: pytest.CaptureFixture[str], *argv: str) -> str:
    """The one line that is said of a command line that cannot work."""
    assert main([each.replace("TMP", str(folder)) for each in argv]) == 2
    said = capsys.readouterr()
    lines = [line for line in said.err.splitlines() if " info start: " not in line]
    assert not said.out and len(lines) == 1 and lines[0].startswith("stepwell: error: "), said
    return lines[0].removeprefix("stepwell: error: ").replace(str(folder), "TMP")


@pytest.mark.parametrize(
    ("argv", "said"),
    [
        ((*SERVE, "--durable"), "unrecognized arguments: --durable (see `stepwell serve --help`)"),
        (("store", "stat", "DIR", "--full"), "unrecognized arguments: --full (see `stepwell store stat --help`)"),
        ((*SERVE, "--port", "99999"), "argument --port: must be a number from 0 to 65535, got '99999'"),
        ((*SERVE, "--port", "-1"), "argument --port: must be a number from 0 to 65535, got '-1'"),
        (("serve", "--model", "/none"), "there is no model at '/none': give a Hugging Face directory"),
        ((*SERVE, "--store-budget", "1GiB"), "--store-budget and --store-option need --store, as in --store log:DIR"),
        ((*SERVE, "--store", "none", "--store-budget", "1GiB"), "--store-budget and --store-option need --store"),
        ((*SERVE, "--store", "log:TMP/a", "--store-budget", "some"), "--store-budget: not an amount of memory: 'some'"),
        ((*SERVE, "--store", "log:TMP/a", "--store-budget", "0"), "--store-budget must be more than 0, got 0"),
        ((*SERVE, "--max-body", "some"), "--max-body: not an amount of memory: 'some'"),
        ((*PLAN, "--device-memory", "banana"), "--device-memory: not an amount of memory: 'banana'; write for example 8GiB"),
        ((*PLAN, "--device-memory", "-5GiB"), "--device-memory: an amount of memory cannot be negative, got '-5GiB'"),
        ((*PLAN, "--device-memory", "1KiB"), "--device-memory of 1.0 KiB cannot hold one page of each kind"),
        ((*PLAN, "--device-memory", "0"), "--device-memory must be more than 0: requests compute into the device tier"),
        ((*REPLAY, "--host-memory", "none"), "a store needs a host tier above it: give --host-memory, or set"),
        ((*REPLAY, "--warm-up", "9", "--requests", "5"), "--warm-up 9 leaves none to count of the 5 requests of --requests"),
        ((*REPLAY, "--warm-up", "1", "--requests", "1"), "--warm-up 1 leaves none to count of the 1 request of --requests"),
        ((*REPLAY, "--json", "TMP/none/x"), "--json TMP/none/x cannot be written: there is no directory TMP/none"),
        ((*REPLAY, "--html", "TMP"), "--html TMP is a directory: name a file"),
        ((*PLAN, "--json", "TMP/none/x"), "--json TMP/none/x cannot be written: there is no directory TMP/none"),
        (("explain", *REPLAY[1:], "--json", "TMP/none/x"), "--json TMP/none/x cannot be written"),
        (("trace", "describe", "/none"), "/none: cannot be read: No such file or directory"),
        (("trace", "convert", "TMP/agents.jsonl", "TMP/none/out"), "TMP/none/out: cannot be written: No such file or directory"),
    ],
)  # fmt: skip
def test_mistakes_are_named_by_their_flags_before_any_work(
    argv: tuple[str, ...], said: str, folder: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("stepwell.cli.plan.run_all", lambda *args, **more: pytest.fail("a replay was begun"))
    assert complaint(folder, capsys, *argv).startswith(said)


@pytest.mark.parametrize(
    ("argv", "said"),
    [
        (NEW_LOG, "TMP/new is new: say how large it may become, for example --store-budget 100GiB"),
        ((*NEW_LOG, *BUDGET, "--store", "log:TMP/file"), "the log store in TMP/file cannot be opened: there is a file of that"),
        ((*NEW_LOG, *BUDGET, "--store", "log:/proc/new"), "the log store in /proc/new cannot be opened: the directory cannot"),
        ((*NEW_LOG, "--host-memory", "none"), "a store needs a host tier above it: give --host-memory, or leave --store out"),
        (("--kv-dtype", "int3"), "--kv-dtype must be one of fp32, bf16, fp16, fp8; got 'int3'"),
        (("--dtype", "int3"), "--dtype must be one of auto, fp32, bf16, fp16; got 'int3'"),
        (("--kernels", "fast"), "--kernels must be one of"),
        (("--device-memory", "none"), "--device-memory must be more than 0"),
        (("--host-memory", "some"), "--host-memory: not an amount of memory: 'some'"),
        (("--page-tokens", "0"), "--page-tokens must be at least 1, got 0"),
        (("--sparse-budget", "9"), "--sparse-budget is the number of tokens that a selector picks: name one with --sparse"),
    ],
)  # fmt: skip
def test_settings_of_a_server_are_named_by_their_flags(
    argv: tuple[str, ...], said: str, folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    pytest.importorskip("uvicorn")
    assert complaint(folder, capsys, *SERVE, *argv).startswith(said)


def test_a_store_that_this_user_may_not_write_is_explained(
    folder: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("uvicorn")

    def denied(*args: object, **more: object) -> None:
        raise PermissionError(13, "Permission denied")

    monkeypatch.setattr("stepwell.store.log.opening.take_lock", denied)
    said = complaint(folder, capsys, *SERVE, *NEW_LOG, *BUDGET)
    assert said == "the log store in TMP/new cannot be opened: permission denied; name a directory that this user can write to"


@pytest.mark.parametrize(
    "argv", [("--model", "/none"), ("--model", "random-hybrid", "--store-budget", "1GiB"), ("--model", "a", "--port", "99999")]
)
def test_arguments_are_checked_before_pytorch_is_loaded(argv: tuple[str, ...]) -> None:
    done = subprocess.run([sys.executable, "-c", WITHOUT_TORCH, "serve", *argv], capture_output=True, text=True, check=False)
    assert done.returncode == 2 and done.stderr.startswith("stepwell: error: "), done.stderr


@pytest.mark.parametrize("width", [80, 120])
def test_the_help_of_serve_has_groups_and_fits_the_screen(
    width: int, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", str(width))
    with pytest.raises(SystemExit):
        main(["serve", "--help"])
    lines = capsys.readouterr().out.splitlines()
    assert max(map(len, lines)) <= width and len([line for line in lines if line.startswith("usage")]) == 1
    groups = [line.rstrip(":") for line in lines if line.endswith(":") and not line.startswith(" ")]
    assert groups[1:] == [
        "model and answers", "engine", "batches", "tiers and store", "checkpoints and loading", "address and access",
        "events for routers", "prefill and decode servers", "stopping and monitoring",
    ]  # fmt: skip
    assert not any("docs/" in line for line in lines), "an installed package has no docs"


def test_every_command_is_summed_up_in_a_sentence() -> None:
    from stepwell.cli.main import COMMANDS

    for command in COMMANDS:
        assert command.summary[0].isupper() and command.summary.endswith(".") and ". " not in command.summary, command.name


@pytest.mark.parametrize(
    ("message", "said"),
    [
        ("give host_memory, or leave `store` out", "give --host-memory, or leave --store out"),
        ("for example `budget=100GiB`", "for example --store-budget 100GiB"),
        ("max_context is 9", "--max-model-len is 9"),
        ("a store, a device and a dtype", "a store, a device and a dtype"),
        (
            "no /tmp/host_memory.py, host_memory=3 or 'page_tokens'",
            "no /tmp/host_memory.py, --host-memory=3 or 'page_tokens'",
        ),
        ("run `stepwell store check DIR`", "run `stepwell store check DIR`"),
    ],
)
def test_settings_of_python_become_flags(message: str, said: str) -> None:
    assert with_flags(message) == said


def test_progress_into_a_file_is_a_line_now_and_then(capsys: pytest.CaptureFixture[str]) -> None:
    clock = ManualClock()
    lines = ProgressLines(clock=clock)
    for done in range(1, 101):
        clock.advance(1.0)
        lines.report("agents", done, 100)
    said = capsys.readouterr().err.splitlines()
    assert len(said) == 100 // int(LINE_S) and said[0] == "agents: 15% done, about 85 s to go"


def test_a_terminal_has_a_bar_and_no_such_lines(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    clock = ManualClock()
    lines = ProgressLines(clock=clock)
    monkeypatch.setattr(cases.sys.stderr, "isatty", lambda: True)
    clock.advance(100.0)
    lines.report("agents", 1, 100)
    assert not capsys.readouterr().err
