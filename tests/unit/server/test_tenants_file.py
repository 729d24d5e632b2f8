"""The tenants file: valid ones, and mistakes."""

from __future__ import annotations

import json
import os
from concurrent.futures import ThreadPoolExecutor
from hashlib import sha256
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from stepwell.base.errors import ConfigError
from stepwell.server.access.tenants import MAX_FILE_BYTES, MAX_TENANTS, Principals, Secrets, parse_tenants, read_tenants
from stepwell.store.log.opening import open_log
from stepwell.store.registry import Opening

ALICE = {"name": "alice", "key": "the key that alice has"}
BOB = {"name": "bob", "key_sha256": sha256(b"the key that bob has").hexdigest()}


def written(*tenants: object) -> bytes:
    return json.dumps({"tenants": tenants}).encode()


def test_a_tenant_has_what_the_file_says_and_defaults_for_the_rest() -> None:
    more = {"salt": "grain", "max_priority": 3, "max_ttl_s": 90, "quota": "20GiB", "memory_quota": "12.5%"}
    alice, bob = parse_tenants(written(ALICE | more, BOB), max_priority=2)
    found = alice.principal
    assert (found.name, found.salt, found.max_priority) == ("alice", "grain", 3)
    assert (found.max_ttl_s, found.quota_bytes, found.operates) == (90.0, 20 << 30, False)
    assert found.memory_quota == 0.125
    assert alice.key_sha256 == sha256(b"the key that alice has").digest()
    assert (bob.principal.salt, bob.principal.max_priority) == (None, 2)
    assert (bob.principal.max_ttl_s, bob.principal.quota_bytes, bob.principal.memory_quota) == (None, None, None)
    assert bob.key_sha256.hex() == BOB["key_sha256"]


def test_neither_keys_nor_salts_are_in_a_repr() -> None:
    (alice,) = parse_tenants(written(ALICE | {"salt": "a secret grain"}))
    assert "alice" in repr(alice) and "grain" not in repr(alice)
    assert repr(alice.key_sha256) not in repr(alice)


@pytest.mark.parametrize(
    ("raw", "says"),
    [
        (b"", "not JSON"),
        (b"\xff\xfe", "not UTF-8"),
        (b"tenants:\n- name: alice", "not JSON"),
        (b"[" * 100_000, "nested too deeply"),
        (b"[]", 'must be {"tenants"'),
        (b'{"tenants": {}}', 'must be {"tenants"'),
        (b'{"tenants": [], "tenants": []}', "same field twice"),
        (b'{"tenants": [], "more": 1}', "and nothing else"),
        (b'{"tenants": []}', "no tenants"),
        (b'{"tenants": [{"name": "x", "max_ttl_s": NaN}]}', "NaN"),
        (written("alice"), "must be an object"),
        (written({"key": ALICE["key"]}), r"tenants\[0\]: name must be"),
        *[(written(ALICE | {"name": name}), "name must be") for name in ("", "a b", "ä", "x" * 65, "../x", "-x", 7, None, "a\n")],
        (written({"name": "alice"}), "either key_sha256"),
        (written(ALICE | {"key_sha256": BOB["key_sha256"]}), "either key_sha256"),
        (written(ALICE | {"key": "short"}), "key must be text of 16"),
        (written(ALICE | {"key": 1234567890123456}), "key must be text"),
        (written(ALICE | {"key": " with space around it"}), "without surrounding spaces"),
        (written(ALICE | {"key": "with \x00 something in it"}), "printable"),
        (written(ALICE | {"key": "half a character \ud800"}), "printable"),
        (written(BOB | {"key_sha256": "abc"}), "64 hexadecimal digits"),
        (written(BOB | {"key_sha256": sha256(b"").hexdigest()}), "digest of an empty key"),
        (written(ALICE | {"salt": ""}), "salt must be text"),
        (written(ALICE | {"max_priorty": 3}), r"tenants\[0\]: its field number 3 is unknown; the fields are name, key"),
        (written(ALICE | {"key": "a" * 32}), "key must be random"),
        (written(ALICE | {"key": "abcd" * 8}), "key must be random"),
        *[(written(ALICE | {"max_priority": bad}), "whole number from 0 to 10") for bad in (-1, 11, 1.5, True, "3", None)],
        *[(written(ALICE | {"max_ttl_s": bad}), "positive number of seconds") for bad in (0, -1, 1e300, True, "1h", None)],
        *[
            (written(ALICE | {"memory_quota": bad}), "memory_quota must be a share")
            for bad in ("0%", "100.1%", "-5%", "25", 0.25, "25 %", "1GiB", "", True, None, "1e1%", "٢%")
        ],
        *[(written(ALICE | {"quota": bad}), "quota") for bad in (0, -1, "lots", "20 GiBs", True, None, 1.5, "99999999PiB")],
        (written(ALICE, BOB | {"name": "alice"}), "two tenants are called alice"),
        (written(ALICE, ALICE | {"name": "bob"}), "bob has the key of a tenant before it"),
        (written(*[BOB | {"name": f"t{at}"} for at in range(MAX_TENANTS + 1)]), "start several servers"),
    ],
)
def test_what_is_wrong_is_refused_and_says_what_to_do(raw: bytes, says: str) -> None:
    with pytest.raises(ConfigError, match=says) as caught:
        parse_tenants(raw)
    assert "the key that" not in str(caught.value) and len(str(caught.value)) < 300


