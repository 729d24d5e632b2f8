"""Principals and tenants: who sends a request, found once from its key, and what that principal may do.

    bearer token  --Principals.of_key-->  Principal  -->  namespace (tenant and salt), priority, time to live, pins

Without tenants there is one anonymous principal, and the operator, who has the admin token. Keys are kept as digests and compared
in constant time, each request with all of them. The tenants file is JSON, which every Python can read:

{"tenants": [{"name": "alice", "key_sha256": "9f86d0...", "salt": "...", "max_priority": 3, "max_ttl_s": 3600, "quota": "20GiB",
  "memory_quota": "25%"}]}

A key is given as `key`, or better as `key_sha256`, the SHA-256 of its UTF-8 bytes in hex; all other fields are optional. Any
error refuses the whole file. Messages name a tenant by its position and quote nothing, because a secret may stand in the wrong
field.
"""

from __future__ import annotations

import hmac
import json
import os
import re
import stat
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from hashlib import sha256
from math import isfinite
from select import POLLHUP, POLLIN, poll
from time import monotonic
from typing import Any, NamedTuple

from stepwell.base.config import MAX_PRIORITY
from stepwell.base.errors import ConfigError
from stepwell.base.units import parse_bytes
from stepwell.store.log.format.superblock import quotas_fit

_KEEP_QUOTAS = ("log", "shared-log")  # stores with quotas
_NO_KEY = sha256(b"").digest()  # the digest of a missing key


@dataclass(frozen=True, slots=True, kw_only=True)
class Secrets:
    """The server's own keys. Without `api_key` and tenants, every client that can connect is served."""

    api_key: str | None
    admin_token: str

    def __repr__(self) -> str:
        return "Secrets(...)"  # keeps secrets out of logs


@dataclass(frozen=True, slots=True, kw_only=True)
class Principal:
    """A sender of requests. Principals with different names never share cached state, whatever their salts."""

    name: str | None = None  # of a tenant; None for all other clients
    salt: str | None = field(default=None, repr=False)  # of all its requests, in addition to their own
    max_priority: int = 0
    max_ttl_s: float | None = None  # longest time its state stays in memory unused; None for no limit
    quota_bytes: int | None = None  # of a log store; None for no limit
    memory_quota: float | None = None  # a share of each memory tier; None for no limit
    operates: bool = False  # has the admin token

    def salted(self, cache_salt: str | None) -> str | None:
        """The salt of a request. Different pairs of tenant's and request's salts differ; without tenants it is the request's."""
        return cache_salt if self.name is None and self.salt is None else json.dumps([self.salt, cache_salt])

    def ttl_s(self, wanted_s: float | None) -> float | None:
        """The time to live for a request of `wanted_s`, which `within_ttl` allowed."""
        return self.max_ttl_s if wanted_s is None else wanted_s

    def within_ttl(self, wanted_s: float | None) -> bool:
        return wanted_s is None or self.max_ttl_s is None or wanted_s <= self.max_ttl_s


@dataclass(frozen=True, slots=True, kw_only=True)
class Tenant:
    principal: Principal
    key_sha256: bytes = field(repr=False)


class Change(NamedTuple):
    """The number of tenants added, removed and changed."""

    new: int
    gone: int
    changed: int


