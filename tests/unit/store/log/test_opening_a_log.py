"""Opening a log store: options, memory of them, and one process at a time."""

from __future__ import annotations

import os
import stat
import subprocess
import sys
from pathlib import Path

import pytest
from log_fixtures import OpenLog

from stepwell.base.errors import ConfigError, StoreError
from stepwell.store.log.opening import open_log
from stepwell.store.log.state import segments
from stepwell.store.registry import Opening
from stepwell.testing.store_contract import fetch, key, offer, space

HERE = space("here")


def test_values_and_options_outlive_the_process(open_here: OpenLog) -> None:
    store = open_here(quota_alice="512KiB")
    store.write_from(HERE, [offer(HERE, "small", 10), offer(HERE, "large", 9000)])
    store = open_here(budget="", segment="")
    assert fetch(store, HERE, "small", 10) and fetch(store, HERE, "large", 9000)
    assert (store.stat().budget_bytes, store.stat().segment_bytes) == (2**20, 64 * 1024)
    assert [tenant.quota_bytes for tenant in store.stat().tenants] == [512 * 1024]
    assert open_here(quota_alice="none").stat().tenants == ()


def test_a_second_opener_is_told_which_process_has_it(open_here: OpenLog, tmp_path: Path) -> None:
    open_here()
    code = f"from stepwell.store.registry import open_store; open_store('log:{tmp_path / 'store'}')"
    child = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert f"is open in process {os.getpid()}; close it there" in child.stderr
    with pytest.raises(StoreError, match="another directory"):
        open_log(Opening(location=str(tmp_path / "store")))


def test_nobody_else_may_read_the_files(open_here: OpenLog, tmp_path: Path) -> None:
    open_here().write_from(HERE, [offer(HERE, "x")])
    open_here()
    assert stat.S_IMODE((tmp_path / "store").stat().st_mode) == 0o700
    modes = {path.name: stat.S_IMODE(path.stat().st_mode) for path in (tmp_path / "store").iterdir()}
    assert set(modes.values()) == {0o600} and {"lock", "store.json", "snapshot"} <= set(modes), modes


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"budget": ""}, "say how large"),
        ({"budget": "100KiB"}, "at least"),
        ({"segment": "5000"}, "multiple of 4096"),
        ({"direct": "perhaps"}, "auto, on, off"),
        ({"speed": "fast"}, "unknown store option"),
        ({"quota.x": "lots"}, "not an amount"),
    ],
)
def test_an_option_that_cannot_work_says_what_would(options: dict[str, str], message: str, tmp_path: Path) -> None:
    named = {name: value for name, value in {"budget": "1MiB", "segment": "64KiB", **options}.items() if value}
    with pytest.raises(ConfigError, match=message):
        open_log(Opening(location=str(tmp_path / "store"), options=named))


def test_the_smallest_budget_named_in_the_error_works(tmp_path: Path) -> None:
    with pytest.raises(ConfigError) as error:
        segments.choose_budget(1, 64 * 1024)
    least = int(str(error.value).split("at least ")[1].split(" bytes")[0])
    assert segments.choose_budget(least, 64 * 1024).segments(0) == segments.MIN_SEGMENTS
    with pytest.raises(ConfigError):
        segments.choose_budget(least - 1, 64 * 1024)


def test_the_smallest_budget_has_room_for_a_store_json_with_many_quotas() -> None:
    usual = segments.choose_budget(2**20, 64 * 1024, superblock_bytes=16 * 1024)
    large = segments.choose_budget(2**20, 64 * 1024, superblock_bytes=64 * 1024)
    assert usual == segments.choose_budget(2**20, 64 * 1024)
    assert usual.left_with(4) - large.left_with(4) == 2 * 48 * 1024


def test_quotas_that_are_given_are_all_there_are(open_here: OpenLog) -> None:
    open_here(quota_alice="512KiB", quota_bob="256KiB")
    assert [tenant.tenant for tenant in open_here(quota_bob="128KiB").stat().tenants] == ["bob"]
    assert [tenant.quota_bytes for tenant in open_here().stat().tenants] == [128 * 1024]


def test_quotas_that_add_up_to_more_than_the_budget_are_warned_of(open_here: OpenLog, caplog: pytest.LogCaptureFixture) -> None:
    open_here(quota_alice="512KiB", quota_bob="512KiB")
    assert caplog.messages == []
    open_here(quota_alice="512KiB", quota_bob="513KiB")
    (warning,) = caplog.messages
    assert "quotas of 2 tenants" in warning and "more than the 1.0 MiB" in warning
    open_here()
    assert len(caplog.messages) == 1, "said when they are given, not to everybody who opens it later"


def test_segments_keep_their_size_and_strangers_their_directory(open_here: OpenLog, tmp_path: Path) -> None:
    open_here().close()
    with pytest.raises(ConfigError, match="cannot become"):
        open_here(segment="128KiB")
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "thesis.txt").write_text("precious")
    with pytest.raises(ConfigError, match=r"not empty \(thesis.txt\)"):
        open_log(Opening(location=str(tmp_path / "mine"), options={"budget": "1MiB"}))


def test_a_smaller_budget_is_kept_from_the_first_moment(open_here: OpenLog, tmp_path: Path) -> None:
    store = open_here(budget="3MiB")
    for at in range(60):
        store.write_from(HERE, [offer(HERE, f"v{at}", 20_000)])
        fetch(store, HERE, "v0", 20_000)
    store = open_here(budget="900KiB")
    assert store.stat().directory_bytes <= 900 * 1024
    store.audit()
    assert fetch(store, HERE, "v0", 20_000) and fetch(store, HERE, "v59", 20_000), "the warm ones are kept"


def test_a_damaged_memory_of_options_is_a_clear_error(open_here: OpenLog, tmp_path: Path) -> None:
    open_here().close()
    path = tmp_path / "store" / "store.json"
    path.write_bytes(path.read_bytes().replace(b'"seed": ', b'"seed": 1'))
    with pytest.raises(StoreError, match="damaged"):
        open_here()


def test_leftovers_of_a_crash_are_taken_away(open_here: OpenLog, tmp_path: Path) -> None:
    open_here().write_from(HERE, [offer(HERE, "x")])
    store = open_here()
    store.close()
    (tmp_path / "store" / "snapshot.new").write_bytes(b"half")
    store = open_here()
    assert not (tmp_path / "store" / "snapshot.new").exists() and store.contains(HERE, [key("x")]) == [True]
