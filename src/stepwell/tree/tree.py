"""The prefix tree: which pages and checkpoints are where, for every path of tokens that is cached.

This file is how it grows; `pruning.py` is how it shrinks, `checkpoints.py` what stands in it, `match.py` what can be asked.
 What it promises, checked by `audit.py`:

    every page of every node is in at least one tier (arrived, or still arriving),
    a checkpoint stands on pages that are all in the tree,
    each page and residency in it holds exactly one reference in its arena.

It moves no bytes and asks no clock: a `Use` that is handed in says when.
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

MAX_PAST, MOST_PAST = 256, 65_536  # visits to things that are gone, of a node and of all: to know them when they return
MAX_LOST, MOST_LOST = 16, 16_384  # why they are gone, of a node and of all: for explanations
NODE_PAGES = 256  # a node is cut at this length, so that growing or trimming one stays cheap


class Tree:
    """All namespaces' paths over one or two memory tiers."""

    def __init__(
        self, spec: ModelSpec, arenas: Mapping[Tier, Arena], value: ValuePolicy, quotas: Mapping[str, float] | None = None,
        *, row_pages: RowPages | None = None, repeats_first: bool = False,
    ) -> None:  # fmt: skip
        """`quotas` are shares of each tier, by tenant. `repeats_first`: see `Ranking`."""
        self.spec = spec
        self.arenas = dict(arenas)
        self.tiers = tuple(tier for tier in CACHED_TIERS if tier in arenas)
        self.page_bytes = spec.page_tokens * TOKEN_BYTES
        self.roots: dict[PageKey, Node] = {}
        self.accounts = Accounts(self.arenas, quotas or {}, row_pages)
        self.ranking = Ranking(spec, self.arenas, value, self.accounts.limited.values(), repeats_first=repeats_first)
        # Of what is gone: the latest visits to it and why it left, both by its first page; why checkpoints left, by boundary.
        self.past: Notes[Visit] = Notes(most_of_node=MAX_PAST, most=MOST_PAST)
        self.lost: Notes[Loss] = Notes(most_of_node=MAX_LOST, most=MOST_LOST)
        self.lost_checkpoints: Notes[Loss] = Notes(most_of_node=MAX_LOST, most=MOST_LOST)
        self.version = 0  # grows with every change a match could notice
        self.on_left: list[Callable[[Residency], None]] = []  # told of each checkpoint that left a tier,
        self.on_split: list[Callable[[Node], None]] = []  # of the upper part of each node that was cut in two,
        self.on_shortened: list[Callable[[Node], None]] = []  # and of each node that lost its last pages, or all
        self.feeds = Feeds(self.page_bytes)  # whoever is told what is stored and evicted
        self.row_pages = row_pages  # where the rows of device pages are, if they may spill
        # Which node a page belongs to, so that copies can speak of pages and nodes may split meanwhile.
        self.owner: dict[Tier, npt.NDArray[np.object_]] = {
            tier: np.full(arena.layout.rows(Kind.PREFIX), None, dtype=object) for tier, arena in self.arenas.items()
        }

    def __del__(self) -> None:
        """Takes apart what refers to each other: the garbage collector does not see it."""
        for node in list(self.nodes()):
            for checkpoint in (node.checkpoints or {}).values():
                checkpoint.node = checkpoint.following = checkpoint.leader = None
                checkpoint.held = [None, None]
            node.parent = node.kids = node.checkpoints = None
            node.runs = [None, None]

    # ---- pages ------------------------------------------------------------------------------------

    def insert(self, namespace: Namespace, packed: bytes, tier: Tier, ids: PageIds, use: Use) -> Node:
        """Offers `ids[i]` as page i of the path `packed`. Takes a reference to those the tree lacks in `tier`.

        Returns the node that the path's last page is in.
        """
        self.version += 1
        node = self.roots.get(namespace.digest)
        if node is None:
            node = self._plant(namespace)
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
        ready = self._adopt(node.account, tier, taken)
        run.num_ready += int(np.count_nonzero(ready))
        if self.feeds:
            which = np.zeros(node.num_pages, np.bool_)
            which[at + np.flatnonzero(gaps)] = ready
            self.feeds.pages_stored(node, tier, which)
        self.carry_pages_up(node, tier, before)
        self.queue(node)

    def split(self, node: Node, at: int) -> Node:
        """Cuts a node after `at` pages. The old object stays the lower part; returns the new upper part."""
        assert 0 < at < node.num_pages, f"cannot split {node} at {at}"
        parent = node.parent
        assert parent is not None and parent.kids is not None
        self.version += 1  # a match made before names the lower part as if it were the whole
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
        for told in self.on_split:
            told(upper)
        return upper

    def touch(self, path: Sequence[Node], upto: int, use: Use) -> Node:
        """Records that a request uses the path up to page `upto`, cutting the last node there if need be; returns it."""
        used = path[0]
        for node in path:
            if node.start >= upto:
                break
            used = node if node.end <= upto else self.split(node, upto - node.start)
            self._note_use(used, use)
            used.hits += 1
        return used

    def refresh(self, tier: Tier, ids: PageIds) -> None:
        """Notices that pages became READY, each once: counts again in the nodes that own them."""
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
        """Takes a reference to every page. Pages of the engine's own memory are not ours to count."""
        for span in spans:
            if span.tier is not Tier.ENGINE:
                self.arenas[span.tier].retain(span.kind, span.ids)

    def release_all(self, spans: Iterable[Span]) -> None:
        for span in spans:
            if span.tier is not Tier.ENGINE:
                self.release(span.tier, span.kind, span.ids)

    def release(self, tier: Tier, kind: Kind, ids: PageIds) -> None:
        """Gives references back. What only the tree refers to then is a candidate for eviction again."""
        self.arenas[tier].release(kind, ids)
        if kind is Kind.PREFIX:
            runs = self.runs_of(tier, ids)
            for run in runs:
                self._queue_run(run)
            self.ranking.tidy(tier, {run.node.account: None for run in runs} if self.accounts.limited else ())

    def pin(self, residency: Residency) -> None:
        """Takes a reference to every page of a checkpoint in its tier: until `unpin` it is not evicted, and its pages are used
        for nothing else, even when it leaves the tree.
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

    def _plant(self, namespace: Namespace) -> Node:
        digest, account = namespace.digest, self.accounts.of(namespace.tenant)
        root = self.roots[digest] = Node(None, account=account, start=0, first=digest, rest=b"", num_pages=0)
        return root

    def _shared_pages(self, node: Node, packed: bytes, page: int, upto: int) -> int:
        """How many of the node's pages the path shares; its first page is known to be equal."""
        offset = (page + 1) * self.page_bytes
        if page + node.num_pages <= upto and packed.startswith(node.rest, offset):
            return node.num_pages
        return 1 + common_pages(node.rest, packed[offset : min(upto, page + node.num_pages) * self.page_bytes], self.page_bytes)

    def _grow(self, node: Node, packed: bytes, tier: Tier, ids: PageIds, *, page: int, use: Use) -> Node:
        """Adds pages `page`.. of a path below `node`: into it while it is a short leaf, then as nodes of their own."""
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
            self._hang(node, child)
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
            self.queue(node)  # what stays on the device is repeated on the host

    def _adopt(self, account: Account, tier: Tier, ids: PageIds) -> npt.NDArray[np.bool_]:
        """Takes the tree's reference to pages that are new to it; says which of them can be read."""
        self.version += 1
        arena = self.arenas[tier]
        arena.retain_for_tree(Kind.PREFIX, ids)
        self.accounts.add_pages(account, tier, ids)
        return np.asarray(arena.state[Kind.PREFIX][ids.astype(np.intp)] == READY)

    def _has_other_past(self, node: Node, page: bytes) -> bool:
        """Whether something hung below a node's end that did not begin with `page`, and may return there."""
        past = self.past.of(node)
        return len(past) > (key_of(page) in past)

    def _hang(self, parent: Node, child: Node) -> None:
        if parent.kids is None:
            parent.kids = Kids()
        parent.kids.add(child)
        self._note_return(parent, child.first)

    def _note_return(self, node: Node, page: bytes) -> None:
        """What begins with a page below a node's end is back."""
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
        """Carries a change of `node.leads_to_pages(tier)` upwards, as far as it makes a difference."""
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
        """Something about the node changed: either tier's run may be a candidate for eviction now."""
        for run in node.runs:
            if run is not None:
                self._queue_run(run)

    def runs_of(self, tier: Tier, ids: PageIds) -> Iterable[Run]:
        """The runs that own these pages, each once; pages the tree does not have are passed over."""
        owner, start = self.owner[tier], 0
        owners: dict[Node | None, None] = {}
        while start < len(ids):  # most pages are those of a path, in its order: whole runs are passed over at once
            node = owner[int(ids[start])]
            run = node.runs[tier] if node is not None else None
            if run is None or run.ids.tobytes() != ids[start : start + len(run.ids)].tobytes():
                break
            owners[node] = None
            start += len(run.ids)
        owners.update(dict.fromkeys(owner[ids[start:].astype(np.intp)].tolist()))
        return [run for node in owners if node is not None and (run := node.runs[tier]) is not None]

    def _queue_run(self, run: Run) -> None:
        """As `Ranking.queue_run`, which most runs of a path are not worth asking."""
        if self.ranking.tails.may_have(run):
            self.ranking.queue_run(run)
