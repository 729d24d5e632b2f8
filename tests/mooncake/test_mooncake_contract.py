"""The contract of every store, over a real Mooncake: values in another process's memory, and in this one's.

One store for a class: a Mooncake client takes one to two seconds to leave.
"""

from __future__ import annotations

import pytest
from mooncake_cluster import Cluster

from stepwell.store.api import Store
from stepwell.testing import StoreContract


@pytest.fixture(scope="class")
def borrowing(shared_cluster: Cluster) -> Store:
    shared_cluster.lend("256mb")
    return shared_cluster.open()


@pytest.fixture(scope="class")
def lending(shared_cluster: Cluster) -> Store:
    return shared_cluster.open(global_segment_size="256mb")


class TestValuesHeldByAnotherProcess(StoreContract):
    @pytest.fixture
    def store(self, borrowing: Store) -> Store:
        return borrowing

    def test_a_closed_store_says_so(self, shared_cluster: Cluster) -> None:
        super().test_a_closed_store_says_so(shared_cluster.open())


class TestValuesHeldByThisProcess(StoreContract):
    @pytest.fixture
    def store(self, lending: Store) -> Store:
        return lending

    def test_a_closed_store_says_so(self, shared_cluster: Cluster) -> None:
        super().test_a_closed_store_says_so(shared_cluster.open(global_segment_size="16mb"))
