"""Stepwell's verified disk or cluster as the bottom tier (L3) of SGLang's HiCache: `StepwellHiCache`, named in its settings.

Importing this imports nothing of SGLang; using the name does.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from stepwell.connectors.sglang.hicache import StepwellHiCache

__all__ = ["StepwellHiCache"]


def __getattr__(name: str) -> object:
    if name != "StepwellHiCache":
        raise AttributeError(f"module 'stepwell.connectors.sglang' has no attribute {name!r}")
    from stepwell.connectors.sglang.hicache import StepwellHiCache

    return StepwellHiCache
