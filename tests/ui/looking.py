"""What tests do with the page at `/ui`: ask the server something, wait for figures, give it a token."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, TypeAlias

import httpx

from server.serving import NAME, Running
from waiting import PATIENCE_S

if TYPE_CHECKING:
    from playwright.sync_api import Page

    OpenPage: TypeAlias = Callable[..., Page]

PROMPT = "You keep the books of a water works, and answer in one line. " * 4


def ask(made: Running, prompt: str, key: str | None = None, **more: object) -> None:
    headers = {"Authorization": f"Bearer {key}"} if key else {}
    body = {"model": NAME, "prompt": prompt, "max_tokens": 4, "temperature": 0} | more
    assert httpx.post(f"{made.address}/v1/completions", json=body, headers=headers, timeout=PATIENCE_S).status_code == 200


def text_of(page: Page, selector: str) -> str:
    return page.locator(selector).inner_text()


def is_shown(page: Page) -> None:
    """Waits for the first figures."""
    page.wait_for_selector("#status[data-state=ok]")


def explain(page: Page, prompt: str) -> None:
    page.fill("#prompt", prompt)
    page.click("#prompt-form button:has-text('Explain')")
    page.wait_for_selector("#explained .says")


def give(page: Page, token: str) -> None:
    page.fill("#token", token)
    page.click("#token-form button:has-text('Use')")


def wait_for(page: Page, selector: str, text: str) -> None:
    """Waits until something says so. By a locator: the page does not allow evaluation of text, even to tests."""
    page.locator(selector).filter(has_text=text).wait_for()
