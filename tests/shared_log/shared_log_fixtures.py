"""Shared logs in this process and in others, all gone when a test ends."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path

import pytest

from processes import Peer
from stepwell.store.registry import open_store
from stepwell.store.shared.store import SharedLog

OPTIONS = {"budget": "16MiB", "segment": "1MiB", "direct": "off"}
PEER = Path(__file__).with_name("log_peer.py")

OpenHere = Callable[..., SharedLog]
StartPeer = Callable[..., Peer]


@pytest.fixture
def directory(tmp_path: Path) -> Path:
    return tmp_path / "store"


@pytest.fixture
def open_here(directory: Path) -> Iterator[OpenHere]:
    """Opens the directory in this process: as owner, or as client of the process that owns it."""
    with ExitStack() as stack:

        def open_(**options: str) -> SharedLog:
            store = open_store(f"shared-log:{directory}", options={**OPTIONS, **options})
            assert isinstance(store, SharedLog)
            stack.callback(store.close)
            return store

        yield open_


@pytest.fixture
def start_peer(directory: Path, tmp_path: Path) -> Iterator[StartPeer]:
    """Starts a process that opens the directory, too."""
    with ExitStack() as stack:
        started = []

        def start(*, opened: bool = True, **options: str) -> Peer:
            peer = Peer(PEER, {**OPTIONS, **options}, [], tmp_path / f"peer{len(started)}.log")
            started.append(peer)
            stack.callback(peer.kill)
            if opened:
                peer.ask("open", directory=str(directory))
            return peer

        yield start
