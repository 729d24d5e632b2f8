"""The log store keeps the contract of `stepwell.testing.store_contract`, however its bytes move."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import closing
from pathlib import Path

import pytest

from stepwell.store.api import Store
from stepwell.store.registry import open_store
from stepwell.testing import StoreContract


class TestLogStore(StoreContract):
    @pytest.fixture
    def store(self, tmp_path: Path) -> Iterator[Store]:
        with closing(open_store(f"log:{tmp_path}", options={"budget": "16MiB", "segment": "1MiB"})) as store:
            yield store


class TestLogStoreThroughThePageCache(StoreContract):
    @pytest.fixture
    def store(self, tmp_path: Path) -> Iterator[Store]:
        options = {"budget": "16MiB", "segment": "1MiB", "direct": "off"}
        with closing(open_store(f"log:{tmp_path}", options=options)) as store:
            yield store
