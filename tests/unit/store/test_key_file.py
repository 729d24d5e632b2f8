"""Store keys in files: made for their owner alone, and refused, with what to do, when they are not kept so."""

from __future__ import annotations

import os
import stat
from pathlib import Path

import pytest

from stepwell import ConfigError, read_store_key
from stepwell.store.key_file import MAX_FILE_BYTES, write_store_key

SECRET = bytes(range(32))


def put(tmp_path: Path, content: bytes, mode: int = 0o600) -> Path:
    path = tmp_path / "key"
    path.write_bytes(content)
    path.chmod(mode)
    return path


def test_a_new_key_is_its_owners_alone_and_is_read_back(tmp_path: Path) -> None:
    before = os.umask(0)
    try:
        key = write_store_key(tmp_path / "key")
    finally:
        os.umask(before)
    assert stat.S_IMODE((tmp_path / "key").stat().st_mode) == 0o600
    assert read_store_key(tmp_path / "key").id == key.id
    assert write_store_key(tmp_path / "other").id != key.id


def test_a_key_is_never_written_over(tmp_path: Path) -> None:
    write_store_key(tmp_path / "key")
    content = (tmp_path / "key").read_bytes()
    with pytest.raises(ConfigError, match="exists already"):
        write_store_key(tmp_path / "key")
    assert (tmp_path / "key").read_bytes() == content
    with pytest.raises(ConfigError, match="cannot be written"):
        write_store_key(tmp_path / "nowhere" / "key")


def test_digits_with_blanks_around_them_and_bytes_are_the_same_secret(tmp_path: Path) -> None:
    ids = {
        read_store_key(put(tmp_path, content)).id
        for content in (SECRET, SECRET.hex().encode(), SECRET.hex().upper().encode() + b"\r\n", b"  " + SECRET.hex().encode())
    }
    assert len(ids) == 1


@pytest.mark.parametrize(
    ("content", "why"),
    [
        (b"", "at least 32 random bytes, got 0"),
        (SECRET[:31], "at least 32 random bytes, got 31"),
        (SECRET[:16].hex().encode() + b"\n", "at least 32 random bytes, got 16"),  # 33 bytes of file, 16 of secret
        (bytes(32), "must be random"),
        (SECRET * (MAX_FILE_BYTES // 32) + b"x", "more than 4,096 bytes"),
    ],
)
def test_what_cannot_be_a_key_is_refused_with_the_command_that_makes_one(tmp_path: Path, content: bytes, why: str) -> None:
    with pytest.raises(ConfigError, match=why) as error:
        read_store_key(put(tmp_path, content))
    assert "stepwell store new-key" in str(error.value)


@pytest.mark.parametrize("mode", [0o604, 0o644, 0o602, 0o601, 0o620, 0o666])
def test_a_key_that_others_may_read_or_change_is_refused(tmp_path: Path, mode: int) -> None:
    with pytest.raises(ConfigError, match="chmod 600"):
        read_store_key(put(tmp_path, SECRET, mode))


@pytest.mark.parametrize("mode", [0o400, 0o440, 0o600, 0o640])
def test_the_group_may_read_it(tmp_path: Path, mode: int) -> None:
    read_store_key(put(tmp_path, SECRET, mode))


def test_what_is_no_file_is_refused_at_once(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe", 0o600)
    for path in (tmp_path, tmp_path / "pipe"):
        with pytest.raises(ConfigError, match="is not a file"):
            read_store_key(path)
    with pytest.raises(ConfigError, match="there is no store key file"):
        read_store_key(tmp_path / "missing")
