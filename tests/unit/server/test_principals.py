"""Whose a request is, and what follows from it."""

from __future__ import annotations

from hashlib import sha256
from itertools import combinations, product

import pytest

from stepwell.base.errors import ConfigError
from stepwell.base.prompt import Namespace
from stepwell.server.access.tenants import Principal, Principals, Secrets, Tenant

ADMIN = "an admin token"
SALTS = (None, "a", "b", "ab", '["a", "b"]', '["a", null]', "null")


def tenant(name: str, key: str, **more: object) -> Tenant:
    return Tenant(principal=Principal(name=name, **more), key_sha256=sha256(key.encode()).digest())  # type: ignore[arg-type]


def test_without_keys_everybody_is_one_principal() -> None:
    known = Principals(Secrets(api_key=None, admin_token=ADMIN), max_priority=4)
    assert known.of_key(b"") == known.of_key(b"anything") == Principal(max_priority=4)
    admin = known.of_key(ADMIN.encode())
    assert admin is not None and admin.operates and admin.max_priority == 4


def test_with_a_key_its_holders_are_one_principal() -> None:
    known = Principals(Secrets(api_key="key", admin_token=ADMIN))
    assert known.of_key(b"key") == Principal()
    assert [known.of_key(given) for given in (b"", b"ke", b"keys", b"\xff")] == [None] * 4


def test_tenants_are_told_apart_by_their_keys() -> None:
    known = Principals(Secrets(api_key=None, admin_token=ADMIN), [tenant("alice", "one"), tenant("bob", "two", max_priority=3)])
    found = [known.of_key(given) for given in (b"one", b"two", b"", b"three", sha256(b"one").hexdigest().encode())]
    assert found == [Principal(name="alice"), Principal(name="bob", max_priority=3), None, None, None]
    assert known.tenant("bob") == found[1] and known.tenant("carol") is None


@pytest.mark.parametrize(
    ("tenants", "api_key"),
    [
        ([tenant("alice", "one"), tenant("bob", "one")], None),
        ([tenant("alice", ADMIN)], None),
        ([tenant("alice", "one")], "one"),
    ],
)
def test_keys_that_tell_nobody_apart_are_refused(tenants: list[Tenant], api_key: str | None) -> None:
    with pytest.raises(ConfigError, match="key"):
        Principals(Secrets(api_key=api_key, admin_token=ADMIN), tenants)


@pytest.mark.parametrize(("api_key", "admin_token"), [(None, ""), (None, " "), ("", ADMIN), (" ", ADMIN)])
def test_empty_secrets_are_refused(api_key: str | None, admin_token: str) -> None:
    with pytest.raises(ConfigError, match="must not be empty"):
        Principals(Secrets(api_key=api_key, admin_token=admin_token))


def test_an_empty_key_makes_nobody_a_tenant() -> None:
    with pytest.raises(ConfigError, match="empty key"):
        Principals(Secrets(api_key=None, admin_token=ADMIN), [tenant("alice", "")])


def test_no_two_pairs_of_salts_of_a_tenant_are_the_same() -> None:
    """So that a new salt in the file starts empty, whatever salts requests had before."""
    salted = [Principal(name="a", salt=own).salted(asked) for own, asked in product(SALTS, SALTS)]
    assert len(set(salted)) == len(SALTS) ** 2


def test_no_two_tenants_or_salts_share_a_namespace() -> None:
    """Not even where a request's salt is written to look like another's."""
    config = [Principal(), Principal(name="a"), Principal(name="b", salt="a"), Principal(name="ab", salt="b")]
    spaces = [
        Namespace(model="m", layout="l", tenant=each.name, salt=each.salted(salt)).digest for each, salt in product(config, SALTS)
    ]
    assert all(one != other for one, other in combinations(spaces, 2))


def test_without_tenants_namespaces_are_what_they_were() -> None:
    assert [Principal().salted(salt) for salt in SALTS] == list(SALTS)


def test_the_longest_time_to_live_is_also_the_default() -> None:
    bound, free = Principal(max_ttl_s=60.0), Principal()
    assert (bound.ttl_s(None), bound.ttl_s(5.0), free.ttl_s(None), free.ttl_s(1e9)) == (60.0, 5.0, None, 1e9)
    assert [bound.within_ttl(each) for each in (None, 60.0, 60.1)] == [True, True, False] and free.within_ttl(1e9)


def test_quotas_reach_log_stores_and_no_store_that_keeps_none() -> None:
    secrets = Secrets(api_key=None, admin_token=ADMIN)
    known = Principals(secrets, [tenant("alice", "one", quota_bytes=4096), tenant("bob", "two")])
    for store in ("log:/d", "shared-log:/d"):
        assert known.with_quotas(store, {"budget": "1GiB"}) == {"budget": "1GiB", "quota.alice": "4096", "quota.bob": "none"}
    for store in ("memory:", "mooncake:"):
        with pytest.raises(ConfigError, match="alice has a quota"):
            known.with_quotas(store, {})
    assert Principals(secrets, [tenant("bob", "two")]).with_quotas("memory:", {"budget": "1"}) == {"budget": "1"}
    assert Principals(secrets).with_quotas("log:/d", {}) == {}


def test_memory_quotas_are_those_of_tenants_that_have_one() -> None:
    known = Principals(Secrets(api_key=None, admin_token="a"), [tenant("alice", "one", memory_quota=0.25), tenant("bob", "two")])
    assert known.memory_quotas == {"alice": 0.25}


def test_tenants_may_be_others_later_and_keys_of_those_before_open_nothing() -> None:
    before = [tenant("alice", "one", quota_bytes=4096), tenant("bob", "two"), tenant("carol", "three")]
    known = Principals(Secrets(api_key=None, admin_token=ADMIN), before)
    after = [tenant("alice", "another", quota_bytes=4096), tenant("bob", "two", max_priority=3), tenant("dave", "four")]
    assert known.replace(after) == (1, 1, 2)
    names = [None if (who := known.of_key(key)) is None else who.name for key in (b"one", b"another", b"two", b"three", b"four")]
    assert names == [None, "alice", "bob", None, "dave"]
    assert known.tenant("carol") is not None, "what it left could not be flushed"
    bob, operator = known.tenant("bob"), known.of_key(ADMIN.encode())
    assert bob is not None and bob.max_priority == 3 and operator is not None and operator.operates


@pytest.mark.parametrize(
    ("after", "message"),
    [
        ([], "restart it"),
        ([tenant("alice", "one", quota_bytes=8192)], "alice has another quota"),
        ([tenant("alice", "one", quota_bytes=4096), tenant("bob", "two", memory_quota=0.5)], "bob has another quota"),
        ([tenant("alice", ADMIN, quota_bytes=4096)], "the admin token"),
    ],
)
def test_tenants_that_cannot_be_taken_change_nothing(after: list[Tenant], message: str) -> None:
    known = Principals(Secrets(api_key=None, admin_token=ADMIN), [tenant("alice", "one", quota_bytes=4096)])
    with pytest.raises(ConfigError, match=message):
        known.replace(after)
    alice, operator = known.of_key(b"one"), known.of_key(ADMIN.encode())
    assert alice is not None and alice.name == "alice" and operator is not None and operator.operates


def test_a_server_without_tenants_gets_none_later() -> None:
    with pytest.raises(ConfigError, match="restart it"):
        Principals(Secrets(api_key=None, admin_token=ADMIN)).replace([tenant("alice", "one")])
