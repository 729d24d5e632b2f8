"""How a tier's bytes are divided: a stride for each kind of object, and slabs that belong to one kind at a time.

    arena   |---- slab 0: prefix ----|---- slab 1: point ----|------ slab 2: idle ------|- tail -|
    slab 0  |page|page|page|page|page|.|        a page starts at a multiple of its own stride

Page `i` of a kind is therefore row `i` of a two-dimensional view of the whole arena. Arithmetic only.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from math import gcd, lcm

from stepwell.base.errors import ConfigError
from stepwell.base.ids import Kind, Tier
from stepwell.base.spec import ModelSpec
from stepwell.base.units import at_least, format_bytes

PAGE_ALIGNMENT_BYTES = 4096  # of every page: the strictest that direct I/O, pinned copies and registered memory require
# The smallest slab size to try: SLAB_BYTES, or in smaller arenas the larger of 1/MOST_SLABS of the arena and LEAST_PAGES pages of
# the smallest kind, if that still makes LEAST_SLABS slabs.
SLAB_BYTES = 64 * 2**20
MOST_SLABS, LEAST_SLABS = 512, 16
LEAST_PAGES = 8
SIZES_TRIED = 64  # multiples of each stride
MAIN_SHARE = 0.8  # prefix pages, or their rows, take about this share of an arena, so memory they cannot use counts most


@dataclass(frozen=True, slots=True, kw_only=True)
class ArenaLayout:
    """Strides by kind, the size of a slab, and the number of bytes in `tier`."""

    size_bytes: int
    slab_bytes: int
    strides: Mapping[Kind, int]
    tier: Tier = Tier.HOST

    @property
    def num_slabs(self) -> int:
        return -(-self.size_bytes // self.slab_bytes)

    @property
    def prefix_stride(self) -> int:
        """Bytes of a prefix page with all its rows, including padding."""
        return self.strides[Kind.PREFIX] + self.strides.get(Kind.ROWS, 0)

    def rows(self, kind: Kind) -> int:
        """Rows of the two-dimensional view of `kind`: one more than its largest possible id."""
        return self.size_bytes // self.strides[kind]

    def pages_of_slabs(self, kind: Kind) -> list[int]:
        """The number of pages of `kind` that each slab can hold. It varies: strides need not divide slabs, and the last may
        be short.
        """
        return [len(self.pages_of_slab(slab, kind)) for slab in range(self.num_slabs)]

    def pages_of_slab(self, slab: int, kind: Kind) -> range:
        """The ids of `kind` that lie wholly inside `slab`."""
        stride = self.strides[kind]
        end = min((slab + 1) * self.slab_bytes, self.size_bytes)
        return range(-(-slab * self.slab_bytes // stride), end // stride)


def lay_out(spec: ModelSpec, *, budget_bytes: int, alignment: int, tier: Tier = Tier.HOST) -> ArenaLayout:
    """Divides a tier's budget for a model. Raises ConfigError if the budget cannot hold one object of each kind."""
    payloads = {kind: payload_bytes(spec, tier, kind) for kind in Kind}
    strides = {kind: _stride(size, alignment) for kind, size in payloads.items() if kind is Kind.PREFIX or size}
    least = sum(strides.values())
    if budget_bytes < least:
        raise ConfigError(
            f"{tier.label}_bytes of {format_bytes(budget_bytes)} cannot hold one page of each kind for {spec.name!r}: "
            f"it must be at least {at_least(least)}"
        )
    return ArenaLayout(size_bytes=budget_bytes, slab_bytes=slab_bytes_of(strides, budget_bytes), strides=strides, tier=tier)


def payload_bytes(spec: ModelSpec, tier: Tier, kind: Kind) -> int:
    """Bytes of an object in a tier, without padding."""
    return spec.device_bytes(kind) if tier is Tier.DEVICE else spec.object_bytes(kind)


def _stride(size_bytes: int, alignment: int) -> int:
    # A model without Prefix states still gets one unit per page, because the tree counts and frees pages.
    return max(-(-size_bytes // alignment), 1) * alignment


def slab_bytes_of(strides: Mapping[Kind, int], budget_bytes: int) -> int:
    """The slab size expected to waste the least memory, at the ends of slabs and in the partly filled slab of each kind."""
    if len(strides) == 1:
        return budget_bytes  # there is no other kind to exchange slabs with
    largest = max(strides.values())
    wanted = min(SLAB_BYTES, max(budget_bytes // MOST_SLABS, LEAST_PAGES * min(strides.values())), budget_bytes // LEAST_SLABS)
    least, most = max(wanted, largest), max(budget_bytes // len(strides), largest)
    sizes = [size for unit in (*strides.values(), lcm(*strides.values())) for size in _multiples(unit, least, most)]
    # Two pages less the greatest common divisor, so that one page fits wherever the slab begins.
    fitting = [size for size in sizes if all(2 * stride - gcd(stride, size) <= size for stride in strides.values())]
    return min(fitting or sizes, key=lambda size: _unused_at_ends(strides, size) + len(strides) * size / budget_bytes)


def _multiples(unit: int, least: int, most: int) -> range:
    """The first multiples of `unit` from `least` on."""
    first = -(-least // unit) * unit
    return range(first, min(most, first + SIZES_TRIED * unit) + 1, unit)


def _unused_at_ends(strides: Mapping[Kind, int], slab_bytes: int) -> float:
    """The share of a slab before its first page and after its last one, averaged over slabs and kinds.

    Pages start at multiples of their stride and slabs at multiples of their size, so the first page starts up to one stride
    into a slab, in steps of the greatest common divisor of both.
    """
    ends = {kind: (stride - gcd(stride, slab_bytes)) / slab_bytes for kind, stride in strides.items()}
    main = Kind.ROWS if Kind.ROWS in ends else Kind.PREFIX  # if rows may spill, they are most of a page
    others = sum(ends.values()) - ends[main]
    return MAIN_SHARE * ends[main] + (1 - MAIN_SHARE) * others / (len(ends) - 1)
