"""Store keys in files: a new file is readable by its owner alone, and a key is read only from a file that others cannot read.

The file holds the secret as raw bytes, or in hexadecimal digits that may be surrounded by blanks.
"""

from __future__ import annotations

import os
import re
import secrets
import stat
from pathlib import Path

from stepwell.base.errors import ConfigError
from stepwell.base.store_key import MIN_SECRET_BYTES, StoreKey

MAX_FILE_BYTES = 4096
_HEX = re.compile(rb"\s*([0-9a-fA-F]{2}){16,}\s*")  # also too few digits, which would otherwise pass for that many raw bytes
_OTHERS = stat.S_IRWXO | stat.S_IWGRP  # anyone else, and write access of the group
_MAKE_ONE = "`stepwell store new-key FILE` makes one"


def read_store_key(path: str | os.PathLike[str]) -> StoreKey:
    """The key in a file. Raises ConfigError, with the remedy, if the file holds no key or others may read or change it."""
    content = _read(Path(path))
    try:
        return StoreKey(bytes.fromhex(content.decode()) if _HEX.fullmatch(content) else content)
    except ConfigError as error:
        raise ConfigError(f"{path}: {error}; {_MAKE_ONE}") from None


def write_store_key(path: str | os.PathLike[str]) -> StoreKey:
    """Creates a key and writes it to a new file that only its owner may read. Raises ConfigError; never overwrites a file."""
    secret = secrets.token_bytes(MIN_SECRET_BYTES)
    try:
        with open(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "w") as file:
            file.write(secret.hex() + "\n")
            file.flush()
            os.fsync(file.fileno())
    except FileExistsError:
        raise ConfigError(f"{path} exists already: without their key, values are useless; name a new file") from None
    except OSError as error:
        raise ConfigError(f"{path}: the key cannot be written: {error.strerror}") from error
    return StoreKey(secret)


def _read(path: Path) -> bytes:
    try:
        fd = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)  # does not block on a pipe without a writer
    except FileNotFoundError:
        raise ConfigError(f"there is no store key file {path}; {_MAKE_ONE}") from None
    except OSError as error:
        raise ConfigError(f"the store key file {path} cannot be read: {error.strerror}") from error
    try:
        mode = os.fstat(fd).st_mode
        if not stat.S_ISREG(mode):
            raise ConfigError(f"{path} is not a file: put the store key into one; {_MAKE_ONE}")
        if mode & _OTHERS:
            shown = stat.filemode(mode)
            raise ConfigError(f"{path} can be read or changed by others ({shown}): run `chmod 600 {path}`, or make a new key")
        content = os.read(fd, MAX_FILE_BYTES + 1)
    except OSError as error:
        raise ConfigError(f"the store key file {path} cannot be read: {error.strerror}") from error
    finally:
        os.close(fd)
    if len(content) > MAX_FILE_BYTES:
        raise ConfigError(f"{path} has more than {MAX_FILE_BYTES:,} bytes, which no store key has; {_MAKE_ONE}")
    return content
