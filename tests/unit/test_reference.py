"""The pages of docs/reference are what the code says today."""

from __future__ import annotations

import re
import runpy
from pathlib import Path
from typing import Any

import pytest

TOOL = Path(__file__).parents[2] / "tools" / "reference.py"


@pytest.fixture(scope="module")
def reference() -> dict[str, Any]:
    return runpy.run_path(str(TOOL))


@pytest.mark.parametrize("page", ["flags.md", "metrics.md", "http.md", "python.md"])
def test_a_page_of_the_reference_is_what_the_code_makes_it(reference: dict[str, Any], page: str) -> None:
    assert reference["is_current"](page, reference["pages"]()[page]), "run python tools/reference.py"


@pytest.mark.filterwarnings("ignore:Duplicate Operation ID")  # GET and HEAD of one function
def test_the_reference_names_every_route_of_the_app(reference: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("uvicorn")
    from server.serving import running
    from stepwell.server import running as starting
    from stepwell.server.app import build_app

    made: list[Any] = []
    monkeypatch.setattr(starting, "build_app", lambda *given: made.append(build_app(*given)) or made[0])
    with running():
        routes = {(verb.upper(), path) for path, verbs in made[0].openapi()["paths"].items() for verb in verbs}
    named = set(re.findall(r"`([A-Z]+) (/[^`]*)`", reference["pages"]()["http.md"]))
    elsewhere = {each for each in named if each[1].startswith(("/handover", "/ui"))}
    without_path = {(verb, path.replace(":path", "")) for verb, path in named - elsewhere}
    assert without_path == {each for each in routes if each[0] != "HEAD" and not each[1].startswith("/ui")}
