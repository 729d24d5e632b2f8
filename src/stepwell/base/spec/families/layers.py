"""Which layers of a model attend to everything, to a window, or keep a recurrent state.

Reads schedules only; knows nothing of rows or bytes.
"""

from __future__ import annotations

from collections.abc import Callable
from enum import Enum

from stepwell.base.spec.families.fields import Fields


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


def schedule(config: Fields, rule: Rule) -> list[Layer]:
    """The kind of each layer: from `layer_types` where the config has it, else from the family's rule."""
    num_layers = config.num_layers()
    if config.has("layer_types"):
        return config.per_layer("layer_types", LAYER_TYPES, num_layers=num_layers)
    return [rule(index) for index in range(num_layers)]


def every(period: int, *, last: Layer, others: Layer) -> Rule:
    """The last layer of each `period` is one kind, the rest another."""
    return lambda index: last if (index + 1) % period == 0 else others
