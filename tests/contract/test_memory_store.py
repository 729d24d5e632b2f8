"""The reference store and the wrappers keep the contract of `stepwell.testing.store_contract`."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import closing
from random import Random

import pytest

from stepwell.base.meters import ManualClock
from stepwell.store.api import Store
from stepwell.store.memory import MemoryStore
from stepwell.store.wrappers import Faults, Faulty, Slow
from stepwell.testing import StoreContract


class TestMemoryStore(StoreContract):
    @pytest.fixture
    def store(self) -> Iterator[Store]:
        with closing(MemoryStore(64 * 2**20)) as store:
            yield store


class TestWrappersThatDoNothing(StoreContract):
    @pytest.fixture
    def store(self) -> Iterator[Store]:
        clock = ManualClock()
        quiet = Faulty(MemoryStore(2**20), Faults(), random=Random(1), sleep=clock.advance)
        with closing(Slow(quiet, sleep=clock.advance, latency_s=0.1)) as store:
            yield store
