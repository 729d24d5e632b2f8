"""`stepwell serve --tenants FILE`, as an operator meets it. What tenants may do is tested in tests/server."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
import urllib.error
import urllib.request
from pathlib import Path
from threading import Timer

import pytest

from stepwell.cli.main import main
from stepwell.jobs.children import start_child
from waiting import PATIENCE_S

pytest.importorskip("uvicorn")

SMALL = ("--device", "cpu", "--device-memory", "16MiB", "--host-memory", "16MiB", "--page-tokens", "16")
KEY = "the key that alice has"


@pytest.fixture
def tenants(tmp_path: Path) -> Path:
    path = tmp_path / "tenants.json"
    path.write_text(json.dumps({"tenants": [{"name": "alice", "key": KEY, "quota": "1MiB"}]}))
    path.chmod(0o600)
    return path


@pytest.mark.parametrize(
    ("argv", "message"),
    [
        (("--tenants", "/no/such/file"), "'/no/such/file' cannot be read"),
        (("--tenants", "FILE", "--api-key", "k"), "leave out --api-key"),
        (("--tenants", "FILE", "--admin-token", KEY), "alice has the key of another, or the admin token"),
        (("--tenants", "FILE", "--store", "memory:"), "alice has a quota, which only log stores keep"),
    ],
)
def test_mistakes_are_found_before_weights_are_read(
    argv: tuple[str, ...], message: str, tenants: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    opened = "stepwell.engine.building.build.open_checkpoint"
    monkeypatch.setattr(opened, lambda *args, **more: pytest.fail("the model was opened"))
    given = [each.replace("FILE", str(tenants)) for each in argv]
    assert main(["serve", "--model", "random-hybrid", "--port", "0", *SMALL, *given]) == 2
    said = capsys.readouterr().err
    assert message in said and said.count("\n") == 1 and KEY not in said


def test_a_tenant_is_served_and_its_quota_is_in_the_log(tenants: Path, tmp_path: Path) -> None:
    where = tmp_path / "log"
    tenants.chmod(0o644)
    store = ("--store", f"log:{where}", "--store-budget", "64MiB", "--store-option", "segment=1MiB")
    command = [sys.executable, "-m", "stepwell", "serve", "--model", "random-hybrid", *SMALL, "--port", "0", *store]
    command += ["--tenants", str(tenants)]
    with start_child(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as process:
        try:
            said = _said(process)
            assert said["API key"] == "one for each of 1 tenant" and "chmod 600" in said["warning"]
            assert [_asked(said["address"], key) for key in (KEY, "another key")] == [200, 401]
            process.send_signal(signal.SIGTERM)
            out, errors = process.communicate(timeout=PATIENCE_S)
        finally:
            process.kill()
    assert process.returncode == 0 and KEY not in out + errors + "".join(said.values())
    assert " tenant=alice " in errors and all(" info " in line for line in errors.splitlines())
    stat = [sys.executable, "-m", "stepwell", "store", "stat", str(where), "--json"]
    report = json.loads(subprocess.run(stat, capture_output=True, text=True, check=True).stdout)
    assert [(each["tenant"], each["quota_bytes"]) for each in report["tenants"]] == [("alice", 1 << 20)]
    assert {each["tenant"] for each in report["spaces"]} == {"alice"} and 0 < report["tenants"][0]["disk_bytes"] <= 1 << 20


def test_tenants_are_read_again_at_sighup_and_a_file_that_is_wrong_changes_nothing(tenants: Path) -> None:
    command = [sys.executable, "-m", "stepwell", "serve", "--model", "random-hybrid", *SMALL, "--port", "0"]
    command += ["--tenants", str(tenants)]
    tenants.write_text(json.dumps({"tenants": [{"name": "alice", "key": KEY}]}))
    tenants.chmod(0o640)
    with start_child(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as process:
        try:
            address = _said(process)["address"]
            others = [{"name": "alice", "key": "a newer key of alice"}, {"name": "bob", "key": "the key that bob has"}]
            tenants.write_text(json.dumps({"tenants": others}))
            process.send_signal(signal.SIGHUP)
            assert _line(process, "tenants reloaded").endswith("tenants reloaded new=1 gone=0 changed=1")
            keys = (KEY, "a newer key of alice", "the key that bob has")
            assert [_asked(address, key) for key in keys] == [401, 200, 200]
            tenants.write_text("{")
            process.send_signal(signal.SIGHUP)
            said = _line(process, "tenants not reloaded")
            assert " error tenants not reloaded: " in said and "it is not JSON" in said
            assert [_asked(address, key) for key in keys] == [401, 200, 200]
            process.send_signal(signal.SIGTERM)
            process.communicate(timeout=PATIENCE_S)
        finally:
            process.kill()
    assert process.returncode == 0


def test_sighup_without_tenants_is_a_line_in_the_log() -> None:
    command = [sys.executable, "-m", "stepwell", "serve", "--model", "random-hybrid", *SMALL, "--port", "0"]
    with start_child(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as process:
        try:
            address = _said(process, "address")["address"]
            process.send_signal(signal.SIGHUP)
            assert "no --tenants file to reload" in _line(process, "SIGHUP")
            assert _asked(address, "") == 200
            process.send_signal(signal.SIGTERM)
            process.communicate(timeout=PATIENCE_S)
        finally:
            process.kill()
    assert process.returncode == 0


def _line(process: subprocess.Popen[str], word: str) -> str:
    """The next line of its log with a word. One that does not come ends the server."""
    assert process.stderr is not None
    patience = Timer(PATIENCE_S, process.kill)
    patience.start()
    try:
        return next(line.rstrip() for line in process.stderr if word in line)
    finally:
        patience.cancel()


def _asked(address: str, key: str) -> int:
    body = {"model": "random-hybrid", "prompt": "Keep this, whatever comes. " * 3, "max_tokens": 2, "ignore_eos": True}
    headers = {"content-type": "application/json", "Authorization": f"Bearer {key}"}
    request = urllib.request.Request(f"{address}/v1/completions", json.dumps(body).encode(), headers)
    try:
        with urllib.request.urlopen(request, timeout=PATIENCE_S) as response:
            return int(response.status)
    except urllib.error.HTTPError as error:
        return error.code


def _said(process: subprocess.Popen[str], last: str = "warning") -> dict[str, str]:
    """What it prints before the first request, to the line with the label `last`."""
    assert process.stdout is not None
    said: dict[str, str] = {}
    for line in process.stdout:
        label, _, value = line.partition("  ")
        said[label.strip()] = value.strip()
        if last in said:
            return said
    raise AssertionError(process.communicate())
