"""How much memory a token and a checkpoint take, measured on the pages themselves. The spec says the same without any."""

from __future__ import annotations

from dataclasses import dataclass
from fractions import Fraction

from stepwell.base.ids import Kind
from stepwell.engine.pages import DevicePages


@dataclass(frozen=True, slots=True, kw_only=True)
class Footprint:
    """`checkpoint_bytes` is that of the largest one: whole window pages, and a point."""

    bytes_per_token: Fraction
    checkpoint_bytes: int


def footprint(pages: DevicePages) -> Footprint:
    spec = pages.spec
    sizes = {kind: sum(pages.state_PLRE(part.state)[0].nbytes for part in spec.parts(kind)) for kind in Kind}
    deep = spec.boundary_step * (spec.window_tokens + 1)  # where every window is full
    windows = len(spec.window_span(deep)) * sizes[Kind.WINDOW]
    return Footprint(bytes_per_token=Fraction(sizes[Kind.PREFIX], spec.page_tokens), checkpoint_bytes=windows + sizes[Kind.POINT])