SECRET = "sk-0123456789abcdef"


@pytest.mark.parametrize(
    "misplaced",
    [
        {"name": SECRET},
        {"name": SECRET, "key": "short"},
        {**ALICE, SECRET: "alice"},
        {**ALICE, "quota": SECRET},
        {**ALICE, "memory_quota": SECRET},
        {**ALICE, "max_priority": SECRET},
        {**ALICE, "max_ttl_s": SECRET},
        {"name": "alice", "key_sha256": SECRET},
    ],
)
def test_a_secret_in_the_wrong_place_is_not_in_the_error(misplaced: dict[str, object]) -> None:
    with pytest.raises(ConfigError, match=r"tenants\[1\]") as caught:
        parse_tenants(written(BOB, misplaced))
    assert "sk-" not in str(caught.value)


def many(count: int, *, name_length: int, quota: int | str = "20GiB") -> bytes:
    names = [f"{at:04}".ljust(name_length, "x") for at in range(count)]
    return written(*[{"name": name, "key_sha256": sha256(name.encode()).hexdigest(), "quota": quota} for name in names])


def test_quotas_that_no_log_store_can_remember_are_refused_here() -> None:
    assert len(parse_tenants(many(MAX_TENANTS, name_length=36))) == MAX_TENANTS
    with pytest.raises(ConfigError, match="the quotas of 1000 tenants are too many for one log store"):
        parse_tenants(many(MAX_TENANTS, name_length=64))


@pytest.mark.parametrize(("count", "name_length", "quota"), [(MAX_TENANTS, 36, "20GiB"), (650, 64, (1 << 60) - 1)])
def test_a_log_store_remembers_the_quotas_of_every_tenant(count: int, name_length: int, quota: int | str, tmp_path: Path) -> None:
    principals = Principals(
        Secrets(api_key=None, admin_token="admin"), parse_tenants(many(count, name_length=name_length, quota=quota))
    )
    options = {"budget": "4MiB", "segment": "64KiB", "direct": "off"}
    for asked in (principals.with_quotas("log:", options), options):  # the second time from what it remembers
        store = open_log(Opening(location=str(tmp_path / "store"), options=asked))
        assert len(store.stat().tenants) == count
        store.close()


_values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=20) | st.just("20GiB"),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=8), inner, max_size=3),
    max_leaves=6,
)
_fields = st.sampled_from(["name", "key", "key_sha256", "salt", "max_priority", "max_ttl_s", "quota", "memory_quota", "other"])


@given(st.lists(st.dictionaries(_fields, _values, max_size=5).map(lambda some: ALICE | some) | _values, max_size=3))
def test_whatever_is_in_it_gives_tenants_or_a_config_error(tenants: list[Any]) -> None:
    try:
        found = parse_tenants(written(*tenants))
    except ConfigError:
        return
    assert len({each.principal.name for each in found}) == len({each.key_sha256 for each in found}) == len(tenants) > 0


@given(st.binary(max_size=80))
def test_bytes_that_are_no_file_of_ours_are_refused(raw: bytes) -> None:
    with pytest.raises(ConfigError):
        parse_tenants(raw)


