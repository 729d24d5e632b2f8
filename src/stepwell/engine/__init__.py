"""A small serving engine over the cache: continuous batching, exact resumption, compact hybrid models. Needs torch."""

from stepwell.engine.build import build_engine, load_engine
from stepwell.engine.engine import Answer, Engine
from stepwell.engine.request import Ask, Delta, Finish, Sampling, Usage
from stepwell.engine.scheduler import Limits
from stepwell.engine.settings import EngineConfig

__all__ = [
    "Answer",
    "Ask",
    "Delta",
    "Engine",
    "EngineConfig",
    "Finish",
    "Limits",
    "Sampling",
    "Usage",
    "build_engine",
    "load_engine",
]
