"""A shared log keeps the contract of `stepwell.testing.store_contract`, whichever process owns it."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import closing
from itertools import cycle
from pathlib import Path

import pytest

from processes import Peer
from stepwell.store.api import Read, ReadResult, Space, Store, Write, WriteOutcome, never
from stepwell.store.registry import open_store
from stepwell.store.shared.store import SharedLog
from stepwell.store.wrappers import Wrapper
from stepwell.testing import StoreContract

OPTIONS = {"budget": "16MiB", "segment": "1MiB"}
PEER = Path(__file__).parents[1] / "shared_log" / "log_peer.py"


def open_shared(directory: Path) -> SharedLog:
    store = open_store(f"shared-log:{directory}", options=OPTIONS)
    assert isinstance(store, SharedLog)
    return store


@pytest.fixture(scope="module")
def another_process(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Peer]:
    peer = Peer(PEER, OPTIONS, [], tmp_path_factory.mktemp("peer") / "peer.log")
    yield peer
    peer.kill()


class TestOwner(StoreContract):
    @pytest.fixture
    def store(self, tmp_path: Path) -> Iterator[Store]:
        with closing(open_shared(tmp_path)) as store:
            assert store.owns
            yield store


class TestClient(StoreContract):
    @pytest.fixture
    def store(self, tmp_path: Path, another_process: Peer) -> Iterator[Store]:
        assert another_process.ask("open", directory=str(tmp_path)) is True
        with closing(open_shared(tmp_path)) as store:
            yield store
            assert not store.owns
        another_process.ask("close")


class TestTwoClients(StoreContract):
    """Verbs go to one and the other in turn: each sees what the other did."""

    @pytest.fixture
    def store(self, tmp_path: Path, another_process: Peer) -> Iterator[Store]:
        assert another_process.ask("open", directory=str(tmp_path)) is True
        with closing(InTurn([open_shared(tmp_path), open_shared(tmp_path)])) as store:
            yield store
            assert not any(each.owns for each in store.stores)
        another_process.ask("close")


class InTurn(Wrapper):
    def __init__(self, stores: Sequence[SharedLog]) -> None:
        super().__init__(stores[0])
        self.stores = stores
        self._turns = cycle(stores)

    def contains(self, space: Space, keys: Sequence[bytes]) -> list[bool]:
        return next(self._turns).contains(space, keys)

    def read_into(self, space: Space, reads: Sequence[Read], *, cancelled: Callable[[], bool] = never) -> list[ReadResult]:
        return next(self._turns).read_into(space, reads, cancelled=cancelled)

    def write_from(self, space: Space, writes: Sequence[Write]) -> list[WriteOutcome]:
        return next(self._turns).write_from(space, writes)

    def delete(self, space: Space, keys: Sequence[bytes]) -> int:
        return next(self._turns).delete(space, keys)

    def close(self) -> None:
        for store in self.stores:
            store.close()
