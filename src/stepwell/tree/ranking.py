"""Who may be evicted from a tier, and who goes first. Decides; frees nothing.

Candidates are the tails of prefix runs and the residencies of checkpoints, in one order. A tail is one when
nothing in its tier hangs below it. A checkpoint's pages go before the prefix pages it stands on, and
prefix pages that no checkpoint reaches any more are worth nothing and go first of all. Where the device saves what leaves it, a
host copy of what the device has too is worth no more than that copy costs, and goes next.

What belongs to a tenant with a quota is in an order of its own beside that of its tier, under the same number: it goes first
when its tenant has too much (`own_orders.py`).
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from stepwell.base.ids import CACHED_TIERS, Kind, Tier
from stepwell.base.spec import ModelSpec
from stepwell.memory.arena import Arena
from stepwell.policy.value import Place, ValuePolicy
from stepwell.tree.accounts import Account
from stepwell.tree.eviction_order import REPEATED, USEFUL, WORTHLESS, EvictionOrder, Standing
from stepwell.tree.node import Node, Residency, Run, Victim, reach_of
from stepwell.tree.own_orders import Orders, OwnOrders
from stepwell.tree.tails import Tail, Tails

MOST_DEPENDED_ON = 1024  # before those that have left the tree are taken out
TIDY_ENTRIES = 2  # more than the one entry that a use can make out of date

Gain = tuple[int, int, int, int, bool]  # of a checkpoint: tokens saved, bytes, distances, whether its backup is deferred


class Ranking:
    """The eviction order of every tier, and in it that of each tenant with a quota."""

    def __init__(
        self, spec: ModelSpec, arenas: Mapping[Tier, Arena], value: ValuePolicy, limited: Iterable[Account] = (),
        *, repeats_first: bool = False,
    ) -> None:  # fmt: skip
        """`limited` are accounts that may have to lose something before others do. With `repeats_first`, the host gives up what
        the device has too before anything else of use.
        """
        self._arenas = arenas
        self._value = value
        self._page_tokens = spec.page_tokens
        # A list by tier: every candidate comes by here several times.
        strides = [arenas[tier].layout.prefix_stride if tier in arenas else 1 for tier in CACHED_TIERS]
        self._page_bytes = [arenas[tier].layout.strides[Kind.PREFIX] if tier in arenas else 1 for tier in CACHED_TIERS]
        self._page_levels = [value.level(spec.page_tokens, stride, 0, 0, deferred=False) for stride in strides]
        self.repeats_first = repeats_first and len(arenas) == len(CACHED_TIERS)
        self.tails = Tails(spec, arenas, repeats_first=self.repeats_first)
        self._needs_checkpoints = spec.free_step is None  # prefix pages are of no use behind the last checkpoint
        self._orders = {tier: Orders(EvictionOrder(value), EvictionOrder(value)) for tier in arenas}
        limited = tuple(limited)
        self._has_quotas = bool(limited)
        self.own = OwnOrders(limited, arenas, value)
        # Runs that are kept only because the other tier's pages depend on them, oldest first; some are out of date.
        self._depended_on: dict[Tier, dict[Run, None]] = {tier: {} for tier in arenas}
        self._most_depended_on = MOST_DEPENDED_ON

    # ---- orders -----------------------------------------------------------------------------------

    def queue_run(self, run: Run) -> None:
        """Makes a run a candidate if it may be one; a run that lost its worth since it was queued is queued again.

        Not while its last page is in use: whoever gives that back will queue it.
        """
        if run.entry and run.standing == WORTHLESS:
            return
        if self.tails.is_in_use(run):
            return
        tail = self.tails.of(run)
        if tail is None:
            if self.tails.of(run, cut_off=True) is not None:
                self._note_depended_on(run)
        elif not run.entry or _rank(tail) < run.standing:
            self._push(run, self._run_standing(run, tail))

    def pop_depended_on(self, tier: Tier) -> tuple[Run, Tail] | None:
        """Takes out an idle run that is kept only because the other tier's pages depend on it: they would go with it."""
        waiting = self._depended_on[tier]
        while waiting:
            run = next(iter(waiting))
            del waiting[run]  # whoever gives it back, if it is in use, will queue it again
            tail = self.tails.of(run, cut_off=True) if run.node.runs[tier] is run else None
            if tail is not None and self.tails.idle(run, tail.start, at_most=1).num_pages:
                return run, tail
        return None

    def _note_depended_on(self, run: Run) -> None:
        waiting = self._depended_on[run.tier]
        waiting[run] = None
        if len(waiting) > self._most_depended_on:
            for each in [each for each in waiting if each.node.runs[each.tier] is not each]:
                del waiting[each]
            self._most_depended_on = max(2 * len(waiting), MOST_DEPENDED_ON)

    def queue(self, victim: Victim) -> None:
        """Makes somebody a candidate again who was taken out and stays."""
        if isinstance(victim, Run):
            self.queue_run(victim)
        else:
            self.queue_residency(victim)

    def queue_residency(self, residency: Residency, *, again: bool = False) -> None:
        """Makes a checkpoint a candidate; `again` when its worth has changed since it was queued."""
        if (again or not residency.entry) and _in_tree(residency):
            self._push(residency, self._residency_standing(residency))

    def queue_repeated(self, residency: Residency) -> None:
        """A checkpoint can be read in a tier: its copy in the other is worth less from now on, where repetitions go first."""
        other = residency.checkpoint.held[1 - residency.tier]
        if self.repeats_first and other is not None:
            self.queue_residency(other, again=True)

    def _push(self, victim: Victim, standing: Standing) -> None:
        self._orders[victim.tier].of(victim).push(victim, standing)
        if self._has_quotas and (account := _account_of(victim)).quota_bytes is not None:
            self.own.push(victim, standing, account)

    def unqueue(self, victim: Victim, account: Account) -> None:
        """It is no candidate any more. If it left its tier, its account does not count it any more."""
        victim.entry = 0
        if account.quota_bytes is not None:
            self.own.note_death(victim, account)

    def tidy(self, tier: Tier, of: Iterable[Account] = ()) -> None:
        """Brings a few entries up to date, also in the own orders of those whose things they are that were given back.

        Called whenever something is, so that no eviction meets a backlog.
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
        """Whether a candidate of one tier is worth more than what would leave another first to make room for it.

        Also where nothing could leave that tier now. Brings entries up to date; takes nothing out.
        """
        standing = self._standing(victim)
        if standing is None or standing.rank == WORTHLESS:
            return False
        heads = [head for order in self._orders[tier] if (head := self._settled_head(order)) is not None]
        rank = self._orders[tier].runs.rank
        return not heads or min(rank(head[1]) for head in heads) < rank(standing)

    def place_of(self, victim: Victim) -> Place | None:
        """What a candidate is worth, as a place; None where it is none, or of no use."""
        standing = self._standing(victim)
        return standing.place if standing is not None and standing.rank == USEFUL else None

    def place_of_pages(self, node: Node, tier: Tier) -> Place:
        """The same for the prefix pages of a node, as if nothing stood on them."""
        group, since = self._value.due(node.used_at, node.urgent_until, node.visit)
        return Place(group, self._page_levels[tier], since)

    def worth(self, place: Place) -> float:
        """Of a place, now: recompute saved per byte and second, of what was put there whenever."""
        return self._value.worth(*place)

    def pop(self, tier: Tier, *, runs: bool, checkpoints: bool, of: Account | None = None) -> Victim | None:
        """Takes the least valuable candidate of the wanted sorts out of the order; with `of`, out of what one tenant has, who
        has a quota.

        It comes back when somebody queues it again.
        """
        orders = self._orders[tier] if of is None else self.own[of, tier]
        first = self._first(orders, runs=runs, checkpoints=checkpoints)
        if of is not None:
            self.own.note_asked(of, tier)
        if first is not None:
            self.take_out(first)
        return first

    def hold(self, tier: Tier) -> bool:
        """Nobody's worth changes in a tier until `let_go`, so that its order need not be found again. False where it was held."""
        runs, checkpoints = self._orders[tier]
        return runs.hold() and checkpoints.hold()

    def let_go(self, tier: Tier) -> None:
        """Time passes again."""
        for order in self._orders[tier]:
            order.let_go()

    def _first(self, orders: Orders, *, runs: bool, checkpoints: bool) -> Victim | None:
        first = self._settled_head(orders.runs) if runs and orders.runs else None
        if checkpoints and orders.checkpoints and (first is None or first[1].rank > WORTHLESS):
            rank = orders.checkpoints.rank
            other = self._settled_head(orders.checkpoints)
            if other is not None and (first is None or rank(other[1]) < rank(first[1])):
                first = other
        return first[0] if first is not None else None

    def _settled_head(self, order: EvictionOrder) -> tuple[Victim, Standing] | None:
        """The order's first entry, once that is up to date."""
        while (head := order.head()) is not None:
            standing = self._settle(head)
            if standing is not None:
                return head[0], standing
        return None

    def _settle(self, entry: tuple[Victim, Standing] | None) -> Standing | None:
        """Where an entry's victim stands, if it still stands there; else takes the entry out, and queues it where it belongs."""
        if entry is None:
            return None
        victim, then = entry
        standing = self._standing(victim)
        if standing == then or (standing is not None and _is_as_queued(standing, then)):
            return standing
        if standing is None:
            self.take_out(victim)  # something stands on it, and will queue it
        else:  # used since it was queued
            self._push(victim, standing)
        return None

    def take_out(self, victim: Victim) -> None:
        """It is no candidate for now, and stays in its tier."""
        victim.entry = 0
        if self._has_quotas:
            self.unqueue(victim, _account_of(victim))

    def _standing(self, victim: Victim) -> Standing | None:
        if isinstance(victim, Run):
            tail = self.tails.of(victim)
            return None if tail is None else self._run_standing(victim, tail)
        return self._residency_standing(victim) if _in_tree(victim) else None

    def _run_standing(self, run: Run, tail: Tail) -> Standing:
        node = run.node
        if tail.dead:
            return Standing(WORTHLESS, Place(0, 0, node.used_at))
        place = self.place_of_pages(node, run.tier)
        return Standing(USEFUL, place) if not tail.repeated else _repeated(place)

    def _residency_standing(self, residency: Residency) -> Standing:
        group, since = self._due_of(residency)
        place = Place(group, self._level_of(residency), since)
        return Standing(USEFUL, place) if not self._is_repeated(residency) else _repeated(place)

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
        """What the level of a checkpoint depends on, as `ValuePolicy.level` takes it."""
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

    def _is_repeated(self, residency: Residency) -> bool:
        """Whether the host has it beside the device, and nobody below waits for it."""
        if not self.repeats_first or residency.tier is not Tier.HOST or residency.backup_deferred:
            return False
        other = residency.checkpoint.ready_in(Tier.DEVICE)
        return other is not None and not other.leaving


def _rank(tail: Tail) -> int:
    return WORTHLESS if tail.dead else REPEATED if tail.repeated else USEFUL


def _repeated(place: Place) -> Standing:
    return Standing(REPEATED, place._replace(since=-place.since))


def _is_as_queued(standing: Standing, then: Standing) -> bool:
    """Whether a victim stands no higher than when it was queued; what is in another place is looked at there."""
    if standing.rank != then.rank:
        return standing.rank < then.rank
    same_place = standing.place[:2] == then.place[:2]
    return same_place and standing.place.since <= then.place.since


def _account_of(victim: Victim) -> Account:
    node = victim.node if isinstance(victim, Run) else victim.checkpoint.node
    assert node is not None, f"{victim} is queued, and not in the tree"
    return node.account


def _in_tree(residency: Residency) -> bool:
    checkpoint = residency.checkpoint
    return checkpoint.node is not None and checkpoint.held[residency.tier] is residency
