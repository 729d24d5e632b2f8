"""One server for all tests of a module: they keep out of each other's way by their prompts."""

from __future__ import annotations

from collections.abc import Iterator

import httpx
import openai
import pytest

pytest.importorskip("fastapi")
pytest.importorskip("uvicorn")

from server.serving import ADMIN, Running, running
from waiting import PATIENCE_S


@pytest.fixture(scope="module")
def served() -> Iterator[Running]:
    with running() as made:
        yield made


@pytest.fixture
def client(served: Running) -> Iterator[openai.OpenAI]:
    with served.client() as made:
        yield made


@pytest.fixture
def http(served: Running) -> Iterator[httpx.Client]:
    with httpx.Client(base_url=served.address, timeout=PATIENCE_S) as made:
        yield made


@pytest.fixture
def admin(served: Running) -> Iterator[httpx.Client]:
    with httpx.Client(base_url=served.address, timeout=PATIENCE_S, headers={"Authorization": f"Bearer {ADMIN}"}) as made:
        yield made
