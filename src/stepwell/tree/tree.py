"""The prefix tree: where the pages and checkpoints of every cached path of tokens are.

This file is how it grows; `pruning.py` is how it shrinks, `checkpoints.py` adds checkpoints, `match.py` searches it. Its
invariants, checked by `audit.py`:

    every page of every node is in at least one tier (arrived, or still arriving),
    a checkpoint stands on pages that are all in the tree,
    each page and residency in it holds exactly one reference in its arena.

It moves no bytes and reads no clock: a `Use` from the caller has the time.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence

import numpy as np
import numpy.typing as npt

from stepwell.base.ids import CACHED_TIERS, Kind, Tier
from stepwell.base.prompt import KEY_BYTES, TOKEN_BYTES, Namespace, PageKey, common_pages
from stepwell.base.spec import ModelSpec
from stepwell.base.tasks import PageIds, Span
from stepwell.base.untracked import untrack
from stepwell.memory.arena import READY, Arena
from stepwell.memory.row_pages import RowPages
from stepwell.policy.value import ValuePolicy, Visit
from stepwell.tree import missing_state
from stepwell.tree.accounts import Account, Accounts
from stepwell.tree.feed import Feeds
from stepwell.tree.node import ABSENT, Kids, Loss, Node, Residency, Run, Use
from stepwell.tree.notes import Notes, key_of
from stepwell.tree.ranking import Ranking

MAX_PAST, MOST_PAST = 256, 65_536  # visits to lost paths, for one node and for all, to recognize them when they return
MAX_LOST, MOST_LOST = 16, 16_384  # reasons of losses, for one node and for all, for explanations
NODE_PAGES = 256  # the longest node, so that extending or trimming one stays cheap


class Tree:
    """All namespaces' paths over one or two memory tiers."""

    def __init__(
        self, spec: ModelSpec, arenas: Mapping[Tier, Arena], value: ValuePolicy, quotas: Mapping[str, float] | None = None,
        *, row_pages: RowPages | None = None, evict_duplicates_first: bool = False,
    ) -> None:  # fmt: skip
        """`quotas` are shares of each tier, by tenant. `evict_duplicates_first`: see `Ranking`."""
        self.spec = spec
        self.arenas = dict(arenas)
        self.tiers = tuple(tier for tier in CACHED_TIERS if tier in arenas)
        self.page_bytes = spec.page_tokens * TOKEN_BYTES
        self.roots: dict[PageKey, Node] = {}
        self.accounts = Accounts(self.arenas, quotas or {}, row_pages)
        self.ranking = Ranking(
            spec, self.arenas, value, self.accounts.limited.values(), evict_duplicates_first=evict_duplicates_first
        )
        # Visits to lost paths and the reasons of their loss, by first page; the reasons of lost checkpoints, by boundary.
        self.past: Notes[Visit] = Notes(most_of_node=MAX_PAST, most=MOST_PAST)
        self.lost: Notes[Loss] = Notes(most_of_node=MAX_LOST, most=MOST_LOST)
        self.lost_checkpoints: Notes[Loss] = Notes(most_of_node=MAX_LOST, most=MOST_LOST)
        self.version = 0  # grows with every change that can affect a match
        self.on_checkpoint_evicted: list[Callable[[Residency], None]] = []  # called for each checkpoint that left a tier,
        self.on_split: list[Callable[[Node], None]] = []  # for the upper part of each node that was split,
        self.on_shortened: list[Callable[[Node], None]] = []  # and for each node that lost its last pages, or all
        self.feeds = Feeds(self.page_bytes)  # listeners to what is stored and evicted
        self.row_pages = row_pages  # where the rows of device pages are, if they may spill
        # The node of each page, so that copies can refer to pages while nodes are split.
        self.owner: dict[Tier, npt.NDArray[np.object_]] = {
            tier: np.full(arena.layout.rows(Kind.PREFIX), None, dtype=object) for tier, arena in self.arenas.items()
        }

    def __del__(self) -> None:
        """Clears the references between records, since the garbage collector does not track them."""
        for node in list(self.nodes()):
            for checkpoint in (node.checkpoints or {}).values():
                checkpoint.node = checkpoint.following = checkpoint.leader = None
                checkpoint.residencies = [None, None]
            node.parent = node.kids = node.checkpoints = None
            node.runs = [None, None]

    # ---- pages ------------------------------------------------------------------------------------

    def insert(self, namespace: Namespace, packed: bytes, tier: Tier, ids: PageIds, use: Use) -> Node:
        """Offers `ids[i]` as page i of the path `packed`. Adds a reference to each page that the tree lacks in `tier`.

        Returns the node with the path's last page.
        """
        self.version += 1
        node = self.roots.get(namespace.digest)
        if node is None:
            node = self._add_root(namespace)
        page, upto = 0, len(ids)
        while page < upto:
            child = node.child(packed[page * self.page_bytes : (page + 1) * self.page_bytes])
            if child is None:
                return self._grow(node, packed, tier, ids, page=page, use=use)
            shared = self._shared_pages(child, packed, page, upto)
            if shared < child.num_pages and page + shared < upto:
                child = self.split(child, shared)
            self.attach(child, tier, ids[page : page + shared])
            self._note_use(child, use)
            page += shared
            node = child
        return node

    def attach(self, node: Node, tier: Tier, ids: PageIds, *, at: int = 0) -> None:
        """Offers `ids` for the node's pages from index `at` on; adds a reference to each page that it lacks in `tier`."""
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
        ready = self._adopt(node.account, tier, taken)
        run.num_ready += int(np.count_nonzero(ready))
        if self.feeds:
            which = np.zeros(node.num_pages, np.bool_)
            which[at + np.flatnonzero(gaps)] = ready
            self.feeds.pages_stored(node, tier, which)
        self.carry_pages_up(node, tier, before)
        self.queue(node)

    def split(self, node: Node, at: int) -> Node:
        """Splits a node after `at` pages. The old object stays the lower part; returns the new upper part."""
        assert 0 < at < node.num_pages, f"cannot split {node} at {at}"
        parent = node.parent
        assert parent is not None and parent.kids is not None
        self.version += 1  # earlier matches refer to the lower part as if it was the whole node
        cut = (at - 1) * self.page_bytes
        upper = Node(parent, account=node.account, start=node.start, first=node.first, rest=node.rest[:cut], num_pages=at)
        upper.note_use(Use(at_s=node.used_at, expires_at_s=node.expires_at))
        upper.urgent_until = node.urgent_until
        upper.hits = node.hits
        upper.visit = node.visit
        upper.keys, node.keys = node.keys[: at * KEY_BYTES], node.keys[at * KEY_BYTES :]
        parent.kids.add(upper)
        node.parent, node.start, node.num_pages = upper, node.start + at, node.num_pages - at
        node.first, node.rest = node.rest[cut : cut + self.page_bytes], node.rest[cut + self.page_bytes :]
        upper.kids = Kids()
        upper.kids.add(node)
        self._share_checkpoints(upper, node)
        missing_state.share(upper, node, self.spec.page_tokens)
        for tier in self.tiers:
            self._share_run(upper, node, tier, at)
            upper.kids.below[tier] = int(node.leads_to_pages(tier))
            upper.kids.anchored[tier] = int(node.leads_to_checkpoints(tier))
        self.queue(upper)
        self.queue(node)
        for callback in self.on_split:
            callback(upper)
        return upper

    def touch(self, path: Sequence[Node], upto: int, use: Use) -> Node:
        """Records that a request uses the path up to page `upto`, splits the last node there if necessary, and returns it."""
        used = path[0]
        for node in path:
            if node.start >= upto:
                break
            used = node if node.end <= upto else self.split(node, upto - node.start)
            self._note_use(used, use)
            used.hits += 1
        return used

    def refresh(self, tier: Tier, ids: PageIds) -> None:
        """Counts the READY pages again in the nodes that own `ids`, which have just become READY."""
        self.version += 1
        state = self.arenas[tier].state[Kind.PREFIX]
        for run in self.runs_of(tier, ids):
            run.num_ready = int(np.count_nonzero(state[run.ids[run.ids != ABSENT]] == READY))
            if self.feeds:
                self.feeds.pages_stored(run.node, tier, np.isin(run.ids, ids))
            self._queue_run(run)

    def nodes(self) -> Iterator[Node]:
        """Every node, parents before children."""
        stack = list(reversed(self.roots.values()))
        while stack:
            node = stack.pop()
            yield node
            if node.kids is not None:
                stack.extend(reversed(node.kids.by_page.values()))

    # ---- references of leases, pins and jobs --------------------------------------------------------

    def retain(self, spans: Iterable[Span]) -> None:
        """Adds a reference to every page. Pages in the engine's own memory are not counted here."""
        for span in spans:
            if span.tier is not Tier.ENGINE:
                self.arenas[span.tier].retain(span.kind, span.ids)

    def release_all(self, spans: Iterable[Span]) -> None:
        for span in spans:
            if span.tier is not Tier.ENGINE:
                self.release(span.tier, span.kind, span.ids)

    def release(self, tier: Tier, kind: Kind, ids: PageIds) -> None:
        """Releases references. Pages that only the tree still refers to become candidates for eviction again."""
        self.arenas[tier].release(kind, ids)
        if kind is Kind.PREFIX:
            runs = self.runs_of(tier, ids)
            for run in runs:
                self._queue_run(run)
            self.ranking.tidy(tier, {run.node.account: None for run in runs} if self.accounts.limited else ())

    def pin(self, residency: Residency) -> None:
        """Adds a reference to every page of a checkpoint in its tier: until `unpin` it is not evicted, and its pages are not
        reused even if it leaves the tree.
        """
        residency.users += 1
        for kind, ids in residency.spans():
            self.arenas[residency.tier].retain(kind, ids)

    def unpin(self, residency: Residency) -> None:
        """Releases the references that one `pin` took; a checkpoint without any others can be evicted again."""
        residency.users -= 1
        assert residency.users >= 0, f"{residency.users=}"
        for kind, ids in residency.spans():
            self.arenas[residency.tier].release(kind, ids)
        if not residency.users:
            self.ranking.queue_residency(residency)

    # ---- inside: growing --------------------------------------------------------------------------

    def _add_root(self, namespace: Namespace) -> Node:
        digest, account = namespace.digest, self.accounts.of(namespace.tenant)
        root = self.roots[digest] = Node(None, account=account, start=0, first=digest, rest=b"", num_pages=0)
        return root

    def _shared_pages(self, node: Node, packed: bytes, page: int, upto: int) -> int:
        """The number of the node's pages that the path shares. Its first page is known to be equal."""
        offset = (page + 1) * self.page_bytes
        if page + node.num_pages <= upto and packed.startswith(node.rest, offset):
            return node.num_pages
        return 1 + common_pages(node.rest, packed[offset : min(upto, page + node.num_pages) * self.page_bytes], self.page_bytes)

    def _grow(self, node: Node, packed: bytes, tier: Tier, ids: PageIds, *, page: int, use: Use) -> Node:
        """Adds the pages of a path from `page` on: first to `node` itself if it is a short leaf, then as nodes below it."""
        size, upto = self.page_bytes, len(ids)
        is_short_leaf = node.parent is not None and node.kids is None and node.num_pages < NODE_PAGES
        if is_short_leaf and not self._has_other_past(node, packed[page * size : (page + 1) * size]):
            end = min(page + NODE_PAGES - node.num_pages, upto)
            self._lengthen(node, packed[page * size : end * size])
            self.attach(node, tier, ids[page:end], at=page - node.start)
            self._note_use(node, use)
            page = end
        if page == upto:
            return node
        before = node.leads_to_pages(tier)
        top = node
        ready = self._adopt(node.account, tier, ids[page:])
        for start in range(page, upto, NODE_PAGES):
            end = min(start + NODE_PAGES, upto)
            child = Node(node, account=node.account, start=start, first=packed[start * size : (start + 1) * size],
                         rest=packed[(start + 1) * size : end * size], num_pages=end - start)  # fmt: skip
            child.note_use(use)
            child.visit = use.visit or self.past.of(node).get(key_of(child.first))
            child.hits = 1
            self._add_child(node, child)
            run = child.runs[tier] = Run(child, tier, ids[start:end].copy())
            run.num_pages = end - start
            run.num_ready = int(np.count_nonzero(ready[start - page : end - page]))
            self.owner[tier][run.ids] = child
            if self.feeds:
                self.feeds.pages_stored(child, tier, ready[start - page : end - page])
            if node.kids is not None:
                node.kids.below[tier] += 1
            node = child
        self.carry_pages_up(top, tier, before)
        self.queue(top)
        self.queue(node)
        return node

    def _note_use(self, node: Node, use: Use) -> None:
        device = node.runs[Tier.DEVICE]
        was_leaving = device is not None and device.leaving
        node.note_use(use)
        if was_leaving:
            self.queue(node)  # it stays on the device, so the host's copy is a duplicate

    def _adopt(self, account: Account, tier: Tier, ids: PageIds) -> npt.NDArray[np.bool_]:
        """Adds the tree's reference to pages that are new to it; returns which of them are readable."""
        self.version += 1
        arena = self.arenas[tier]
        arena.retain_for_tree(Kind.PREFIX, ids)
        self.accounts.add_pages(account, tier, ids)
        return np.asarray(arena.state[Kind.PREFIX][ids.astype(np.intp)] == READY)

    def _has_other_past(self, node: Node, page: bytes) -> bool:
        """Whether a lost path that does not begin with `page` may return below the node."""
        past = self.past.of(node)
        return len(past) > (key_of(page) in past)

    def _add_child(self, parent: Node, child: Node) -> None:
        if parent.kids is None:
            parent.kids = Kids()
        parent.kids.add(child)
        self._note_return(parent, child.first)

    def _note_return(self, node: Node, page: bytes) -> None:
        """Drops the notes about a path below a node that is cached again."""
        self.lost.remove(node, key_of(page))
        self.past.remove(node, key_of(page))

    def _lengthen(self, node: Node, packed: bytes) -> None:
        added = len(packed) // self.page_bytes
        node.rest += packed
        node.num_pages += added
        self._note_return(node, packed[: self.page_bytes])
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
            part.unsaved, part.leaving = run.unsaved, run.leaving
            node.runs[tier] = part if part.num_pages else None
            self.owner[tier][present] = node
        self.ranking.unqueue(run, lower.account)

    def _share_checkpoints(self, upper: Node, lower: Node) -> None:
        moved = [c for c in (lower.checkpoints or {}).values() if c.page <= upper.end]
        for checkpoint in moved:
            assert lower.checkpoints is not None
            del lower.checkpoints[checkpoint.page]
            checkpoint.node = upper
        upper.checkpoints = {c.page: c for c in moved} or None
        untrack(upper.checkpoints) if upper.checkpoints else None

    # ---- what leads where: for the other modules of this package ------------------------------------

    def carry_pages_up(self, node: Node, tier: Tier, before: bool) -> None:
        """Propagates a change of `node.leads_to_pages(tier)` upwards, as far as it makes a difference."""
        while node.parent is not None and node.leads_to_pages(tier) != before:
            parent, gained = node.parent, not before
            assert parent.kids is not None
            before = parent.leads_to_pages(tier)
            parent.kids.below[tier] += 1 if gained else -1
            node = parent
            if not gained:
                self.queue(node)

    def carry_checkpoints_up(self, node: Node, tier: Tier, before: bool) -> None:
        """The same for `node.leads_to_checkpoints(tier)`."""
        while node.parent is not None and node.leads_to_checkpoints(tier) != before:
            parent, gained = node.parent, not before
            assert parent.kids is not None
            before = parent.leads_to_checkpoints(tier)
            parent.kids.anchored[tier] += 1 if gained else -1
            node = parent
            if not gained:
                self.queue(node)

    def queue(self, node: Node) -> None:
        """Checks after a change whether the node's runs are candidates for eviction now."""
        for run in node.runs:
            if run is not None:
                self._queue_run(run)

    def runs_of(self, tier: Tier, ids: PageIds) -> Iterable[Run]:
        """The runs that own these pages, each once; skips pages that the tree does not have."""
        owner, start = self.owner[tier], 0
        owners: dict[Node | None, None] = {}
        while start < len(ids):  # most calls have the pages of a path in order, so whole runs are skipped at once
            node = owner[int(ids[start])]
            run = node.runs[tier] if node is not None else None
            if run is None or run.ids.tobytes() != ids[start : start + len(run.ids)].tobytes():
                break
            owners[node] = None
            start += len(run.ids)
        owners.update(dict.fromkeys(owner[ids[start:].astype(np.intp)].tolist()))
        return [run for node in owners if node is not None and (run := node.runs[tier]) is not None]

    def _queue_run(self, run: Run) -> None:
        """Like `Ranking.queue_run`, with a fast check that is false for most runs of a path."""
        if self.ranking.suffixes.maybe_evictable(run):
            self.ranking.queue_run(run)
