"""`stepwell serve`, as a user meets it. What the server does is tested in tests/server."""

from __future__ import annotations

import json
import signal
import socket
import subprocess
import sys
import urllib.error
import urllib.request
from argparse import ArgumentParser, Namespace
from contextlib import closing
from pathlib import Path

import pytest

from stepwell.base.errors import ConfigError
from stepwell.base.spec.presets import load_spec
from stepwell.base.units import format_bytes
from stepwell.cli import engine_options, serve, serve_summary
from stepwell.cli.main import main
from stepwell.cli.serve_summary import narrow
from stepwell.jobs.children import start_child
from stepwell.server.access.tenants import Principals, Secrets, TenantsFile
from stepwell.store.key_file import write_store_key
from stepwell.store.registry import open_store
from waiting import PATIENCE_S

SMALL = ("--device", "cpu", "--device-memory", "16MiB", "--host-memory", "16MiB", "--page-tokens", "16")


def parsed(*argv: str) -> Namespace:
    parser = ArgumentParser()
    serve.configure(parser)
    return parser.parse_args(["--model", "m", *argv])


def python(code: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=PATIENCE_S, check=False)


def test_help_imports_nothing_heavy() -> None:
    code = """
import sys
from stepwell.cli.main import main
from stepwell.store.registry import open_store
for argv in (["--help"], ["serve", "--help"]):
    try:
        main(argv)
    except SystemExit:
        pass
heavy = {"torch", "fastapi", "uvicorn", "prometheus_client", "jinja2", "tokenizers", "pydantic"} & sys.modules.keys()
assert not heavy, heavy
"""
    done = python(code)
    assert done.returncode == 0, done.stderr
    assert "--prefetch-policy" in done.stdout and "serve" in done.stdout


def test_rings_of_connections_do_not_wait_until_they_are_as_many_as_the_objects_of_libraries() -> None:
    code = """
import gc
from collections import deque
from stepwell.cli import serve

class Ring:
    alive = most = 0

    def __init__(self) -> None:
        self.me = self
        Ring.alive += 1
        Ring.most = max(Ring.most, Ring.alive)

    def __del__(self) -> None:
        Ring.alive -= 1

libraries = [[] for _ in range(400_000)]
gc.collect()
serve._tune_garbage_collector()
connections = deque(maxlen=5_000)  # open for a while
for _ in range(100_000):
    connections.append(Ring())
assert Ring.most < 25_000, Ring.most
"""
    done = python(code)
    assert done.returncode == 0, done.stderr


def test_store_options_come_from_arguments_and_for_mooncake_from_the_environment() -> None:
    environment = {"MOONCAKE_MASTER": "there:50051", "OTHER": "x"}
    args = parsed("--store", "log:/d", "--store-budget", "50GiB", "--store-option", "direct=off")
    assert engine_options.store_options(args, environment) == {"budget": "50GiB", "direct": "off"}
    assert engine_options.store_options(parsed("--store", "mooncake:"), environment) == {"master_server_address": "there:50051"}
    file = {"MOONCAKE_CONFIG_PATH": "/etc/theirs.json"}
    assert engine_options.store_options(parsed("--store", "mooncake:"), file) == {"config_path": "/etc/theirs.json"}
    assert engine_options.store_options(parsed("--store", "mooncake:/etc/ours.json"), file) == {}
    for bad in (
        ("--store-budget", "1GiB"),
        ("--store", "log:/d", "--store-budget", "much"),
        ("--store", "x:", "--store-option", "y"),
    ):
        with pytest.raises(ConfigError):
            engine_options.store_options(parsed(*bad), {})


def test_the_store_key_is_read_from_its_file(tmp_path: Path) -> None:
    pytest.importorskip("torch")
    key = write_store_key(tmp_path / "key")
    found = engine_options.read(parsed("--store-key-file", str(tmp_path / "key")), {}).store_config.key
    assert found is not None and found.id == key.id
    assert engine_options.read(parsed(), {}).store_config.key is None


def test_a_selector_is_part_of_the_engine_s_settings() -> None:
    pytest.importorskip("torch")
    config = engine_options.read(parsed("--sparse", "quest", "--sparse-budget", "1024"), {})
    assert (config.sparse, config.sparse_budget, config.picks.identity) == ("quest", 1024, "quest1-1024")
    assert engine_options.read(parsed("--sparse", "clusterkv"), {}).picks.identity == "clusterkv1-2048"
    assert engine_options.read(parsed(), {}).picks is None


def _errors(said: str) -> list[str]:
    """The lines of standard error, without those that time the start."""
    return [line for line in said.splitlines() if " info start: " not in line]


