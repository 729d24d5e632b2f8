"""`/cache`, `/metrics`, `/health`, and who may do what."""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from datetime import UTC, datetime, timedelta
from pathlib import Path
from threading import Event, current_thread
from typing import Any

import httpx
import openai
import pytest
from prometheus_client.parser import text_string_to_metric_families

from server.serving import ADMIN, CONFIG, KEY, MAX_BODY, NAME, Running, running, tiny_checkpoint
from stepwell.base.config import WritePolicy
from stepwell.base.ids import Kind, Tier
from stepwell.cache.question import Question
from stepwell.engine.engine import Engine
from stepwell.engine.ops.kernels import OPERATIONS
from stepwell.server import stores
from stepwell.store.api import Space, Traits
from stepwell.store.memory import MemoryStore
from stepwell.store.wrappers import Wrapper
from waiting import PATIENCE_S, wait_until

PROMPT = "What is known of this prompt, and who wants to know? " * 3


def say(http: httpx.Client, prompt: str, **more: object) -> dict[str, int]:
    """Asks for an answer and returns where its prompt came from."""
    body = {"model": NAME, "prompt": prompt, "max_tokens": 4, "temperature": 0} | more
    response = http.post("/v1/completions", json=body)
    assert response.status_code == 200, response.text
    return response.json()["usage"]["prompt_tokens_details"]  # type: ignore[no-any-return]


def settled(served: Running) -> None:
    """Waits until nothing is on its way to the host or the store."""
    served.settle(lambda engine: engine.num_open == 0)
    served.settle(lambda engine: (report := engine.cache.step()).running + report.storing == 0)


def test_health_says_whether_it_runs(http: httpx.Client) -> None:
    assert http.get("/health").json() == {"status": "ok", "model": NAME}


def test_state_shows_tiers_and_counters(http: httpx.Client) -> None:
    say(http, "State. " + PROMPT)
    state = http.get("/cache").json()
    assert state["model"] == NAME and state["requests"] == {"waiting": 0, "active": 0}
    assert state["tiers"].keys() == {"device", "host"} and 0 < state["tiers"]["device"]["used_bytes"] <= 8 << 20
    assert state["counters"]["tokens_computed"] > 0 and state["store"]["state"] == "detached"
    assert set(OPERATIONS) == state["kernels"].keys() and set(state["kernels"].values()) == {"torch"}


def test_state_says_when_pages_go_down(http: httpx.Client) -> None:
    """The default follows from the sizes of the tiers: the host is as large as the device, and would only repeat it."""
    assert http.get("/cache").json()["write_policy"] == {"policy": "exclusive", "resumable_after_s": None}
    with running(write=WritePolicy.SELECTIVE) as asked:
        state = httpx.get(f"{asked.address}/cache", timeout=PATIENCE_S).json()
    assert state["write_policy"] == {"policy": "selective", "resumable_after_s": None}


def test_state_says_how_checkpoints_are_kept(http: httpx.Client) -> None:
    assert http.get("/cache").json()["checkpoint_dtype"] is None
    with running(checkpoint_dtype="int8") as narrow:
        state = httpx.get(f"{narrow.address}/cache", timeout=PATIENCE_S).json()
    assert state["checkpoint_dtype"] == "int8" and 0 < state["checkpoint_bytes"] < http.get("/cache").json()["checkpoint_bytes"]


def test_explain_says_why_a_prompt_starts_over(http: httpx.Client) -> None:
    asked = {"prompt": "Explained. " + PROMPT}
    before = http.post("/cache/explain", json=asked).json()
    assert (before["cause"], before["restore_tokens"]) == ("never_stored", 0)
    say(http, "Explained. " + PROMPT)
    after = http.post("/cache/explain", json=asked).json()
    assert after["cause"] == "complete" and after["restore_tokens"] > len(PROMPT) and "resumes at token" in after["says"]
    assert after["device_tokens"] + after["host_tokens"] == after["restore_tokens"] and "from the device" in after["says"]
    other = http.post("/cache/explain", json=asked | {"cache_salt": "another"}).json()
    assert (other["cause"], other["restore_tokens"]) == ("never_stored", 0), "what other salts hold stays private"
    short = http.post("/cache/explain", json={"prompt": [1, 2]}).json()
    assert short["cause"] == "too_short" and "shorter than a page" in short["says"]
    chat = http.post("/cache/explain", json={"messages": [{"role": "user", "content": "unheard of"}]}).json()
    assert chat["prompt_tokens"] > len("unheard of")
    assert http.post("/cache/explain", json={}).status_code == 400


