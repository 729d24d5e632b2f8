"""How much of a decode step fetching takes, and how much of that happens while something else is computed: from a profile.

Kernels are told apart by their names. Copies by the copy engines, such as pages that are saved, count as neither.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from gpu.device_time import Span

FETCH, RESOLVE = ("_fetch_kernel",), ("_claim_kernel", "_assign_kernel")


@dataclass(frozen=True, slots=True, kw_only=True)
class Shares:
    """Microseconds of kernels in a step; `hidden` is that part of `fetch` in which another kernel ran too."""

    kernels: float
    resolve: float
    fetch: float
    hidden: float


def shares_of(spans: Sequence[Span], *, steps: int) -> Shares:
    """Of one of so many steps."""
    fetches = [span for span in spans if span.name.startswith(FETCH)]
    others = _merged(span for span in spans if not span.name.startswith(FETCH))
    overlaps = (min(span.stop, stop) - max(span.start, start) for span in fetches for start, stop in others)
    return Shares(
        kernels=sum(stop - start for start, stop in _merged(spans)) / steps,
        resolve=sum(span.stop - span.start for span in spans if span.name.startswith(RESOLVE)) / steps,
        fetch=sum(span.stop - span.start for span in fetches) / steps,
        hidden=sum(overlap for overlap in overlaps if overlap > 0) / steps,
    )


def _merged(spans: Iterable[Span]) -> list[tuple[float, float]]:
    """Times in which at least one of them ran, in their order and without overlaps."""
    merged: list[tuple[float, float]] = []
    for span in sorted(spans, key=lambda span: span.start):
        if merged and span.start <= merged[-1][1]:
            merged[-1] = merged[-1][0], max(merged[-1][1], span.stop)
        else:
            merged.append((span.start, span.stop))
    return merged
