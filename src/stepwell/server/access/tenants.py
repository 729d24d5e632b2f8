"""The tenants file: who may ask, with which key, and how much. JSON, for every Python reads it.

{"tenants": [{"name": "alice", "key_sha256": "9f86d0...", "salt": "...", "max_priority": 3, "max_ttl_s": 3600, "quota": "20GiB",
  "memory_quota": "25%"}]}

A key is given as `key`, or better as `key_sha256`: the SHA-256 of its UTF-8 bytes in hex. Everything else may be left out.
What is wrong is refused, all of it. Messages name a tenant by its place in the file, and quote nothing of what is wrong there:
a secret may stand where a name or a number should.
"""

from __future__ import annotations

import json
import os
import re
import stat
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from hashlib import sha256
from math import isfinite
from select import POLLHUP, POLLIN, poll
from time import monotonic
from typing import Any

from stepwell.base.config import MAX_PRIORITY
from stepwell.base.errors import ConfigError
from stepwell.base.units import parse_bytes
from stepwell.server.access.principals import Principal, Tenant
from stepwell.store.log.format.superblock import quotas_fit

MAX_FILE_BYTES = 4 << 20
MAX_TENANTS = 1000  # each request is compared with all of them
MIN_KEY, MAX_SECRET = 16, 1024  # characters of a key, and of a key or a salt
MIN_VARIETY = 5  # different characters of a key: of 16 random hexadecimal digits, fewer are seen once in two million keys
PIPE_WAIT_S = 30.0  # for whoever writes the file into a pipe
_CHANGED_BY_OTHERS = stat.S_IWGRP | stat.S_IWOTH
_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,63}", re.ASCII)  # a log store has room for 64 bytes
_SHARE = re.compile(r"([0-9]{1,3}(?:\.[0-9]{1,6})?)%", re.ASCII)
_DIGEST = re.compile(r"[0-9a-fA-F]{64}", re.ASCII)
_FIELDS = ("name", "key", "key_sha256", "salt", "max_priority", "max_ttl_s", "quota", "memory_quota")


@dataclass(frozen=True, slots=True, kw_only=True)
class TenantsFile:
    tenants: tuple[Tenant, ...] = ()
    warnings: tuple[str, ...] = ()  # for whoever started the server


def read_tenants(path: str, *, max_priority: int = 0, wait_s: float = PIPE_WAIT_S) -> TenantsFile:
    """`max_priority` is for tenants that name none; a pipe is waited for. Raises ConfigError that says what to do."""
    try:
        fd = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)  # a pipe that nobody writes to does not hold us up
        try:
            warnings = _warnings(path, os.fstat(fd).st_mode)
            raw = _read(path, fd, wait_s)
        finally:
            os.close(fd)
    except (OSError, ValueError) as error:
        raise ConfigError(f"the tenants file {path!r} cannot be read: {error}") from None
    if len(raw) > MAX_FILE_BYTES:
        raise ConfigError(f"the tenants file {path!r} has more than {MAX_FILE_BYTES} bytes: is it the right file?")
    try:
        tenants = parse_tenants(raw, max_priority=max_priority)
    except ConfigError as error:
        raise ConfigError(f"the tenants file {path!r}: {error}") from None
    return TenantsFile(tenants=tenants, warnings=(*warnings, *_idle_quotas(tenants), *_promised_twice(tenants)))


