"""What takes up memory in a tree: its largest stretches, and checkpoints with the reason they were left. Pure, and bounded.

A stretch lies between two branches of paths:

    tokens   0 ....... 4096 ....... 6000
    stretch  |-- shared --|-- one --|              each byte belongs to one stretch, so their bytes add up
                          |-- another ---|

However large the tree is, only a limited number of nodes and checkpoints are visited: in every namespace the paths that were
added last. A survey reports whether it is complete.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from heapq import nlargest
from itertools import islice

import numpy as np

from stepwell.base.ids import Kind, Tier
from stepwell.base.prompt import PageKey
from stepwell.memory.row_pages import ABSENT
from stepwell.policy.placement import Trigger
from stepwell.tree.node import Checkpoint, Node, Run
from stepwell.tree.tree import Tree

MOST_LOOKS = 1024  # nodes and checkpoints that one survey visits: a few milliseconds
LEAST_LOOKS = 16  # the same for one namespace, so that a few paths of it are seen completely


@dataclass(slots=True, kw_only=True, eq=False)
class Stretch:
    """Tokens `[start, end)` shared by paths without a branch in between. Bytes are those of prefix pages, by tier."""

    space: PageKey  # its namespace
    start: int
    end: int
    branches: int = 0  # paths that continue from its end
    page_bytes: list[int] = field(default_factory=lambda: [0, 0])
    checkpoints: int = 0
    hits: int = 0
    used_at_s: float = 0.0

    @property
    def total_bytes(self) -> int:
        return sum(self.page_bytes)


@dataclass(frozen=True, slots=True, kw_only=True)
class SurveyedCheckpoint:
    """A checkpoint in the tree. Without it, a request would compute `saves_tokens` more."""

    space: PageKey
    boundary: int  # in tokens
    trigger: Trigger | None
    saves_tokens: int
    size_bytes: tuple[int, int]  # by tier, 0 if it is not there; windows shared by neighbours count for each
    uses: int
    used_at_s: float
    in_use: bool
    to_be_stored: bool


@dataclass(slots=True, kw_only=True, eq=False)
class Tally:
    count: int = 0
    size_bytes: list[int] = field(default_factory=lambda: [0, 0])


@dataclass(frozen=True, slots=True, kw_only=True)
class Survey:
    """`stretches` by bytes and `checkpoints` by what they save, largest first; the tallies include everything visited."""

    stretches: tuple[Stretch, ...]
    num_stretches: int
    checkpoints: tuple[SurveyedCheckpoint, ...]
    triggers: dict[Trigger | None, Tally]
    complete: bool  # whether the whole tree was visited


def survey(
    tree: Tree, *, show: int, most_looks: int = MOST_LOOKS, wanted: Callable[[PageKey], bool] = lambda space: True
) -> Survey:
    """The `show` largest of each, in namespaces that are `wanted`. Paths that were added last are visited first."""
    walk = _Walk(tree, most_looks, wanted)
    stretches = list(walk)
    return Survey(
        stretches=tuple(nlargest(show, stretches, key=lambda each: (each.total_bytes, each.end))),
        num_stretches=len(stretches),
        checkpoints=tuple(nlargest(show, walk.checkpoints, key=lambda each: (each.saves_tokens, each.used_at_s))),
        triggers=walk.triggers,
        complete=walk.complete,
    )


class _Walk:
    """A depth-first walk over a tree. Yields stretches, and collects checkpoints."""

    def __init__(self, tree: Tree, most_looks: int, wanted: Callable[[PageKey], bool]) -> None:
        self._tree = tree
        self._wanted = wanted
        self._left = most_looks
        self._enough = 0  # the walk of this namespace stops when `_left` falls to this
        self._page_tokens = tree.spec.page_tokens
        self._strides = [
            tree.arenas[tier].layout.prefix_stride if tier in tree.arenas else 0 for tier in (Tier.DEVICE, Tier.HOST)
        ]
        self.checkpoints: list[SurveyedCheckpoint] = []
        self.triggers: dict[Trigger | None, Tally] = {}
        self.complete = True

    def __iter__(self) -> Iterator[Stretch]:
        roots = self._tree.roots
        self.complete = len(roots) <= self._left
        newest = islice(reversed(roots.items()), self._left)
        planted = [(space, root) for space, root in newest if root.kids and self._wanted(space)]
        for num_before, (space, root) in enumerate(planted):
            share = max(self._left // (len(planted) - num_before), LEAST_LOOKS)
            yield from self._below(space, root, min(share, self._left))

    def _below(self, space: PageKey, root: Node, most: int) -> Iterator[Stretch]:
        """The stretches of one namespace. `before` is the boundary of the checkpoint above a node, in pages."""
        self._enough = self._left - most
        stack = [(_newest_first(root), 0)]  # the remaining children, and the boundary before them
        while stack:
            kids, before = stack[-1]
            node = next(kids, None)
            if node is None:
                stack.pop()
                continue
            if self._left <= self._enough:
                self.complete = False
                return
            stretch = Stretch(space=space, start=node.start * self._page_tokens, end=0)
            before = self._add(stretch, node, before)
            while node.kids is not None and len(node.kids.by_page) == 1 and self._left > self._enough:
                node = next(iter(node.kids.by_page.values()))
                before = self._add(stretch, node, before)
            if node.kids is not None:
                stretch.branches = len(node.kids.by_page)
                stack.append((_newest_first(node), before))
            yield stretch

    def _add(self, stretch: Stretch, node: Node, before: int) -> int:
        """Adds a node to a stretch; returns the boundary of the last checkpoint in it, or before it."""
        pages = sorted(node.checkpoints or ())
        looked_at = pages[: max(self._left - self._enough - 1, 0)]
        self._left -= 1 + len(looked_at)
        self.complete &= len(looked_at) == len(pages)
        stretch.checkpoints += len(pages)
        stretch.end = node.end * self._page_tokens
        stretch.hits = max(stretch.hits, node.hits)
        stretch.used_at_s = max(stretch.used_at_s, node.used_at)
        for run in node.runs:
            if run is not None:
                stretch.page_bytes[run.tier] += self._bytes_of(run)
        for page in looked_at:
            assert node.checkpoints is not None
            self._add_checkpoint(stretch, node.checkpoints[page], before)
            before = page
        return pages[-1] if pages else before

    def _bytes_of(self, run: Run) -> int:
        size, rows = run.num_pages * self._strides[run.tier], self._tree.row_pages
        if rows is not None and run.tier is Tier.DEVICE:  # add the rows that are on the device
            bound = int(np.count_nonzero(rows.rows[run.ids[run.ids != ABSENT]] != ABSENT))
            size += bound * self._tree.arenas[run.tier].layout.strides[Kind.ROWS]
        return size

    def _add_checkpoint(self, stretch: Stretch, checkpoint: Checkpoint, before: int) -> None:
        held = [each for each in checkpoint.residencies if each is not None]
        device, host = (each.size_bytes if each is not None else 0 for each in checkpoint.residencies)
        tally = self.triggers.setdefault(checkpoint.trigger, Tally())
        tally.count += 1
        tally.size_bytes[Tier.DEVICE] += device
        tally.size_bytes[Tier.HOST] += host
        self.checkpoints.append(
            SurveyedCheckpoint(
                space=stretch.space,
                boundary=checkpoint.page * self._page_tokens,
                trigger=checkpoint.trigger,
                saves_tokens=(checkpoint.page - before) * self._page_tokens,
                size_bytes=(device, host),
                uses=checkpoint.uses,
                used_at_s=checkpoint.used_at,
                in_use=checkpoint.in_use,
                to_be_stored=any(each.backup_deferred for each in held),
            )
        )


def _newest_first(node: Node) -> Iterator[Node]:
    return reversed(node.kids.by_page.values()) if node.kids is not None else iter(())
