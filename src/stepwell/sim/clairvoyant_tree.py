"""All prompts of a trace as one tree, known beforehand, and who will come by where. Pure; reads a trace once.

    pages    o-o-o-o-o-o-o-o-o       a page stands for its whole history, so equal pages are one place
                   |       |
                   o-o-o   (end)     places: where a prompt ends, and where one leaves another
                       |
                     (end)           an edge: the pages from the place above, which the same requests pass

Nothing that a cache decides falls inside an edge, so a place carries its edge, and there are at most two of them for a request.
"""

from __future__ import annotations

from array import array
from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from stepwell.sim.trace import BlockIds, Trace, TraceRequest

Ints = npt.NDArray[np.int64]
Floats = npt.NDArray[np.float64]

NEVER_S = 1e18  # later than any trace, and a number that can be divided by
NOWHERE = -1  # no place above, no page, no place at all: inside these arrays only


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class PromptTree:
    """Places P, above ones first, and requests R in the order they came."""

    page_tokens: int
    num_pages: int
    above_P: Ints  # NOWHERE at the top
    depth_P: Ints  # pages from the top down to the place, itself included
    pages_P: Ints  # of its edge
    last_wanted_P: Ints  # the last request that leaves what was ever seen there; NOWHERE if none does
    end_R: Ints  # a request's last place; NOWHERE for one shorter than a page
    at_s_R: Floats
    prompt_tokens_R: Ints

    def paths(self) -> list[Ints]:
        """The places of each request, from the top."""
        above, paths = self.above_P.tolist(), []
        for end in self.end_R.tolist():
            path = []
            while end != NOWHERE:
                path.append(end)
                end = above[end]
            paths.append(np.array(path[::-1], np.int64))
        return paths


def next_passes_s(tree: PromptTree, paths: list[Ints]) -> list[Floats]:
    """For each request and each place on its path the time of the next request that comes by; NEVER_S where none does."""
    coming_s_P = np.full(len(tree.above_P), NEVER_S)
    times: list[Floats] = []
    for path, at_s in zip(reversed(paths), tree.at_s_R[::-1].tolist(), strict=True):
        times.append(coming_s_P[path])
        coming_s_P[path] = at_s
    return times[::-1]


def tree_of(trace: Trace, *, page_tokens: int) -> PromptTree:
    """Reads a trace. Of each prompt only whole pages count, one token less than it has, since one is always computed."""
    reader = _Reader(trace.block_tokens, page_tokens)
    at_s, prompt_tokens = array("d"), array("q")
    for request in trace:
        at_s.append(request.at_s)
        prompt_tokens.append(request.prompt_tokens)
        reader.add(request)
    return reader.tree(np.array(at_s, np.float64), np.array(prompt_tokens, np.int64))


class _Reader:
    """Numbers pages as they are first seen: what a request adds is one run of consecutive numbers, below a page it shares."""

    def __init__(self, block_tokens: int, page_tokens: int) -> None:
        self._block_tokens = block_tokens
        self._page_tokens = page_tokens
        self._numbers: dict[int, int] = {}
        self._shared = array("q")  # a request's last page that was known before it
        self._last = array("q")
        self._shared_depth = array("q")
        self._added = array("q")

    def add(self, request: TraceRequest) -> None:
        tokens = min(request.prompt_tokens - 1, len(request.blocks) * self._block_tokens)
        count = max(tokens, 0) // self._page_tokens
        known = self._known(request.blocks, count)
        first = len(self._numbers)
        self._numbers.update(zip(self._keys(request.blocks, known, count), range(first, first + count - known), strict=True))
        shared = self._numbers[self._key(request.blocks, known - 1)] if known else NOWHERE
        self._shared.append(shared)
        self._last.append(len(self._numbers) - 1 if known < count else shared)
        self._shared_depth.append(known)
        self._added.append(count - known)

    def tree(self, at_s_R: Floats, prompt_tokens_R: Ints) -> PromptTree:
        shared_R, last_R, depth_R, added_R = (
            np.array(each, np.int64) for each in (self._shared, self._last, self._shared_depth, self._added)
        )
        page_P = np.unique(np.concatenate([shared_R, last_R]))
        page_P = page_P[page_P != NOWHERE]
        # Runs of added pages: `first` is a run's first page, below page `shared`, which has `depth` pages down to it.
        adding_R = added_R > 0
        first_N = (np.cumsum(added_R) - added_R)[adding_R]
        run_P = np.searchsorted(first_N, page_P, side="right") - 1
        opens_run_P = np.ones(len(page_P), bool)
        opens_run_P[1:] = run_P[1:] != run_P[:-1]
        upper_P = np.arange(len(page_P)) - 1
        above_P = np.where(opens_run_P, _places(page_P, shared_R[adding_R][run_P]), upper_P)
        depth_P = depth_R[adding_R][run_P] + page_P - first_N[run_P] + 1
        last_wanted_P = np.full(len(page_P), NOWHERE)
        leaving_P = _places(page_P, shared_R)
        np.maximum.at(last_wanted_P, leaving_P[leaving_P != NOWHERE], np.flatnonzero(leaving_P != NOWHERE))
        return PromptTree(
            page_tokens=self._page_tokens,
            num_pages=len(self._numbers),
            above_P=above_P,
            depth_P=depth_P,
            pages_P=depth_P - np.where(above_P == NOWHERE, 0, depth_P[above_P]),
            last_wanted_P=last_wanted_P,
            end_R=_places(page_P, last_R),
            at_s_R=at_s_R,
            prompt_tokens_R=prompt_tokens_R,
        )

    def _known(self, blocks: BlockIds, count: int) -> int:
        """How many leading pages were seen before, by halving: no page is known after one that is not."""
        low, high = 0, count
        while low < high:
            middle = (low + high) // 2
            if self._key(blocks, middle) in self._numbers:
                low = middle + 1
            else:
                high = middle
        return low

    def _keys(self, blocks: BlockIds, start: int, stop: int) -> Iterator[int]:
        return (self._key(blocks, page) for page in range(start, stop))

    def _key(self, blocks: BlockIds, page: int) -> int:
        """A page is known by its last token: which block that is in, and where. Pages may be larger or smaller than blocks."""
        block, offset = divmod((page + 1) * self._page_tokens - 1, self._block_tokens)
        return int(blocks[block]) * self._block_tokens + offset


def _places(page_P: Ints, pages: Ints) -> Ints:
    """The places of pages that are places; NOWHERE for no page."""
    return np.where(pages == NOWHERE, NOWHERE, np.searchsorted(page_P, pages))
