"""How much memory a token and a checkpoint take, measured on the pages themselves (or from the spec alone), and how long a
request can be. Allocates nothing.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from fractions import Fraction
from functools import partial

from stepwell.base.ids import Kind
from stepwell.base.spec import ModelSpec
from stepwell.cache.facade import Cache
from stepwell.engine.passes.pages import DevicePages


@dataclass(frozen=True, slots=True, kw_only=True)
class Footprint:
    """`checkpoint_bytes` is that of the largest one: whole window pages, and a point."""

    bytes_per_token: Fraction
    checkpoint_bytes: int


def footprint(pages: DevicePages) -> Footprint:
    """Measured on a tier's pages."""
    spec = pages.spec
    return _footprint(spec, {kind: sum(pages.state_PLRE(part.state)[0].nbytes for part in spec.parts(kind)) for kind in Kind})


def footprint_of(spec: ModelSpec) -> Footprint:
    """The same by the spec alone, for pages that are in another process."""
    return _footprint(spec, {kind: spec.object_bytes(kind) for kind in Kind})


def _footprint(spec: ModelSpec, sizes: Mapping[Kind, int]) -> Footprint:
    deep = spec.boundary_step * (spec.window_tokens + 1)  # where every window is full
    windows = len(spec.window_span(deep)) * sizes[Kind.WINDOW]
    return Footprint(bytes_per_token=Fraction(sizes[Kind.PREFIX], spec.page_tokens), checkpoint_bytes=windows + sizes[Kind.POINT])


def longest_request(cache: Cache, chunk_tokens: int, *, most: int, spills_upto: int | None = None) -> int:
    """The most tokens that one request can have on the device, to the page, or `most`; with `spills_upto`, for one that spills
    no more tokens than that.
    """
    step = cache.spec.boundary_step
    could_hold = partial(cache.could_hold, chunk_tokens=chunk_tokens, spills_upto=spills_upto)
    if could_hold(most):
        return most
    low, high = 0, 1
    while could_hold(high * step):
        low, high = high, high * 2
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (middle, high) if could_hold(middle * step) else (low, middle)
    return min(low * step, most)
