"""The page at `/ui` as people meet it: in a browser, on a phone, on paper, with a token and without, and with no server."""

from __future__ import annotations

import threading
from hashlib import sha256
from typing import TYPE_CHECKING

from server.serving import ADMIN, KEY, NAME, Held, Running, running
from stepwell.server.access.tenants import Principal, Tenant
from ui.looking import PROMPT, ask, give, is_shown, text_of, wait_for
from waiting import PATIENCE_S

if TYPE_CHECKING:
    from ui.looking import OpenPage


# ---- what there is to see ----------------------------------------------------------------------------


def test_a_busy_server_shows_what_it_holds_and_where_prompts_came_from(busy: Running, open_page: OpenPage) -> None:
    page = open_page(busy.address)
    is_shown(page)
    assert text_of(page, "#model") == NAME and page.title() == f"{NAME} · stepwell"
    assert "%" in text_of(page, "#figures")
    assert page.locator("#sources svg g rect").count() >= 2, "a column with its parts"
    assert [each.inner_text() for each in page.locator("#tiers .tier strong").all()] == ["device", "host", "store"]
    assert page.locator("#paths tbody tr").count() >= 3 and "branch off" in text_of(page, "#paths")
    assert "end of a prompt" in text_of(page, "#checkpoints") and "prompts diverge here" in text_of(page, "#checkpoints")
    assert "None." in text_of(page, "#requests")
    assert "closed" in text_of(page, "#store") and "The admin token shows what it holds." in text_of(page, "#store")
    page.click("summary")
    assert "tokens_computed" in text_of(page, "#counters")


def test_a_page_that_is_opened_late_sees_the_same_curve(busy: Running, open_page: OpenPage) -> None:
    first, second = open_page(busy.address), open_page(busy.address)
    for page in (first, second):
        is_shown(page)
    said = [page.locator("#sources svg g title").all_text_contents() for page in (first, second)]
    assert said[0] and all(title.partition(": ")[2] for title in said[0])
    assert sum(_tokens(title) for title in said[0]) == sum(_tokens(title) for title in said[1]) > 0


def _tokens(title: str) -> int:
    return int(title.partition(": ")[2].partition(" prompt")[0].replace(",", ""))


def test_times_are_rounded_before_they_are_cut_into_units(busy: Running, open_page: OpenPage) -> None:
    page = open_page(busy.address)
    given = [0.0004, 0.9997, 9.97, 59.7, 119.7, 3599.6, 7199.0]
    said = page.evaluate("async (given) => { const dom = await import('/ui/dom.js'); return given.map(dom.seconds); }", given)
    assert said == ["< 1 ms", "1.0 s", "10 s", "1 min 0 s", "2 min 0 s", "1 h 0 min", "2 h 0 min"]


def test_an_empty_server_says_that_there_is_nothing(open_page: OpenPage) -> None:
    with running() as made:
        page = open_page(made.address)
        is_shown(page)
        assert "No answer has ended" in text_of(page, "#sources") and "Nothing is cached" in text_of(page, "#paths")
        assert "There are none." in text_of(page, "#checkpoints") and "None is attached." in text_of(page, "#store")
        assert "NaN" not in text_of(page, "body") and "undefined" not in text_of(page, "body")


def test_requests_under_way_come_and_go(open_page: OpenPage) -> None:
    with running() as made, Held(made) as held:
        asking = threading.Thread(target=ask, args=(made, PROMPT))
        asking.start()
        made.settle(lambda engine: len(engine.scheduler.active) == 1)
        page = open_page(made.address)
        is_shown(page)
        page.wait_for_selector("#requests tbody tr")
        assert "computes its prompt" in text_of(page, "#requests")
        held.let_go()
        asking.join(PATIENCE_S)
        wait_for(page, "#requests", "None.")


# ---- the token ---------------------------------------------------------------------------------------


def test_the_token_opens_the_page_and_stays_in_the_tab(open_page: OpenPage) -> None:
    with running(api_key=KEY) as made:
        ask(made, PROMPT, KEY)
        page = open_page(made.address)
        page.wait_for_selector("#status[data-state=refused]")
        assert page.locator("#main").is_hidden()
        asked: list[str] = []
        page.on("request", lambda request: asked.append(request.url))
        give(page, "another token")
        wait_for(page, "#status", "does not open")
        assert page.locator("#main").is_hidden() and asked == [f"{made.address}/cache"], "a refused page asks for no more"
        give(page, KEY)
        is_shown(page)
        assert page.locator("#flush").is_disabled() and "not the admin token" in text_of(page, "#token-note")
        give(page, ADMIN)
        page.wait_for_selector("#token-form[data-state=admin]")
        assert page.locator("#flush").is_enabled() and page.input_value("#token") == ""
        assert ADMIN not in page.url and page.evaluate("localStorage.length") == 0 and not page.context.cookies()
        page.reload()
        page.wait_for_selector("#token-form[data-state=admin]")
        page.fill("#prompt", "for the operator alone")
        page.fill("#salt", "sea")
        page.click("#token-form button[type=button]")
        page.wait_for_selector("#status[data-state=refused]")
        assert page.input_value("#prompt") == "" == page.input_value("#salt"), "the next user reads none of it"
        assert page.locator("#main").is_hidden() and page.evaluate("sessionStorage.length") == 0


