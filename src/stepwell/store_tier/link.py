"""One attached store, as the cache sees it: operations on their way, what it is believed to have, and whether it is well.

A belief may be wrong: a store evicts without telling. It then costs a miss later, never more, since whoever sends something down
asks the store first. The tree tells of every node that it cuts and of everything that leaves it.

The verbs that use a link are in `prefetch.py` (upwards) and `backup.py` (downwards).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from enum import Enum
from threading import Thread
from typing import NamedTuple

import numpy as np

from stepwell.base.config import StoreConfig
from stepwell.base.errors import StoreError
from stepwell.base.ids import Kind, Tier
from stepwell.base.prompt import Namespace, PageKey
from stepwell.base.tasks import PageIds
from stepwell.policy.displaced import Displaced
from stepwell.policy.expected import ComputeTime, FetchTime
from stepwell.policy.store_use import KEPT_OF_MEAN, Breaker, BreakerState, StoreTuning
from stepwell.store.api import Store, unregister
from stepwell.store_tier.deferred import DeferredBackups
from stepwell.store_tier.ops import StoreOps
from stepwell.store_tier.ticket import Fetch, Ticket
from stepwell.tiers.state import CacheState
from stepwell.tree.node import ABSENT, Checkpoint, Loss, Node, Residency, Victim

MOST_GIVEN_UP = 256  # notes of fetches that were not waited for, for explanations
MOST_WAIT_S = 1.0  # that room on the host waits for a store which takes nothing
RESTED_S = 10.0  # without a step, after which what waits was not waiting for the store
MOST_PUTS = 4  # operations that go down at a time: the rest waits in line, where it holds nothing


class Beliefs:
    """What one store is believed to have of what is in memory: pages by node, and checkpoints. One thread."""

    def __init__(self) -> None:
        self._pages: dict[Node, int] = {}  # of its first pages, how many; nodes with none are left out
        self._pages_at_s: dict[Node, float] = {}  # since when, of the same nodes
        self._checkpoints: dict[Checkpoint, float] = {}  # since when
        self._arriving: set[Checkpoint] = set()
        self._boundaries: dict[Node, set[int]] = {}  # where checkpoints went down, in memory or not any more
        self._owed: set[Node] = set()  # that things in the store stand on, and which are not there themselves

    def pages(self, node: Node) -> int:
        """How many of a node's first pages are believed to be in the store, or on their way there."""
        return self._pages.get(node, 0)

    def fresh_pages(self, node: Node) -> int:
        """The same, none where the node was used since they went there."""
        return self._pages.get(node, 0) if node.used_at <= self._pages_at_s.get(node, 0.0) else 0

    def is_fresh(self, checkpoint: Checkpoint) -> bool:
        """Whether a checkpoint was not used since it went to the store."""
        return self.has(checkpoint) and checkpoint.used_at <= self._checkpoints[checkpoint]

    def set_pages(self, node: Node, count: int, *, at_s: float | None = None) -> None:
        if count > 0:
            self._pages[node] = count
            if at_s is not None:
                self._pages_at_s[node] = at_s
                if count == node.num_pages:
                    self._owed.discard(node)
        else:
            self._pages.pop(node, None)
            self._pages_at_s.pop(node, None)

    def has(self, checkpoint: Checkpoint) -> bool:
        """Whether a checkpoint is believed to be in the store, or on its way there."""
        return checkpoint in self._checkpoints

    def has_arrived(self, checkpoint: Checkpoint) -> bool:
        """The same, once the store has answered for it."""
        return checkpoint in self._checkpoints and checkpoint not in self._arriving

    def add(self, checkpoint: Checkpoint, *, arriving: bool = False, at_s: float = 0.0) -> None:
        self._checkpoints[checkpoint] = max(at_s, self._checkpoints.get(checkpoint, 0.0))
        if arriving:
            self._arriving.add(checkpoint)
        else:
            self._arriving.discard(checkpoint)

    def answered(self, checkpoint: Checkpoint, *, stored: bool) -> None:
        """The store has answered for one that was on its way, which may have left memory meanwhile."""
        if stored and checkpoint.node is not None:
            self.add(checkpoint)
        else:
            self.remove(checkpoint)

    def note_boundary(self, node: Node, page: int) -> None:
        """A checkpoint of a node goes down, and is known to be there when it has left memory."""
        self._boundaries.setdefault(node, set()).add(page)

    def take_boundaries(self, node: Node) -> list[int]:
        """Where checkpoints of a node went down, each told once."""
        return sorted(self._boundaries.pop(node, ()))

    def must_store(self, node: Node) -> bool:
        """Whether something went down without pages of a node that it stands on: they have to follow it."""
        return node in self._owed

    def note_owed(self, node: Node, page: int) -> None:
        """What stands on a node's path up to `page` goes down, whatever the store has of that."""
        for each in node.path():
            if self.fresh_pages(each) < min(each.end, page) - each.start:
                self._owed.add(each)

    def remove(self, checkpoint: Checkpoint) -> None:
        self._checkpoints.pop(checkpoint, None)
        self._arriving.discard(checkpoint)

    def node_split(self, upper: Node) -> None:
        """A node was cut in two; `upper` is the new first part, and what it was cut from its only child."""
        assert upper.kids is not None
        lower = next(iter(upper.kids.by_page.values()))
        count, at_s = self.pages(lower), self._pages_at_s.get(lower)
        for page in self.take_boundaries(lower):
            self.note_boundary(upper if page <= upper.end else lower, page)
        owed = lower in self._owed
        self.set_pages(upper, min(count, upper.num_pages), at_s=at_s)
        self.set_pages(lower, count - upper.num_pages)
        if owed:
            self._owed |= {upper, lower}

    def node_shortened(self, node: Node) -> None:
        """A node lost its last pages, or all of them."""
        if not node.num_pages:
            self._owed.discard(node)
        if node in self._boundaries:
            left = {page for page in self._boundaries.pop(node) if node.parent is not None and page <= node.end}
            if left:
                self._boundaries[node] = left
        if node in self._pages:
            self.set_pages(node, min(self._pages[node], node.num_pages))

    def audit(self) -> None:
        """Asserts that nothing is believed of what has left memory."""
        for node in self._owed:
            assert node.parent is not None, f"{node} left memory, and is still to be stored"
        for node, count in self._pages.items():
            assert node.parent is not None and 0 < count <= node.num_pages, f"{count} page(s) believed of {node}"
        assert self._arriving <= self._checkpoints.keys(), (
            f"{len(self._arriving - self._checkpoints.keys())} arrive that are not believed"
        )
        for node, pages in self._boundaries.items():
            assert node.parent is not None and all(node.start < page <= node.end for page in pages), f"{pages} of {node}"
        for checkpoint in self._checkpoints:
            assert checkpoint.node is not None, f"boundary {checkpoint.page} left memory, and is still believed to be stored"


