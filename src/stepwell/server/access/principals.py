"""Whose a request is: found once from its key, and asked everywhere else for what it may do and which state it may meet.

    bearer token  --Principals.of_key-->  Principal  -->  namespace (tenant and salt), priority, time to live, pins

Without tenants there is one principal for everybody, and the operator, who has the admin token. Keys are kept as digests and
compared in constant time, each request with all of them. Reads no files; `tenants.py` does.
"""

from __future__ import annotations

import hmac
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from hashlib import sha256
from typing import NamedTuple

from stepwell.base.errors import ConfigError

_KEEP_QUOTAS = ("log", "shared-log")  # the kinds of store that do
_NO_KEY = sha256(b"").digest()  # what whoever sends no key would have


@dataclass(frozen=True, slots=True, kw_only=True)
class Secrets:
    """Who may do what. `api_key` None: whoever can connect may ask, unless there are tenants, who have keys of their own."""

    api_key: str | None
    admin_token: str

    def __repr__(self) -> str:
        return "Secrets(...)"  # which are not for logs


@dataclass(frozen=True, slots=True, kw_only=True)
class Principal:
    """Somebody who asks. Two with different names never share cached state, whatever salts they or their requests have."""

    name: str | None = None  # of a tenant; None for everybody else
    salt: str | None = field(default=None, repr=False)  # of all its requests, beside their own
    max_priority: int = 0
    max_ttl_s: float | None = None  # that its state may stay in memory unused; None for no limit
    quota_bytes: int | None = None  # of a log store; None for no limit
    memory_quota: float | None = None  # a share of each memory tier; None for no limit
    operates: bool = False  # has the admin token

    def salted(self, cache_salt: str | None) -> str | None:
        """The salt of a request. No two pairs of salts of a tenant give the same one; without tenants it is the request's."""
        return cache_salt if self.name is None and self.salt is None else json.dumps([self.salt, cache_salt])

    def ttl_s(self, wanted_s: float | None) -> float | None:
        """The time to live of a request that wants `wanted_s`, which `within_ttl` has allowed."""
        return self.max_ttl_s if wanted_s is None else wanted_s

    def within_ttl(self, wanted_s: float | None) -> bool:
        return wanted_s is None or self.max_ttl_s is None or wanted_s <= self.max_ttl_s


@dataclass(frozen=True, slots=True, kw_only=True)
class Tenant:
    principal: Principal
    key_sha256: bytes = field(repr=False)


class Change(NamedTuple):
    """How many tenants came, went, and are others than they were: with another key, say."""

    new: int
    gone: int
    changed: int


class Principals:
    """Everybody this server knows. Any thread."""

    def __init__(self, secrets: Secrets, tenants: Sequence[Tenant] = (), *, max_priority: int = 0) -> None:
        """`max_priority` is for everybody but tenants, whose own are known. Raises ConfigError."""
        if tenants and secrets.api_key is not None:
            raise ConfigError("there are tenants, who have keys of their own: leave the API key out")
        if not secrets.admin_token.strip() or (secrets.api_key is not None and not secrets.api_key.strip()):
            raise ConfigError("the admin token and the API key must not be empty: everybody would have them")
        admin = sha256(secrets.admin_token.encode()).digest()
        self._everybody = Principal(max_priority=max_priority)
        self._others = [(admin, Principal(max_priority=max_priority, operates=True))]
        if secrets.api_key is not None:
            self._others.append((sha256(secrets.api_key.encode()).digest(), self._everybody))
        self._holders = self._with(tenants)
        self._tenants = {str(tenant.principal.name): tenant.principal for tenant in tenants}
        self._gone: dict[str, Principal] = {}  # by name, of tenants that were there since the start
        self._quotas = {name: _quotas(each) for name, each in self._tenants.items()}
        self._open = secrets.api_key is None and not tenants

    def replace(self, tenants: Sequence[Tenant]) -> Change:
        """Others than so far, for all requests that come from now on. Raises ConfigError, and then changes nothing: quotas are
        what memory and stores were told at the start.
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
        """All who hold a key, by its digest. Raises ConfigError."""
        holders = list(self._others)
        for tenant in tenants:
            if tenant.key_sha256 == _NO_KEY:
                raise ConfigError(f"tenant {tenant.principal.name} has an empty key: everybody would be this tenant")
            if any(hmac.compare_digest(tenant.key_sha256, digest) for digest, _ in holders):
                raise ConfigError(f"tenant {tenant.principal.name} has the key of another, or the admin token: give it its own")
            holders.append((tenant.key_sha256, tenant.principal))
        return holders

    def of_key(self, given: bytes) -> Principal | None:
        """Who has this key; None for nobody. Takes as long for a key that is nearly right as for any other."""
        digest, found = sha256(given).digest(), self._everybody if self._open else None
        for known, principal in reversed(self._holders):  # the admin token comes last, and counts
            if hmac.compare_digest(digest, known):
                found = principal
        return found

    def tenant(self, name: str) -> Principal | None:
        """By its name. One that is gone has no key, but what it left may still have to be flushed."""
        return self._tenants.get(name) or self._gone.get(name)

    @property
    def names(self) -> tuple[str, ...]:
        """Of the tenants there are now."""
        return tuple(self._tenants)

    @property
    def memory_quotas(self) -> dict[str, float]:
        """The share of each memory tier that a tenant may take, by name, for those that have a limit."""
        return {name: each.memory_quota for name, each in self._tenants.items() if each.memory_quota is not None}

    def with_quotas(self, store: str, options: Mapping[str, str]) -> dict[str, str]:
        """Options of a store, and the tenants' quotas beside them. Raises ConfigError where a store keeps none."""
        if store.partition(":")[0] in _KEEP_QUOTAS:  # and remembers them until it is told that there is none
            amounts = {name: tenant.quota_bytes for name, tenant in self._tenants.items()}
            return {f"quota.{name}": "none" if size is None else str(size) for name, size in amounts.items()} | dict(options)
        if limited := [name for name, tenant in self._tenants.items() if tenant.quota_bytes is not None]:
            raise ConfigError(
                f"tenant {limited[0]} has a quota, which only log stores keep: use log:DIR, or leave quotas out of the file"
            )
        return dict(options)


def _quotas(principal: Principal) -> tuple[int | None, float | None]:
    return principal.quota_bytes, principal.memory_quota
