"""Stepwell: a tiered cache for everything a hybrid-attention language model remembers about a prompt.

Resume any cached prompt exactly, from any tier, or miss honestly. Importing it loads no torch and has no effect.
"""

from stepwell.base.config import CacheConfig, EvictionPolicy, PlacementConfig, WritePolicy
from stepwell.base.errors import BadTokens, ConfigError, LeaseError, NoRoom, SpecError, StepwellError
from stepwell.base.ids import Kind, Tier
from stepwell.base.keys import Namespace
from stepwell.base.spec import ModelSpec, Point, Prefix, StateSpec, Window
from stepwell.base.spec.presets import load_spec
from stepwell.cache.borrowed import EnginePages
from stepwell.cache.build import build_cache
from stepwell.cache.explain import Cause, Explanation
from stepwell.cache.facade import Cache, StepReport
from stepwell.cache.lease import Lease, LeaseState, Sources
from stepwell.tree.match import Match

__version__ = "0.1.0"

__all__ = [
    "BadTokens",
    "Cache",
    "CacheConfig",
    "Cause",
    "ConfigError",
    "EnginePages",
    "EvictionPolicy",
    "Explanation",
    "Kind",
    "Lease",
    "LeaseError",
    "LeaseState",
    "Match",
    "ModelSpec",
    "Namespace",
    "NoRoom",
    "PlacementConfig",
    "Point",
    "Prefix",
    "Sources",
    "SpecError",
    "StateSpec",
    "StepReport",
    "StepwellError",
    "Tier",
    "Window",
    "WritePolicy",
    "__version__",
    "build_cache",
    "load_spec",
]