class LinkState(Enum):
    ATTACHED = "attached"
    SWITCHED_OFF = "switched off after failures"
    DETACHED = "detached"


class Unplaced(NamedTuple):
    """Since when a path waits for room on the host, and how much the store had taken when it was last tried."""

    since_s: float
    num_taken: int = -1


@dataclass(kw_only=True, eq=False)
class StoreLink:
    """What stands behind one attached store. One thread."""

    store: Store
    config: StoreConfig
    tuning: StoreTuning
    ops: StoreOps
    compute: ComputeTime  # what waiting for the store is held against
    barred: set[bytes]  # namespaces that were cleared: what any store has of them is not to be used
    beliefs: Beliefs
    breaker: Breaker  # opens when the store fails
    fetching: Breaker = field(default_factory=Breaker)  # opens when what it says it has is of no use, or does not come in time
    fetch_time: FetchTime = field(default_factory=FetchTime)
    asking_s: float | None = None  # that the store takes to say what it has
    trials: list[Ticket] = field(default_factory=list)  # opened to measure the store, for no request
    tickets: dict[Ticket, None] = field(default_factory=dict)  # open ones, oldest first
    fetches: dict[Fetch, None] = field(default_factory=dict)  # whose pages are still held for somebody
    fetch_of: dict[int, Fetch] = field(default_factory=dict)  # by host page on its way
    to_plan: dict[Ticket, None] = field(default_factory=dict)  # that learned something since they planned last
    to_plan_later: dict[Ticket, None] = field(default_factory=dict)  # those for whom room on the host is on its way
    to_load: dict[Ticket, None] = field(default_factory=dict)  # of whose pages some came since
    next_look_s: float = 0.0  # when tickets that their engines forgot are looked for next
    given_up: dict[PageKey, Loss] = field(
        default_factory=dict
    )  # fetches, by the first page that was not waited for, oldest first
    waiting: dict[Node, float] = field(default_factory=dict)  # paths to be backed up, by their last node: since when
    unplaced: dict[Node, Unplaced] = field(default_factory=dict)  # paths that wait for room on the host first
    deferred: DeferredBackups  # checkpoints whose pages were backed up
    most_backup_bytes: int  # on their way down before nothing more is sent off
    backup_bytes: int = 0  # on their way down
    num_putting: int = 0  # operations that go down
    is_late: bool = False  # things go down when memory needs their room, and not before
    is_durable: bool = False  # what is committed goes down soon, whatever the write policy says
    displaced: Displaced  # what the store would give up for what goes down late
    is_superseded: Callable[[Checkpoint], bool]  # by a later checkpoint of its path
    ahead: dict[Victim, bool] = field(default_factory=dict)  # to be stored before they leave; whether to try to complete it
    num_taken: int = 0  # operations that stored something
    came_by_s: float = 0.0  # when somebody last looked whether anything can be sent down
    putting_since_s: float = 0.0  # when something began to go down, or the latest of it was answered
    left_bytes: int = 0  # that left the host since what will follow was looked for
    detached: bool = False
    current: bool = True  # no other store was attached since
    ended: bool = False  # detached, with its last operation answered: the store is its owner's again
    keeps_memory: bool = False  # the store goes on knowing the host's memory: it was attached again
    giving_back: Thread | None = None  # on which the store forgets the host's memory
    why_not_given_back: list[str] = field(default_factory=list)

    @property
    def state(self) -> LinkState:
        if self.detached:
            return LinkState.DETACHED
        return LinkState.ATTACHED if self.breaker.state is BreakerState.CLOSED else LinkState.SWITCHED_OFF

    @property
    def num_busy(self) -> int:
        """Operations under way, and what waits to be backed up and could be now."""
        return self.ops.num_running + len(self.waiting) + len(self.unplaced) + len(self.ahead) + self.deferred.num_due

    def has_given_back(self, memory: Sequence[memoryview], *, wait_s: float = 0.0) -> bool:
        """Lets the store forget the host's memory, once nothing is under way; whether it has. On a thread: it may take long."""
        assert not self.ops.num_running, f"{self.ops.num_running} operation(s) are using the memory"
        if not self.store.traits.registers or self.keeps_memory:
            return True
        if self.giving_back is None:
            self.giving_back = Thread(target=self._give_back, args=(memory,), name="stepwell-give-back", daemon=True)
            self.giving_back.start()
        self.giving_back.join(wait_s)
        return not self.giving_back.is_alive()

    def keep_memory(self) -> None:
        """The store is attached again: it keeps the host's memory registered. Raises StoreError while it is unregistering it,
        which may take long or hang: attaching must not wait for that.
        """
        if self.giving_back is not None and self.giving_back.is_alive():
            raise StoreError(
                "this store was detached, and is still unregistering the host's memory: attach it once step() has reported it "
                "as detached"
            )
        self.keeps_memory = True

    def take_failures(self) -> list[str]:
        """What went wrong since it was last asked."""
        mine, self.why_not_given_back = self.why_not_given_back, []
        return [*self.ops.take_failures(), *mine]

    def _give_back(self, memory: Sequence[memoryview]) -> None:
        try:
            unregister(self.store, memory)
        except Exception as error:  # the worker boundary: it comes home in `take_failures`
            self.why_not_given_back.append(f"the store keeps the host's memory: {type(error).__name__}: {error}")

    def stored_pages(self, node: Node) -> int:
        """How many of a node's first pages need not be sent down. Those used since they were are asked for again, if the host
        has them.
        """
        run = node.runs[Tier.HOST]
        if not self.is_late or run is None or run.ids[0] == ABSENT:
            return self.beliefs.pages(node)
        return self.beliefs.fresh_pages(node)

    def node_split(self, upper: Node) -> None:
        """A node was cut in two: both parts wait where it did, since the lower one may leave before its turn comes."""
        self.beliefs.node_split(upper)
        assert upper.kids is not None
        (lower,) = upper.kids.by_page.values()
        if lower in self.waiting:
            self.waiting[upper] = self.waiting[lower]
        if lower in self.unplaced:
            self.unplaced[upper] = self.unplaced[lower]

    @property
    def turn_bytes(self) -> int:
        """What one reader fetches in one call."""
        return self.tuning.fetch_chunk_bytes or self.store.traits.turn_bytes

    def namespace_of(self, state: CacheState, node: Node) -> Namespace | None:
        """Whose a node is; None when nothing of theirs may be stored."""
        digest = node.root.first
        return state.namespaces.get(digest) if digest not in self.barred else None

    def serves(self, namespace: Namespace) -> bool:
        """Whether what this store has of a namespace may be used: it is the one that is attached, and nobody cleared that."""
        return self.current and not self.detached and namespace.digest not in self.barred

    def may_fetch(self, now: float) -> bool:
        """Whether both the store and what comes from it are well enough to ask."""
        return self.breaker.allows(now) and self.fetching.allows(now)

    def learn_reads(self, now: float) -> None:
        """What the store tried at its opening is believed until something was fetched."""
        if not self.fetch_time.is_known:
            for read in self.store.traits.reads:
                self.fetch_time.measure(read.size_bytes, read.seconds, now)

    def note_asked(self, took_s: float) -> None:
        """The store took so long to say what it has."""
        self.asking_s = took_s if self.asking_s is None else KEPT_OF_MEAN * self.asking_s + (1 - KEPT_OF_MEAN) * took_s

    def came_by(self, now: float) -> None:
        """Somebody looks whether anything can be sent down. After a long pass or an idle hour what waits has had no chance,
        though the store may have been free: its time begins anew.
        """
        if now - self.came_by_s > RESTED_S:
            self.waiting = dict.fromkeys(self.waiting, now)
            self.unplaced = {node: Unplaced(now, each.num_taken) for node, each in self.unplaced.items()}
            self.deferred.rested(now)
        self.came_by_s = now

    def may_put(self, now: float) -> bool:
        """Whether more may be sent down: a store that hangs never holds more than a small part of the host tier."""
        return self.num_putting < MOST_PUTS and self.backup_bytes < self.most_backup_bytes and self.breaker.allows(now)

    def may_put_at_once(self, now: float) -> bool:
        """The same for what would be lost otherwise, which may be twice as much: one request for room can turn out many."""
        return self.backup_bytes < 2 * self.most_backup_bytes and self.breaker.allows(now)

    def put_began(self, size_bytes: int, now: float) -> None:
        if not self.num_putting:
            self.putting_since_s = now
        self.backup_bytes += size_bytes
        self.num_putting += 1

    def put_ended(self, size_bytes: int, now: float, *, taken: bool) -> None:
        self.backup_bytes -= size_bytes
        self.num_putting -= 1
        self.putting_since_s = now
        self.num_taken += taken

    def is_taking(self, now: float) -> bool:
        """Whether room on the host may wait for what goes down. A store that hangs must not cost more than it saves."""
        return self.num_taken > 0 and self.num_putting > 0 and now - self.putting_since_s <= MOST_WAIT_S

    def note_given_up(self, ticket: Ticket, loss: Loss) -> None:
        """Remembers for a while that a request went on without what the store may have of it."""
        missing = np.flatnonzero(~ticket.from_store[ticket.first_asked :])
        at = ticket.first_asked + int(missing[0]) if len(missing) else len(ticket.keys) - 1  # or only a checkpoint was missing
        self.given_up.pop(ticket.keys[at], None)
        self.given_up[ticket.keys[at]] = loss
        if len(self.given_up) > MOST_GIVEN_UP:
            del self.given_up[next(iter(self.given_up))]

    def forget_given_up(self, ticket: Ticket) -> None:
        """What was not waited for once has been since."""
        for key in ticket.keys if self.given_up else ():
            self.given_up.pop(key, None)

    @property
    def held_bytes(self) -> int:
        """Host bytes that fetches hold: for requests that have not begun, or because they failed a moment ago."""
        return sum(fetch.size_bytes for fetch in self.fetches) + self.ops.held_bytes

    def holders(self) -> Iterator[tuple[Tier, Kind, PageIds]]:
        """Every reference held on the store's behalf, for audits."""
        for span in self.ops.held():
            yield span.tier, span.kind, span.ids
        for fetch in self.fetches:
            yield Tier.HOST, Kind.PREFIX, fetch.ids

    def readers(self) -> Iterator[Residency]:
        yield from self.ops.readers()
        for fetch in self.fetches:
            yield from fetch.residencies