@pytest.mark.parametrize(
    ("argv", "said"),
    [
        (("quest",), "quest1-2048"),
        (("clusterkv", "--sparse-budget", "1024"), "clusterkv1-1024"),
        (("quest", "--hot-rows", "96"), "quest1-2048, 96 hot rows a request, "),
        (("quest", "--hot-rows", "0"), "quest1-2048, 0 hot rows a request, "),
        (("quest", "--hot-rows", "1000000"), "quest1-2048, 256 hot rows a request, "),
    ],
)
def test_people_are_told_whether_rows_may_leave_the_device_and_what_that_takes(argv: tuple[str, ...], said: str) -> None:
    """No more rows than the longest request has tokens: more would be wasted."""
    pytest.importorskip("torch")
    pytest.importorskip("transformers")
    from engine.families import checkpoint
    from stepwell.engine import build_engine

    config = engine_options.read(parsed("--sparse", *argv, *SMALL, "--max-model-len", "256"), {})
    keys = Secrets(api_key=None, admin_token="word")
    with build_engine(checkpoint("llama"), config) as engine:
        rows = engine.spilling
        reported = dict(serve_summary.lines(engine, "a", config, "b", keys, TenantsFile(), made=False))["sparse"]
    assert reported == said + ("" if rows is None else f"{format_bytes(rows.beside_bytes)} reserved for them")
    assert rows is None or rows.beside_bytes > 32 * 8 * 2048 * 16, "a plan for all that could be missing, at least"


def test_a_draft_is_part_of_the_engine_s_settings() -> None:
    pytest.importorskip("torch")
    config = engine_options.read(parsed("--draft", "mtp", "--draft-tokens", "2"), {})
    assert (config.draft, config.draft_tokens) == ("mtp", 2)
    assert engine_options.read(parsed(), {}).draft is None


def test_secrets_come_from_arguments_then_the_environment_then_chance() -> None:
    pytest.importorskip("fastapi")
    environment = {"STEPWELL_API_KEY": "env key", "STEPWELL_ADMIN_TOKEN": "env token"}
    both = serve._secrets(parsed("--api-key", "k", "--admin-token", "t"), environment)
    assert (both.api_key, both.admin_token) == ("k", "t") and repr(both) == "Secrets(...)"
    found = serve._secrets(parsed(), environment)
    assert (found.api_key, found.admin_token) == ("env key", "env token") and "env" not in repr(found)
    made, other = serve._secrets(parsed(), {"STEPWELL_API_KEY": ""}), serve._secrets(parsed(), {})
    assert made.api_key is None and len(made.admin_token) >= 32 and made.admin_token != other.admin_token
    for empty in ("--api-key", "--admin-token"):
        with pytest.raises(ConfigError, match="must not be empty"):
            Principals(serve._secrets(parsed(empty, ""), {}))


@pytest.mark.parametrize("spelled", ["127.0.0.1", "127.1", "localhost", "127.0.0.5", "0x7f.1"])
def test_names_are_checked_wherever_only_this_machine_can_ask(spelled: str) -> None:
    pytest.importorskip("uvicorn")
    from stepwell.server.running import bind

    with bind(spelled, 0) as taken:
        host = taken.getsockname()[0]
    named = serve._host_names(parsed("--host", spelled, "--allow-host", "well.example"), host)
    assert {"127.0.0.1", "localhost", spelled, host, "well.example"} <= set(named)
    assert not serve._warnings(host, Secrets(api_key=None, admin_token="word"), TenantsFile())


def test_whoever_listens_to_others_knows_no_names_of_theirs_and_is_told_to_set_a_key() -> None:
    assert serve._host_names(parsed("--host", "0.0.0.0"), "0.0.0.0") == ()
    ((_, said),) = serve._warnings("0.0.0.0", Secrets(api_key=None, admin_token="word"), TenantsFile())
    assert "set an API key" in said