def test_a_file_that_others_may_read_is_warned_of(tmp_path: Path) -> None:
    path = tmp_path / "tenants.json"
    path.write_bytes(written(ALICE))
    path.chmod(0o600)
    assert read_tenants(str(path)).warnings == ()
    for mode in (0o640, 0o604):
        path.chmod(mode)
        (warning,) = read_tenants(str(path)).warnings
        assert "chmod 600" in warning and f"{mode:03o}" in warning
        assert len(read_tenants(str(path)).tenants) == 1


@pytest.mark.parametrize("mode", [0o620, 0o602, 0o666])
def test_a_file_that_others_may_change_is_refused(tmp_path: Path, mode: int) -> None:
    path = tmp_path / "tenants.json"
    path.write_bytes(written(ALICE))
    path.chmod(mode)
    with pytest.raises(ConfigError, match=f"may change.*{mode:03o}.*chmod 600"):
        read_tenants(str(path))


def test_a_quota_of_what_is_never_stored_is_warned_of(tmp_path: Path) -> None:
    path = tmp_path / "tenants.json"
    path.write_bytes(written(ALICE | {"max_ttl_s": 60, "quota": "1GiB"}, BOB | {"quota": "1GiB"}))
    path.chmod(0o600)
    (warning,) = read_tenants(str(path)).warnings
    assert "alice" in warning and "quota has no effect" in warning


@pytest.mark.parametrize(
    ("shares", "warned"), [(("60%", "40.1%"), True), (("60%", "40%"), False), (("33.333333%", "66.7%"), True)]
)
def test_shares_of_memory_beyond_all_of_it_are_warned_of(tmp_path: Path, shares: tuple[str, str], warned: bool) -> None:
    path = tmp_path / "tenants.json"
    path.write_bytes(written(ALICE | {"memory_quota": shares[0]}, BOB | {"memory_quota": shares[1]}))
    path.chmod(0o600)
    said = ["the memory_quota of all tenants is 100." in each for each in read_tenants(str(path)).warnings]
    assert said == [True] * warned


def test_a_file_that_cannot_be_read_or_is_another_is_named(tmp_path: Path) -> None:
    large, wrong = tmp_path / "large", tmp_path / "wrong"
    large.write_bytes(b" " * (MAX_FILE_BYTES + 1))
    wrong.write_bytes(b"{}")
    for path in (tmp_path / "none", tmp_path, large, wrong):
        with pytest.raises(ConfigError, match=path.name):
            read_tenants(str(path))
    with pytest.raises(ConfigError, match="cannot be read"):
        read_tenants("\0")


def test_it_may_come_through_a_pipe() -> None:
    """As from a vault: `--tenants <(command)`. Its mode says nothing."""
    reading, writing = os.pipe()
    os.write(writing, written(ALICE))
    os.close(writing)
    try:
        found = read_tenants(f"/dev/fd/{reading}")
    finally:
        os.close(reading)
    assert [each.principal.name for each in found.tenants] == ["alice"] and found.warnings == ()


def test_a_pipe_that_nobody_writes_to_does_not_hold_up_the_start(tmp_path: Path) -> None:
    path = tmp_path / "pipe"
    os.mkfifo(path, 0o600)
    with pytest.raises(ConfigError, match="did not finish within"):
        read_tenants(str(path), wait_s=0.01)


def test_a_pipe_whose_writer_takes_its_time_is_read_to_its_end(tmp_path: Path) -> None:
    path, raw = tmp_path / "pipe", written(ALICE, BOB)
    os.mkfifo(path, 0o600)

    def write() -> None:
        with open(path, "wb", buffering=0) as file:  # waits for a reader
            for at in range(0, len(raw), 16):
                file.write(raw[at : at + 16])

    with ThreadPoolExecutor(1) as pool:
        writing = pool.submit(write)
        found = read_tenants(str(path))
        writing.result()
    assert len(found.tenants) == 2


def test_a_pipe_whose_writer_says_nothing_is_an_empty_file() -> None:
    reading, writing = os.pipe()
    os.close(writing)
    try:
        with pytest.raises(ConfigError):
            read_tenants(f"/dev/fd/{reading}", wait_s=0.01)
    finally:
        os.close(reading)
