"""The prefix tree: which pages and checkpoints are where, for every path of tokens that is cached.

Orders only; questions are in `match.py`. What it promises, checked by `audit.py`:

    every page of every node is in at least one tier (arrived, or still arriving),
    a checkpoint stands on pages that are all in the tree,
    each page and residency in it holds exactly one reference in its arena.

It moves no bytes and asks no clock: a `Use` that is handed in says when.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence

import numpy as np
import numpy.typing as npt

from stepwell.base.ids import CACHED_TIERS, Kind, Tier
from stepwell.base.keys import PageKey
from stepwell.base.plan import PageIds
from stepwell.base.spec import ModelSpec
from stepwell.base.tokens import TOKEN_BYTES, common_pages
from stepwell.memory.arena import READY, Arena
from stepwell.policy.value import ValuePolicy
from stepwell.tree.node import ABSENT, Checkpoint, Kids, Loss, Node, Residency, Run, Use
from stepwell.tree.ranking import Ranking

NODE_PAGES = 256  # a node is cut at this length, so that growing or trimming one stays cheap
KEPT_EMPTY_ROOTS = 256  # namespaces remembered after their last page left, for explanations
MAX_LOSSES = 16  # notes of lost things a node keeps, for explanations


class Tree:
    """All namespaces' paths over one or two memory tiers."""

    def __init__(self, spec: ModelSpec, arenas: Mapping[Tier, Arena], value: ValuePolicy) -> None:
        self.spec = spec
        self.arenas = dict(arenas)
        self.tiers = tuple(tier for tier in CACHED_TIERS if tier in arenas)
        self.page_bytes = spec.page_tokens * TOKEN_BYTES
        self.roots: dict[PageKey, Node] = {}
        self.ranking = Ranking(spec, self.arenas, value)
        self.version = 0  # grows with every change a match could notice
        # Which node a page belongs to, so that copies can speak of pages and nodes may split meanwhile.
        self.owner: dict[Tier, npt.NDArray[np.object_]] = {
            tier: np.full(arena.layout.rows(Kind.PREFIX), None, dtype=object) for tier, arena in self.arenas.items()
        }

    # ---- pages ------------------------------------------------------------------------------------

    def insert(self, namespace: PageKey, packed: bytes, tier: Tier, ids: PageIds, use: Use) -> Node:
        """Offers `ids[i]` as page i of the path `packed`. Takes a reference to those the tree lacks in `tier`.

        Returns the node that the path's last page is in.
        """
        self.version += 1
        node = self.roots.get(namespace)
        if node is None:
            node = self.roots[namespace] = Node(None, start=0, first=namespace, rest=b"", num_pages=0)
        page, upto = 0, len(ids)
        while page < upto:
            child = node.child(packed[page * self.page_bytes : (page + 1) * self.page_bytes])
            if child is None:
                return self._grow(node, packed, tier, ids, page=page, use=use)
            shared = self._shared_pages(child, packed, page, upto)
            if shared < child.num_pages and page + shared < upto:
                child = self.split(child, shared)
            self.attach(child, tier, ids[page : page + shared])
            child.note_use(use)
            page += shared
            node = child
        return node

    def attach(self, node: Node, tier: Tier, ids: PageIds, *, at: int = 0) -> None:
        """Offers `ids` for the node's pages from index `at`; takes a reference to those it lacks in `tier`."""
        run = node.runs[tier]
        if run is not None and run.num_pages == node.num_pages:
            return
        before = node.leads_to_pages(tier)
        if run is None:
            run = node.runs[tier] = Run(node, tier, np.full(node.num_pages, ABSENT, np.int32))
        held = run.ids[at : at + len(ids)]
        gaps = (held == ABSENT) & (ids != ABSENT)
        taken = ids[gaps]
        if not len(taken):
            if not run.num_pages:
                node.runs[tier] = None
            return
        held[gaps] = taken
        self.owner[tier][taken] = node
        run.num_pages += len(taken)
        run.num_ready += int(np.count_nonzero(self._adopt(tier, taken)))
        self._carry_pages_up(node, tier, before)
        self._queue(node)

    def split(self, node: Node, at: int) -> Node:
        """Cuts a node after `at` pages. The old object stays the lower part; returns the new upper part."""
        assert 0 < at < node.num_pages, f"cannot split {node} at {at}"
        parent = node.parent
        assert parent is not None and parent.kids is not None
        self.version += 1  # a match made before names the lower part as if it were the whole
        cut = (at - 1) * self.page_bytes
        upper = Node(parent, start=node.start, first=node.first, rest=node.rest[:cut], num_pages=at)
        upper.note_use(Use(at_s=node.used_at, priority=node.priority, expires_at_s=node.expires_at))
        upper.hits = node.hits
        parent.kids.by_page[upper.first] = upper
        node.parent, node.start, node.num_pages = upper, node.start + at, node.num_pages - at
        node.first, node.rest = node.rest[cut : cut + self.page_bytes], node.rest[cut + self.page_bytes :]
        upper.kids = Kids()
        upper.kids.by_page[node.first] = node
        self._share_checkpoints(upper, node)
        for tier in self.tiers:
            self._share_run(upper, node, tier, at)
            upper.kids.below[tier] = int(node.leads_to_pages(tier))
            upper.kids.anchored[tier] = int(node.leads_to_checkpoints(tier))
        self._queue(upper)
        self._queue(node)
        return upper

    def touch(self, path: Sequence[Node], upto: int, use: Use) -> Node:
        """Records that a request uses the path up to page `upto`, cutting the last node there if need be; returns it."""
        used = path[0]
        for node in path:
            if node.start >= upto:
                break
            used = node if node.end <= upto else self.split(node, upto - node.start)
            used.note_use(use)
            used.hits += 1
        return used

    def refresh(self, tier: Tier, ids: PageIds) -> None:
        """Notices that pages became READY: counts again in the nodes that own them."""
        self.version += 1
        state = self.arenas[tier].state[Kind.PREFIX]
        for run in self._runs_of(tier, ids):
            run.num_ready = int(np.count_nonzero(state[run.ids[run.ids != ABSENT]] == READY))
            self.ranking.queue_run(run)

    def requeue(self, tier: Tier, ids: PageIds) -> None:
        """Notices that somebody let go of pages: what owns them may be a candidate for eviction again."""
        for run in self._runs_of(tier, ids):
            self.ranking.queue_run(run)
        self.ranking.tidy(tier)

    def discard(self, run: Run, gone: npt.NDArray[np.bool_], loss: Loss) -> None:
        """Takes the pages where `gone` is true out of the run's tier, and out of the tree what no tier holds then."""
        node, tier = run.node, run.tier
        before = node.leads_to_pages(tier)
        ids = run.ids[gone & (run.ids != ABSENT)]
        run.ids[gone] = ABSENT
        run.num_pages -= len(ids)
        run.num_ready -= int(np.count_nonzero(self.arenas[tier].state[Kind.PREFIX][ids] == READY))
        if not run.num_pages:
            node.runs[tier] = None
        self.owner[tier][ids] = None
        self.version += 1
        self._carry_pages_up(node, tier, before)
        self._queue(node)
        missing = gone.copy()
        for other in node.runs:
            if other is not None:
                missing &= other.ids == ABSENT
        if missing.any():
            self.truncate(node, int(missing.argmax()), loss)
        self.arenas[tier].drop(Kind.PREFIX, ids)

    def discard_tail(self, run: Run, start: int, loss: Loss) -> None:
        """Takes the run's pages from index `start` on out of its tier, and out of the tree what no tier holds then."""
        node = run.node
        if node.runs[1 - run.tier] is None and node.kids is None:
            self.truncate(node, start, loss)  # no other tier has any of it
            return
        gone = np.zeros(node.num_pages, np.bool_)
        gone[start:] = True
        self.discard(run, gone, loss)

    def discard_ids(self, tier: Tier, ids: PageIds, loss: Loss) -> None:
        """Takes these pages out of the tree wherever they are in it now."""
        for run in self._runs_of(tier, ids):
            if run.node.runs[tier] is run:
                self.discard(run, np.isin(run.ids, ids), loss)

    def truncate(self, node: Node, at: int, loss: Loss) -> None:
        """Removes the node's pages from index `at`, all below them, and the checkpoints that stood on them."""
        self.version += 1
        if at:
            self._note(node, node.rest[(at - 1) * self.page_bytes : at * self.page_bytes], loss)
        before = [(tier, node.leads_to_pages(tier), node.leads_to_checkpoints(tier)) for tier in self.tiers]
        if node.kids is not None:
            for child in node.kids.by_page.values():
                self._remove_below(child, loss)
            node.kids = None
        if node.checkpoints:
            for checkpoint in [c for c in node.checkpoints.values() if c.page > node.start + at]:
                self._forget(checkpoint, loss)
        self._trim(node, at)
        for tier, pages, checkpoints in before:
            self._carry_pages_up(node, tier, pages)
            self._carry_checkpoints_up(node, tier, checkpoints)
        if at == 0:
            self._unlink(node, loss)
        else:
            self._queue(node)

    # ---- checkpoints ------------------------------------------------------------------------------

    def add_residency(
        self, node: Node, page: int, tier: Tier, *, windows: PageIds, points: PageIds, ready: bool, now: float
    ) -> Residency | None:
        """Places a checkpoint at boundary `page` in `tier`, taking a reference to each page; None if one is there already."""
        assert node.start < page <= node.end, f"boundary {page} is not in {node}"
        if node.checkpoints is None:
            node.checkpoints = {}
        before = node.leads_to_checkpoints(tier)
        checkpoint = node.checkpoints.get(page)
        if checkpoint is None:
            checkpoint = node.checkpoints[page] = Checkpoint(node, page, now)
        if checkpoint.held[tier] is not None:
            return None
        residency = checkpoint.held[tier] = Residency(checkpoint, tier, windows=windows, points=points, ready=ready)
        for kind, ids in residency.spans():
            self.arenas[tier].keep(kind, ids)
        if node.lost:
            node.lost.pop(page, None)
        self.version += 1
        self._carry_checkpoints_up(node, tier, before)
        self.ranking.queue_residency(residency)
        return residency

    def residency_arrived(self, residency: Residency) -> None:
        residency.ready = True
        self.version += 1
        self.ranking.queue_residency(residency)

    def drop_residency(self, residency: Residency, loss: Loss) -> None:
        """Takes a checkpoint out of one tier; out of the tree when it was the last. Prefix pages stay."""
        checkpoint, tier = residency.checkpoint, residency.tier
        node = checkpoint.node
        if node is None or checkpoint.held[tier] is not residency:
            return
        before = node.leads_to_checkpoints(tier)
        checkpoint.held[tier] = None
        residency.ticket = 0
        self.version += 1
        if not any(checkpoint.held):
            assert node.checkpoints is not None
            del node.checkpoints[checkpoint.page]
            checkpoint.node = None
            self._note(node, checkpoint.page, loss)
        self._carry_checkpoints_up(node, tier, before)
        self._queue(node)
        for kind, ids in residency.spans():
            self.arenas[tier].drop(kind, ids)

    def clear(self, namespace: PageKey, loss: Loss) -> None:
        """Forgets everything under a namespace. What requests hold stays theirs until they give it back."""
        root = self.roots.get(namespace)
        if root is not None and root.kids is not None:
            for child in list(root.kids.by_page.values()):
                self.truncate(child, 0, loss)

    def nodes(self) -> Iterator[Node]:
        """Every node, parents before children."""
        stack = list(reversed(self.roots.values()))
        while stack:
            node = stack.pop()
            yield node
            if node.kids is not None:
                stack.extend(reversed(node.kids.by_page.values()))

    # ---- inside: growing --------------------------------------------------------------------------

    def _shared_pages(self, node: Node, packed: bytes, page: int, upto: int) -> int:
        """How many of the node's pages the path shares; its first page is known to be equal."""
        offset = (page + 1) * self.page_bytes
        if page + node.num_pages <= upto and packed.startswith(node.rest, offset):
            return node.num_pages
        return 1 + common_pages(node.rest, packed[offset : min(upto, page + node.num_pages) * self.page_bytes], self.page_bytes)

    def _grow(self, node: Node, packed: bytes, tier: Tier, ids: PageIds, *, page: int, use: Use) -> Node:
        """Adds pages `page`.. of a path below `node`: into it while it is a short leaf, then as nodes of their own."""
        size, upto = self.page_bytes, len(ids)
        if node.parent is not None and node.kids is None and node.num_pages < NODE_PAGES:
            end = min(page + NODE_PAGES - node.num_pages, upto)
            self._lengthen(node, packed[page * size : end * size])
            self.attach(node, tier, ids[page:end], at=page - node.start)
            node.note_use(use)
            page = end
        if page == upto:
            return node
        before = node.leads_to_pages(tier)
        top = node
        ready = self._adopt(tier, ids[page:])
        for start in range(page, upto, NODE_PAGES):
            end = min(start + NODE_PAGES, upto)
            child = Node(node, start=start, first=packed[start * size : (start + 1) * size],
                         rest=packed[(start + 1) * size : end * size], num_pages=end - start)  # fmt: skip
            child.note_use(use)
            child.hits = 1
            self._hang(node, child)
            run = child.runs[tier] = Run(child, tier, ids[start:end].copy())
            run.num_pages = end - start
            run.num_ready = int(np.count_nonzero(ready[start - page : end - page]))
            self.owner[tier][run.ids] = child
            if node.kids is not None:
                node.kids.below[tier] += 1
            node = child
        self._carry_pages_up(top, tier, before)
        self._queue(top)
        self._queue(node)
        return node

    def _adopt(self, tier: Tier, ids: PageIds) -> npt.NDArray[np.bool_]:
        """Takes the tree's reference to pages that are new to it; says which of them can be read."""
        self.version += 1
        arena = self.arenas[tier]
        arena.keep(Kind.PREFIX, ids)
        return np.asarray(arena.state[Kind.PREFIX][ids] == READY)

    @staticmethod
    def _hang(parent: Node, child: Node) -> None:
        if parent.kids is None:
            parent.kids = Kids()
        parent.kids.by_page[child.first] = child
        if parent.lost:
            parent.lost.pop(child.first, None)

    def _lengthen(self, node: Node, packed: bytes) -> None:
        added = len(packed) // self.page_bytes
        node.rest += packed
        node.num_pages += added
        if node.lost:
            node.lost.pop(packed[: self.page_bytes], None)
        for run in node.runs:
            if run is not None:
                run.ids = np.concatenate([run.ids, np.full(added, ABSENT, np.int32)])

    def _share_run(self, upper: Node, lower: Node, tier: Tier, at: int) -> None:
        run = lower.runs[tier]
        if run is None:
            return
        state = self.arenas[tier].state[Kind.PREFIX]
        for node, ids in ((upper, run.ids[:at].copy()), (lower, run.ids[at:].copy())):
            present = ids[ids != ABSENT]
            part = Run(node, tier, ids)
            part.num_pages = len(present)
            part.num_ready = int(np.count_nonzero(state[present] == READY))
            part.unsaved = run.unsaved
            node.runs[tier] = part if part.num_pages else None
            self.owner[tier][present] = node
        run.ticket = 0

    def _share_checkpoints(self, upper: Node, lower: Node) -> None:
        moved = [c for c in (lower.checkpoints or {}).values() if c.page <= upper.end]
        for checkpoint in moved:
            assert lower.checkpoints is not None
            del lower.checkpoints[checkpoint.page]
            checkpoint.node = upper
        upper.checkpoints = {c.page: c for c in moved} or None

    # ---- inside: shrinking ------------------------------------------------------------------------

    def _trim(self, node: Node, at: int) -> None:
        """Cuts the node to `at` pages in every tier, giving up the tree's references to the rest."""
        for tier in self.tiers:
            run = node.runs[tier]
            if run is None:
                continue
            gone = run.ids[at:]
            if run.num_pages < node.num_pages:
                gone = gone[gone != ABSENT]
            if run.num_ready == run.num_pages:
                run.num_ready -= len(gone)
            else:
                run.num_ready -= int(np.count_nonzero(self.arenas[tier].state[Kind.PREFIX][gone] == READY))
            run.num_pages -= len(gone)
            run.ids = run.ids[:at].copy()
            if not run.num_pages:
                node.runs[tier] = None
                run.ticket = 0
            self.owner[tier][gone] = None
            self.arenas[tier].drop(Kind.PREFIX, gone)
        node.num_pages = at
        node.rest = node.rest[: max(at - 1, 0) * self.page_bytes]

    def _remove_below(self, top: Node, loss: Loss) -> None:
        """Empties a whole subtree that is being cut off; counts above it are the caller's."""
        stack = [top]
        while stack:
            node = stack.pop()
            if node.kids is not None:
                stack.extend(node.kids.by_page.values())
            for checkpoint in list((node.checkpoints or {}).values()):
                self._forget(checkpoint, loss)
            self._trim(node, 0)
            node.parent = node.kids = None

    def _forget(self, checkpoint: Checkpoint, loss: Loss) -> None:
        """Drops a checkpoint from all tiers without touching the counts above its node."""
        node = checkpoint.node
        assert node is not None and node.checkpoints is not None
        del node.checkpoints[checkpoint.page]
        checkpoint.node = None
        self._note(node, checkpoint.page, loss)
        for residency in checkpoint.held:
            if residency is not None:
                residency.ticket = 0
                for kind, ids in residency.spans():
                    self.arenas[residency.tier].drop(kind, ids)
        checkpoint.held = [None, None]

    def _unlink(self, node: Node, loss: Loss) -> None:
        parent = node.parent
        assert parent is not None and parent.kids is not None
        del parent.kids.by_page[node.first]
        node.parent = None
        self._note(parent, node.first, loss)
        if not parent.kids.by_page:
            parent.kids = None
            if parent.parent is None and len(self.roots) > KEPT_EMPTY_ROOTS:
                del self.roots[PageKey(parent.first)]
        self._queue(parent)

    @staticmethod
    def _note(node: Node, what: bytes | int, loss: Loss) -> None:
        if node.lost is None:
            node.lost = {}
        node.lost[what] = loss
        if len(node.lost) > MAX_LOSSES:
            del node.lost[next(iter(node.lost))]

    # ---- inside: what leads where -----------------------------------------------------------------

    def _carry_pages_up(self, node: Node, tier: Tier, before: bool) -> None:
        """Carries a change of `node.leads_to_pages(tier)` upwards, as far as it makes a difference."""
        while node.parent is not None and node.leads_to_pages(tier) != before:
            parent, gained = node.parent, not before
            assert parent.kids is not None
            before = parent.leads_to_pages(tier)
            parent.kids.below[tier] += 1 if gained else -1
            node = parent
            self._queue(node)

    def _carry_checkpoints_up(self, node: Node, tier: Tier, before: bool) -> None:
        while node.parent is not None and node.leads_to_checkpoints(tier) != before:
            parent, gained = node.parent, not before
            assert parent.kids is not None
            before = parent.leads_to_checkpoints(tier)
            parent.kids.anchored[tier] += 1 if gained else -1
            node = parent
            self._queue(node)

    def _queue(self, node: Node) -> None:
        """Something about the node changed: either tier's run may be a candidate for eviction now."""
        for run in node.runs:
            if run is not None:
                self.ranking.queue_run(run)

    def _runs_of(self, tier: Tier, ids: PageIds) -> Iterable[Run]:
        owners = dict.fromkeys(self.owner[tier][ids].tolist())
        return [run for node in owners if node is not None and (run := node.runs[tier]) is not None]