def test_nobody_is_told_what_another_salt_holds(http: httpx.Client, served: Running) -> None:
    """Neither explain nor any other route that a client can read shows it: a salt's prompts are its own."""
    say(http, "Secret. " + PROMPT, cache_salt="theirs")
    settled(served)
    salts = ({}, {"cache_salt": "mine"})
    held = [http.post("/cache/explain", json={"prompt": "Secret. " + PROMPT} | salt).json() for salt in salts]
    free = [http.post("/cache/explain", json={"prompt": "Secure. " + PROMPT} | salt).json() for salt in salts]
    assert held == free and {each["cause"] for each in held} == {"never_stored"}
    assert http.post("/cache/explain", json={"prompt": "Secret. " + PROMPT, "cache_salt": "theirs"}).json()["restore_tokens"] > 0
    assert (
        say(http, "Secret. " + PROMPT)["cached_tokens"] == say(http, "Secret. " + PROMPT, cache_salt="mine")["cached_tokens"] == 0
    )
    assert http.get("/cache/pins").status_code == 401
    assert "theirs" not in http.get("/cache").text + http.get("/metrics").text


def test_a_request_can_do_without_the_cache(http: httpx.Client) -> None:
    """It computes its whole prompt, and leaves nothing for others."""
    prompt = "Without. " + PROMPT
    assert say(http, prompt, use_cache=False)["cached_tokens"] == 0
    assert http.post("/cache/explain", json={"prompt": prompt}).json()["known_tokens"] == 0
    assert say(http, prompt)["cached_tokens"] == 0
    assert say(http, prompt, use_cache=False)["cached_tokens"] == 0
    assert say(http, prompt, use_cache=True)["cached_tokens"] > 0


def test_orders_need_the_admin_token(http: httpx.Client) -> None:
    orders = [
        ("POST", "/cache/flush", {}),
        ("POST", "/cache/audit", {}),
        ("POST", "/cache/store", {"store": "memory:"}),
        ("DELETE", "/cache/store", None),
        ("POST", "/cache/pins", {"prompt": "x"}),
        ("GET", "/cache/pins", None),
        ("DELETE", "/cache/pins/1", None),
    ]
    for given in (None, "Bearer", "Bearer wrong", f"Bearer {KEY}", f"Bearer {ADMIN}x", f"Basic {ADMIN}", ADMIN, "Bearer \xff"):
        headers = {} if given is None else {"Authorization": given.encode("latin-1")}
        for method, path, body in orders:
            response = http.request(method, path, json=body, headers=headers)
            assert response.status_code == 401, (given, method, path)
            assert response.json()["error"]["code"] == "invalid_admin_token"
    assert http.get("/cache").json()["store"]["state"] == "detached"


def test_pages_that_point_their_name_at_this_machine_see_nothing() -> None:
    with (
        running(hosts=("127.0.0.1", "::1", "well.example")) as made,
        httpx.Client(base_url=made.address, timeout=PATIENCE_S) as http,
    ):
        for host in ("evil.example", "evil.example:80", "", "[::2]", "127.0.0.1.evil.example"):
            response = http.get("/cache", headers={"Host": host})
            assert (response.status_code, response.json()["error"]["code"]) == (421, "unknown_host")
        for host in ("127.0.0.1", "127.0.0.1:1", "[::1]:80", "Well.example:443"):
            assert http.get("/cache", headers={"Host": host}).status_code == 200
        assert _samples(http)["stepwell_http_errors_total421"] == 5


def test_the_audit_is_clean_while_requests_run_and_says_which_page_is_not_accounted_for(
    admin: httpx.Client, served: Running, client: openai.OpenAI
) -> None:
    stream = client.completions.create(model=NAME, prompt=PROMPT, max_tokens=500, stream=True, extra_body={"ignore_eos": True})
    next(iter(stream))
    assert admin.post("/cache/audit").json()["clean"]
    stream.close()

    def off_by_one(engine: Engine, more: int) -> None:
        engine.cache._state.arena(Tier.HOST).refs[Kind.PREFIX][0] += more

    served.settle(lambda engine: engine.num_open == 0)
    served.on_engine(lambda engine: off_by_one(engine, 1))
    reported = admin.post("/cache/audit").json()
    served.on_engine(lambda engine: off_by_one(engine, -1))
    assert not reported["clean"] and "host" in reported["says"]