def test_tenants_are_named_to_the_operator_alone(open_page: OpenPage) -> None:
    tenant = Tenant(principal=Principal(name="alice", memory_quota=0.5), key_sha256=sha256(b"alice's key").digest())
    with running(tenants=(tenant,)) as made:
        ask(made, PROMPT, "alice's key")
        page = open_page(made.address)
        page.wait_for_selector("#status[data-state=refused]")
        give(page, "alice's key")
        wait_for(page, "#status", "does not open")
        give(page, ADMIN)
        is_shown(page)
        assert "alice" in text_of(page, "#tenants") and "alice" in text_of(page, "#paths")
        page.fill("#prompt", PROMPT + "more")
        page.select_option("#prompt-tenant", "alice")
        page.click("#prompt-form button:has-text('Explain')")
        page.wait_for_selector("#explained .says")
        assert "resumes at" in text_of(page, "#explained") and "token 0" not in text_of(page, "#explained dl")


# ---- doing something ---------------------------------------------------------------------------------


def test_a_typed_prompt_is_explained(busy: Running, open_page: OpenPage) -> None:
    page = open_page(busy.address)
    is_shown(page)
    page.fill("#prompt", PROMPT + "A" * 80 + " and something new")
    page.click("#prompt-form button:has-text('Explain')")
    page.wait_for_selector("#explained .says")
    assert "resumes at token" in text_of(page, "#explained .says") and page.locator("#explained svg.bar rect").count() >= 2
    page.fill("#salt", "river")
    page.click("#prompt-form button:has-text('Explain')")
    wait_for(page, "#explained", "never stored")
    page.fill("#prompt", "")
    page.click("#prompt-form button:has-text('Explain')")
    page.wait_for_selector("#explained .problem")
    assert "empty" in text_of(page, "#explained .problem")
    page.fill("#prompt", "As a chat.")
    page.check("#as-chat")
    page.click("#prompt-form button:has-text('Explain')")
    page.wait_for_selector("#explained .says")


def test_pin_release_and_flush_with_the_admin_token(open_page: OpenPage) -> None:
    with running() as made:
        ask(made, PROMPT)
        page = open_page(made.address)
        is_shown(page)
        assert page.locator("#pin").is_disabled() and page.locator("#flush").is_disabled()
        give(page, ADMIN)
        page.wait_for_selector("#token-form[data-state=admin]")
        page.fill("#prompt", PROMPT + "more")
        page.fill("#ttl", "600")
        page.click("#pin")
        page.wait_for_selector("#pins button")
        assert "min" in text_of(page, "#pins") and "Pinned" in text_of(page, "#explained")
        page.click("#pins button")
        wait_for(page, "#pins", "None.")
        page.click("#flush")
        assert text_of(page, "#flush") == "Really flush everything"
        page.click("#keep")
        assert text_of(page, "#flush") == "Flush" and made.on_engine(lambda engine: len(engine.cache.namespaces)) == 1
        page.click("#flush")
        page.fill("#flush-salt", "sea")
        assert text_of(page, "#flush") == "Flush", "what is meant has changed: it has to be said again"
        page.fill("#flush-salt", "")
        page.click("#flush")
        page.click("#flush")
        wait_for(page, "#flushed", "Flushed: all")
        wait_for(page, "#paths", "Nothing is cached.")


# ---- when something is wrong -------------------------------------------------------------------------


def test_a_server_that_does_not_answer_is_tried_again(busy: Running, open_page: OpenPage) -> None:
    page = open_page(busy.address)
    is_shown(page)
    page.route("**/cache", lambda route: route.abort())
    page.wait_for_selector("#status[data-state=stale]")
    assert "does not answer" in text_of(page, "#status") and "what is below is old" in text_of(page, "#status")
    assert page.locator("#paths tbody tr").count() >= 3, "what was seen last stays"
    page.unroute("**/cache")
    is_shown(page)


def test_a_server_that_was_never_reached_says_so(busy: Running, open_page: OpenPage) -> None:
    page = open_page(busy.address)
    page.route("**/cache", lambda route: route.fulfill(status=503, json={"error": {"message": "the server is stopping"}}))
    page.reload()
    page.wait_for_selector("#status[data-state=stale]")
    assert text_of(page, "#status") == "The server is stopping. Trying again every 5 seconds."
    assert page.locator("#main").is_hidden()
