"""`stepwell store`, as a user meets it."""

from __future__ import annotations

import json
from contextlib import closing
from pathlib import Path

import pytest

from stepwell.cli.main import main
from stepwell.store.api import Space
from stepwell.store.log.opening import open_log
from stepwell.store.log.store import LogStore
from stepwell.store.registry import Opening
from stepwell.testing.store_contract import fetch, key, offer

ONE = Space(digest=b"1" * 32, label="first [model]", tenant="alice")
TWO = Space(digest=b"2" * 32, label="second", tenant="bob")


def open_in(directory: Path) -> LogStore:
    options = {"budget": "4MiB", "segment": "256KiB", "direct": "off", "quota.alice": "1MiB"}
    return open_log(Opening(location=str(directory), options=options))


@pytest.fixture
def directory(tmp_path: Path) -> Path:
    with closing(open_in(tmp_path / "store")) as store:
        for space in (ONE, TWO):
            for at in range(3):  # a batch each, so that one damaged header costs one value
                store.write_from(space, [offer(space, f"v{at}", 10_000)])
        store.write_from(TWO, [offer(TWO, "small", 50)])
    return tmp_path / "store"


def run(capsys: pytest.CaptureFixture[str], *argv: str) -> tuple[int, str, str]:
    status = main(argv)
    captured = capsys.readouterr()
    return status, captured.out, captured.err


def damage(directory: Path, offset: int) -> None:
    (segment,) = directory.glob("*.seg")
    content = bytearray(segment.read_bytes())
    content[offset] ^= 1
    segment.write_bytes(content)


def place_of(directory: Path, name: str) -> int:
    with closing(open_in(directory)) as store:
        index = store._state.index
        return int(index.columns.offset[index.rows_of(ONE.digest)[key(name)]])


def test_stat_counts_values_and_bytes_per_namespace(directory: Path, capsys: pytest.CaptureFixture[str]) -> None:
    status, out, err = run(capsys, "store", "stat", str(directory), "--json")
    report = json.loads(out)
    assert (status, err, report["values"], report["value_bytes"]) == (0, "", 7, 60_050)
    by_label = {space["label"]: space for space in report["spaces"]}
    assert (by_label["second"]["values"], by_label["second"]["value_bytes"], by_label["second"]["tenant"]) == (4, 30_050, "bob")
    assert by_label["second"]["digest"] == TWO.digest.hex()
    assert report["tenants"] == [{"tenant": "alice", "disk_bytes": 3 * (12_288 + 160), "quota_bytes": 2**20}]
    assert report["directory_bytes"] <= report["budget_bytes"] == 4 * 2**20 and report["open_in"] is None


def test_stat_prints_a_table_in_human_units(directory: Path, capsys: pytest.CaptureFixture[str]) -> None:
    status, out, _ = run(capsys, "store", "stat", str(directory))
    assert status == 0 and "first [model]" in out and "29.3 KiB" in out and "of 4.0 MiB" in out and "quota" in out


def test_stat_and_check_work_while_the_store_is_open_and_say_so(directory: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with closing(open_in(directory)) as store:
        store.write_from(ONE, [offer(ONE, "late", 10_000)])
        status, out, _ = run(capsys, "store", "stat", str(directory), "--json")
        assert status == 0 and json.loads(out)["values"] == 8 and "process" in json.loads(out)["open_in"]
        status, out, _ = run(capsys, "store", "check", str(directory))
        assert status == 0 and "all sound" in out and "open in process" in out
        status, _, err = run(capsys, "store", "check", str(directory), "--repair")
        assert status == 2 and "is open in process" in err


def test_check_finds_a_damaged_value_and_repair_drops_it_for_good(directory: Path, capsys: pytest.CaptureFixture[str]) -> None:
    offset = place_of(directory, "v1")
    damage(directory, offset + 5000)
    status, out, _ = run(capsys, "store", "check", str(directory), "--json")
    report = json.loads(out)
    assert status == 1 and report["damaged_values"] == 1 and report["damaged_bytes"] == 10_000
    (found,) = report["damage"]
    assert (found["offset"], found["key"], found["namespace"]) == (offset, key("v1").hex(), ONE.digest.hex())
    assert found["file"].endswith(".seg") and "checksum" in found["reason"]
    status, out, _ = run(capsys, "store", "check", str(directory), "--repair")
    assert status == 0 and "dropped" in out, "everything that was found is repaired"
    (directory / "snapshot").unlink()
    assert run(capsys, "store", "check", str(directory))[0] == 0
    with closing(open_in(directory)) as store:
        assert store.contains(ONE, [key(name) for name in ("v0", "v1", "v2")]) == [True, False, True]
        assert fetch(store, TWO, "small", 50) is not None


def test_check_finds_a_damaged_header_and_repair_covers_it(directory: Path, capsys: pytest.CaptureFixture[str]) -> None:
    header = place_of(directory, "v1") - 4096
    damage(directory, header + 100)
    status, out, _ = run(capsys, "store", "check", str(directory))
    assert status == 1 and "no valid header" in out and "1 values" in out
    assert run(capsys, "store", "check", str(directory), "--repair")[0] == 0
    assert run(capsys, "store", "check", str(directory))[0] == 0
    (directory / "snapshot").unlink()
    status, out, _ = run(capsys, "store", "check", str(directory), "--json")
    assert status == 0 and json.loads(out)["values"] == 7, "what was whole behind it was copied first"


def test_a_directory_without_a_store_is_one_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for argv in (["stat"], ["check"], ["check", "--repair"]):
        status, out, err = run(capsys, "store", argv[0], str(tmp_path / "none"), *argv[1:])
        assert (status, out) == (2, "") and "there is no log store in" in err and err.count("\n") == 1
    assert not (tmp_path / "none").exists()


def test_clear_forgets_one_namespace_for_good_and_touches_no_other(directory: Path, capsys: pytest.CaptureFixture[str]) -> None:
    status, out, _ = run(capsys, "store", "clear", str(directory), ONE.digest.hex()[:8])
    assert status == 0 and "forgot 3 values" in out
    with closing(open_in(directory)) as store:
        assert [fetch(store, ONE, f"v{at}", 10_000) for at in range(3)] == [None] * 3
        assert all(fetch(store, TWO, f"v{at}", 10_000) is not None for at in range(3))


def test_clear_wants_exactly_one_namespace_and_an_existing_store(
    directory: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(capsys, "store", "clear", str(directory), "3")[0] == 2, "31 and 32: two namespaces start like that"
    assert run(capsys, "store", "clear", str(directory), "ff")[0] == 2
    assert run(capsys, "store", "clear", str(tmp_path / "nothing"), "31")[0] == 2
    assert not (tmp_path / "nothing").exists()
