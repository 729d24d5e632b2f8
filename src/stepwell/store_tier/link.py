"""One attached store, as the cache sees it: operations in flight, what it is believed to have, and its health.

A belief may be wrong: a store evicts without notice. That costs a miss later, never more, since the store worker queries the
store before it writes. The tree reports every node that it splits and everything that is evicted from it.

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
from stepwell.policy.expected import ComputeTime, FetchTime
from stepwell.policy.store_use import KEPT_OF_MEAN, Breaker, BreakerState, StoreTuning
from stepwell.policy.store_victims import StoreVictimEstimate
from stepwell.store.api import Store, unregister
from stepwell.store_tier.deferred import DeferredBackups
from stepwell.store_tier.ops import StoreOps
from stepwell.store_tier.ticket import Fetch, Ticket
from stepwell.tiers.state import CacheState
from stepwell.tree.node import ABSENT, Checkpoint, Loss, Node, Residency, Victim

MOST_GIVEN_UP = 256  # notes of fetches that were not waited for, for explanations
MOST_WAIT_S = 1.0  # how long space on the host may wait for a store that accepts nothing
RESTED_S = 10.0  # without a step, after which timers restart: the delay was not the store's
MOST_PUTS = 4  # write operations at a time: others wait in the queue, where they hold nothing


class Beliefs:
    """What one store is believed to have of what is in memory: pages by node, and checkpoints. One thread."""

    def __init__(self) -> None:
        self._pages: dict[Node, int] = {}  # number of stored first pages; nodes without any are left out
        self._pages_at_s: dict[Node, float] = {}  # since when, for the same nodes
        self._checkpoints: dict[Checkpoint, float] = {}  # since when
        self._arriving: set[Checkpoint] = set()
        self._boundaries: dict[Node, set[int]] = {}  # boundaries of stored checkpoints, in memory or not
        self._owed: set[Node] = set()  # nodes that are not stored, but that stored content depends on

    def pages(self, node: Node) -> int:
        """How many of a node's first pages are believed to be in the store, or in flight to it."""
        return self._pages.get(node, 0)

    def fresh_pages(self, node: Node) -> int:
        """Like `pages`, but 0 if the node was used since they were stored."""
        return self._pages.get(node, 0) if node.used_at <= self._pages_at_s.get(node, 0.0) else 0

    def is_fresh(self, checkpoint: Checkpoint) -> bool:
        """Whether a checkpoint was not used since it was stored."""
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
        """Whether a checkpoint is believed to be in the store, or in flight to it."""
        return checkpoint in self._checkpoints

    def has_arrived(self, checkpoint: Checkpoint) -> bool:
        """Whether a checkpoint is believed to be in the store, and is not in flight any more."""
        return checkpoint in self._checkpoints and checkpoint not in self._arriving

    def add(self, checkpoint: Checkpoint, *, arriving: bool = False, at_s: float = 0.0) -> None:
        self._checkpoints[checkpoint] = max(at_s, self._checkpoints.get(checkpoint, 0.0))
        if arriving:
            self._arriving.add(checkpoint)
        else:
            self._arriving.discard(checkpoint)

    def answered(self, checkpoint: Checkpoint, *, stored: bool) -> None:
        """Records the store's answer for a checkpoint in flight, which may have left memory meanwhile."""
        if stored and checkpoint.node is not None:
            self.add(checkpoint)
        else:
            self.remove(checkpoint)

    def note_boundary(self, node: Node, page: int) -> None:
        """Records the boundary of a checkpoint that is being stored: known also after the checkpoint has left memory."""
        self._boundaries.setdefault(node, set()).add(page)

    def take_boundaries(self, node: Node) -> list[int]:
        """Returns the boundaries of a node's stored checkpoints, each once."""
        return sorted(self._boundaries.pop(node, ()))

    def must_store(self, node: Node) -> bool:
        """Whether content was stored without the pages of a node on which it depends: they must follow."""
        return node in self._owed

    def note_owed(self, node: Node, page: int) -> None:
        """Records that content that depends on a node's path up to `page` is being stored: missing pages of it must follow."""
        for each in node.path():
            if self.fresh_pages(each) < min(each.end, page) - each.start:
                self._owed.add(each)

    def remove(self, checkpoint: Checkpoint) -> None:
        self._checkpoints.pop(checkpoint, None)
        self._arriving.discard(checkpoint)

    def node_split(self, upper: Node) -> None:
        """Updates beliefs after a node was split; `upper` is the new first part, and the original node its only child."""
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
        """Updates beliefs after a node lost its last pages, or all of them."""
        if not node.num_pages:
            self._owed.discard(node)
        if node in self._boundaries:
            left = {page for page in self._boundaries.pop(node) if node.parent is not None and page <= node.end}
            if left:
                self._boundaries[node] = left
        if node in self._pages:
            self.set_pages(node, min(self._pages[node], node.num_pages))

    def audit(self) -> None:
        """Asserts that there are no beliefs about content that has left memory."""
        for node in self._owed:
            assert node.parent is not None, f"{node} left memory, and must still be stored"
        for node, count in self._pages.items():
            assert node.parent is not None and 0 < count <= node.num_pages, f"{count} page(s) believed of {node}"
        assert self._arriving <= self._checkpoints.keys(), (
            f"{len(self._arriving - self._checkpoints.keys())} are in flight without a belief"
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
    """Since when a path waits for space on the host, and how much the store had taken at the last attempt."""

    since_s: float
    num_taken: int = -1


@dataclass(kw_only=True, eq=False)
class StoreLink:
    """The state of one attached store. One thread."""

    store: Store
    config: StoreConfig
    tuning: StoreTuning
    ops: StoreOps
    compute: ComputeTime  # compared with the time of waiting for the store
    barred: set[bytes]  # cleared namespaces: what any store has of them must not be used
    beliefs: Beliefs
    breaker: Breaker  # opens when the store fails
    fetching: Breaker = field(default_factory=Breaker)  # opens when its content is unusable, or does not come in time
    fetch_time: FetchTime = field(default_factory=FetchTime)
    asking_s: float | None = None  # that the store takes to answer a query
    trials: list[Ticket] = field(default_factory=list)  # opened to measure the store, for no request
    tickets: dict[Ticket, None] = field(default_factory=dict)  # open ones, oldest first
    fetches: dict[Fetch, None] = field(default_factory=dict)  # whose pages are still held for a request
    fetch_of: dict[int, Fetch] = field(default_factory=dict)  # by host page in flight
    to_plan: dict[Ticket, None] = field(default_factory=dict)  # those with news since they planned last
    to_plan_later: dict[Ticket, None] = field(default_factory=dict)  # those that wait for space on the host
    to_load: dict[Ticket, None] = field(default_factory=dict)  # those with arrived pages since
    next_look_s: float = 0.0  # when abandoned tickets are looked for next
    given_up: dict[PageKey, Loss] = field(default_factory=dict)  # by the first page that was not waited for, oldest first
    waiting: dict[Node, float] = field(default_factory=dict)  # paths to be backed up, by their last node: since when
    unplaced: dict[Node, Unplaced] = field(default_factory=dict)  # paths that wait for space on the host first
    deferred: DeferredBackups  # checkpoints whose pages were backed up
    most_backup_bytes: int  # limit of the bytes in flight to the store
    backup_bytes: int = 0  # in flight to the store
    num_putting: int = 0  # write operations in flight
    is_late: bool = False  # content is stored only when memory needs its space
    is_durable: bool = False  # committed content is stored soon, whatever the write policy says
    displaced: StoreVictimEstimate  # what the store would evict for content stored late
    is_superseded: Callable[[Checkpoint], bool]  # by a later checkpoint of its path
    ahead: dict[Victim, bool] = field(default_factory=dict)  # to be stored before they leave; whether to try to complete it
    num_taken: int = 0  # operations that stored something
    came_by_s: float = 0.0  # when `came_by` was called last
    putting_since_s: float = 0.0  # when a write began, or the latest of them was answered
    left_bytes: int = 0  # that left the host since the last search for what will follow
    detached: bool = False
    current: bool = True  # no other store was attached since
    ended: bool = False  # detached, with its last operation answered: the owner may use the store
    keeps_memory: bool = False  # the host's memory stays registered: the store was attached again
    giving_back: Thread | None = None  # on which the store unregisters the host's memory
    why_not_given_back: list[str] = field(default_factory=list)

    @property
    def state(self) -> LinkState:
        if self.detached:
            return LinkState.DETACHED
        return LinkState.ATTACHED if self.breaker.state is BreakerState.CLOSED else LinkState.SWITCHED_OFF

    @property
    def num_busy(self) -> int:
        """The number of operations in flight, and of backups that could be sent now."""
        return self.ops.num_running + len(self.waiting) + len(self.unplaced) + len(self.ahead) + self.deferred.num_due

    def has_given_back(self, memory: Sequence[memoryview], *, wait_s: float = 0.0) -> bool:
        """Unregisters the host's memory, once no operation is in flight; returns whether it is done. Uses a thread."""
        assert not self.ops.num_running, f"{self.ops.num_running} operation(s) are using the memory"
        if not self.store.traits.registers or self.keeps_memory:
            return True
        if self.giving_back is None:
            self.giving_back = Thread(target=self._give_back, args=(memory,), name="stepwell-give-back", daemon=True)
            self.giving_back.start()
        self.giving_back.join(wait_s)
        return not self.giving_back.is_alive()

    def keep_memory(self) -> None:
        """The store is attached again: keeps the host's memory registered. Raises StoreError while it is being unregistered,
        which may take long or hang: attaching must not wait for that.
        """
        if self.giving_back is not None and self.giving_back.is_alive():
            raise StoreError(
                "this store was detached, and is still unregistering the host's memory: attach it once step() has reported it "
                "as detached"
            )
        self.keeps_memory = True

    def take_failures(self) -> list[str]:
        """Returns and clears the failures so far."""
        mine, self.why_not_given_back = self.why_not_given_back, []
        return [*self.ops.take_failures(), *mine]

    def _give_back(self, memory: Sequence[memoryview]) -> None:
        try:
            unregister(self.store, memory)
        except Exception as error:  # worker boundary: `take_failures` returns it
            self.why_not_given_back.append(f"the store keeps the host's memory: {type(error).__name__}: {error}")

    def stored_pages(self, node: Node) -> int:
        """How many of a node's first pages need not be stored. Those used since they were stored count as missing, if the host
        has them.
        """
        run = node.runs[Tier.HOST]
        if not self.is_late or run is None or run.ids[0] == ABSENT:
            return self.beliefs.pages(node)
        return self.beliefs.fresh_pages(node)

    def node_split(self, upper: Node) -> None:
        """Queues both parts of a split node, since the lower one may leave before its turn comes."""
        self.beliefs.node_split(upper)
        assert upper.kids is not None
        (lower,) = upper.kids.by_page.values()
        if lower in self.waiting:
            self.waiting[upper] = self.waiting[lower]
        if lower in self.unplaced:
            self.unplaced[upper] = self.unplaced[lower]

    @property
    def turn_bytes(self) -> int:
        """The bytes that one reader fetches in one call."""
        return self.tuning.fetch_chunk_bytes or self.store.traits.turn_bytes

    def namespace_of(self, state: CacheState, node: Node) -> Namespace | None:
        """The namespace of a node; None if nothing of it may be stored."""
        digest = node.root.first
        return state.namespaces.get(digest) if digest not in self.barred else None

    def serves(self, namespace: Namespace) -> bool:
        """Whether this store's content of a namespace may be used: the store is attached, and the namespace was not cleared."""
        return self.current and not self.detached and namespace.digest not in self.barred

    def may_fetch(self, now: float) -> bool:
        """Whether both the store and the content fetched from it are healthy enough for a query."""
        return self.breaker.allows(now) and self.fetching.allows(now)

    def learn_reads(self, now: float) -> None:
        """Uses the speeds that the store measured at its opening until something was fetched."""
        if not self.fetch_time.is_known:
            for read in self.store.traits.reads:
                self.fetch_time.measure(read.size_bytes, read.seconds, now)

    def note_asked(self, took_s: float) -> None:
        """Records how long the store took to answer a query."""
        self.asking_s = took_s if self.asking_s is None else KEPT_OF_MEAN * self.asking_s + (1 - KEPT_OF_MEAN) * took_s

    def came_by(self, now: float) -> None:
        """Restarts timers after a long pass or an idle hour: waiting content had no chance to be sent, though the store may have
        been free.
        """
        if now - self.came_by_s > RESTED_S:
            self.waiting = dict.fromkeys(self.waiting, now)
            self.unplaced = {node: Unplaced(now, each.num_taken) for node, each in self.unplaced.items()}
            self.deferred.rested(now)
        self.came_by_s = now

    def may_put(self, now: float) -> bool:
        """Whether more may be stored now: a store that hangs never holds more than a small part of the host tier."""
        return self.num_putting < MOST_PUTS and self.backup_bytes < self.most_backup_bytes and self.breaker.allows(now)

    def may_put_at_once(self, now: float) -> bool:
        """Like `may_put`, for content that would be lost otherwise, with twice the limit: one allocation can evict much."""
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
        """Whether space on the host may wait for the store. A store that hangs must not cost more than it saves."""
        return self.num_taken > 0 and self.num_putting > 0 and now - self.putting_since_s <= MOST_WAIT_S

    def note_given_up(self, ticket: Ticket, loss: Loss) -> None:
        """Records for a while that a request went on without content that the store may have."""
        missing = np.flatnonzero(~ticket.from_store[ticket.first_asked :])
        at = ticket.first_asked + int(missing[0]) if len(missing) else len(ticket.keys) - 1  # or only a checkpoint was missing
        self.given_up.pop(ticket.keys[at], None)
        self.given_up[ticket.keys[at]] = loss
        if len(self.given_up) > MOST_GIVEN_UP:
            del self.given_up[next(iter(self.given_up))]

    def forget_given_up(self, ticket: Ticket) -> None:
        """Drops the record of an earlier abandoned fetch that has been waited for since."""
        for key in ticket.keys if self.given_up else ():
            self.given_up.pop(key, None)

    @property
    def held_bytes(self) -> int:
        """Host bytes that fetches hold: for requests that have not begun, or because they failed a moment ago."""
        return sum(fetch.size_bytes for fetch in self.fetches) + self.ops.held_bytes

    def holders(self) -> Iterator[tuple[Tier, Kind, PageIds]]:
        """Every reference held for the store, for audits."""
        for span in self.ops.held():
            yield span.tier, span.kind, span.ids
        for fetch in self.fetches:
            yield Tier.HOST, Kind.PREFIX, fetch.ids

    def readers(self) -> Iterator[Residency]:
        yield from self.ops.readers()
        for fetch in self.fetches:
            yield from fetch.residencies
