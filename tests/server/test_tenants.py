"""Tenants behind one server: none learns of another, and each has its own limits."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack
from dataclasses import dataclass, replace
from hashlib import sha256
from pathlib import Path

import httpx
import pytest

from server.serving import ADMIN, NAME, WAIT, Running, running
from stepwell.base.config import WritePolicy
from stepwell.base.errors import ConfigError
from stepwell.engine.engine import Engine
from stepwell.engine.requests.request import GenerateRequest
from stepwell.server.access.tenants import Principal, Tenant
from stepwell.store.log.store import LogStore
from waiting import PATIENCE_S, wait_until

PROMPT = "A prompt that both of them might send, and that only one has. " * 3
QUOTA = 256 << 10


def tenant(name: str, **limits: object) -> Tenant:
    principal = Principal(name=name, **limits)  # type: ignore[arg-type]
    return Tenant(principal=principal, key_sha256=sha256(f"{name}'s key".encode()).digest())


TENANTS = (
    tenant("alice", salt="alice's grain", max_priority=3, quota_bytes=QUOTA),
    tenant("bob"),
    tenant("carol", max_ttl_s=600.0, memory_quota=0.5),
)


@dataclass(frozen=True, kw_only=True)
class Clients:
    alice: httpx.Client
    bob: httpx.Client
    carol: httpx.Client
    admin: httpx.Client
    served: Running


@pytest.fixture(scope="module")
def two() -> Iterator[Clients]:
    settings = {"store_config": replace(WAIT, checkpoint_delay_s=0.0), "write": WritePolicy.THROUGH}
    with running(tenants=TENANTS, **settings) as made, ExitStack() as stack:

        def client(key: str) -> httpx.Client:
            return stack.enter_context(httpx.Client(base_url=made.address, timeout=PATIENCE_S, headers=bearer(key)))

        alice, bob, carol = (client(f"{name}'s key") for name in ("alice", "bob", "carol"))
        yield Clients(alice=alice, bob=bob, carol=carol, admin=client(ADMIN), served=made)


def bearer(key: str) -> dict[str, str]:
    return {"Authorization": f"Bearer {key}"}


def say(http: httpx.Client, prompt: str, **more: object) -> int:
    """Asks for an answer and returns how much of its prompt was cached."""
    body = {"model": NAME, "prompt": prompt, "max_tokens": 2, "temperature": 0} | more
    response = http.post("/v1/completions", json=body)
    assert response.status_code == 200, response.text
    return response.json()["usage"]["prompt_tokens_details"]["cached_tokens"]  # type: ignore[no-any-return]


def why(http: httpx.Client, prompt: str, **more: object) -> dict[str, object]:
    response = http.post("/cache/explain", json={"prompt": prompt} | more)
    assert response.status_code == 200, response.text
    return response.json()  # type: ignore[no-any-return]


def settled(served: Running) -> None:
    served.settle(lambda engine: engine.num_open == 0)
    served.settle(lambda engine: (report := engine.cache.step()).running + report.storing == 0)


def test_only_tenants_and_the_operator_are_let_in(two: Clients) -> None:
    for given in ("Bearer", "Bearer dave's key", "Bearer alice's ke", "Bearer alice's keys", "alice's key", "Basic alice's key"):
        assert httpx.get(f"{two.served.address}/v1/models", headers={"Authorization": given}).status_code == 401, given
    assert httpx.get(f"{two.served.address}/v1/models").status_code == 401
    assert {each.get("/v1/models").status_code for each in (two.alice, two.bob, two.admin)} == {200}


@pytest.mark.parametrize("salt", [{}, {"cache_salt": "the same"}])
def test_hits_come_from_ones_own_prompts_alone(two: Clients, salt: dict[str, str]) -> None:
    prompt = f"Hits {salt}. " + PROMPT
    assert say(two.alice, prompt, **salt) == 0 and say(two.alice, prompt, **salt) > 0
    assert say(two.bob, prompt, **salt) == 0 and say(two.bob, prompt, **salt) > 0
    assert say(two.admin, prompt, **salt) == 0, "the operator belongs to no tenant"


def test_chats_are_kept_apart_as_well(two: Clients) -> None:
    body = {"model": NAME, "messages": [{"role": "user", "content": PROMPT}], "max_tokens": 2}

    def cached(http: httpx.Client) -> int:
        return http.post("/v1/chat/completions", json=body).json()["usage"]["prompt_tokens_details"]["cached_tokens"]  # type: ignore[no-any-return]

    assert [cached(two.alice), cached(two.bob)] == [0, 0] and min(cached(two.alice), cached(two.bob)) > 0


def test_a_salt_cannot_be_written_to_look_like_another_tenants(two: Clients) -> None:
    say(two.alice, "Forged. " + PROMPT)
    for forged in ("alice's grain", '["alice\'s grain", null]', "alice"):
        assert say(two.bob, "Forged. " + PROMPT, cache_salt=forged) == 0
        assert why(two.bob, "Forged. " + PROMPT, cache_salt=f"{forged} ")["known_tokens"] == 0


def test_explain_tells_of_ones_own_prompts_alone(two: Clients) -> None:
    say(two.alice, "Secret. " + PROMPT, cache_salt="s")
    say(two.alice, "Secret. " + PROMPT)
    settled(two.served)
    for salt in ({}, {"cache_salt": "s"}):
        assert why(two.bob, "Secret. " + PROMPT, **salt) == why(two.bob, "Secure. " + PROMPT, **salt)
        assert why(two.alice, "Secret. " + PROMPT, **salt)["cause"] == "complete"
        assert why(two.alice, "Secret. " + PROMPT, tenant="alice", **salt)["cause"] == "complete"
        assert why(two.admin, "Secret. " + PROMPT, **salt)["cause"] == "never_stored"
        assert why(two.admin, "Secret. " + PROMPT, tenant="alice", **salt)["cause"] == "complete"
    for name in ("alice", "dave"):  # who does not learn which of them exists
        refused = two.bob.post("/cache/explain", json={"prompt": "Secret. " + PROMPT, "tenant": name})
        assert refused.status_code == 403 and name not in refused.text
    unnamed, named = (
        two.admin.post("/cache/explain", json={"prompt": "x" * 40, **more}).json() for more in ({}, {"tenant": "bob"})
    )
    assert unnamed["tenant"] is None and "name a tenant" in unnamed["says"], "it looked in no tenant's name, and says so"
    assert named["tenant"] == "bob" and "name a tenant" not in named["says"]
    missing = two.admin.post("/cache/explain", json={"prompt": "x" * 40, "tenant": "dave"})
    assert (missing.status_code, missing.json()["error"]["code"]) == (404, "tenant_not_found")


def test_pins_are_listed_to_their_owner_and_the_operator(two: Clients) -> None:
    for http in (two.alice, two.bob):
        say(http, "Pinned. " + PROMPT)
        assert http.post("/cache/pins", json={"prompt": "Pinned. " + PROMPT}).status_code == 401
    settled(two.served)
    pins = [two.admin.post("/cache/pins", json={"prompt": "Pinned. " + PROMPT, "tenant": n}).json() for n in ("alice", "bob")]
    assert all(pin["pinned_tokens"] > 0 for pin in pins) and [pin["tenant"] for pin in pins] == ["alice", "bob"]
    for http, mine in ((two.alice, pins[:1]), (two.bob, pins[1:]), (two.admin, pins)):
        assert [pin["id"] for pin in http.get("/cache/pins").json()["pins"]] == [pin["id"] for pin in mine]
    assert two.bob.delete(f"/cache/pins/{pins[0]['id']}").status_code == 401
    assert two.admin.post("/cache/flush", json={"tenant": "alice"}).json() == {"flushed": "tenant", "released_pins": 1}
    assert [pin["id"] for pin in two.admin.get("/cache/pins").json()["pins"]] == [pins[1]["id"]]
    assert two.admin.delete(f"/cache/pins/{pins[1]['id']}").status_code == 200


def test_a_pin_ends_with_its_tenants_longest_time_to_live(two: Clients) -> None:
    say(two.carol, "Ends. " + PROMPT)
    settled(two.served)
    wanted = {"prompt": "Ends. " + PROMPT, "tenant": "carol"}
    pin, short = (two.admin.post("/cache/pins", json=wanted | more).json() for more in ({}, {"ttl_s": 5.0}))
    assert 0 < short["expires_in_s"] <= 5 < pin["expires_in_s"] <= 600
    long = two.admin.post("/cache/pins", json=wanted | {"ttl_s": 601})
    assert long.status_code == 400 and long.json()["error"]["param"] == "ttl_s"
    assert two.admin.post("/cache/flush", json={"tenant": "carol"}).json()["released_pins"] >= 1


def test_flushing_a_tenant_empties_all_its_salts_and_no_others(two: Clients) -> None:
    for http in (two.alice, two.bob):
        for salt in ({}, {"cache_salt": "s"}):
            say(http, "Flushed. " + PROMPT, **salt)
    settled(two.served)
    assert two.admin.post("/cache/flush", json={"tenant": "bob", "cache_salt": "s"}).json()["flushed"] == "salt"
    assert why(two.bob, "Flushed. " + PROMPT, cache_salt="s")["cause"] == "cleared"
    assert why(two.bob, "Flushed. " + PROMPT)["restore_tokens"] != 0
    assert two.admin.post("/cache/flush", json={"tenant": "alice"}).json()["flushed"] == "tenant"
    assert {why(two.alice, "Flushed. " + PROMPT, **salt)["cause"] for salt in ({}, {"cache_salt": "s"})} == {"cleared"}
    assert why(two.bob, "Flushed. " + PROMPT)["restore_tokens"] != 0
    assert two.admin.post("/cache/flush", json={"tenant": "dave"}).status_code == 404
    assert two.alice.post("/cache/flush", json={}).status_code == 401


def test_what_all_do_together_is_shown_to_the_operator_and_tells_no_prompts(two: Clients) -> None:
    say(two.alice, "Measured. " + PROMPT, cache_salt="whose salt")
    for path in ("/metrics", "/cache"):  # who has how much, and who found how much, is there by name
        for http in (two.alice, two.bob):
            refused = http.get(path)
            assert (refused.status_code, refused.json()["error"]["code"]) == (401, "invalid_admin_token")
        shown = two.admin.get(path)
        assert shown.status_code == 200
        assert not any(word in shown.text for word in ("grain", "Measured", "whose salt"))


def test_the_operator_sees_what_each_tenant_has_in_memory(two: Clients) -> None:
    for http in (two.alice, two.carol):
        say(http, "Weighed. " + PROMPT)
    settled(two.served)
    two.admin.post("/cache/flush", json={"tenant": "bob"}).raise_for_status()
    shown, sizes = two.admin.get("/cache").json(), two.served.on_engine(lambda engine: engine.cache.stats().tiers)
    for name in ("alice", "carol"):
        assert all(
            0 < shown["tenants"][name][tier]["used_bytes"] <= shown["tiers"][tier]["used_bytes"] for tier in shown["tiers"]
        )
    assert "bob" not in shown["tenants"], "nothing is left of bob, and nothing limits him"
    for tier, found in sizes.items():
        quotas = [shown["tenants"][name][tier.label]["quota_bytes"] for name in ("alice", "carol")]
        assert quotas == [None, found.size_bytes // 2]


@pytest.mark.parametrize("write", [WritePolicy.THROUGH, WritePolicy.EXCLUSIVE])
def test_a_tenant_over_its_memory_quota_loses_its_own_and_is_told_why(write: WritePolicy) -> None:
    limited = (tenant("alice", memory_quota=0.2), tenant("bob"))
    sizes = {"device_memory": "512KiB", "host_memory": "512KiB", "write": write}
    with running(tenants=limited, **sizes) as made, ExitStack() as stack:

        def client(name: str) -> httpx.Client:
            headers = bearer(f"{name}'s key" if name != "admin" else ADMIN)
            return stack.enter_context(httpx.Client(base_url=made.address, timeout=PATIENCE_S, headers=headers))

        alice, bob, admin = map(client, ("alice", "bob", "admin"))
        say(bob, "Kept. " + PROMPT)
        settled(made)
        for number in range(24):
            say(alice, f"Flood {number}. " + PROMPT)
            settled(made)
        counters = admin.get("/cache").json()["counters"]
        assert counters["over_quota_host_pages"] > 0, "else memory was never short, and nothing is proved"
        assert why(bob, "Kept. " + PROMPT)["cause"] == "complete"
        assert {why(alice, f"Flood {number}. " + PROMPT)["cause"] for number in range(24)} == {"over_quota", "complete"}


def test_priorities_and_times_to_live_are_bounded_by_tenant(two: Clients) -> None:
    body = {"model": NAME, "prompt": "x", "max_tokens": 1}

    def asked(http: httpx.Client, **more: object) -> tuple[int, str]:
        response = http.post("/v1/completions", json=body | more)
        return response.status_code, "" if response.status_code == 200 else response.json()["error"]["message"]

    assert asked(two.alice, priority=3)[0] == asked(two.bob, priority=0)[0] == 200
    for http, priority in ((two.alice, 4), (two.bob, 1)):
        status, message = asked(http, priority=priority)
        assert status == 400 and f"at most {priority - 1}" in message and "tenants file" in message
    assert asked(two.carol, cache_ttl_s=600)[0] == asked(two.bob, cache_ttl_s=1e9)[0] == 200
    status, message = asked(two.carol, cache_ttl_s=600.5)
    assert status == 400 and "cache_ttl_s may be at most 600" in message and "tenants file" in message


@pytest.mark.parametrize(
    ("path", "prompt"),
    [("/v1/completions", {"prompt": PROMPT}), ("/v1/chat/completions", {"messages": [{"role": "user", "content": PROMPT}]})],
)
def test_a_tenant_cannot_be_named_in_a_request_for_an_answer(two: Clients, path: str, prompt: dict[str, object]) -> None:
    for http in (two.alice, two.bob, two.admin):
        reply = http.post(path, json={"model": NAME, "max_tokens": 2, "tenant": "alice"} | prompt)
        assert reply.status_code == 400 and reply.json()["error"]["param"] == "tenant", reply.text
        assert "send the API key of the tenant" in reply.json()["error"]["message"]


def test_the_engine_is_told_whose_a_request_is(two: Clients, monkeypatch: pytest.MonkeyPatch) -> None:
    reported: list[GenerateRequest] = []
    submit = Engine.submit

    def noting(engine: Engine, ask: GenerateRequest) -> int:
        reported.append(ask)
        return submit(engine, ask)

    monkeypatch.setattr(Engine, "submit", noting)
    for http in (two.alice, two.carol):
        say(http, "Said. " + PROMPT)
        say(http, "Said. " + PROMPT, cache_salt="s", cache_ttl_s=5.0)
    assert [(ask.tenant, ask.ttl_s) for ask in reported] == [("alice", None), ("alice", 5.0), ("carol", 600.0), ("carol", 5.0)]
    assert len({(ask.tenant, ask.salt) for ask in reported}) == 4 and [ask.salt for ask in reported[2:]] == [
        "[null, null]",
        '[null, "s"]',
    ]


def test_what_a_tenant_leaves_in_memory_runs_out_with_its_longest_time_to_live() -> None:
    brief = (tenant("alice", max_ttl_s=0.05), tenant("bob"))
    with running(tenants=brief) as made, httpx.Client(base_url=made.address, timeout=PATIENCE_S) as http:
        for name in ("alice", "bob"):
            http.headers.update(bearer(f"{name}'s key"))
            say(http, PROMPT)
        http.headers.update(bearer("alice's key"))
        wait_until(lambda: why(http, PROMPT)["cause"] == "expired", pause_s=0.02)
        http.headers.update(bearer("bob's key"))
        assert why(http, PROMPT)["cause"] == "complete"


def test_a_quota_reaches_the_log_and_evicts_ones_own_values_alone(two: Clients, tmp_path: Path) -> None:
    attach(two, tmp_path)
    try:
        for number in range(3):
            say(two.bob, f"Kept {number}. " + PROMPT)
        settled(two.served)
        store = two.served.on_engine(lambda engine: engine.stores[0])
        assert isinstance(store, LogStore)
        assert [(each.tenant, each.quota_bytes) for each in store.stat().tenants] == [("alice", QUOTA)]
        before = by_tenant(store)
        assert before["bob"][0] > 0 and "alice" not in before
        for number in range(16):
            say(two.alice, f"Flood {number}. " + PROMPT)
            settled(two.served)
        after = by_tenant(store)
        assert after["bob"] == before["bob"], "another's quota is not for bob to keep"
        assert 0 < after["alice"][1] <= QUOTA < 16 * (before["bob"][1] // 3), "more was written than may stay"
        store.audit()
    finally:
        two.admin.delete("/cache/store")


def test_what_may_not_stay_is_never_stored(two: Clients, tmp_path: Path) -> None:
    attach(two, tmp_path)
    try:
        say(two.carol, "Brief. " + PROMPT)
        say(two.bob, "Brief. " + PROMPT)
        settled(two.served)
        store = two.served.on_engine(lambda engine: engine.stores[0])
        assert isinstance(store, LogStore) and by_tenant(store).keys() == {"bob"}
    finally:
        two.admin.delete("/cache/store")


def attach(two: Clients, tmp_path: Path) -> None:
    """A log store, below memory that is empty: nothing of other tests comes into it."""
    settled(two.served)
    two.admin.post("/cache/flush", json={}).raise_for_status()
    where = {"store": f"log:{tmp_path / 'log'}", "options": {"budget": "64MiB", "segment": "1MiB", "direct": "off"}}
    assert two.admin.post("/cache/store", json=where).json()["state"] == "attached"


def by_tenant(store: LogStore) -> dict[str, tuple[int, int]]:
    """Values, and bytes on disk."""
    found: dict[str, tuple[int, int]] = {}
    for space in store.stat().spaces:
        values, size = found.get(space.tenant, (0, 0))
        found[space.tenant] = values + space.values, size + space.disk_bytes
    return found


def test_a_store_without_quotas_is_not_attached_where_a_tenant_has_one(two: Clients) -> None:
    refused = two.admin.post("/cache/store", json={"store": "memory:"})
    assert refused.status_code == 400 and "alice has a quota" in refused.json()["error"]["message"]
    assert two.admin.get("/cache").json()["store"]["state"] == "detached"


def test_tenants_and_one_key_for_all_exclude_each_other() -> None:
    with pytest.raises(ConfigError, match="leave out the API key"), running(tenants=TENANTS, api_key="one for all"):
        pass