def test_flush_empties_memory(admin: httpx.Client, served: Running) -> None:
    say(admin, "Flushed. " + PROMPT)
    assert say(admin, "Flushed. " + PROMPT)["cached_tokens"] > 0
    say(admin, "Flushed. " + PROMPT, cache_salt="mine")
    settled(served)
    assert admin.post("/cache/flush", json={"cache_salt": "mine"}).json()["flushed"] == "salt"
    why = admin.post("/cache/explain", json={"prompt": "Flushed. " + PROMPT, "cache_salt": "mine"}).json()
    assert (why["cause"], why["restore_tokens"], why["store_tokens"]) == ("cleared", 0, None)
    assert abs(datetime.now(UTC) - datetime.fromisoformat(why["at"])) < timedelta(minutes=2)
    assert admin.post("/cache/explain", json={"prompt": "Flushed. " + PROMPT}).json()["restore_tokens"] > 0
    assert admin.post("/cache/flush", json={}).json()["flushed"] == "all"
    assert admin.get("/cache").json()["tiers"]["device"]["used_bytes"] == 0
    assert say(admin, "Flushed. " + PROMPT)["cached_tokens"] == 0


def test_pins_are_kept_listed_and_released(admin: httpx.Client, served: Running) -> None:
    say(admin, "Pinned. " + PROMPT)
    settled(served)
    nothing = admin.post("/cache/pins", json={"prompt": "never seen " + PROMPT}).json()
    assert (nothing["id"], nothing["pinned_tokens"]) == (None, 0)
    pin = admin.post("/cache/pins", json={"prompt": "Pinned. " + PROMPT}).json()
    short = admin.post("/cache/pins", json={"prompt": "Pinned. " + PROMPT, "ttl_s": 500.0}).json()
    gone = admin.post("/cache/pins", json={"prompt": "Pinned. " + PROMPT, "ttl_s": 1e-6}).json()
    assert pin["pinned_tokens"] > len(PROMPT) and pin["expires_in_s"] is None and 0 < short["expires_in_s"] <= 500
    assert [each["id"] for each in admin.get("/cache/pins").json()["pins"]] == [pin["id"], short["id"]]
    assert admin.delete(f"/cache/pins/{gone['id']}").status_code == 404
    assert admin.delete(f"/cache/pins/{pin['id']}").json()["released"]
    assert admin.delete(f"/cache/pins/{pin['id']}").json()["error"]["code"] == "pin_not_found"
    assert admin.post("/cache/flush", json={}).json()["released_pins"] == 1
    assert admin.get("/cache/pins").json() == {"pins": []}
    assert [tier["used_bytes"] for tier in admin.get("/cache").json()["tiers"].values()] == [0, 0]
    assert admin.post("/cache/pins", json={"prompt": "x", "ttl_s": 0}).status_code == 400
    served.audit()


def test_a_pin_holds_its_bytes_until_it_is_released(admin: httpx.Client, served: Running) -> None:
    def host_bytes() -> int:
        return admin.get("/cache").json()["tiers"]["host"]["used_bytes"]  # type: ignore[no-any-return]

    say(admin, "Held. " + PROMPT, cache_salt="holder")
    settled(served)
    pin = admin.post("/cache/pins", json={"prompt": "Held. " + PROMPT, "cache_salt": "holder"}).json()
    served.on_engine(lambda engine: engine.cache.flush())  # behind the server's back
    assert host_bytes() > 0
    assert admin.delete(f"/cache/pins/{pin['id']}").status_code == 200
    assert host_bytes() == 0


def explained(http: httpx.Client, prompt: str) -> dict[str, Any]:
    """What explain says of a prompt, asked until the store answers within its quarter of a second: a busy disk may not."""

    def answer() -> dict[str, Any] | None:
        found: dict[str, Any] = http.post("/cache/explain", json={"prompt": prompt}).json()
        return None if "did not answer within" in found["store_note"] else found

    return wait_until(answer)


