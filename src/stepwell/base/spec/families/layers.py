"""Which layers of a model attend to everything, to a window, or keep a recurrent state.

Reads schedules only; knows nothing of rows or bytes. What transformers ignores in a config is ignored, and what it cannot run is
refused.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from enum import Enum

from stepwell.base.errors import SpecError
from stepwell.base.spec.families.fields import Fields
from stepwell.base.spec.schedule import Schedule


class Layer(Enum):
    FULL = "full"
    SLIDING = "sliding"
    LINEAR = "linear"


Rule = Callable[[int], Layer]

LAYER_TYPES: dict[str | int, Layer] = {
    "full_attention": Layer.FULL,
    "sliding_attention": Layer.SLIDING,
    "linear_attention": Layer.LINEAR,
}


KEPT = {Layer.FULL: ("kv",), Layer.SLIDING: ("swa",), Layer.LINEAR: ("ssm", "conv")}  # the states that each keeps


def keeping(kinds: Iterable[Layer]) -> Schedule:
    return tuple(KEPT[kind] for kind in kinds)


def layer_kinds(config: Fields, rule: Rule) -> list[Layer]:
    """The kind of each layer: from `layer_types` where the config has it, else from the family's rule."""
    num_layers = config.num_layers()
    if config.has("layer_types"):
        return config.per_layer("layer_types", LAYER_TYPES, num_layers=num_layers)
    return [rule(index) for index in range(num_layers)]


def uniform(config: Fields, kind: Layer) -> list[Layer]:
    """One kind in every layer: for models whose `layer_types` transformers does not read. Raises SpecError if they differ."""
    kinds = layer_kinds(config, lambda index: kind)
    if other := next((each for each in kinds if each is not kind), None):
        raise SpecError(
            f"config field {config.path}layer_types names {other.value}_attention, and with these settings every layer of "
            f"{config.text('model_type')!r} has {kind.value} attention: leave layer_types out"
        )
    return kinds


def every(period: int, *, last: Layer, others: Layer) -> Rule:
    """The last layer of each `period` is one kind, the rest another."""
    return lambda index: last if (index + 1) % period == 0 else others
