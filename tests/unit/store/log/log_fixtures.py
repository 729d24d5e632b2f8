"""Small log stores for the tests of this folder."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from stepwell.store.log.opening import open_log
from stepwell.store.log.store import LogStore
from stepwell.store.registry import Opening

OpenLog = Callable[..., LogStore]


@pytest.fixture
def open_here(tmp_path: Path) -> Iterator[OpenLog]:
    """Opens the store of this test, again and again; options by name, with `_` for `.`."""
    opened: list[LogStore] = []

    def open_(**options: str) -> LogStore:
        for store in opened:
            store.close()
        settings = {"budget": "1MiB", "segment": "64KiB", "direct": "off", **options}
        named = {name.replace("_", "."): value for name, value in settings.items() if value}
        opened.append(open_log(Opening(location=str(tmp_path / "store"), options=named)))
        return opened[-1]

    yield open_
    for store in opened:
        store.close()
