"""The description of a hybrid model's memory: shapes, states, and what follows from them."""

from stepwell.base.spec.model import ModelSpec, Part, StateSpec
from stepwell.base.spec.shapes import Point, Prefix, Shape, Window

__all__ = ["ModelSpec", "Part", "Point", "Prefix", "Shape", "StateSpec", "Window"]
