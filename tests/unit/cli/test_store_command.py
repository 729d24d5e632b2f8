"""`stepwell store`, as a user meets it."""

from __future__ import annotations

import json
import stat
from contextlib import closing
from pathlib import Path

import pytest

from stepwell.base.store_key import StoreKey
from stepwell.cli.main import main
from stepwell.store.api import Space, Write
from stepwell.store.key_file import read_store_key, write_store_key
from stepwell.store.keyed_seal import Keyed
from stepwell.store.log.opening import open_log
from stepwell.store.log.store import LogStore
from stepwell.store.registry import Opening
from stepwell.testing.store_contract import fetch, key, offer

ONE = Space(digest=b"1" * 32, label="first [model]", tenant="alice")
TWO = Space(digest=b"2" * 32, label="second", tenant="bob")
KEYED = Space(digest=b"4" * 32, label="first, key 1234")


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
    assert status == 1 and "no valid header" in out and "1 value " in out
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
    assert status == 0 and "dropped 3 values" in out
    with closing(open_in(directory)) as store:
        assert [fetch(store, ONE, f"v{at}", 10_000) for at in range(3)] == [None] * 3
        assert all(fetch(store, TWO, f"v{at}", 10_000) is not None for at in range(3))


def test_clear_wants_exactly_one_namespace_and_an_existing_store(
    directory: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(capsys, "store", "clear", str(directory), "3")[0] == 2, "31 and 32: two namespaces start like that"
    assert run(capsys, "store", "clear", str(directory), "ff")[0] == 2
    status, _, err = run(capsys, "store", "clear", str(directory), "")
    assert status == 2 and "NAMESPACE must not be empty" in err, "an empty variable in a script"
    assert run(capsys, "store", "clear", str(tmp_path / "nothing"), "31")[0] == 2
    assert not (tmp_path / "nothing").exists()


def test_new_key_makes_a_key_for_its_owner_alone_and_never_writes_over_one(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "key"
    status, out, err = run(capsys, "store", "new-key", str(file))
    made = read_store_key(file)
    assert (status, err) == (0, "") and made.id.hex() in out and stat.S_IMODE(file.stat().st_mode) == 0o600
    assert file.read_text().strip() not in out, "the secret is not shown"
    status, out, err = run(capsys, "store", "new-key", str(file))
    assert (status, out) == (2, "") and "exists already" in err and read_store_key(file).id == made.id


def test_check_works_without_the_key_says_what_it_could_not_check_and_with_it_finds_what_was_planted(
    directory: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    ours, theirs = write_store_key(tmp_path / "ours"), write_store_key(tmp_path / "theirs")
    planted = keyed(ours, "planted", KEYED)
    planted = planted._replace(stamp=keyed(theirs, "planted", KEYED).stamp[:44] + planted.stamp[44:48] + bytes(16))
    with closing(open_in(directory)) as store:
        store.write_from(KEYED, [keyed(ours, "good", KEYED), planted, keyed(theirs, "not ours", KEYED)])
    with closing(open_in(directory)) as store:  # and once more from what is on the disk alone
        assert all(store.contains(KEYED, [key("good"), key("planted"), key("not ours")]))
    check = ("store", "check", str(directory))
    status, out, _ = run(capsys, *check)
    assert status == 0 and "all sound" in out and "3 of them are stamped with a store key: give it with" in out
    assert json.loads(run(capsys, *check, "--json")[1])["unproven_values"] == 3
    given = (*check, "--store-key-file", str(tmp_path / "ours"))
    status, out, _ = run(capsys, *given, "--json")
    report = json.loads(out)
    assert (status, report["unproven_values"], [one["key"] for one in report["damage"]]) == (1, 8, [key("planted").hex()])
    assert report["damage"][0]["reason"] == "it was not written with the same store key"
    assert run(capsys, *given, "--repair")[0] == 0
    status, out, _ = run(capsys, *given)
    assert status == 0 and "all sound" in out and "8 of them are not stamped with the store key" in out
    with closing(open_in(directory)) as store:
        assert store.contains(KEYED, [key("good"), key("planted"), key("not ours")]) == [True, False, True]


def test_what_carries_no_key_in_a_namespace_of_the_key_is_damage_and_can_be_dropped(
    directory: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    ours = write_store_key(tmp_path / "ours")
    with closing(open_in(directory)) as store:
        store.write_from(KEYED, [offer(KEYED, "planted", 1000)])
        store.write_from(KEYED, [keyed(ours, "good", KEYED)])
    check = ("store", "check", str(directory), "--store-key-file", str(tmp_path / "ours"))
    status, out, _ = run(capsys, *check, "--json")
    report = json.loads(out)
    assert (status, report["unproven_values"], [one["key"] for one in report["damage"]]) == (1, 7, [key("planted").hex()])
    assert report["damage"][0]["reason"] == "it was not written with the same store key"
    assert run(capsys, *check, "--repair")[0] == 0
    assert run(capsys, *check)[0] == 0
    with closing(open_in(directory)) as store:
        assert store.contains(KEYED, [key("good"), key("planted")]) == [True, False]
        assert all(store.contains(ONE, [key(f"v{at}") for at in range(3)])), "namespaces without the key are left alone"


def test_damage_to_keyed_values_is_found_without_the_key(directory: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with closing(open_in(directory)) as store:
        store.write_from(ONE, [keyed(StoreKey(bytes(range(32))), "v9")])
    damage(directory, place_of(directory, "v9") + 500)
    status, out, _ = run(capsys, "store", "check", str(directory))
    assert status == 1 and "checksum" in out and "1 of them is stamped" in out


def keyed(store_key: StoreKey, name: str, where: Space = ONE) -> Write:
    seals, plain = Keyed(store_key), offer(where, name, 1000)
    (stamp,) = seals.stamp_all(where, [plain.key], [1000], [seals.digest(plain.data)])
    return plain._replace(stamp=stamp)


def test_names_from_files_cannot_steer_the_terminal(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    hostile = Space(digest=b"9" * 32, label="\x1b[31mred\x07\u202egnp.exe", tenant="\x1b]0;title\x07\n")
    directory = tmp_path / "store\x1b[2J"
    with closing(open_in(directory)) as store:
        store.write_from(hostile, [offer(hostile, "v0", 10_000), offer(hostile, "v1", 10_000)])
    with closing(open_in(directory)) as store:
        index = store._state.index
        offset = int(index.columns.offset[index.rows_of(hostile.digest)[key("v1")]])
    damage(directory, offset)
    shown = []
    for order in (["stat"], ["check"], ["check", "--repair"]):
        _, out, err = run(capsys, "store", *order, str(directory))
        shown += [out, err]
    shown += run(capsys, "store", "clear", str(directory), hostile.digest.hex())[1:]
    shown += run(capsys, "store", "stat", f"{tmp_path}/no\x1b[2Jsuch")[1:]
    assert "\\x1b[31mred\\x07\\u202egnp.exe" in shown[0] and "\\x1b]0;title" in shown[0]
    assert not [one for text in shown for one in text if one != "\n" and not one.isprintable()]
