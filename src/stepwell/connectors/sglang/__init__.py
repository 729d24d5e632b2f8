"""Stepwell below SGLang, in one of two places that its settings name:

    StepwellHiCache    a verified disk or cluster as the bottom tier (L3) of SGLang's hierarchical cache
    StepwellLinker     host memory and such a store right below its device pools, in place of SGLang's own host tier

Importing this imports nothing of SGLang; using a name does.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from stepwell.connectors.sglang.hicache import StepwellHiCache
    from stepwell.connectors.sglang.linker import StepwellLinker

__all__ = ["StepwellHiCache", "StepwellLinker"]

_MODULES = {"StepwellHiCache": "hicache", "StepwellLinker": "linker"}


def __getattr__(name: str) -> object:
    if name in _MODULES:
        try:
            return getattr(import_module(f"stepwell.connectors.sglang.{_MODULES[name]}"), name)
        except ImportError as error:
            raise ImportError(f"{error}. Stepwell's connector is written for SGLang 0.5.23: install that one") from error
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
