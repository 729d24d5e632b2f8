"""Stepwell below SGLang, in one of two places that its settings name:

    StepwellHiCache    a verified disk or cluster as the bottom tier (L3) of SGLang's hierarchical cache
    StepwellLinker     host memory and such a store right below its device pools, in place of SGLang's own host tier

Importing this imports nothing of SGLang; using a name does.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from stepwell.connectors.sglang.hicache import StepwellHiCache
    from stepwell.connectors.sglang.linker import StepwellLinker

__all__ = ["StepwellHiCache", "StepwellLinker"]


def __getattr__(name: str) -> object:
    if name == "StepwellHiCache":
        from stepwell.connectors.sglang.hicache import StepwellHiCache

        return StepwellHiCache
    if name == "StepwellLinker":
        from stepwell.connectors.sglang.linker import StepwellLinker

        return StepwellLinker
    raise AttributeError(f"module 'stepwell.connectors.sglang' has no attribute {name!r}")
