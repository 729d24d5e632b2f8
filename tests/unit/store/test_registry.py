"""Stores are opened by name, ours and other packages'."""

from __future__ import annotations

from importlib.metadata import EntryPoint
from pathlib import Path

import pytest

from stepwell import ConfigError, open_store
from stepwell.store import registry
from stepwell.store.log.store import LogStore
from stepwell.store.memory import MemoryStore
from stepwell.store.registry import GROUP, Opening

OPENED: list[Opening] = []


def open_mine(opening: Opening) -> MemoryStore:
    OPENED.append(opening)
    return MemoryStore()


def test_ours_are_there(tmp_path: Path) -> None:
    memory = open_store("memory:", options={"budget": "1MiB"})
    assert isinstance(memory, MemoryStore) and memory.traits.max_value_bytes == 2**20
    log = open_store(f"log:{tmp_path}/store", options={"budget": "8MiB"})
    assert isinstance(log, LogStore) and log.traits.durable
    log.close()


def test_another_package_adds_one_by_an_entry_point(monkeypatch: pytest.MonkeyPatch) -> None:
    points = [EntryPoint(name="mine", value=f"{__name__}:open_mine", group=GROUP)]
    monkeypatch.setattr(registry, "entry_points", lambda group: points if group == GROUP else [])
    assert "mine" in registry.names()
    open_store("mine:somewhere/else", options={"colour": "blue"})
    assert OPENED[-1].location == "somewhere/else" and OPENED[-1].options == {"colour": "blue"}


def test_names_and_options_that_are_not_known_are_named() -> None:
    with pytest.raises(ConfigError, match="no store is called 'cloud'; there are log, shared-log, memory, mooncake"):
        open_store("cloud:somewhere")
    with pytest.raises(ConfigError, match="unknown store option"):
        open_store("memory:", options={"colour": "blue"})
    with pytest.raises(ConfigError, match="needs a directory"):
        open_store("log:")