def test_a_store_that_is_still_being_closed_is_said_to_be_so(
    admin: httpx.Client, served: Running, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    where = {"store": f"log:{tmp_path / 'log'}", "options": {"budget": "64MiB", "segment": "1MiB"}}
    assert admin.post("/cache/store", json=where).json()["state"] == "attached"
    store = served.on_engine(lambda engine: engine.stores[-1])
    go_on, close = Event(), store.close
    monkeypatch.setattr(store, "close", lambda: (go_on.wait(PATIENCE_S), close()))
    with ThreadPoolExecutor(1) as threads:
        detaching = threads.submit(admin.delete, "/cache/store")
        wait_until(lambda: served.on_engine(lambda engine: not engine.stores))
        refused = admin.post("/cache/store", json=where)
        go_on.set()
        assert detaching.result().json() == {"state": "closed"}
    assert refused.status_code == 400 and "still being closed" in refused.json()["error"]["message"]
    assert admin.post("/cache/store", json=where).status_code == 200
    assert admin.delete("/cache/store").status_code == 200


def test_stores_come_and_go_while_requests_run(admin: httpx.Client, served: Running, tmp_path: Path) -> None:
    where = {"store": f"log:{tmp_path / 'log'}", "options": {"budget": "64MiB", "segment": "1MiB"}}
    prompt = "Stored. " + PROMPT
    say(admin, prompt)
    assert admin.post("/cache/store", json=where).json()["state"] == "attached"
    assert admin.get("/cache").json()["store"]["name"] == where["store"]
    assert admin.post("/cache/store", json=where).status_code == 400  # one at a time
    settled(served)
    admin.post("/cache/flush", json={}).raise_for_status()
    settled(served)  # the backup of its checkpoint was deferred, and is made before the host is emptied
    why = explained(admin, prompt)
    assert (why["cause"], why["restore_tokens"], why["store_note"]) == ("in_store", 0, ""), (why, admin.get("/cache").json())
    assert say(admin, prompt)["store_tokens"] == why["store_tokens"] > 0
    assert admin.delete("/cache/store").json() == {"state": "closed"}
    assert admin.delete("/cache/store").status_code == 400
    assert admin.get("/cache").json()["store"] == {"name": None, "state": "detached", "says": "detached"}
    admin.post("/cache/flush", json={}).raise_for_status()
    assert say(admin, prompt)["cached_tokens"] == 0
    assert admin.post("/cache/store", json=where).status_code == 200  # no process holds its directory any more
    assert admin.delete("/cache/store").status_code == 200
    served.audit()


class Stuck(MemoryStore):
    """Answers no question until the test releases it."""

    def __init__(self) -> None:
        super().__init__()
        self.let_go = Event()

    def contains(self, space: Space, keys: Sequence[bytes]) -> list[bool]:
        assert self.let_go.wait(60), "the test never released it"
        return super().contains(space, keys)


def test_explain_says_when_the_store_did_not_answer_and_never_blocks_the_engine(monkeypatch: pytest.MonkeyPatch) -> None:
    def wait(question: Question) -> None:
        raise AssertionError("the engine's thread waits for the store")

    monkeypatch.setattr(Question, "wait", wait)
    store = Stuck()
    with running() as made, httpx.Client(base_url=made.address, timeout=60) as http:
        made.server.served.loop.call(lambda engine: engine.cache.store.attach(store)).result(10)
        asked = {"prompt": "Stuck. " + PROMPT}
        why = http.post("/cache/explain", json=asked).json()
        assert why["cause"] == "never_stored" and why["store_tokens"] is None
        assert "did not answer within" in why["store_note"] and why["store_note"] in why["says"]
        assert say(http, asked["prompt"])["store_tokens"] == 0
        counters = http.get("/cache").json()["counters"]
        assert counters["prefetch_given_up"] == 1 and _samples(http)["stepwell_cache_events_totalprefetch_given_up"] == 1
        why = http.post("/cache/explain", json=asked).json()
        assert why["cause"] == "complete" and "given up after" in why["says"], "why it was slow the last time"
        store.let_go.set()


class Failing(MemoryStore):
    def contains(self, space: Space, keys: Sequence[bytes]) -> list[bool]:
        raise OSError("/srv/cache on host-7 is gone")


def test_what_a_store_says_of_itself_is_for_the_operator(caplog: pytest.LogCaptureFixture) -> None:
    with running() as made, httpx.Client(base_url=made.address, timeout=PATIENCE_S) as http:
        made.on_engine(lambda engine: engine.cache.store.attach(Failing()))
        asked = {"prompt": "Failing. " + PROMPT}
        reply = http.post("/cache/explain", json=asked)
        assert reply.json()["store_note"] == "the store could not say what it has; the log says why"
        assert "host-7" not in reply.text and "host-7" in caplog.text
        why = http.post("/cache/explain", json=asked, headers={"Authorization": f"Bearer {ADMIN}"}).json()
        assert "host-7" in why["store_note"] and "host-7" in why["says"]


class Registering(Wrapper):
    """A store that wants to know memory, and notes who showed it what, and in which order."""

    def __init__(self) -> None:
        super().__init__(MemoryStore())
        self.known: list[memoryview] = []
        self.heard: list[tuple[str, str]] = []

    @property
    def traits(self) -> Traits:
        return replace(super().traits, registers=True)

    def register(self, memory: Sequence[memoryview]) -> None:
        self.heard.append(("register", current_thread().name))
        self.known = list(memory)

    def unregister(self, memory: Sequence[memoryview]) -> None:
        self.heard.append(("unregister", current_thread().name))
        self.known = []

    def close(self) -> None:
        self.heard.append(("close", current_thread().name))
        assert not self.known
        super().close()


def test_a_store_attached_at_run_time_is_shown_the_hosts_memory(
    admin: httpx.Client, served: Running, monkeypatch: pytest.MonkeyPatch
) -> None:
    store = Registering()
    monkeypatch.setattr(stores, "open_store", lambda where, options: store)
    assert admin.post("/cache/store", json={"store": "mooncake:"}).json()["state"] == "attached"
    memory = served.server.served.loop.call(lambda engine: engine.cache.store.host_memory).result(10)
    assert [each.nbytes for each in store.known] == [each.nbytes for each in memory] and memory
    assert admin.delete("/cache/store").json() == {"state": "closed"}
    assert [what for what, _ in store.heard] == ["register", "register", "unregister", "close"]
    slow = [thread for at, (_, thread) in enumerate(store.heard) if at != 1]  # the second finds it done
    assert "stepwell-engine" not in slow, "a network card may take seconds for it"


@pytest.mark.parametrize("store", ["nowhere:", "log:", "mooncake:/no/such/file"])
def test_stores_that_cannot_be_opened_are_refused(admin: httpx.Client, store: str) -> None:
    response = admin.post("/cache/store", json={"store": store})
    assert response.status_code in (400, 502) and response.json()["error"]["message"]
    assert admin.get("/cache").json()["store"]["state"] == "detached"


def test_the_store_of_the_start_serves_the_next_run(tmp_path: Path) -> None:
    settings = {"store": f"log:{tmp_path / 'log'}", "store_options": {"budget": "64MiB", "segment": "1MiB"}}
    for expected in (False, True):
        with running(**settings) as made, httpx.Client(base_url=made.address, timeout=PATIENCE_S) as http:
            assert (say(http, PROMPT)["store_tokens"] > 0) is expected
    headers = {"Authorization": f"Bearer {ADMIN}"}
    with running(**settings) as made, httpx.Client(base_url=made.address, timeout=PATIENCE_S, headers=headers) as http:
        assert http.get("/cache").json()["store"]["name"] == settings["store"]
        assert http.delete("/cache/store").json() == {"state": "closed"}
        assert made.engine.stores == []


def test_metrics_are_what_prometheus_reads(http: httpx.Client) -> None:
    before = _samples(http)
    say(http, "Measured. " + PROMPT)
    say(http, "Measured. " + PROMPT)
    http.post("/v1/completions", json={"model": NAME})
    after = _samples(http)

    def grown(name: str) -> float:
        return after.get(name, 0.0) - before.get(name, 0.0)

    sources = {source: grown(f"stepwell_prompt_tokens_total{source}") for source in ("device", "host", "store", "computed")}
    assert sum(sources.values()) == 2 * (len("Measured. " + PROMPT) + 1) and sources["device"] > 0
    assert grown("stepwell_generated_tokens_total") == 8 and grown("stepwell_requests_totallength") == 2
    assert grown("stepwell_time_to_first_token_seconds_count") == 2 and grown("stepwell_http_errors_total400") == 1
    assert after["stepwell_requests_openwaiting"] == after["stepwell_requests_openactive"] == 0
    assert after["stepwell_engine_up"] == after["stepwell_store_statedetached"] == 1
    assert after["stepwell_tier_used_bytesdevice"] > 0 and after["stepwell_tier_available_byteshost"] > 0
    assert after["stepwell_cache_tokens_totaltokens_computed"] > 0


def test_bodies_that_are_too_large_are_counted(http: httpx.Client) -> None:
    before = _samples(http).get("stepwell_http_errors_total413", 0.0)
    declared = http.post("/v1/completions", json={"model": NAME, "prompt": "x" * MAX_BODY})
    pieces = http.post("/v1/completions", content=iter([b" " * MAX_BODY] * 2), headers={"content-type": "application/json"})
    assert declared.status_code == pieces.status_code == 413
    assert _samples(http)["stepwell_http_errors_total413"] == before + 2


def test_times_are_counted_from_arrival_at_the_server() -> None:
    """What comes before the engine's queue is part of what a client waits for."""
    with running() as made, httpx.Client(base_url=made.address, timeout=60) as http:
        encode, delay_s = made.engine.text.encode, 0.25  # type: ignore[union-attr]

        def slowly(text: str, *, special: bool) -> list[int]:
            time.sleep(delay_s)
            return encode(text)

        made.engine.text.encode = slowly  # type: ignore[union-attr,method-assign,assignment]
        say(http, PROMPT)
        samples = _samples(http)
    assert samples["stepwell_queue_seconds_sum"] >= delay_s
    assert samples["stepwell_time_to_first_token_seconds_sum"] >= samples["stepwell_queue_seconds_sum"]


def test_what_a_draft_guessed_is_counted() -> None:
    whole = {**CONFIG, "layer_types": ["full_attention"] * 2}
    draft = replace(tiny_checkpoint(), config=whole, digest="draft")
    body = {"model": NAME, "prompt": "Guess. " + PROMPT, "max_tokens": 12, "temperature": 0, "ignore_eos": True}
    with running(draft=draft) as made, httpx.Client(base_url=made.address, timeout=PATIENCE_S) as http:
        details = http.post("/v1/completions", json=body).json()["usage"]["completion_tokens_details"]
        samples = _samples(http)
        assert details["accepted_prediction_tokens"] == samples["stepwell_draft_tokens_totalaccepted"] > 0
        assert details["rejected_prediction_tokens"] == samples["stepwell_draft_tokens_totalrejected"]
        assert http.post("/cache/explain", json={"prompt": body["prompt"]}).json()["missing_states"] == {}


def _samples(http: httpx.Client) -> dict[str, float]:
    """By name and the values of labels, buckets left out."""
    response = http.get("/metrics")
    assert response.headers["content-type"].startswith("text/plain")
    families = list(text_string_to_metric_families(response.text))
    samples = [sample for family in families for sample in family.samples if "le" not in sample.labels]
    return {sample.name + "".join(sample.labels.values()): sample.value for sample in samples}


# ---- a server with a key --------------------------------------------------------------------------


@pytest.fixture(scope="module")
def locked() -> Iterator[Running]:
    with running(api_key=KEY) as made:
        yield made


def test_a_key_is_wanted_where_one_is_set(locked: Running) -> None:
    for key in ("wrong", KEY + "x"):
        with locked.client(key) as client, pytest.raises(openai.AuthenticationError) as caught:
            client.completions.create(model=NAME, prompt="x")
        assert caught.value.code == "invalid_api_key" and "not valid here" in str(caught.value)
    for key in (KEY, ADMIN):
        with locked.client(key) as client:
            assert client.completions.create(model=NAME, prompt="x", max_tokens=1).usage is not None
    with httpx.Client(base_url=locked.address, timeout=PATIENCE_S) as http:
        statuses = [http.get(path).status_code for path in ("/health", "/metrics", "/cache", "/v1/models", "/cache/pins")]
        assert statuses == [200, 401, 401, 401, 401]
        for key in (KEY, ADMIN):
            assert "stepwell_engine_up 1.0" in http.get("/metrics", headers={"Authorization": f"Bearer {key}"}).text
        unnamed = http.get("/v1/models")
        assert unnamed.headers["www-authenticate"] == "Bearer" and "as a bearer token" in unnamed.json()["error"]["message"]


def test_metrics_can_be_open_to_all() -> None:
    with running(api_key=KEY, serving={"open_metrics": True}) as made, httpx.Client(base_url=made.address) as http:
        assert [http.get(path).status_code for path in ("/metrics", "/cache")] == [200, 401]
