"""Whatever names the server passes on, and wherever a page would like to go: the browser runs and loads our files alone."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

from server.serving import ADMIN, Running
from ui.looking import PROMPT, explain, give, is_shown, text_of

if TYPE_CHECKING:
    from playwright.sync_api import Browser, Route

    from ui.looking import OpenPage

HOSTILE = """<img src=x onerror="window.struck=1"><script>window.struck=2</script>"""


def _poisoned(value: Any) -> Any:
    """The same answer with something hostile in the place of every text."""
    if isinstance(value, dict):
        return {name: _poisoned(each) for name, each in value.items()}
    if isinstance(value, list):
        return [_poisoned(each) for each in value]
    return HOSTILE if isinstance(value, str) else value


def _poison(route: Route) -> None:
    reply = route.fetch()
    body = _poisoned(reply.json())
    if route.request.url.endswith("/cache"):
        sizes = {tier: {"used_bytes": 1, "quota_bytes": 2} for tier in body["tiers"]}
        body |= {"tenants": {HOSTILE: sizes}, "counters": {HOSTILE: 1}, "kernels": {HOSTILE: HOSTILE, "other": "torch"}}
    if route.request.url.endswith("/cache/requests"):
        sizes = dict.fromkeys(("age_s", "prompt_tokens", "ready_tokens", "cached_tokens", "answer_tokens", "max_tokens"), 1)
        body = {"active": 1, "waiting": 0, "requests": [{"id": HOSTILE, "tenant": HOSTILE, "state": HOSTILE, **sizes}]}
    if route.request.url.endswith("/cache/pins"):
        body = {"pins": [{"id": HOSTILE, "tenant": HOSTILE, "pinned_tokens": 1, "prompt_tokens": 1, "expires_in_s": None}]}
    route.fulfill(response=reply, body=json.dumps(body))


def test_names_from_others_are_text_and_nothing_else(busy: Running, open_page: OpenPage) -> None:
    """Models, tenants, namespaces, stores: whatever the server says, none of it becomes markup or code."""
    page = open_page(busy.address)
    is_shown(page)
    give(page, ADMIN)
    page.wait_for_selector("#token-form[data-state=admin]")
    page.route("**/cache", _poison)
    page.route("**/cache/**", _poison)
    page.reload()
    is_shown(page)
    explain(page, PROMPT)
    assert text_of(page, "#model") == HOSTILE and HOSTILE in page.title()
    for panel in ("about", "requests", "paths", "checkpoints", "pins", "store", "tenants", "explained", "counters"):
        assert HOSTILE in (page.locator(f"#{panel}").text_content() or ""), panel
    assert page.locator("body img, main script, main iframe").count() == 0
    assert page.evaluate("window.struck") is None


def test_errors_are_text_too(busy: Running, open_page: OpenPage) -> None:
    page = open_page(busy.address)
    is_shown(page)
    page.route("**/cache/explain", lambda route: route.fulfill(status=400, json={"error": {"message": HOSTILE}}))
    page.route("**/cache", lambda route: route.fulfill(status=500, json={"error": {"message": HOSTILE}}))
    page.fill("#prompt", PROMPT)
    page.click("#prompt-form button:has-text('Explain')")
    page.wait_for_selector("#explained .problem")
    page.wait_for_selector("#status[data-state=stale]")
    assert HOSTILE in text_of(page, "#explained") and HOSTILE in text_of(page, "#status")
    assert page.locator("body img, main script").count() == 0 and page.evaluate("window.struck") is None


def test_the_browser_is_told_to_run_and_load_nothing_else(busy: Running, browser: Browser) -> None:
    page = browser.new_page()
    asked: list[str] = []
    page.on("request", lambda request: asked.append(request.url))
    page.goto(f"{busy.address}/ui")
    is_shown(page)
    assert asked and all(url.startswith(f"{busy.address}/") for url in asked)
    inline = "const made = document.createElement('script'); made.append('window.struck = 1'); document.body.append(made)"
    page.evaluate(f"() => {{ try {{ {inline} }} catch {{ }} }}")
    assert page.evaluate("window.struck") is None
    assert (
        page.evaluate("() => { try { document.body.innerHTML = '<b>x</b>'; return 'made' } catch { return 'refused' } }")
        == "refused"
    )
    assert page.evaluate("fetch('http://198.51.100.1/').then(() => 'sent', () => 'refused')") == "refused"
    image = (
        "new Promise(done => { const i = new Image(); i.onerror = () => done('refused'); i.src = 'http://198.51.100.1/i.png' })"
    )
    assert page.evaluate(image) == "refused"
    page.close()
