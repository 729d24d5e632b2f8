"""A small serving engine over the cache: continuous batching, exact resumption, compact hybrid models. Needs torch."""

from stepwell.engine.building.build import build_engine, load_engine
from stepwell.engine.building.settings import EngineConfig
from stepwell.engine.engine import Answer, Engine
from stepwell.engine.requests.request import Ask, Delta, Finish, Sampling, Usage
from stepwell.engine.scheduling.scheduler import Limits

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
