"""Which states each layer of a model keeps. A spec counts the layers of its states by it, and an engine builds the model by it.

    schedule        ("kv",)   ("swa",)   ("swa",)   ("kv",)          names of states, layer by layer
    place           kv 0      swa 0      swa 1      kv 1             which of the state's layers each is

Data only; knows no model by name.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TypeAlias

from stepwell.base.errors import SpecError
from stepwell.base.spec.shapes import Window
from stepwell.base.spec.states import StateSpec

Schedule: TypeAlias = tuple[tuple[str, ...], ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class LayerSpec:
    """One layer of a model. `places` says, for each state that it keeps, which of that state's layers it is."""

    number: int
    places: Mapping[str, int]
    window: int | None  # tokens it looks at, itself included; None for all

    def place(self, *names: str) -> tuple[str, int]:
        """The first of these states that it keeps, and its place there."""
        name = next(name for name in names if name in self.places)
        return name, self.places[name]


def count(schedule: Schedule, state: str) -> int:
    """How many layers keep a state."""
    return sum(state in kept for kept in schedule)


def layers_of(schedule: Schedule, states: Sequence[StateSpec]) -> tuple[LayerSpec, ...]:
    """Every layer, in order. Raises SpecError where schedule and states say different things."""
    named = {state.name: state for state in states}
    found: dict[str, int] = {}
    layers = []
    for number, kept in enumerate(schedule):
        if missing := [name for name in kept if name not in named]:
            raise SpecError(f"layer {number} keeps {missing[0]!r}, which is no state of the model: {', '.join(named)}")
        places = {name: found.get(name, 0) for name in kept}
        found |= {name: place + 1 for name, place in places.items()}
        shapes = (named[name].shape for name in kept)
        window = next((shape.tokens for shape in shapes if isinstance(shape, Window)), None)
        layers.append(LayerSpec(number=number, places=places, window=window))
    for name, layers_found in found.items():
        if layers_found != named[name].layers:
            raise SpecError(f"state {name!r} has {named[name].layers} layers, and {layers_found} layers of the model keep it")
    return tuple(layers)
