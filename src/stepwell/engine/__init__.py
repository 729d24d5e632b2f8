"""A small serving engine over the cache: continuous batching, exact resumption, compact hybrid models. Needs torch.

Importing it loads nothing: each public name brings in what it needs when it is first used.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from stepwell.engine.building.build import build_engine, load_engine
    from stepwell.engine.building.settings import EngineConfig
    from stepwell.engine.engine import Answer, Engine
    from stepwell.engine.requests.request import Delta, Finish, GenerateRequest, Sampling, Usage
    from stepwell.engine.scheduling.scheduler import Limits

_HOMES = {
    "stepwell.engine.building.build": ("build_engine", "load_engine"),
    "stepwell.engine.building.settings": ("EngineConfig",),
    "stepwell.engine.engine": ("Answer", "Engine"),
    "stepwell.engine.requests.request": ("GenerateRequest", "Delta", "Finish", "Sampling", "Usage"),
    "stepwell.engine.scheduling.scheduler": ("Limits",),
}
_HOME_OF = {name: home for home, names in _HOMES.items() for name in names}

__all__ = [
    "Answer",
    "Delta",
    "Engine",
    "EngineConfig",
    "Finish",
    "GenerateRequest",
    "Limits",
    "Sampling",
    "Usage",
    "build_engine",
    "load_engine",
]


def __getattr__(name: str) -> object:
    if name not in _HOME_OF:
        raise AttributeError(f"module 'stepwell.engine' has no attribute {name!r}")
    value = getattr(import_module(_HOME_OF[name]), name)
    globals()[name] = value  # found here from now on
    return value
