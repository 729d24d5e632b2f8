"""Tools for tests, ours and those of authors of stores: scripted executors, a model that computes digests, and the contract
of every store (`stepwell.testing.store_contract`).
"""

from stepwell.testing.digest_engine import POISON, DigestEngine, WrongBytes
from stepwell.testing.executor import ScriptedExecutor
from stepwell.testing.store_contract import StoreContract
from stepwell.testing.store_executor import ScriptedStoreExecutor, TimedStoreExecutor

__all__ = [
    "POISON",
    "DigestEngine",
    "ScriptedExecutor",
    "ScriptedStoreExecutor",
    "StoreContract",
    "TimedStoreExecutor",
    "WrongBytes",
]
