"""How much of a prompt can be restored, from which pages of which pools are there. Pure.

kv      x x x x x x . x      all pages of the prefix               legal: 1 to 6
swa     . . x x . x x .      those of the last `window`, here 2    legal: 4, 7
mamba   . . . x . x . .      the last one                          legal: 4, 6; so 4 for all three
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple


class Want(NamedTuple):
    """What a pool needs of a prefix: all its pages, or those of the last `window`."""

    pool: str
    window: int | None


class Found(NamedTuple):
    """How much of a prompt is there."""

    pages: dict[str, int]  # of each pool, up to where it alone would do; absent for none
    restorable: list[int]  # prefix lengths, in pages, at which every pool has what it needs


def restorable(there: Mapping[str, Sequence[bool]], wants: Sequence[Want]) -> Found:
    """The lengths that are legal for all pools at once: never a minimum of what each of them would allow."""
    pages: dict[str, int] = {}
    lengths: list[int] | None = None
    for want in wants:
        here = there[want.pool]
        good = range(1, leading(here) + 1) if want.window is None else ends_of_windows(here, want.window)
        if good:
            pages[want.pool] = max(good)
        allowed = set(good)
        lengths = list(good) if lengths is None else [length for length in lengths if length in allowed]
    return Found(pages=pages, restorable=lengths or [])


def leading(there: Sequence[bool]) -> int:
    """How many pages are there without a gap."""
    return list(there).index(False) if False in there else len(there)


def ends_of_windows(there: Sequence[bool], window: int) -> list[int]:
    """Prefix lengths whose last `window` pages, or all of a shorter prefix, are there."""
    ends, run = [], 0
    for length, here in enumerate(there, 1):
        run = run + 1 if here else 0
        if run >= min(window, length):
            ends.append(length)
    return ends


def window_of(transfer: Any) -> int | None:
    """How many of the last pages SGLang needs of a pool; None for all. Of a trailing pool's keys only their number counts."""
    return None if transfer.hit_policy == "all_pages" else max(1, len(transfer.keys or ()))


def needed(want: Want, length: int) -> range:
    """The pages that a pool needs for a prefix of this length."""
    return range(0 if want.window is None else max(0, length - want.window), length)
