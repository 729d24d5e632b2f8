"""Tools for tests, ours and those of other backends' authors: an executor and porters that obey a script, a model of digests,
and the promises every store keeps (`stepwell.testing.store_contract`).
"""

from stepwell.testing.digest_engine import POISON, DigestEngine, WrongBytes
from stepwell.testing.executor import ScriptedExecutor
from stepwell.testing.porter import ScriptedPorter, TimedPorter
from stepwell.testing.store_contract import StoreContract

__all__ = ["POISON", "DigestEngine", "ScriptedExecutor", "ScriptedPorter", "StoreContract", "TimedPorter", "WrongBytes"]
