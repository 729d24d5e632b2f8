"""How deep a store should take a prompt: the joint rule over pages and checkpoints, and what is worth its time. Pure.

pages      |== in memory ==|== in the store ==|  nowhere
boundary         a             b     c           deepest one with a checkpoint, or that needs none: c
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import numpy as np
import numpy.typing as npt

from stepwell.base.spec import ModelSpec

MOST_FALLBACKS = 8  # checkpoints fetched in case the deepest is not reached

Flags = npt.NDArray[np.bool_]


def reachable(known: int, has_page: Flags) -> int:
    """How many pages are there without a gap, when the first `known` are in memory."""
    beyond = np.flatnonzero(~has_page[known:])
    return known + int(beyond[0]) if len(beyond) else len(has_page)


def restore_points(spec: ModelSpec, *, above: int, upto: int, has_checkpoint: Flags) -> Iterator[int]:
    """Boundaries (in pages) from the deepest to the shallowest, `above` < b <= `upto`, at which a request could resume."""
    for page in range(upto, above, -1):
        tokens = page * spec.page_tokens
        if spec.is_legal(tokens) and (has_checkpoint[page] or not spec.needs_checkpoint_at(tokens)):
            yield page


def fallbacks(points: Sequence[int], *, checkpoint_bytes: int, fetch_bytes: int, share: float) -> list[int]:
    """Of boundaries before the deepest, evenly spread ones whose checkpoints cost at most `share` of the fetch."""
    if not points or not checkpoint_bytes:
        return sorted(points)
    count = min(int(share * fetch_bytes) // checkpoint_bytes, len(points), MOST_FALLBACKS)
    return sorted({points[index * len(points) // count] for index in range(count)}) if count else []


def is_worth_it(fetch_s: float | None, recompute_s: float | None) -> bool:
    """Whether to fetch rather than compute; what has not been measured gets the chance to be."""
    return fetch_s is None or recompute_s is None or fetch_s < recompute_s