class Principals:
    """All principals of a server. Any thread."""

    def __init__(self, secrets: Secrets, tenants: Sequence[Tenant] = (), *, max_priority: int = 0) -> None:
        """`max_priority` applies to all principals except tenants, which have their own. Raises ConfigError."""
        if tenants and secrets.api_key is not None:
            raise ConfigError("tenants have their own keys: leave out the API key")
        if not secrets.admin_token.strip() or (secrets.api_key is not None and not secrets.api_key.strip()):
            raise ConfigError("the admin token and the API key must not be empty: every client would have them")
        admin = sha256(secrets.admin_token.encode()).digest()
        self._anonymous = Principal(max_priority=max_priority)
        self._others = [(admin, Principal(max_priority=max_priority, operates=True))]
        if secrets.api_key is not None:
            self._others.append((sha256(secrets.api_key.encode()).digest(), self._anonymous))
        self._holders = self._with(tenants)
        self._tenants = {str(tenant.principal.name): tenant.principal for tenant in tenants}
        self._gone: dict[str, Principal] = {}  # tenants removed since the start, by name
        self._quotas = {name: _quotas(each) for name, each in self._tenants.items()}
        self._open = secrets.api_key is None and not tenants

    def replace(self, tenants: Sequence[Tenant]) -> Change:
        """Replaces the tenants for all further requests. Raises ConfigError, and then changes nothing; quotas cannot change,
        because memory and stores got them at the start.
        """
        if not (self._tenants and tenants):
            raise ConfigError("a server that began with tenants has some, and one that began without has none: restart it")
        for each in tenants:
            if _quotas(each.principal) != self._quotas.get(name := str(each.principal.name), (None, None)):
                raise ConfigError(f"tenant {name} has another quota than at the start: restart the server for that")
        holders, before = self._with(tenants), {principal.name: (key, principal) for key, principal in self._holders}
        after = {each.principal.name: (each.key_sha256, each.principal) for each in tenants}
        gone = self._tenants.keys() - after.keys()
        self._gone = {**self._gone, **{name: self._tenants[name] for name in gone}}
        self._tenants = {str(name): principal for name, (_, principal) in after.items()}
        self._holders = holders
        changed = sum(name in before and before[name] != each for name, each in after.items())
        return Change(new=len(after.keys() - before.keys()), gone=len(gone), changed=changed)

    def _with(self, tenants: Sequence[Tenant]) -> list[tuple[bytes, Principal]]:
        """All principals with a key, by its digest. Raises ConfigError."""
        holders = list(self._others)
        for tenant in tenants:
            if tenant.key_sha256 == _NO_KEY:
                raise ConfigError(f"tenant {tenant.principal.name} has an empty key: every client would be this tenant")
            if any(hmac.compare_digest(tenant.key_sha256, digest) for digest, _ in holders):
                raise ConfigError(f"tenant {tenant.principal.name} has the key of another, or the admin token: give it its own")
            holders.append((tenant.key_sha256, tenant.principal))
        return holders

    def of_key(self, given: bytes) -> Principal | None:
        """The principal with this key, or None. Runs in constant time."""
        digest, found = sha256(given).digest(), self._anonymous if self._open else None
        for known, principal in reversed(self._holders):  # the admin token comes last, and counts
            if hmac.compare_digest(digest, known):
                found = principal
        return found

    def tenant(self, name: str) -> Principal | None:
        """A tenant by name. Removed tenants are included, so that their state can be flushed."""
        return self._tenants.get(name) or self._gone.get(name)

    @property
    def names(self) -> tuple[str, ...]:
        """The names of the current tenants."""
        return tuple(self._tenants)

    @property
    def memory_quotas(self) -> dict[str, float]:
        """The share of each memory tier that a tenant may take, by name, for those that have a limit."""
        return {name: each.memory_quota for name, each in self._tenants.items() if each.memory_quota is not None}

    def with_quotas(self, store: str, options: Mapping[str, str]) -> dict[str, str]:
        """A store's options with the tenants' quotas. Raises ConfigError if there are quotas and the store supports none."""
        if store.partition(":")[0] in _KEEP_QUOTAS:  # a log keeps a quota until it is set to none
            amounts = {name: tenant.quota_bytes for name, tenant in self._tenants.items()}
            return {f"quota.{name}": "none" if size is None else str(size) for name, size in amounts.items()} | dict(options)
        if limited := [name for name, tenant in self._tenants.items() if tenant.quota_bytes is not None]:
            raise ConfigError(
                f"tenant {limited[0]} has a quota, which only log stores keep: use log:DIR, or leave quotas out of the file"
            )
        return dict(options)


def _quotas(principal: Principal) -> tuple[int | None, float | None]:
    return principal.quota_bytes, principal.memory_quota


MAX_FILE_BYTES = 4 << 20
MAX_TENANTS = 1000  # each request is compared with all of them
MIN_KEY, MAX_SECRET = 16, 1024  # characters of a key, and of a key or a salt
MIN_VARIETY = 5  # different characters of a key; 16 random hexadecimal digits have fewer once in two million keys
PIPE_WAIT_S = 30.0  # for the writer of a pipe
_CHANGED_BY_OTHERS = stat.S_IWGRP | stat.S_IWOTH
_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,63}", re.ASCII)  # a log store holds names of 64 bytes
_SHARE = re.compile(r"([0-9]{1,3}(?:\.[0-9]{1,6})?)%", re.ASCII)
_DIGEST = re.compile(r"[0-9a-fA-F]{64}", re.ASCII)
_FIELDS = ("name", "key", "key_sha256", "salt", "max_priority", "max_ttl_s", "quota", "memory_quota")


@dataclass(frozen=True, slots=True, kw_only=True)
class TenantsFile:
    tenants: tuple[Tenant, ...] = ()
    warnings: tuple[str, ...] = ()  # for the operator


