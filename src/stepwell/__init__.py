"""Stepwell: a tiered cache for everything a hybrid-attention language model remembers about a prompt.

Resume any cached prompt exactly, from any tier, or miss honestly. Importing it loads nothing and has no effect; each public
name brings in what it needs when it is first used, and torch only where tensors are handled.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from stepwell.base.config import CacheConfig, PlacementConfig, PrefetchPolicy, StoreConfig, WritePolicy
    from stepwell.base.errors import (
        BadTokens,
        ConfigError,
        LeaseError,
        LoadFailed,
        NoRoom,
        SpecError,
        StepwellError,
        StoreError,
        WrongThread,
    )
    from stepwell.base.ids import Kind, Tier
    from stepwell.base.prompt import Namespace
    from stepwell.base.spec.model import ModelSpec
    from stepwell.base.spec.presets import load_spec
    from stepwell.base.spec.shapes import Point, Prefix, Window
    from stepwell.base.spec.spill import Spill
    from stepwell.base.spec.states import StateSpec
    from stepwell.base.tasks import ItemStatus
    from stepwell.cache.build import build_cache
    from stepwell.cache.explain import Cause, Explanation
    from stepwell.cache.facade import Cache
    from stepwell.cache.report import Stats, StepReport, TierStats
    from stepwell.store.key_file import read_store_key
    from stepwell.store.registry import open_store
    from stepwell.tiers.external import EnginePages
    from stepwell.tiers.lease import Lease, LeaseState, Sources
    from stepwell.tree.feed import CacheEvent, EventFeed, EventKind
    from stepwell.tree.match import Match
    from stepwell.verified.runs import ReadRuns, WriteRuns
    from stepwell.verified.store import VerifiedStore

__version__ = "0.1.0"

_HOMES = {
    "stepwell.base.config": ("CacheConfig", "PlacementConfig", "PrefetchPolicy", "StoreConfig", "WritePolicy"),
    "stepwell.base.errors": (
        "BadTokens",
        "ConfigError",
        "LeaseError",
        "LoadFailed",
        "NoRoom",
        "SpecError",
        "StepwellError",
        "StoreError",
        "WrongThread",
    ),
    "stepwell.base.ids": ("Kind", "Tier"),
    "stepwell.base.prompt": ("Namespace",),
    "stepwell.base.spec.model": ("ModelSpec",),
    "stepwell.base.spec.presets": ("load_spec",),
    "stepwell.base.spec.shapes": ("Point", "Prefix", "Window"),
    "stepwell.base.spec.spill": ("Spill",),
    "stepwell.base.spec.states": ("StateSpec",),
    "stepwell.tiers.external": ("EnginePages",),
    "stepwell.cache.build": ("build_cache",),
    "stepwell.cache.explain": ("Cause", "Explanation"),
    "stepwell.cache.facade": ("Cache",),
    "stepwell.cache.report": ("Stats", "StepReport", "TierStats"),
    "stepwell.tiers.lease": ("Lease", "LeaseState", "Sources"),
    "stepwell.store.key_file": ("read_store_key",),
    "stepwell.store.registry": ("open_store",),
    "stepwell.tree.feed": ("CacheEvent", "EventFeed", "EventKind"),
    "stepwell.tree.match": ("Match",),
    "stepwell.base.tasks": ("ItemStatus",),
    "stepwell.verified.runs": ("ReadRuns", "WriteRuns"),
    "stepwell.verified.store": ("VerifiedStore",),
}
_HOME_OF = {name: home for home, names in _HOMES.items() for name in names}

__all__ = [
    "BadTokens",
    "Cache",
    "CacheConfig",
    "CacheEvent",
    "Cause",
    "ConfigError",
    "EnginePages",
    "EventFeed",
    "EventKind",
    "Explanation",
    "ItemStatus",
    "Kind",
    "Lease",
    "LeaseError",
    "LeaseState",
    "LoadFailed",
    "Match",
    "ModelSpec",
    "Namespace",
    "NoRoom",
    "PlacementConfig",
    "Point",
    "PrefetchPolicy",
    "Prefix",
    "ReadRuns",
    "Sources",
    "SpecError",
    "Spill",
    "StateSpec",
    "Stats",
    "StepReport",
    "StepwellError",
    "StoreConfig",
    "StoreError",
    "Tier",
    "TierStats",
    "VerifiedStore",
    "Window",
    "WritePolicy",
    "WriteRuns",
    "WrongThread",
    "__version__",
    "build_cache",
    "load_spec",
    "open_store",
    "read_store_key",
]


def __getattr__(name: str) -> object:
    if name not in _HOME_OF:
        raise AttributeError(f"module 'stepwell' has no attribute {name!r}")
    value = getattr(import_module(_HOME_OF[name]), name)
    globals()[name] = value  # found here from now on
    return value


def __dir__() -> list[str]:
    return sorted(__all__)
