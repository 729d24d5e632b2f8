"""Decides what may be evicted from a tier, and in which order. Frees nothing.

Candidates are suffixes of prefix runs and residencies of checkpoints, in one order. A suffix is a candidate if nothing in its
tier hangs below it. A checkpoint's pages are evicted before the prefix pages it stands on. Prefix pages that no checkpoint can
reach are worthless and are evicted first of all. If the device saves what it evicts, a host copy of something that the device
has too is worth no more than copying it again, and is evicted next.

Candidates of tenants with quotas are also in a separate order, under the same number: they are evicted first if the tenant is
over its quota (`own_orders.py`).
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from stepwell.base.ids import CACHED_TIERS, Kind, Tier
from stepwell.base.spec import ModelSpec
from stepwell.memory.arena import Arena
from stepwell.policy.value import ValueClass, ValuePolicy
from stepwell.tree.accounts import Account
from stepwell.tree.evictable import EvictableSuffix, EvictableSuffixes
from stepwell.tree.eviction_order import DUPLICATE, USEFUL, WORTHLESS, EvictionOrder, Standing
from stepwell.tree.node import Node, Residency, Run, Victim, reach_of
from stepwell.tree.own_orders import Orders, OwnOrders

MOST_REQUIRED = 1024  # entries, before those that left the tree are removed
TIDY_ENTRIES = 2  # more than the one entry that a use can make out of date

Gain = tuple[int, int, int, int, bool]  # a checkpoint's saved tokens, bytes, two distances, and whether its backup is deferred


class Ranking:
    """The eviction order of every tier, and of each tenant with a quota."""

    def __init__(
        self, spec: ModelSpec, arenas: Mapping[Tier, Arena], value: ValuePolicy, limited: Iterable[Account] = (),
        *, evict_duplicates_first: bool = False,
    ) -> None:  # fmt: skip
        """`limited` are the accounts with quotas. With `evict_duplicates_first`, the host evicts what the device has too before
        anything else that is useful.
        """
        self._arenas = arenas
        self._value = value
        self._page_tokens = spec.page_tokens
        # Lists by tier, because every candidate is looked up several times.
        strides = [arenas[tier].layout.prefix_stride if tier in arenas else 1 for tier in CACHED_TIERS]
        self._page_bytes = [arenas[tier].layout.strides[Kind.PREFIX] if tier in arenas else 1 for tier in CACHED_TIERS]
        self._page_levels = [value.level(spec.page_tokens, stride, 0, 0, deferred=False) for stride in strides]
        self.evict_duplicates_first = evict_duplicates_first and len(arenas) == len(CACHED_TIERS)
        self.suffixes = EvictableSuffixes(spec, arenas, evict_duplicates_first=self.evict_duplicates_first)
        self._needs_checkpoints = spec.free_step is None  # prefix pages behind the last checkpoint are useless
        self._orders = {tier: Orders(EvictionOrder(value), EvictionOrder(value)) for tier in arenas}
        limited = tuple(limited)
        self._has_quotas = bool(limited)
        self.own = OwnOrders(limited, arenas, value)
        # Runs that are kept only because the other tier's pages require them, oldest first; some entries are stale.
        self._required_by_other_tier: dict[Tier, dict[Run, None]] = {tier: {} for tier in arenas}
        self._most_required = MOST_REQUIRED

    # ---- orders -----------------------------------------------------------------------------------

    def queue_run(self, run: Run) -> None:
        """Makes a run a candidate if it can be one; queues it again if it became worthless since it was queued.

        A run whose last page is in use is queued when that page is released.
        """
        if run.entry and run.standing == WORTHLESS:
            return
        if self.suffixes.is_in_use(run):
            return
        suffix = self.suffixes.of(run)
        if suffix is None:
            if self.suffixes.of(run, ignore_other_tier=True) is not None:
                self._note_required_by_other_tier(run)
        elif not run.entry or _rank(suffix) < run.standing:
            self._push(run, self._run_standing(run, suffix))

    def pop_required_by_other_tier(self, tier: Tier) -> tuple[Run, EvictableSuffix] | None:
        """Removes and returns an idle run that is kept only because pages of the other tier require it."""
        waiting = self._required_by_other_tier[tier]
        while waiting:
            run = next(iter(waiting))
            del waiting[run]  # if it is in use, it is queued again when it is released
            suffix = self.suffixes.of(run, ignore_other_tier=True) if run.node.runs[tier] is run else None
            if suffix is not None and self.suffixes.idle(run, suffix.start, at_most=1).num_pages:
                return run, suffix
        return None

    def _note_required_by_other_tier(self, run: Run) -> None:
        waiting = self._required_by_other_tier[run.tier]
        waiting[run] = None
        if len(waiting) > self._most_required:
            for each in [each for each in waiting if each.node.runs[each.tier] is not each]:
                del waiting[each]
            self._most_required = max(2 * len(waiting), MOST_REQUIRED)

    def queue(self, victim: Victim) -> None:
        """Makes a victim that was unqueued, but not evicted, a candidate again."""
        if isinstance(victim, Run):
            self.queue_run(victim)
        else:
            self.queue_residency(victim)

    def queue_residency(self, residency: Residency, *, again: bool = False) -> None:
        """Makes a checkpoint a candidate; `again` if its worth changed since it was queued."""
        if (again or not residency.entry) and _in_tree(residency):
            self._push(residency, self._residency_standing(residency))

    def queue_duplicate(self, residency: Residency) -> None:
        """Queues the other tier's copy of a checkpoint that became readable again: as a duplicate it is worth less."""
        other = residency.checkpoint.residencies[1 - residency.tier]
        if self.evict_duplicates_first and other is not None:
            self.queue_residency(other, again=True)

    def _push(self, victim: Victim, standing: Standing) -> None:
        self._orders[victim.tier].of(victim).push(victim, standing)
        if self._has_quotas and (account := _account_of(victim)).quota_bytes is not None:
            self.own.push(victim, standing, account)

    def unqueue(self, victim: Victim, account: Account) -> None:
        """The victim is no longer a candidate. If it left its tier, its account must not count it any more."""
        victim.entry = 0
        if account.quota_bytes is not None:
            self.own.note_stale(victim, account)

    def tidy(self, tier: Tier, of: Iterable[Account] = ()) -> None:
        """Brings a few entries of the tier's order and of the orders of the accounts `of` up to date.

        Called with every release, so that evictions meet no backlog.
        """
        self._tidy(self._orders[tier])
        for account in of:
            if account.quota_bytes is not None:
                self._tidy(self.own[account, tier])

    def _tidy(self, orders: Orders) -> None:
        for order in orders:
            for _ in range(TIDY_ENTRIES):
                self._settle(order.next_head())

    def is_worth_more(self, victim: Victim, tier: Tier) -> bool:
        """Whether a victim is worth more than the first candidate of `tier`, or `tier` has no candidate.

        Brings entries up to date, but removes no candidate.
        """
        standing = self._standing(victim)
        if standing is None or standing.rank == WORTHLESS:
            return False
        heads = [head for order in self._orders[tier] if (head := self._settled_head(order)) is not None]
        rank = self._orders[tier].runs.rank
        return not heads or min(rank(head[1]) for head in heads) < rank(standing)

    def value_class_of(self, victim: Victim) -> ValueClass | None:
        """The value class of a victim; None if it is no candidate, or worthless or a duplicate."""
        standing = self._standing(victim)
        return standing.value_class if standing is not None and standing.rank == USEFUL else None

    def value_class_of_pages(self, node: Node, tier: Tier) -> ValueClass:
        """The value class of a node's prefix pages, as if nothing depended on them."""
        group, since = self._value.due(node.used_at, node.urgent_until, node.visit)
        return ValueClass(group, self._page_levels[tier], since)

    def worth(self, value_class: ValueClass) -> float:
        """What a value class is worth now: expected recompute saved per byte and second."""
        return self._value.worth(*value_class)

    def pop(self, tier: Tier, *, runs: bool, checkpoints: bool, of: Account | None = None) -> Victim | None:
        """Removes and returns the least valuable candidate of the wanted sorts, with `of` among those of a tenant with a quota.

        The caller evicts it or queues it again.
        """
        orders = self._orders[tier] if of is None else self.own[of, tier]
        first = self._first(orders, runs=runs, checkpoints=checkpoints)
        if of is not None:
            self.own.note_asked(of, tier)
        if first is not None:
            self.unqueue_for_now(first)
        return first

    def freeze_time(self, tier: Tier) -> bool:
        """Keeps values in a tier constant until `unfreeze_time`, so its order stays valid. False if time is frozen already."""
        runs, checkpoints = self._orders[tier]
        return runs.freeze_time() and checkpoints.freeze_time()

    def unfreeze_time(self, tier: Tier) -> None:
        """Lets values in a tier change with time again."""
        for order in self._orders[tier]:
            order.unfreeze_time()

    def _first(self, orders: Orders, *, runs: bool, checkpoints: bool) -> Victim | None:
        first = self._settled_head(orders.runs) if runs and orders.runs else None
        if checkpoints and orders.checkpoints and (first is None or first[1].rank > WORTHLESS):
            rank = orders.checkpoints.rank
            other = self._settled_head(orders.checkpoints)
            if other is not None and (first is None or rank(other[1]) < rank(first[1])):
                first = other
        return first[0] if first is not None else None

    def _settled_head(self, order: EvictionOrder) -> tuple[Victim, Standing] | None:
        """The order's first entry, after it was brought up to date."""
        while (head := order.head()) is not None:
            standing = self._settle(head)
            if standing is not None:
                return head[0], standing
        return None

    def _settle(self, entry: tuple[Victim, Standing] | None) -> Standing | None:
        """The standing of an entry's victim if the entry is up to date; otherwise removes it, and queues the victim correctly."""
        if entry is None:
            return None
        victim, then = entry
        standing = self._standing(victim)
        if standing == then or (standing is not None and _is_as_queued(standing, then)):
            return standing
        if standing is None:
            self.unqueue_for_now(victim)  # something depends on it now, and queues it when that ends
        else:  # used since it was queued
            self._push(victim, standing)
        return None

    def unqueue_for_now(self, victim: Victim) -> None:
        """Makes a victim that stays in its tier no candidate for now."""
        victim.entry = 0
        if self._has_quotas:
            self.unqueue(victim, _account_of(victim))

    def _standing(self, victim: Victim) -> Standing | None:
        if isinstance(victim, Run):
            suffix = self.suffixes.of(victim)
            return None if suffix is None else self._run_standing(victim, suffix)
        return self._residency_standing(victim) if _in_tree(victim) else None

    def _run_standing(self, run: Run, suffix: EvictableSuffix) -> Standing:
        node = run.node
        if suffix.unreachable:
            return Standing(WORTHLESS, ValueClass(0, 0, node.used_at))
        value_class = self.value_class_of_pages(node, run.tier)
        return Standing(USEFUL, value_class) if not suffix.duplicate else _as_duplicate(value_class)

    def _residency_standing(self, residency: Residency) -> Standing:
        group, since = self._due_of(residency)
        value_class = ValueClass(group, self._level_of(residency), since)
        return Standing(USEFUL, value_class) if not self._is_duplicate(residency) else _as_duplicate(value_class)

    def _due_of(self, residency: Residency) -> tuple[int, float]:
        checkpoint = residency.checkpoint
        node = checkpoint.node
        assert node is not None
        return self._value.due(checkpoint.used_at, node.urgent_until, node.visit)

    def _level_of(self, residency: Residency) -> int:
        node = residency.checkpoint.node
        assert node is not None
        *gain, deferred = self._gain_of(residency, node)
        return self._value.level(*gain, deferred=deferred)

    def _gain_of(self, residency: Residency, node: Node) -> Gain:
        """The arguments of `ValuePolicy.level` for a checkpoint."""
        checkpoint = residency.checkpoint
        page, follower = checkpoint.page, checkpoint.following
        size = residency.size_bytes
        before, num_alone = reach_of(node, page)
        if self._needs_checkpoints:
            size += num_alone * self._page_bytes[residency.tier]
        page_tokens, visit = self._page_tokens, node.visit
        end = visit.end if visit is not None else page
        distance = (end - page + 1) * page_tokens if end > page else page_tokens
        next_distance = 0
        if follower is not None and follower.node is not None:
            next_distance = (end - follower.page + 1) * page_tokens if end > follower.page else page_tokens
        return (page - before) * page_tokens, size or 1, next_distance, distance, residency.backup_deferred

    def _is_duplicate(self, residency: Residency) -> bool:
        """Whether this is the host's copy of a checkpoint that the device has too, with no deferred backup."""
        if not self.evict_duplicates_first or residency.tier is not Tier.HOST or residency.backup_deferred:
            return False
        other = residency.checkpoint.ready_in(Tier.DEVICE)
        return other is not None and not other.leaving


def _rank(suffix: EvictableSuffix) -> int:
    return WORTHLESS if suffix.unreachable else DUPLICATE if suffix.duplicate else USEFUL


def _as_duplicate(value_class: ValueClass) -> Standing:
    return Standing(DUPLICATE, value_class._replace(last_visit_s=-value_class.last_visit_s))


def _is_as_queued(standing: Standing, then: Standing) -> bool:
    """Whether a victim stands no higher than when it was queued. A victim in another value class must be queued there."""
    if standing.rank != then.rank:
        return standing.rank < then.rank
    same_class = standing.value_class[:2] == then.value_class[:2]
    return same_class and standing.value_class.last_visit_s <= then.value_class.last_visit_s


def _account_of(victim: Victim) -> Account:
    node = victim.node if isinstance(victim, Run) else victim.checkpoint.node
    assert node is not None, f"{victim} is queued, and not in the tree"
    return node.account


def _in_tree(residency: Residency) -> bool:
    checkpoint = residency.checkpoint
    return checkpoint.node is not None and checkpoint.residencies[residency.tier] is residency