def read_tenants(path: str, *, max_priority: int = 0, wait_s: float = PIPE_WAIT_S) -> TenantsFile:
    """`max_priority` is for tenants without their own. Waits for a pipe. Raises ConfigError that says what to do."""
    try:
        fd = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)  # must not block on a pipe without a writer
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
        raise ConfigError("it is nested too deeply") from None
    except UnicodeDecodeError:
        raise ConfigError("it is not UTF-8 text") from None
    except json.JSONDecodeError as error:
        raise ConfigError(f"it is not JSON: {error.msg} in line {error.lineno}") from None  # quotes nothing of the file
    except ValueError as error:
        raise ConfigError(f"it is not JSON: {error!s:.80}") from None
    if not isinstance(content, dict) or content.keys() != {"tenants"} or not isinstance(content["tenants"], list):
        raise ConfigError('it must be {"tenants": [...]} and nothing else')
    tenants = [_tenant(at, entry, max_priority) for at, entry in enumerate(content["tenants"])]
    if len(tenants) > MAX_TENANTS:
        raise ConfigError(f"it has {len(tenants)} tenants, and a server takes {MAX_TENANTS}: start several servers")
    if not tenants:
        raise ConfigError("it has no tenants: list at least one, or start without --tenants")
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
        raise ConfigError(
            f"{where}: name must be 1 to 64 letters, digits, dots, dashes or underscores, and begin with a letter or digit"
        )
    if unknown := [place for place, field in enumerate(entry, start=1) if field not in _FIELDS]:
        raise ConfigError(f"{where}: its field number {unknown[0]} is unknown; the fields are {', '.join(_FIELDS)}")
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
            raise ConfigError(f"{where}: key must be random, but has fewer than {MIN_VARIETY} different characters")
        return sha256(key.encode()).digest()
    digest = entry["key_sha256"]
    if not isinstance(digest, str) or not _DIGEST.fullmatch(digest):
        raise ConfigError(f"{where}: key_sha256 must be 64 hexadecimal digits, as from: printf %s KEY | sha256sum")
    if bytes.fromhex(digest) == sha256(b"").digest():
        raise ConfigError(f"{where}: key_sha256 is the digest of an empty key: every client would be this tenant")
    return bytes.fromhex(digest)


def _secret(where: str, field: str, value: object, *, least: int) -> str:
    if not isinstance(value, str) or not least <= len(value) <= MAX_SECRET:
        raise ConfigError(f"{where}: {field} must be text of {least} to {MAX_SECRET} characters")
    if not value.isprintable() or value != value.strip():  # cannot be sent as a bearer token
        raise ConfigError(f"{where}: {field} must be printable, without surrounding spaces")
    return value


def _seconds(where: str, value: object) -> float:
    if isinstance(value, bool) or not isinstance(value, int | float) or not 0 < value < 1e12 or not isfinite(value):
        raise ConfigError(f"{where}: max_ttl_s must be a positive number of seconds")
    return float(value)


def _bytes(where: str, value: Any) -> int:
    try:
        quota = parse_bytes(value)
    except ConfigError:  # its message quotes the value
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
        raise ConfigError("an object has the same field twice; keep one")
    return made


def _no_constant(text: str) -> float:
    raise ConfigError(f"{text} is not a valid number")


def _idle_quotas(tenants: Sequence[Tenant]) -> list[str]:
    both = [each.principal for each in tenants if None not in (each.principal.max_ttl_s, each.principal.quota_bytes)]
    return [f"tenant {each.name} has max_ttl_s, so that nothing of it is stored: its quota has no effect" for each in both]


def _promised_twice(tenants: Sequence[Tenant]) -> list[str]:
    together = sum(each.principal.memory_quota or 0.0 for each in tenants)
    if together <= 1 + 1e-6:  # tolerates rounding
        return []
    return [
        f"the memory_quota of all tenants is {100 * together:g}% in total: tenants within their quotas may still evict each other"
    ]


def _warnings(path: str, mode: int) -> tuple[str, ...]:
    """Warnings about a file's permissions. Raises ConfigError if it is not a file or a pipe, or others may change it."""
    shown = f"mode {stat.S_IMODE(mode):03o}"
    if not stat.S_ISREG(mode) and not stat.S_ISFIFO(mode):
        raise ConfigError(f"the tenants file {path!r} is neither a file nor a pipe")
    if mode & _CHANGED_BY_OTHERS:
        raise ConfigError(f"other users of this machine may change the tenants file {path!r} ({shown}): run chmod 600 on it")
    if mode & (stat.S_IRWXG | stat.S_IRWXO) and stat.S_ISREG(mode):
        return (f"other users of this machine may read {path} ({shown}): run chmod 600 on it",)
    return ()


def _read(path: str, fd: int, wait_s: float) -> bytes:
    """A whole file, cut after MAX_FILE_BYTES + 1; from a pipe, everything until its writer closes it."""
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
            raise ConfigError(f"the tenants file {path!r} is a pipe whose writer did not finish within {wait_s:g} s")
        writer_left = events[0][1] == POLLHUP
    return raw


def _piece(fd: int, size: int) -> bytes | None:
    """None while a writer has no data; empty at the end, and before a writer opened the pipe."""
    try:
        return os.read(fd, size)
    except BlockingIOError:
        return None
