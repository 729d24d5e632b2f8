"""Many victims leave a tier together: in the order of one by one, and with the same outcome.

What makes an eviction dear is to tell the arena about its few pages. Here the tree lets go of one victim after the other, and the
arena is told once of the pages of all. Only what is idle is taken: runs without checkpoints, which no other tier has or which it
has whole, and checkpoints. The rest is left to the caller, one at a time.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from stepwell.base.ids import Kind, Tier
from stepwell.base.tasks import NO_PAGES, PageIds
from stepwell.memory.arena import Need
from stepwell.tree.accounts import Account
from stepwell.tree.checkpoints import leave_node, leave_tier, tell_left
from stepwell.tree.eviction_order import USEFUL
from stepwell.tree.left_pages import SharedWindows, SlabUse
from stepwell.tree.node import ABSENT, Loss, Node, Residency, Run, Victim
from stepwell.tree.pruning import leave_tree, note_cut, shorten, tell
from stepwell.tree.tree import Tree

PREFIX, WINDOW, POINT = Kind.PREFIX, Kind.WINDOW, Kind.POINT
FEW_PAGES = 16  # of a run: looked at one by one


class Gone(NamedTuple):
    """What left together, and who is next: it has to go alone, or nobody is left if there is none."""

    num_pages: int
    num_checkpoints: int
    in_vain_bytes: int  # of sorts that are not short
    next: Victim | None


def may_leave_together(tree: Tree, tier: Tier) -> bool:
    """Whether nobody has to be asked for each victim: whose it is, where its rows are, or, on the host, whether the device has it
    too, so that it may go whatever stands on it.
    """
    has_rows = tier is Tier.DEVICE and tree.row_pages is not None
    repeats = tier is Tier.HOST and tree.ranking.repeats_first
    return not (tree.accounts.limited or has_rows or repeats)


def leave_together(
    tree: Tree, tier: Tier, need: Need, short: Need, loss: Loss, *, any_sort: bool, patience_bytes: int, saved_only: bool
) -> Gone:  # fmt: skip
    """Evicts in the tier's order until that has to be looked at anew: `short` may be another by then, or its next goes alone.

    `need` lacks `short`, prefix pages among it. With `any_sort` of checkpoints too, as long as fewer bytes of what is not short
    go than `patience_bytes`. With `saved_only` what the other tier lacks goes alone: it may have to be saved first.
    """
    batch = _Batch(tree, tier, need, short, loss, patience_bytes, saved_only)
    checkpoints = any_sort or WINDOW in short or POINT in short
    victim = None
    try:
        while batch.take_in_turn(checkpoints=checkpoints):
            victim = tree.ranking.first(tier, runs=True, checkpoints=checkpoints)
            if victim is None or not (batch.take_run(victim) if isinstance(victim, Run) else batch.take_residency(victim)):
                break
            victim = None
    finally:
        batch.give_back()
    return Gone(batch.num_pages, batch.num_checkpoints, batch.in_vain_bytes, victim)


class _Batch:
    """Victims that have left the tree, and pages that the arena has not been told about yet."""

    def __init__(
        self, tree: Tree, tier: Tier, need: Need, short: Need, loss: Loss, patience_bytes: int, saved_only: bool
    ) -> None:  # fmt: skip
        self._tree, self._tier, self._loss = tree, tier, loss
        self._arena = tree.arenas[tier]
        self._refs = self._arena.refs[PREFIX]
        self._ref_of = self._refs.data  # one number of it is read in less time than from the array
        self._wanted = short[PREFIX]
        self._is_heard = bool(tree.feeds)
        self._saved_only = saved_only
        self._needs_checkpoints = tree.spec.free_step is None
        # Where prefix pages alone are needed, and may have every slab, those that empty of themselves change nothing for them.
        self._has_every_slab = len(need) == 1 and not self._arena.idle_slabs[1]
        self._counts_slabs = len(self._arena.layout.strides) > 1 and not self._has_every_slab
        self._left: dict[Kind, SlabUse] = {}
        self._helps = [kind for kind in short if kind is not PREFIX]
        self._spoils = [kind for kind in need if kind is not PREFIX and kind not in short]  # see `take_residency`
        self._ids: list[PageIds] = []
        self._points: list[int] = []
        self._point_refs = self._arena.refs.get(POINT, self._refs).data
        self._has_windows = WINDOW in self._arena.refs
        self._windows: SharedWindows | None = None
        self._account: Account | None = None  # whose the last victims are,
        self._owned_bytes = 0  # and how many bytes of it have not been taken off its account
        self._page_bytes = self._arena.layout.strides[PREFIX]
        self._patience_bytes = patience_bytes
        self.is_over = False  # what is short may be another now, or goes out of turn
        self.num_pages = self.num_checkpoints = self.in_vain_bytes = 0

    def take_in_turn(self, *, checkpoints: bool) -> bool:
        """Takes those who are next as long as little has to be asked of them. False once it is over."""
        if self.is_over:
            return False
        ranking, tier = self._tree.ranking, self._tier
        for leaf in ranking.leaves_in_turn(tier, checkpoints=checkpoints):
            if not self.take_run(leaf) or self.is_over:
                break
        if checkpoints and not self.is_over:
            for checkpoint in ranking.checkpoints_in_turn(tier):
                if not self.take_residency(checkpoint) or self.is_over:
                    break
        return not self.is_over

    def take_run(self, run: Run) -> bool:
        """Takes a run out of the tier, or as much of it as is wanted. False, and nothing is changed, if it has to go alone."""
        node, count, tier, tree = run.node, run.num_pages, self._tier, self._tree
        if count != node.num_pages or node.checkpoints:
            return False
        other = node.runs[1 - tier]
        if (self._saved_only or node.kids is not None) if other is None else other.num_pages != count:
            return False
        if count > self._wanted:
            return other is None and self._cut(run, count - self._wanted)
        ids = run.ids
        if not self._is_idle(ids):
            return False
        if self._is_heard:
            tell(tree, run, np.ones(count, np.bool_))
        self._note_pages(node, ids, count)
        run.num_pages = run.num_ready = run.entry = 0
        node.runs[tier] = None
        if other is not None:
            run.ids = np.full(count, ABSENT, np.int32)
        assert node.parent is not None and node.parent.kids is not None
        below = node.parent.kids.below
        if below[tier] > 1 and not tree.ranking.repeats_first:
            below[tier] -= 1  # what is above stays what it was: something of the tier is below it still
        else:
            tree.carry_pages_up(node, tier, before=True)
        if other is None:
            run.ids = NO_PAGES
            leave_tree(tree, node, self._loss)
        else:
            tree.queue(node)
        return True

    def _cut(self, run: Run, at: int) -> bool:
        """Takes the end of a leaf that only this tier has; the last that is wanted."""
        node, tree, ids = run.node, self._tree, run.ids[at:]
        if run.num_ready < run.num_pages or not self._is_idle(ids):
            return False
        if self._is_heard:
            tell(tree, run, np.arange(run.num_pages) >= at)
        self._note_pages(node, ids, len(ids))
        run.num_pages = run.num_ready = at
        run.entry = 0
        run.ids = run.ids[:at].copy()
        note_cut(tree, node, at, self._loss)
        shorten(tree, node, at)
        tree.queue(node)
        return True

    def _note_pages(self, node: Node, ids: PageIds, count: int) -> None:
        """Pages of a node go: when the arena is told, it is told of them."""
        if self._counts_slabs:
            self._note_slabs(PREFIX, ids.tolist())
        self._ids.append(ids)
        if node.account is not self._account:
            self._note_owner(node.account)
        self._owned_bytes += count * self._page_bytes
        self.num_pages += count
        self._wanted -= count
        if self._wanted <= 0:
            self.is_over = True

    def take_residency(self, residency: Residency) -> bool:
        """The same for a checkpoint, and with the last one of a leaf for the pages behind it: they are worth nothing, so they are
        next, and go before they are queued.
        """
        if residency.users or not residency.ready or (self._saved_only and residency.checkpoint.held[1 - self._tier] is None):
            return False
        if self._spoils and any(kind in self._spoils for kind, _ in residency.spans()):
            return False  # it has idle slabs, and more room of its own would leave these to others
        point = residency.points.item() if len(residency.points) else ABSENT
        if point != ABSENT and self._point_refs[point] != 1:
            return False
        self.num_checkpoints += 1
        if self._helps and any(kind in self._helps for kind, _ in residency.spans()):
            self.is_over = True
        elif residency.standing == USEFUL:
            self.in_vain_bytes += residency.size_bytes
        node, size_bytes = residency.checkpoint.node, residency.size_bytes
        assert node is not None
        residency.entry = 0
        if point != ABSENT:
            self._points.append(point)
            left = self._left.get(POINT) or self._left_of(POINT)
            slab = point * left.stride // left.slab_bytes
            left[slab] = in_use = left[slab] - 1
            if not in_use:
                self._note_empty(POINT, slab)
        if self._has_windows and len(residency.windows):
            size_bytes -= self._note_windows(residency.windows)
        if node.account is not self._account:
            self._note_owner(node.account)
        self._owned_bytes += size_bytes
        if self.is_over or not self._take_leaf(node, residency):
            tree = self._tree
            leave_tier(tree, residency, self._loss)
            tell_left(tree, node, residency)
            if self.is_over or not self._take_end(node):
                tree.queue(node)
        if self.in_vain_bytes >= self._patience_bytes:
            self.is_over = True
        return True

    def _note_windows(self, ids: PageIds) -> int:
        """Windows of a checkpoint go: when the arena is told, it is told of them. Returns the bytes that others have too."""
        if self._windows is None:
            self._windows = SharedWindows(self._arena)
        freed = self._windows.let_go(ids)
        self._note_slabs(WINDOW, freed)
        self.is_over = self.is_over or self._windows.are_unspared
        return self._windows.shared_bytes

    def _take_leaf(self, node: Node, residency: Residency) -> bool:
        """Takes a leaf out of the tree with its only checkpoint. That this is gone is noted nowhere: the note would go with it.

        False, and nothing is changed, if somebody uses it, or something above it would not stay what it was.
        """
        tree, tier, checkpoint = self._tree, self._tier, residency.checkpoint
        run = node.runs[tier]
        if run is None or node.kids is not None or node.runs[1 - tier] is not None or not self._needs_checkpoints:
            return False
        parent, checkpoints = node.parent, node.checkpoints
        assert checkpoints is not None and parent is not None and parent.kids is not None
        below, anchored = parent.kids.below, parent.kids.anchored
        if len(checkpoints) > 1 or checkpoint.held[1 - tier] is not None or below[tier] <= 1 or anchored[tier] <= 1:
            return False
        ids, count, ref_of = run.ids, run.num_pages, self._ref_of
        if count != node.num_pages or count > self._wanted:
            return False
        if count > FEW_PAGES:
            if not self._is_idle(ids):
                return False
        else:
            for each in ids.tolist():
                if ref_of[each] > 1:
                    return False
        checkpoint.held[tier] = None
        leave_node(checkpoint, node)
        anchored[tier] -= 1
        if self._is_heard or tree.on_left:
            tell_left(tree, node, residency)
        if self._is_heard:
            tell(tree, run, np.ones(count, np.bool_))
        self._note_pages(node, ids, count)
        run.num_pages = run.num_ready = run.entry = 0
        run.ids = NO_PAGES
        node.runs[tier] = None
        below[tier] -= 1
        leave_tree(tree, node, self._loss)
        return True

    def _take_end(self, node: Node) -> bool:
        """The same for pages behind the last checkpoint of a leaf that stays, or of which something above changes.

        False, and nothing is changed, where there are none, or they have to go alone.
        """
        run = node.runs[self._tier]
        if run is None or node.kids is not None or node.runs[1 - self._tier] is not None or not self._needs_checkpoints:
            return False
        return self.take_run(run)

    def _is_idle(self, ids: PageIds) -> bool:
        """Whether only the tree refers to these pages."""
        if len(ids) > FEW_PAGES:
            return not np.count_nonzero(self._refs[ids] > 1)
        ref_of = self._ref_of
        for each in ids.tolist():  # noqa: SIM110 (half the time of a generator)
            if ref_of[each] > 1:
                return False
        return True

    def _left_of(self, kind: Kind) -> SlabUse:
        left = self._left.get(kind)
        if left is None:
            left = self._left[kind] = SlabUse(self._arena, kind)
        return left

    def _note_slabs(self, kind: Kind, ids: list[int]) -> None:
        """Pages of a kind go: whoever counts those of each slab counts them."""
        left = self._left_of(kind)
        stride, slab_bytes = left.stride, left.slab_bytes
        slabs = [each * stride // slab_bytes for each in ids]
        if len(slabs) > 1 and slabs.count(slabs[0]) == len(slabs):  # as most of a checkpoint's windows are
            left[slabs[0]] -= len(slabs) - 1
            del slabs[1:]
        for slab in slabs:
            left[slab] = in_use = left[slab] - 1
            if not in_use:
                self._note_empty(kind, slab)

    def _note_empty(self, kind: Kind, slab: int) -> None:
        """A slab that empties is anybody's, and changes what is short: by its pages, or by who knows what."""
        is_counted = self._has_every_slab and kind is not WINDOW  # some of those of windows may be spared for windows again
        if is_counted:
            self._wanted -= self._arena.slab_pages(PREFIX, slab)
        if not is_counted or self._wanted <= 0:
            self.is_over = True

    def _note_owner(self, account: Account | None) -> None:
        """What follows is another's: what went of the one before is no longer counted as its own."""
        if self._account is not None:
            self._tree.accounts.charge(self._account, self._tier, -self._owned_bytes)
        self._account, self._owned_bytes = account, 0

    def give_back(self) -> None:
        """Tells the arena, and whoever counts pages."""
        tree, tier = self._tree, self._tier
        self._note_owner(None)
        tree.version += 1
        if self._ids:
            ids = np.concatenate(self._ids) if len(self._ids) > 1 else self._ids[0]
            tree.owner[tier][ids.astype(np.intp)] = None
            self._arena.drop(PREFIX, ids)
        if self._windows is not None:
            self._windows.give_back()
        if self._points:
            self._arena.drop(POINT, np.array(self._points, np.int32))
