"""The command that installs an extra is one that works where this installation came from."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from stepwell.base import extras


class Installed:
    def __init__(self, origin: dict[str, Any] | None) -> None:
        self._origin = origin

    def read_text(self, name: str) -> str | None:
        assert name == "direct_url.json"
        return None if self._origin is None else json.dumps(self._origin)


@pytest.mark.parametrize(
    ("origin", "command"),
    [
        (None, "pip install 'stepwell[serve]'"),
        ({"url": "file://HERE", "dir_info": {"editable": True}}, "pip install -e 'HERE[serve]'"),
        ({"url": "file://HERE", "dir_info": {}}, "pip install 'HERE[serve]'"),
        ({"url": "file:///gone/since", "dir_info": {}}, "pip install 'stepwell[serve]'"),
        ({"url": "https://h/r.git", "vcs_info": {"vcs": "git"}}, "pip install 'stepwell[serve] @ git+https://h/r.git'"),
    ],
    ids=["an index", "an editable checkout", "a checkout", "a folder that is gone", "git"],
)
def test_an_extra_comes_from_where_the_package_came_from(
    origin: dict[str, Any] | None, command: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    here = None if origin is None else {**origin, "url": origin["url"].replace("HERE", str(tmp_path))}
    monkeypatch.setattr(extras, "distribution", lambda name: Installed(here))
    assert extras.install("serve") == command.replace("HERE", str(tmp_path))