def parse_tenants(raw: bytes, *, max_priority: int = 0) -> tuple[Tenant, ...]:
    """Raises ConfigError."""
    try:
        content = json.loads(raw.decode("utf-8-sig"), object_pairs_hook=_object, parse_constant=_no_constant)
    except RecursionError:
        raise ConfigError("it is nested too deeply to be one") from None
    except UnicodeDecodeError:
        raise ConfigError("it is not UTF-8 text") from None
    except json.JSONDecodeError as error:
        raise ConfigError(f"it is not JSON: {error.msg} in line {error.lineno}") from None  # and nothing of what stands there
    except ValueError as error:
        raise ConfigError(f"it is not JSON: {error!s:.80}") from None
    if not isinstance(content, dict) or content.keys() != {"tenants"} or not isinstance(content["tenants"], list):
        raise ConfigError('it must be {"tenants": [...]} and nothing else')
    tenants = [_tenant(at, entry, max_priority) for at, entry in enumerate(content["tenants"])]
    if len(tenants) > MAX_TENANTS:
        raise ConfigError(f"it has {len(tenants)} tenants, and a server takes {MAX_TENANTS}: start several servers")
    if not tenants:
        raise ConfigError("it has no tenants: list one at least, or start without --tenants")
    _all_differ([str(tenant.principal.name) for tenant in tenants], lambda at: f"two tenants are called {_called(tenants, at)}")
    _all_differ([tenant.key_sha256 for tenant in tenants], lambda at: f"{_called(tenants, at)} has the key of a tenant before it")
    quotas = {_called(tenants, at): each.principal.quota_bytes for at, each in enumerate(tenants)}
    limited = {name: size for name, size in quotas.items() if size is not None}
    if not quotas_fit(limited):
        raise ConfigError(
            f"the quotas of {len(limited)} tenants are too many for one log store, with names as long: "
            "use shorter names, leave quotas out, or start several servers"
        )
    return tuple(tenants)


def _tenant(at: int, entry: object, max_priority: int) -> Tenant:
    where = f"tenants[{at}]"
    if not isinstance(entry, dict):
        raise ConfigError(f"{where} must be an object with a name and a key")
    name = entry.get("name")
    if not isinstance(name, str) or not _NAME.fullmatch(name):
        raise ConfigError(f"{where}: name must be 1 to 64 letters, digits, dots, dashes or underscores, the first no sign")
    if unknown := [place for place, field in enumerate(entry, start=1) if field not in _FIELDS]:
        raise ConfigError(f"{where}: field {unknown[0]} of it is not known; there are {', '.join(_FIELDS)}")
    priority = entry.get("max_priority", max_priority)
    if type(priority) is not int or not 0 <= priority <= MAX_PRIORITY:
        raise ConfigError(f"{where}: max_priority must be a whole number from 0 to {MAX_PRIORITY}")
    principal = Principal(
        name=name,
        salt=_secret(where, "salt", entry["salt"], least=1) if "salt" in entry else None,
        max_priority=priority,
        max_ttl_s=_seconds(where, entry["max_ttl_s"]) if "max_ttl_s" in entry else None,
        quota_bytes=_bytes(where, entry["quota"]) if "quota" in entry else None,
        memory_quota=_share(where, entry["memory_quota"]) if "memory_quota" in entry else None,
    )
    return Tenant(principal=principal, key_sha256=_key(where, entry))


def _key(where: str, entry: Mapping[str, Any]) -> bytes:
    if ("key" in entry) == ("key_sha256" in entry):
        raise ConfigError(f"{where}: give either key_sha256 (the SHA-256 of its key, in hex) or key")
    if "key" in entry:
        key = _secret(where, "key", entry["key"], least=MIN_KEY)
        if len(set(key)) < MIN_VARIETY:
            raise ConfigError(f"{where}: key must be random, and has fewer than {MIN_VARIETY} different characters")
        return sha256(key.encode()).digest()
    digest = entry["key_sha256"]
    if not isinstance(digest, str) or not _DIGEST.fullmatch(digest):
        raise ConfigError(f"{where}: key_sha256 must be 64 hexadecimal digits, as from: printf %s KEY | sha256sum")
    if bytes.fromhex(digest) == sha256(b"").digest():
        raise ConfigError(f"{where}: key_sha256 is that of no key at all: everybody would be this tenant")
    return bytes.fromhex(digest)


def _secret(where: str, field: str, value: object, *, least: int) -> str:
    if not isinstance(value, str) or not least <= len(value) <= MAX_SECRET:
        raise ConfigError(f"{where}: {field} must be text of {least} to {MAX_SECRET} characters")
    if not value.isprintable() or value != value.strip():  # no bearer token, or not the one that was meant
        raise ConfigError(f"{where}: {field} must be printable, without space around it")
    return value


