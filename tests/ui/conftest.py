"""A real browser for the tests of `/ui`: Chromium as the system has it, driven by Playwright.

Runs only when asked for by path, so that a plain run needs neither; a skip says how to have them run.
"""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

pytest.importorskip("fastapi")
pytest.importorskip("uvicorn")

from server.serving import Running, running
from ui.looking import PROMPT, ask

if TYPE_CHECKING:
    from playwright.sync_api import Browser, Page

HERE = Path(__file__).parent
BROWSERS = ("chromium", "chromium-browser", "google-chrome")
PATIENCE_MS = 120_000  # a busy machine is slow to paint


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    given = [(config.invocation_params.dir / argument.split("::")[0]).resolve() for argument in config.args]
    if not any(path == HERE or HERE in path.parents for path in given):
        for item in items:
            if HERE in item.path.parents:
                item.add_marker(pytest.mark.skip(reason="they need Chromium and Playwright: run `make test-ui`"))


def chromium() -> dict[str, Any]:
    """How Playwright starts the system's browser; nothing where there is none."""
    found = next((path for name in BROWSERS if (path := shutil.which(name))), None)
    sandbox = ["--no-sandbox"] if os.geteuid() == 0 else []  # which root cannot have
    return {} if found is None else {"executable_path": found, "args": sandbox}


@pytest.fixture(scope="session")
def browser() -> Iterator[Browser]:
    api = pytest.importorskip("playwright.sync_api", reason="they need Chromium and Playwright: run `make test-ui`")
    if not chromium():
        pytest.skip("there is no Chromium: run `make install-ui`, then `make test-ui`")
    with api.sync_playwright() as playwright:
        browser = playwright.chromium.launch(**chromium())
        yield browser
        browser.close()


@pytest.fixture
def open_page(browser: Browser) -> Iterator[Callable[..., Page]]:
    """Opens a page in a context of its own. What it complains about fails the test, but for answers with an error."""
    pages: list[tuple[Page, list[str]]] = []

    def opened(address: str, *, width: int = 1180, dark: bool = False) -> Page:
        context = browser.new_context(viewport={"width": width, "height": 900}, color_scheme="dark" if dark else "light")
        page, said = context.new_page(), []  # type: ignore[var-annotated]
        page.set_default_timeout(PATIENCE_MS)
        page.on("pageerror", lambda error: said.append(str(error)))
        page.on("console", lambda message: said.append(message.text) if message.type in ("error", "warning") else None)
        pages.append((page, said))
        page.goto(f"{address}/ui")
        return page

    yield opened
    for page, said in pages:
        page.context.close()
        complaints = [each for each in said if "Failed to load resource" not in each]
        assert not complaints, complaints


@pytest.fixture(scope="module")
def busy(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Running]:
    """A server with a store that has answered a few questions, some of them twice."""
    where = f"log:{tmp_path_factory.mktemp('ui') / 'log'}"
    with running(store=where, store_options={"budget": "64MiB"}) as made:
        for question in (*"ABCDEF", *"ABC"):
            ask(made, PROMPT + question * 80)
        ask(made, PROMPT, cache_salt="sea")
        yield made