@pytest.mark.parametrize(
    ("argv", "message"),
    [
        (("--model", "/no/such/model"), "there is no model"),
        (("--model", "random-hybrid", "--device", "cpu", "--host-memory", "900TiB"), "are free"),
        (("--model", "random-hybrid", "--device", "cpu", "--host-memory", "lots"), "not an amount of memory"),
        (("--model", "random-hybrid", "--host", "203.0.113.1"), "cannot listen"),
        (("--model", "random-hybrid", "--port", "99999"), "from 0 to 65535"),
        (("--model", "random-hybrid", "--max-body", "0"), "--max-body must be more than 0"),
        (("--model", "random-hybrid", "--checkpoint-delay", "nan"), "--checkpoint-delay must be 0 or more"),
        (("--model", "random-hybrid", *SMALL, "--host-memory", "0", "--store", "memory:"), "host"),
    ],
)
def test_what_cannot_work_fails_at_the_start_in_one_line(
    argv: tuple[str, ...], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    pytest.importorskip("uvicorn")
    port = () if "--port" in argv else ("--port", "0")
    assert main(["serve", *argv, *port]) == 2
    captured = capsys.readouterr()
    assert message in captured.err and len(_errors(captured.err)) == 1 and captured.out == ""


def test_a_taken_port_is_said_before_anything_is_loaded(capsys: pytest.CaptureFixture[str]) -> None:
    pytest.importorskip("uvicorn")
    with socket.create_server(("127.0.0.1", 0)) as taken:
        assert main(["serve", "--model", __file__, "--port", str(taken.getsockname()[1])]) == 2
    assert "cannot listen" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("argv", "message"),
    [
        (("--store", "foo:bar"), "no store is called 'foo'"),
        (("--store", "log:"), "log:DIR"),
        (("--store", "log:TMP/new"), "say how large it may become"),
        (("--store", "log:TMP/taken"), "is open in process"),
        (("--store", "log:TMP/other", "--store-budget", "64MiB", "--store-option", "colour=red"), "unknown store option"),
        (("--store", "memory:", "--host-memory", "0"), "host"),
        (("--host-memory", "900TiB"), "are free"),
        (("--device-memory", "900TiB"), "are free"),
        (("--device-memory", "some"), "not an amount of memory"),
        (("--max-body", "some"), "not an amount of memory"),
        (("--device", "tpu"), "cpu, cuda"),
        (("--device", "cuda:99"), "--device"),
        (("--dtype", "fp4"), "--dtype must be one of"),
        (("--kv-dtype", "fp4"), "--kv-dtype must be one of fp32, bf16, fp16, fp8; got 'fp4'"),
        (("--page-tokens", "0"), "--page-tokens"),
        (("--draft", "/no/such/draft"), "no draft model"),
        (("--sparse-budget", "512"), "name one with --sparse"),
        (("--sparse", "dsa", "--sparse-budget", "512"), "the model defines how many tokens are picked"),
        (("--hot-rows", "512"), "name a selector with --sparse"),
        (("--sparse", "quest", "--hot-rows", "512", "--host-memory", "0"), "leave --hot-rows out"),
        (("--sparse", "quest", "--hot-rows", "512", "--write-policy", "back"), "--write-policy through"),
        (("--checkpoint-dtype", "int8", "--host-memory", "0"), "give --host-memory, or leave it out"),
        (("--checkpoint-dtype", "int8", "--tensor-parallel", "2"), "--checkpoint-dtype works on one rank only"),
        (("--chunk-tokens", "0"), "--chunk-tokens"),
        (("--store-key-file", "TMP/none"), "stepwell store new-key"),
        (("--store-key-file", "TMP"), "is not a file"),
        (("--max-priority", "11"), "from 0 to 10"),
        (("--drain", "-1"), "--drain"),
    ],
)
def test_mistakes_that_need_no_weights_are_found_before_any_are_read(
    argv: tuple[str, ...], message: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    pytest.importorskip("uvicorn")
    for module in ("stepwell.engine.building.build", "stepwell.engine.loading.checkpoint"):
        monkeypatch.setattr(f"{module}.open_checkpoint", lambda *args, **more: pytest.fail("the model was opened"))
    small = [] if any(each in argv for each in ("--host-memory", "--device", "--device-memory", "--page-tokens")) else SMALL
    with closing(open_store(f"log:{tmp_path}/taken", options={"budget": "64MiB", "segment": "1MiB"})):
        given = [each.replace("TMP", str(tmp_path)) for each in argv]
        assert main(["serve", "--model", "random-hybrid", "--port", "0", *small, *given]) == 2
    said = capsys.readouterr().err
    assert message in said and len(_errors(said)) == 1


def test_the_start_says_what_smaller_checkpoints_cost() -> None:
    pytest.importorskip("torch")
    from stepwell.engine.scheduling.footprint import footprint_of

    exact = load_spec("qwen3-next-80b")
    said = narrow(footprint_of(exact), exact.with_checkpoint_dtype("int8"))
    assert said == "int8 on the host and in the store: 20.3 MiB instead of 74.2 MiB; what resumes from there is not exact"


def test_a_file_that_is_no_model_leaves_no_lock_behind(tmp_path: Path) -> None:
    pytest.importorskip("uvicorn")
    store = ("--store", f"log:{tmp_path}/log", "--store-budget", "64MiB", "--store-option", "segment=1MiB")
    assert main(["serve", "--model", __file__, "--port", "0", *SMALL, *store]) == 2
    open_store(f"log:{tmp_path}/log").close()


def test_a_second_signal_does_not_wait_for_answers(tmp_path: Path) -> None:
    pytest.importorskip("uvicorn")
    command = [sys.executable, "-m", "stepwell", "serve", "--model", "random-hybrid", *SMALL, "--port", "0", "--drain", "100000"]
    body = {"model": "random-hybrid", "prompt": "On and on.", "max_tokens": 2000, "ignore_eos": True, "stream": True}
    with start_child(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as process:
        try:
            address = _until_address(process)["address"]
            request = urllib.request.Request(
                f"{address}/v1/completions", json.dumps(body).encode(), {"content-type": "application/json"}
            )
            with urllib.request.urlopen(request, timeout=120) as response:
                assert response.readline().startswith(b"data: ")
                process.send_signal(signal.SIGTERM)
                while _status(f"{address}/ready") != 503:
                    assert process.poll() is None, "it did not wait for its answer"
                process.send_signal(signal.SIGTERM)
                assert b"the server is stopping" in response.read()
            _, errors = process.communicate(timeout=120)
        finally:
            process.kill()
    assert process.returncode == 0, errors
    assert _logged(errors)[-3:] == ["aborting 1 request(s) that did not finish in time", *_CLOSING]


_CLOSING = ["closing: finishing backups and copies, then closing the store", "stopped"]


def _logged(errors: str) -> list[str]:
    """The lines a server has logged, without those of requests, which end at any time. None may be a warning."""
    lines = [line.split(" ", 2) for line in errors.splitlines()]

    def ended(said: str) -> bool:
        return said.startswith("error sent") and "status=503" in said  # a stream with the server

    assert all(level == "info" for _, level, _ in lines), errors
    unheard = ("request ended", "the vocabulary for formats and grammars", "start: ")
    return [said for _, _, said in lines if not said.startswith(unheard) and not ended(said)]


def _status(address: str) -> int:
    try:
        with urllib.request.urlopen(address, timeout=60) as response:
            return int(response.status)
    except urllib.error.HTTPError as error:
        return error.code


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_signal_ends_it_in_order_and_its_store_keeps_what_was_computed(tmp_path: Path, number: signal.Signals) -> None:
    pytest.importorskip("uvicorn")
    where = tmp_path / "log"
    options = ("--port", "0", "--store", f"log:{where}", "--store-budget", "64MiB", "--store-option", "segment=1MiB")
    command = [sys.executable, "-m", "stepwell", "serve", "--model", "random-hybrid", *SMALL, *options]
    with start_child(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as process:
        try:
            said = _until_address(process)
            assert said["after a kill"] == "what was cached up to 60 s ago can be resumed from the store"
            assert said["kernels"] == "torch" and "tokens a request" in said["model"] and "requests at once" in said["passes"]
            assert said["store"] == f"log:{where}" and said["tiers"] == ", ".join(
                f"{tier} 16.0 MiB (16,384 tokens)" for tier in ("device", "host")
            )
            assert (
                "per token" in said["memory"] and "per checkpoint" in said["memory"] and "(for this run)" in said["admin token"]
            )
            body = json.dumps(
                {"model": "random-hybrid", "prompt": "Keep this, whatever comes. " * 3, "max_tokens": 2, "ignore_eos": True}
            ).encode()
            request = urllib.request.Request(f"{said['address']}/v1/completions", body, {"content-type": "application/json"})
            with urllib.request.urlopen(request, timeout=PATIENCE_S) as response:
                assert json.load(response)["usage"]["completion_tokens"] == 2
            process.send_signal(number)
            _, errors = process.communicate(timeout=PATIENCE_S)
        finally:
            process.kill()
    began = [
        "loading the weights of random-hybrid",
        "write policy: exclusive (the store has at most 4 times the memory of the tiers above it)",
        f"ready model=random-hybrid address={said['address']} kernels=torch",
    ]
    assert process.returncode == 0 and "request ended id=cmpl-" in errors
    assert _logged(errors) == [*began, "stopping: 0 request(s) may finish for 30 s", *_CLOSING]
    stat = subprocess.run(
        [sys.executable, "-m", "stepwell", "store", "stat", str(where), "--json"], capture_output=True, text=True, check=True
    )
    report = json.loads(stat.stdout)
    assert report["values"] > 0 and report["open_in"] is None


def _until_address(process: subprocess.Popen[str]) -> dict[str, str]:
    assert process.stdout is not None
    said: dict[str, str] = {}
    for line in process.stdout:
        label, _, value = line.partition("  ")
        said[label.strip()] = value.strip()
        if "address" in said:
            break
    assert "address" in said, process.communicate()
    return said


def test_what_keeps_a_server_from_starting_is_a_line_of_json_too(capfd: pytest.CaptureFixture[str]) -> None:
    pytest.importorskip("uvicorn")
    assert main(["serve", "--model", "/no/such/model", "--port", "0", *SMALL, "--log-format", "json"]) == 2
    (line,) = [json.loads(each) for each in capfd.readouterr().err.splitlines()]
    assert line["level"] == "error" and "/no/such/model" in line["message"]