def _seconds(where: str, value: object) -> float:
    if isinstance(value, bool) or not isinstance(value, int | float) or not 0 < value < 1e12 or not isfinite(value):
        raise ConfigError(f"{where}: max_ttl_s must be a positive number of seconds")
    return float(value)


def _bytes(where: str, value: Any) -> int:
    try:
        quota = parse_bytes(value)
    except ConfigError:  # which quotes what it was given
        quota = 0
    if not 0 < quota < 1 << 60:
        raise ConfigError(f"{where}: quota must be a positive amount, as in 20GiB")
    return quota


def _share(where: str, value: object) -> float:
    match = _SHARE.fullmatch(value) if isinstance(value, str) else None
    share = float(match[1]) / 100 if match is not None else 0.0
    if not 0 < share <= 1:
        raise ConfigError(f"{where}: memory_quota must be a share of each memory tier, above 0% and up to 100%, as in 25%")
    return share


def _all_differ(values: Sequence[object], says: Callable[[int], str]) -> None:
    met = set()
    for at, value in enumerate(values):
        if value in met:
            raise ConfigError(f"{says(at)}; each needs its own")
        met.add(value)


def _called(tenants: Sequence[Tenant], at: int) -> str:
    return str(tenants[at].principal.name)


def _object(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    made = dict(pairs)
    if len(made) < len(pairs):
        raise ConfigError("an object in it has the same field twice; keep one")
    return made


def _no_constant(text: str) -> float:
    raise ConfigError(f"{text} is no number that can be used")


def _idle_quotas(tenants: Sequence[Tenant]) -> list[str]:
    both = [each.principal for each in tenants if None not in (each.principal.max_ttl_s, each.principal.quota_bytes)]
    return [f"tenant {each.name} has max_ttl_s, and what may not stay is never stored: its quota does nothing" for each in both]


def _promised_twice(tenants: Sequence[Tenant]) -> list[str]:
    together = sum(each.principal.memory_quota or 0.0 for each in tenants)
    if together <= 1 + 1e-6:  # shares have six digits, and are no whole numbers here
        return []
    return [f"the memory_quota of all tenants is {100 * together:g}% together: one within its own may still lose to another"]


def _warnings(path: str, mode: int) -> tuple[str, ...]:
    """What is unwise about a file. Raises ConfigError for what is no file, and for one that others may change."""
    shown = f"mode {stat.S_IMODE(mode):03o}"
    if not stat.S_ISREG(mode) and not stat.S_ISFIFO(mode):
        raise ConfigError(f"the tenants file {path!r} is neither a file nor a pipe")
    if mode & _CHANGED_BY_OTHERS:
        raise ConfigError(f"other users of this machine may change the tenants file {path!r} ({shown}): run chmod 600 on it")
    if mode & (stat.S_IRWXG | stat.S_IRWXO) and stat.S_ISREG(mode):
        return (f"other users of this machine may read {path} ({shown}): run chmod 600 on it",)
    return ()


def _read(path: str, fd: int, wait_s: float) -> bytes:
    """All of a file, or one byte more than it may have. Of a pipe, what is written until its writer leaves."""
    raw, until_s, pipe = b"", monotonic() + wait_s, poll()
    pipe.register(fd, POLLIN)
    writer_left = False
    while len(raw) <= MAX_FILE_BYTES:
        piece = _piece(fd, MAX_FILE_BYTES + 1 - len(raw))
        if piece:
            raw += piece
            continue
        if piece is not None and (raw or writer_left or stat.S_ISREG(os.fstat(fd).st_mode)):
            break
        events = pipe.poll(max(until_s - monotonic(), 0) * 1000)  # ms
        if not events:
            raise ConfigError(f"the tenants file {path!r} is a pipe, and was not written to its end in {wait_s:g} s")
        writer_left = events[0][1] == POLLHUP
    return raw


def _piece(fd: int, size: int) -> bytes | None:
    """None where a writer has nothing yet; nothing at the end, and where no writer has come."""
    try:
        return os.read(fd, size)
    except BlockingIOError:
        return None
