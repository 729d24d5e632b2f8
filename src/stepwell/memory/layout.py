"""How a tier's bytes are cut: a stride for each kind of object, and slabs that one kind holds at a time.

    arena   |---- slab 0: prefix ----|---- slab 1: point ----|---- slab 2: nobody's ----|- tail -|
    slab 0  |page|page|page|page|page|.|        a page starts at a multiple of its own stride

So page `i` of a kind is row `i` of an ordinary two-dimensional view of the whole arena. Arithmetic only.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from math import lcm

from stepwell.base.errors import ConfigError
from stepwell.base.ids import Kind
from stepwell.base.spec import ModelSpec

SLAB_TARGET_BYTES = 64 * 2**20
MIN_SLABS = 16  # small arenas get small slabs, so that kinds can still trade them
MAX_WASTE = 0.1  # of a slab, by the kind that fits it worst; a larger slab is tried before more is left unused
MAX_SLAB_TRIES, SAMPLED_SLABS = 16, 16


@dataclass(frozen=True, slots=True, kw_only=True)
class ArenaLayout:
    """Strides per kind, the size of a slab, and how many bytes there are."""

    size_bytes: int
    slab_bytes: int
    strides: Mapping[Kind, int]

    @property
    def num_slabs(self) -> int:
        return -(-self.size_bytes // self.slab_bytes)

    def rows(self, kind: Kind) -> int:
        """Rows of the two-dimensional view of `kind`: one more than the largest id it could have."""
        return self.size_bytes // self.strides[kind]

    def pages_of_slabs(self, kind: Kind) -> list[int]:
        """How many pages of `kind` each slab can hold. They differ: a stride need not divide a slab, and the last is short."""
        return [len(self.pages_of_slab(slab, kind)) for slab in range(self.num_slabs)]

    def pages_of_slab(self, slab: int, kind: Kind) -> range:
        """The ids of `kind` that lie wholly inside `slab`."""
        stride = self.strides[kind]
        end = min((slab + 1) * self.slab_bytes, self.size_bytes)
        return range(-(-slab * self.slab_bytes // stride), end // stride)


def lay_out(spec: ModelSpec, *, budget_bytes: int, alignment: int) -> ArenaLayout:
    """Cuts a budget for a model. Raises ConfigError when not one object of each kind would fit."""
    strides = {kind: _stride(spec.object_bytes(kind), alignment) for kind in Kind if kind is Kind.PREFIX or spec.parts(kind)}
    least = sum(strides.values())
    if budget_bytes < least:
        raise ConfigError(
            f"a tier of {budget_bytes} bytes cannot hold one page of each kind for {spec.name!r}; it needs at least {least} bytes"
        )
    return ArenaLayout(size_bytes=budget_bytes, slab_bytes=_slab_bytes(strides, budget_bytes), strides=strides)


def _stride(payload_bytes: int, alignment: int) -> int:
    # A model without Prefix states still gets one unit per page: it is what the tree counts and frees.
    return max(-(-payload_bytes // alignment), 1) * alignment


def _slab_bytes(strides: Mapping[Kind, int], budget_bytes: int) -> int:
    """The size of a slab: small enough for kinds to trade them, large enough that pages of every stride fill it well."""
    if len(strides) == 1:
        return budget_bytes  # nobody to trade with
    largest = max(strides.values())
    target = max(min(SLAB_TARGET_BYTES, budget_bytes // MIN_SLABS), largest)
    exact = lcm(*strides.values())
    if exact <= target:
        return target // exact * exact  # slabs that every stride divides waste nothing
    first = target // largest
    last = max(budget_bytes // len(strides) // largest, first)
    sizes = [largest * count for count in range(first, min(last, first + MAX_SLAB_TRIES) + 1)]
    return next(
        (size for size in sizes if _waste(strides, size) <= MAX_WASTE), min(sizes, key=lambda size: _waste(strides, size))
    )


def _waste(strides: Mapping[Kind, int], slab_bytes: int) -> float:
    """The share of a slab that the worst-fitting kind leaves unused, over a few slabs in a row."""
    few = ArenaLayout(size_bytes=SAMPLED_SLABS * slab_bytes, slab_bytes=slab_bytes, strides=strides)
    used = min(sum(len(few.pages_of_slab(i, kind)) for i in range(SAMPLED_SLABS)) * stride for kind, stride in strides.items())
    return 1 - used / few.size_bytes
