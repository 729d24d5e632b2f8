"""What the page at `/ui` asks for: who may see it, that it adds up, and that it never shows what a client asked."""

from __future__ import annotations

import json
import re
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from hashlib import sha256
from pathlib import Path

import httpx
import pytest

from server.serving import ADMIN, KEY, NAME, PAGE, Held, Running, running
from stepwell.base.errors import StoreError
from stepwell.engine.engine import Engine
from stepwell.server.access.tenants import Principal, Tenant
from stepwell.server.ui import routes
from stepwell.server.ui.routes import MOST_PATHS, MOST_REQUESTS
from stepwell.store.api import StoreSize, Traits
from stepwell.store.memory import MemoryStore
from stepwell.store.wrappers import Wrapper
from waiting import PATIENCE_S, wait_until

WATCHED = ("/cache/history", "/cache/requests", "/cache/tree", "/cache/store")
PROMPT = "A prompt long enough for several pages, whose words no one else may read. " * 3


@pytest.fixture(autouse=True)
def _nothing_old(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(routes, "REUSED_S", 0.0)


def say(http: httpx.Client, prompt: str, **more: object) -> None:
    body = {"model": NAME, "prompt": prompt, "max_tokens": 4, "temperature": 0} | more
    assert http.post("/v1/completions", json=body).status_code == 200


def client(made: Running, key: str | None = None) -> httpx.Client:
    headers = {} if key is None else {"Authorization": f"Bearer {key}"}
    return httpx.Client(base_url=made.address, timeout=PATIENCE_S, headers=headers)


def asking(made: Running, body: dict[str, object]) -> threading.Thread:
    """Starts a client that waits for an answer."""
    wait = {"json": body, "timeout": PATIENCE_S}
    thread = threading.Thread(target=httpx.post, args=(f"{made.address}/v1/completions",), kwargs=wait)
    thread.start()
    return thread


@pytest.fixture
def fresh() -> Iterator[Running]:
    with running() as made:
        yield made


def test_state_says_how_large_tiers_are_and_whether_orders_would_be_taken(http: httpx.Client, admin: httpx.Client) -> None:
    sizes = http.get("/cache").json()["tiers"]["device"]
    assert sizes.keys() == {"size_bytes", "used_bytes", "available_bytes"} and sizes["size_bytes"] >= sizes["available_bytes"]
    assert (http.get("/cache").json()["admin"], admin.get("/cache").json()["admin"]) == (False, True)


def test_history_adds_up_to_what_clients_were_told(fresh: Running) -> None:
    with client(fresh) as http:
        empty = http.get("/cache/history").json()
        assert not any(sum(column) for column in empty["prompt_tokens"].values()) and len(empty["ago_s"]) >= 1
        details = []
        for _ in range(2):
            body = {"model": NAME, "prompt": PROMPT, "max_tokens": 4, "temperature": 0}
            details.append(http.post("/v1/completions", json=body).json()["usage"])
        found = http.get("/cache/history").json()
        assert (
            sum(found["prompt_tokens"]["device"]) == sum(each["prompt_tokens_details"]["device_tokens"] for each in details) > 0
        )
        assert sum(map(sum, found["prompt_tokens"].values())) == sum(each["prompt_tokens"] for each in details)
        assert sum(found["output_tokens"]) == sum(each["completion_tokens"] for each in details)
        lengths = {len(column) for column in (*found["prompt_tokens"].values(), *found["used_bytes"].values())}
        assert lengths == {len(found["ago_s"])} and found["ago_s"] == sorted(found["ago_s"], reverse=True)
        assert found["used_bytes"]["device"][-1] > 0


def test_requests_under_way_are_shown_without_their_words(fresh: Running) -> None:
    prompt = {"model": NAME, "prompt": PROMPT, "max_tokens": 4}
    with client(fresh) as http, client(fresh, ADMIN) as admin, Held(fresh) as held:
        asks = [prompt, prompt | {"cache_salt": "grains", "prompt": "Salted. " + PROMPT}]
        threads = [asking(fresh, each) for each in asks]
        fresh.settle(lambda engine: len(engine.scheduler.active) == 2)
        reply = admin.get("/cache/requests")
        found = reply.json()
        assert (found["active"], found["waiting"], len(found["requests"])) == (2, 0, 2)
        (plain,) = [each for each in found["requests"] if each["prompt_tokens"] == len(PROMPT) + 1]
        assert plain["state"] == "prompt" and (plain["answer_tokens"], plain["max_tokens"]) == (0, 4) and plain["age_s"] >= 0
        others = http.get("/cache/requests")
        assert (others.json()["active"], len(others.json()["requests"])) == (2, 1), "what has a salt is counted, and no more"
        for text in (reply.text, others.text):
            assert "grains" not in text and "words" not in text
        held.let_go()
        for thread in threads:
            thread.join(PATIENCE_S)
    fresh.settle(lambda engine: engine.num_open == 0)


def test_a_long_queue_is_cut(fresh: Running) -> None:
    body = {"model": NAME, "prompt": PROMPT, "max_tokens": 2, "n": MOST_REQUESTS + 10, "temperature": 1}
    with client(fresh, ADMIN) as admin, Held(fresh) as held:
        thread = asking(fresh, body)
        fresh.settle(lambda engine: engine.num_open == MOST_REQUESTS + 10)
        found = admin.get("/cache/requests").json()
        assert len(found["requests"]) == MOST_REQUESTS and found["active"] + found["waiting"] == MOST_REQUESTS + 10
        held.let_go()
        thread.join(PATIENCE_S)


def test_the_tree_shows_what_takes_room_and_why_checkpoints_are_there(fresh: Running) -> None:
    with client(fresh) as http:
        assert http.get("/cache/tree").json()["paths"] == []
        for question in range(MOST_PATHS + 3):
            say(http, PROMPT + chr(ord("A") + question) * 60)
        fresh.settle(lambda engine: engine.num_open == 0 and not engine.cache.copying)
        found = http.get("/cache/tree").json()
    assert found["complete"] and found["needs_checkpoints"] and len(found["paths"]) == MOST_PATHS < found["num_paths"]
    trunk = max(found["paths"], key=lambda each: each["branches"])
    assert trunk["branches"] >= MOST_PATHS and trunk["start"] == 0 and trunk["end"] % PAGE == 0
    assert trunk["namespace"] == {**trunk["namespace"], "tenant": None, "salted": False}
    sizes = [sum(each["used_bytes"].values()) for each in found["paths"]]
    assert sizes == sorted(sizes, reverse=True) and sizes[-1] > 0
    triggers = {each["trigger"]: each for each in found["triggers"]}
    assert triggers["prompt_end"]["count"] >= MOST_PATHS and "branch" in triggers and None not in triggers
    saved = [each["saves_tokens"] for each in found["checkpoints"]]
    assert saved == sorted(saved, reverse=True) and found["checkpoints"][0]["says"]
    assert "words" not in json.dumps(found)
    assert found["tokens_per_s"] > 0 and found["paths"][0]["compute_s"] > 0


def test_what_has_a_salt_is_for_the_admin_token(fresh: Running) -> None:
    with client(fresh) as http, client(fresh, ADMIN) as admin:
        say(http, PROMPT, cache_salt="grains of sand")
        fresh.settle(lambda engine: engine.num_open == 0)
        assert http.get("/cache/tree").json()["paths"] == [] == http.get("/cache/tree").json()["triggers"]
        (path, *_) = admin.get("/cache/tree").json()["paths"]
        assert path["namespace"]["salted"] and "grains" not in admin.get("/cache/tree").text


def test_a_survey_is_handed_out_again_for_a_moment(fresh: Running, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(routes, "REUSED_S", PATIENCE_S)
    with client(fresh) as http, client(fresh, ADMIN) as admin:
        say(http, PROMPT)
        fresh.settle(lambda engine: engine.num_open == 0)
        first = http.get("/cache/tree").json()
        say(http, "Another. " + PROMPT)
        assert http.get("/cache/tree").json() == first, "however many look, the engine is asked once"
        assert admin.get("/cache/tree").json()["num_paths"] > first["num_paths"], "and no client gets what only another may see"


def test_many_who_look_at_once_cost_one_survey(fresh: Running, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(routes, "REUSED_S", PATIENCE_S)
    made, surveyed = routes._tree, []

    def counted(engine: Engine, *, salted: bool) -> dict[str, object]:
        surveyed.append(salted)
        return made(engine, salted=salted)

    monkeypatch.setattr(routes, "_tree", counted)
    busy = threading.Event()
    with client(fresh) as http, ThreadPoolExecutor(8) as pool:
        held = pool.submit(fresh.on_engine, lambda engine: busy.wait(PATIENCE_S))
        looks = [pool.submit(http.get, "/cache/tree") for _ in range(6)]
        wait_until(lambda: fresh.inside == 6, "all of them inside")
        busy.set()
        assert held.result(PATIENCE_S) and {each.result(PATIENCE_S).status_code for each in looks} == {200}
    assert surveyed == [False]


def test_the_store_says_what_it_holds_to_the_operator(tmp_path: Path) -> None:
    options = {"budget": "64MiB"}
    with (
        running(store=f"log:{tmp_path / 'log'}", store_options=options) as made,
        client(made) as http,
        client(made, ADMIN) as admin,
    ):
        say(http, PROMPT)
        found = wait_until(lambda: (each := admin.get("/cache/store").json())["namespaces"] and each, "a value stored")
        assert found["state"] == "attached" and found["breaker"] == "closed" and found["budget_bytes"] == 64 << 20
        (space,) = found["namespaces"]
        assert space["label"].startswith(f"{NAME} "), "people know the model by its name"
        assert space["values"] > 0 and 0 < space["used_bytes"] <= found["used_bytes"] and space["tenant"] is None
        assert http.get("/cache/store").json()["namespaces"] is None


def test_a_checkpoint_that_came_from_the_store_says_so(tmp_path: Path) -> None:
    where = {"store": f"log:{tmp_path / 'log'}", "store_options": {"budget": "64MiB"}}
    with running(**where) as made, client(made, ADMIN) as admin:  # type: ignore[arg-type]
        say(admin, PROMPT)
        made.settle(lambda engine: engine.num_open == 0)
        admin.post("/cache/flush", json={})  # which stores what was deferred
        wait_until(lambda: admin.get("/cache").json()["pending"] == 0, "backups done")
        assert admin.get("/cache/tree").json()["triggers"] == []
        say(admin, PROMPT)
        made.settle(lambda engine: engine.num_open == 0)
        assert "store" in {each["trigger"] for each in admin.get("/cache/tree").json()["checkpoints"]}


class Unsized(Wrapper):
    @property
    def traits(self) -> Traits:
        return replace(super().traits, sized=False, lists_spaces=False)


def test_a_store_that_does_not_know_its_size_is_no_error(fresh: Running) -> None:
    store = Unsized(MemoryStore())
    fresh.on_engine(lambda engine: (engine.cache.store.attach(store), engine.stores.append(store)))
    with client(fresh, ADMIN) as admin:
        found = admin.get("/cache/store").json()
        assert (found["state"], found["used_bytes"], found["namespaces"]) == ("attached", None, None)


class OfAnotherPackage:
    """A store written before stores could list their spaces: it knows its size, and nothing more."""

    def __init__(self, inner: MemoryStore) -> None:
        self._inner = inner

    @property
    def traits(self) -> Traits:
        return Traits(name="theirs", durable=False, shared=False, groups=False, sized=True)

    def __getattr__(self, name: str) -> object:
        if name in ("largest_spaces", "relevel"):
            raise AttributeError(name)
        return getattr(self._inner, name)


def test_a_store_that_knows_its_size_alone_is_no_error(fresh: Running) -> None:
    store = OfAnotherPackage(MemoryStore(budget_bytes=4096))
    fresh.on_engine(lambda engine: (engine.cache.store.attach(store), engine.stores.append(store)))  # type: ignore[arg-type]
    with client(fresh, ADMIN) as admin:
        found = admin.get("/cache/store").json()
        assert (found["used_bytes"], found["budget_bytes"], found["namespaces"]) == (0, 4096, None)


class Away(Wrapper):
    def size(self) -> StoreSize:
        raise StoreError("its server does not answer")


def test_a_store_that_cannot_be_asked_is_no_error(fresh: Running) -> None:
    """That is when people look at the page."""
    store = Away(MemoryStore())
    fresh.on_engine(lambda engine: (engine.cache.store.attach(store), engine.stores.append(store)))
    with client(fresh, ADMIN) as admin:
        found = admin.get("/cache/store").json()
        assert (found["state"], found["used_bytes"], found["namespaces"]) == ("attached", None, None)


def test_without_a_store_it_says_so(http: httpx.Client) -> None:
    found = http.get("/cache/store").json()
    assert (found["name"], found["state"], found["used_bytes"], found["breaker"]) == (None, "detached", None, None)


def test_it_is_seen_by_those_who_see_the_state() -> None:
    tenant = Tenant(principal=Principal(name="alice"), key_sha256=sha256(b"alice's key").digest())
    with running(tenants=(tenant,)) as made, client(made, "alice's key") as alice, client(made, ADMIN) as admin:
        say(alice, PROMPT)
        for path in WATCHED:
            assert alice.get(path).status_code == 401, f"{path} shows all tenants together"
            assert httpx.get(made.address + path).status_code == 401
            assert admin.get(path).status_code == 200
        assert admin.get("/cache/tree").json()["paths"][0]["namespace"]["tenant"] == "alice"
    with running(api_key=KEY) as made, client(made) as nobody, client(made, KEY) as holder:
        for path in WATCHED:
            assert (nobody.get(path).status_code, holder.get(path).status_code) == (401, 200)


# ---- the page itself --------------------------------------------------------------------------------


def test_the_page_has_no_secrets_and_loads_nothing_from_elsewhere() -> None:
    with running(api_key=KEY) as made, client(made) as http:
        page = http.get("/ui")
        assert page.status_code == 200 and page.headers["content-type"].startswith("text/html")
        policy = page.headers["content-security-policy"]
        for rule in (
            "default-src 'none'",
            "script-src 'self'",
            "style-src 'self'",
            "frame-ancestors 'none'",
            "connect-src 'self'",
        ):
            assert rule in policy.split("; ")
        assert "unsafe" not in policy and page.headers["x-content-type-options"] == "nosniff"
        files = [page.text]
        for name, media in (("page.css", "text/css"), ("main.js", "text/javascript"), ("icon.svg", "image/svg+xml")):
            reply = http.get(f"/ui/{name}")
            assert reply.status_code == 200 and reply.headers["content-type"].startswith(media)
            assert reply.headers["content-security-policy"] == policy
        files += [http.get(f"/ui/{name}").text for name in ("page.css", "main.js", "panels.js", "charts.js", "dom.js")]
        assert http.get("/ui/other.js").status_code == 404
    text = "\n".join(files).replace("http://www.w3.org/2000/svg", "")
    assert "://" not in text and "<style" not in text and "style=" not in text and "onclick" not in text
    for sink in ("innerHTML", "outerHTML", "insertAdjacentHTML", "document.write", "eval(", "localStorage"):
        assert sink not in text
    assert KEY not in text and ADMIN not in text


def test_every_file_the_page_names_is_served(http: httpx.Client) -> None:
    names = re.findall(r'(?:src|href)="([^"]+)"', http.get("/ui").text)
    imported = re.findall(
        r'from "\./([\w.]+)"', "".join(http.get(f"/ui/{name}").text for name in ("main.js", "panels.js", "charts.js"))
    )
    assert {"ui/main.js", "ui/page.css"} <= set(names)
    for name in {*names, *(f"ui/{each}" for each in imported)}:
        assert http.get(f"/{name}").status_code == 200, name
