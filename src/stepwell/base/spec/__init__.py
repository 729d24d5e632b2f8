"""The description of a hybrid model's memory: shapes, states, and what follows from them."""

from stepwell.base.spec.model import ModelSpec
from stepwell.base.spec.narrow import Narrow
from stepwell.base.spec.shapes import Point, Prefix, Shape, Window
from stepwell.base.spec.spill import Spill
from stepwell.base.spec.states import Cut, Part, StateSpec

__all__ = ["Cut", "ModelSpec", "Narrow", "Part", "Point", "Prefix", "Shape", "Spill", "StateSpec", "Window"]
