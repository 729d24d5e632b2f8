"""Tools for tests, ours and those of other backends' authors: an executor that obeys a script, and a model of digests."""

from stepwell.testing.digest_engine import POISON, DigestEngine, WrongBytes
from stepwell.testing.executor import ScriptedExecutor

__all__ = ["POISON", "DigestEngine", "ScriptedExecutor", "WrongBytes"]
