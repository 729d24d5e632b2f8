"""The store tier as the cache sees it: one object over the attached store, and detached ones with operations in flight.

    attach, detach       stores come and go while the cache runs
    open_prefetch        a request arrives: fetch what the store has of its prompt
    offer                a path has new content on the host: store it in time
    before_eviction      something is about to leave the host: store it now
    step                 apply the answers of stores, send what waits

`link.py` has the state of one store.
"""

from __future__ import annotations

from collections.abc import Container, Sequence
from functools import partial

from stepwell.base.config import StoreConfig
from stepwell.base.errors import ConfigError, StoreError
from stepwell.base.ids import Tier
from stepwell.base.meters import Durations
from stepwell.jobs.executors import StoreExecutor, ThreadStoreExecutor
from stepwell.policy.expected import ComputeTime
from stepwell.policy.placement import milestone_step
from stepwell.policy.store_use import Breaker, BreakerState, StoreTuning
from stepwell.policy.store_victims import StoreVictimEstimate
from stepwell.store.api import Store, register, size_of
from stepwell.store_tier.backup import (
    can_be_stored,
    forget_refusals,
    offer,
    offer_everything,
    pump,
    put_before_leaving,
    put_deferred_of,
    put_waiting_of,
)
from stepwell.store_tier.deferred import MOST_DELAYS, DeferredBackups
from stepwell.store_tier.durable import is_lacking, leave_for_good, line_up, line_up_all, save_again, save_on_the_way
from stepwell.store_tier.late import keep_clean, leave_host, put_ahead, put_everything_of, release_path
from stepwell.store_tier.link import Beliefs, LinkState, StoreLink
from stepwell.store_tier.ops import OPERATIONS, StoreOps
from stepwell.store_tier.prefetch import prefetch, settle
from stepwell.store_tier.ticket import Ticket
from stepwell.tiers.lease import RequestOptions
from stepwell.tiers.state import CacheState, Leaving
from stepwell.transfer.store_worker import HostPages, StoreWorker
from stepwell.tree.checkpoints import is_superseded
from stepwell.tree.match import Match
from stepwell.tree.node import Node, Residency, Victim

DEFERRED_SHARE = 1 / 16  # of the host tier: checkpoints whose backup is deferred
BACKUP_SHARE = 1 / 16  # of the host tier: limit of the bytes in flight to the store
GIVE_BACK_S = 5.0  # how long closing a cache waits for a store to unregister the host's memory


class StoreTier:
    """All links of one cache. One thread."""

    def __init__(self, state: CacheState, host_pages: Sequence[HostPages], *, ranks: int, names_weights: bool) -> None:
        self._state = state
        self._host_pages = host_pages
        self._ranks = ranks
        self._names_weights = names_weights  # the namespace identifies the weights, not only their shape
        self.link: StoreLink | None = None  # the attached one
        self.links: list[StoreLink] = []
        self.compute = ComputeTime()  # that prompts take
        self.times = {operation: Durations() for operation in OPERATIONS}  # that all stores took
        self.barred: set[bytes] = set()  # cleared namespaces: what any store has of them must not be used

    @property
    def link_state(self) -> LinkState:
        return self.link.state if self.link is not None else LinkState.DETACHED

    @property
    def breaker_state(self) -> BreakerState | None:
        """None without a store."""
        return self.link.breaker.state if self.link is not None else None

    @property
    def num_busy(self) -> int:
        """The number of operations in flight, and of waiting backups."""
        return sum(link.num_busy for link in self.links)

    @property
    def num_deferred(self) -> int:
        """Checkpoints on the host that will be stored later, if nothing supersedes them."""
        return sum(len(link.deferred) for link in self.links)

    @property
    def host_memory(self) -> tuple[memoryview, ...]:
        """The host tier's memory, of every known rank."""
        return tuple(pages.block for pages in self._host_pages)

    @property
    def host_pages(self) -> Sequence[HostPages]:
        """The same by page."""
        return self._host_pages

    def attach(self, store: Store, config: StoreConfig, executor: StoreExecutor | None, tuning: StoreTuning) -> None:
        """Attaches a store below the host tier. It is offered what reaches the host from now on, and what is there already; if it
        is durable, also what only the device has.
        """
        state = self._state
        self._check(store)
        if executor is None:
            self._check_ranks()
        elif config.key is not None:
            raise ConfigError("an executor's workers stamp values with their own key: set it there, not in StoreConfig")
        for old in self.links:
            if old.store is store:
                old.keep_memory()
        register(store, self.host_memory)
        executor = executor or self._make_executor(store, config)
        for old in self.links:  # the new one will be offered what they still have queued
            old.current = False
            old.waiting.clear()
            old.unplaced.clear()
            old.deferred.clear()
        if config.recompute_tokens_per_s is not None:
            self.compute = ComputeTime(config.recompute_tokens_per_s)
        self.link = self._make_link(store, config, tuning, executor)
        if not self.links:
            self._listen()
        self.links.append(self.link)
        forget_refusals(state)
        if store.traits.writable and not self.link.is_late:
            state.copies.on_saved = self._offer
            offer_everything(state, self.link)
        if self.link.is_durable:
            line_up_all(state, self.link)

    def detach(self) -> None:
        """Detaches the store. Its operations continue, and what waits or was deferred is still stored there."""
        if self.link is None:
            raise ConfigError("no store is attached")
        self._end_waiting(self.link)
        self.link.unplaced.clear()
        self.link.detached = True
        self.link = None
        self._state.copies.on_saved = None
        if self._state.tree.feeds:
            self._state.tree.feeds.store_detached()

    # ---- calls of the memory tiers and of requests ------------------------------------------------

    def open_prefetch(self, match: Match, request: RequestOptions, *, awaited: bool) -> Ticket:
        """Starts fetching what the store has of a prompt; without a store the ticket is ready at once."""
        return prefetch(self._state, self.link, match, request, awaited=awaited)

    @property
    def takes_paths(self) -> bool:
        """Whether a store takes pages, parents before children, when they reach the host. Not if they are stored earlier
        (`durable`).
        """
        link = self.link
        return link is not None and link.store.traits.writable and not link.is_late and not link.is_durable

    @property
    def is_durable(self) -> bool:
        return self.link is not None and self.link.is_durable

    @property
    def resumable_after_s(self) -> float | None:
        """See `StoreControl.resumable_after_s`."""
        link = self.link
        if link is None or not link.is_durable:
            return None
        return 2 * link.config.delay_s(shared=link.store.traits.shared)  # each may be deferred once more

    @property
    def takes_late(self) -> bool:
        return self.link is not None and self.link.is_late

    @property
    def putting_bytes(self) -> int:
        link = self.link
        return link.backup_bytes if link is not None and link.is_late and link.is_taking(self._state.clock.now()) else 0

    def offer(self, node: Node) -> None:
        """The path to a node was committed or used, and may have content that the store lacks."""
        if self.link is not None and self.link.store.traits.writable:
            if self.link.is_durable and self._state.config.write.is_exclusive:
                save_on_the_way(self._state, self.link, node)
            if self.link.is_durable and is_lacking(self._state, self.link, node):
                line_up(self._state, self.link, node)
            offer(self._state, self.link, node)

    def _offer(self, node: Node) -> None:
        """Something of the path to a node has reached the host."""
        if self.link is not None:
            offer(self._state, self.link, node)

    def must_store(self, node: Node) -> bool:
        return self.link is not None and self.link.beliefs.must_store(node)

    def before_use(self, path: Sequence[Node]) -> None:
        if self.link is not None and self.link.is_late:
            release_path(self._state, self.link, path)

    def before_eviction(self, victim: Victim) -> Leaving:
        """Something is about to leave the host: stores it if it must not be lost."""
        if self.link is None or not self.link.store.traits.writable:
            return Leaving.NOW
        if self.link.is_late:
            return leave_host(self._state, self.link, victim)
        if self.link.is_durable:
            return leave_for_good(self._state, self.link, victim)
        return put_before_leaving(self._state, self.link, victim)

    def computed(self, spans: Sequence[tuple[int, int]], took_s: float) -> None:
        """Learns how long a pass over such parts of prompts takes, to choose between computing and fetching."""
        self.compute.measure(spans, took_s)

    def forget_compute_time(self) -> None:
        """Drops the measured computing speed; a configured speed stays."""
        self.compute = ComputeTime(None if self.link is None else self.link.config.recompute_tokens_per_s)
        for link in self.links:
            link.compute = self.compute

    def bar(self, namespace: bytes) -> None:
        """Bars a namespace: no store's content of it, now or later, may be used, and none of it may be stored."""
        self.barred.add(namespace)

    def step(self) -> tuple[list[Store], list[str]]:
        """Applies the answers of stores and sends what waits; returns stores no longer used, and failures."""
        for link in self.links:
            link.ops.apply()
            settle(self._state, link)
            pump(self._state, link)
            if link.unplaced:
                save_again(self._state, link)
            if link.is_late and not link.detached:
                keep_clean(self._state, link)
                put_ahead(self._state, link)
        idle = [link for link in self.links if link.detached and not link.num_busy]
        ended = [link for link in idle if not link.ended and link.has_given_back(self.host_memory)]
        failures = [why for link in self.links for why in link.take_failures()]
        for link in ended:
            link.ended = True
            link.ops.close()
        # Tickets may hold what arrived, and pages of failed transfers have to be held for a while.
        remaining = [link for link in self.links if not link.ended or link.fetches or link.ops.held_bytes]
        if self.links and not remaining:
            self._listen_no_more()
        self.links = remaining
        return [link.store for link in ended], failures

    def before_flush(self, namespaces: Container[bytes]) -> None:
        """Before memory of some namespaces is emptied: sends what waits of them, and what was deferred."""
        if self.link is not None:
            if self.link.is_late:
                put_everything_of(self._state, self.link, namespaces)
            put_waiting_of(self._state, self.link, namespaces)
            put_deferred_of(self._state, self.link, namespaces)

    def end_deferral(self) -> None:
        """Before the cache is closed: ends all deferrals. What only the device has is stored through the host, once that has
        space for it again.
        """
        for each in self.links:
            self._end_waiting(each)
        if self.link is not None and self.link.store.traits.writable and self._state.config.write.is_exclusive:
            self._state.copies.on_saved = self._offer
            line_up_all(self._state, self.link)

    def _end_waiting(self, link: StoreLink) -> None:
        link.deferred.end_all(self._state.clock.now())
        if link.is_late:  # now or never
            link.is_late = False
            link.ahead.clear()
            offer_everything(self._state, link)

    @property
    def num_awaited(self) -> int:
        """The number of links with operations in flight that still count, or with paths that may still get space on the host."""
        copies, now = self._state.copies, self._state.clock.now()
        are_copied = copies.num_running == copies.num_awaited  # a copy that hangs may hold the space forever
        return sum(
            1 for link in self.links
            if link.ops.num_awaited or (link.unplaced and are_copied and link.may_put(now))
        )  # fmt: skip

    def drain(self, timeout_s: float) -> None:
        """Waits until no link has operations in flight, or for this time."""
        for link in self.links:
            if link.ops.num_awaited:
                link.ops.drain(timeout_s)

    def close(self) -> None:
        """Drops waiting backups, withdraws operations that have not begun, and lets the threads end."""
        for link in self.links:
            link.waiting.clear()
            link.unplaced.clear()
            if link.ended:
                continue  # its threads have ended
            link.ops.close()
            if not link.ops.num_running:  # otherwise the store waits for them when it is closed
                link.has_given_back(self.host_memory, wait_s=GIVE_BACK_S)

    def _listen(self) -> None:
        """Makes the tree report the nodes that it splits and the content that leaves it."""
        tree = self._state.tree
        tree.on_checkpoint_evicted.append(self._left)
        tree.on_split.append(self._split)
        tree.on_shortened.append(self._shortened)

    def _listen_no_more(self) -> None:
        tree = self._state.tree
        tree.on_checkpoint_evicted.remove(self._left)
        tree.on_split.remove(self._split)
        tree.on_shortened.remove(self._shortened)

    def _split(self, upper: Node) -> None:
        for link in self.links:
            link.node_split(upper)

    def _shortened(self, node: Node) -> None:
        for link in self.links:
            link.beliefs.node_shortened(node)

    def _left(self, left: Residency) -> None:
        for link in self.links:
            if left.tier is Tier.HOST:
                link.deferred.forget(left.checkpoint)
            if left.checkpoint.node is None:
                link.beliefs.remove(left.checkpoint)

    def _check(self, store: Store) -> None:
        if self.link is not None:
            raise ConfigError("a store is attached already; detach it first")
        if Tier.HOST not in self._state.tree.arenas:
            raise ConfigError("a store is below host memory: set host_bytes of the cache")
        traits = store.traits
        if traits.outlives_process and not self._names_weights:
            raise ConfigError(
                f"a {traits.name} store outlives this process or is shared: name the weights that its values belong to, with "
                "build_cache(model=...), a digest if there is one"
            )

    def _check_ranks(self) -> None:
        if len(self._host_pages) != self._ranks:
            raise ConfigError(
                f"a store needs to reach the host memory of all {self._ranks} rank(s), and knows {len(self._host_pages)}: "
                "give build_cache() host_pages, one for each"
            )

    def _make_executor(self, store: Store, config: StoreConfig) -> StoreExecutor:
        key, ranks = config.key, self._ranks
        workers = [StoreWorker(store, memory, rank=i, ranks=ranks, key=key) for i, memory in enumerate(self._host_pages)]
        return ThreadStoreExecutor(workers, self._state.clock, readers=config.readers, writers=config.writers)

    def _make_link(self, store: Store, config: StoreConfig, tuning: StoreTuning, executor: StoreExecutor) -> StoreLink:
        state, breaker = self._state, Breaker()
        host = state.arena(Tier.HOST)
        ops = StoreOps(
            executor, state.tree, state.counters, state.clock, state.wakeup, breaker,
            timeout_s=tuning.op_timeout_s, late_write_s=store.traits.late_write_s,
            times=self.times,
        )  # fmt: skip
        beliefs, traits = Beliefs(), store.traits
        is_durable = state.config.durable and traits.outlives_process and traits.writable
        step = milestone_step(state.spec, state.placement)
        deferred = DeferredBackups(
            delay_s=config.delay_s(shared=traits.shared),
            most_delays=1 if is_durable else MOST_DELAYS,
            most_bytes=int(host.layout.size_bytes * DEFERRED_SHARE),
            is_superseded=partial(is_superseded, milestone_pages=step // state.spec.page_tokens),
            can_be_stored=partial(can_be_stored, beliefs),
            is_stored=beliefs.has_arrived,
            on_change=partial(state.tree.ranking.queue_residency, again=True),
            counters=state.counters,
        )
        # A store without levels would duplicate what memory has: there is no reason to wait then.
        waits = traits.levels and traits.sized
        is_late = state.config.write.is_exclusive and waits and traits.writable and not is_durable
        return StoreLink(
            is_late=is_late,
            is_durable=is_durable,
            is_superseded=partial(is_superseded, milestone_pages=step // state.spec.page_tokens),
            store=store,
            config=config,
            tuning=tuning,
            ops=ops,
            compute=self.compute,
            barred=self.barred,
            beliefs=beliefs,
            breaker=breaker,
            deferred=deferred,
            displaced=StoreVictimEstimate(_room_bytes(store) if is_late else None),
            most_backup_bytes=min(tuning.backup_bytes, int(host.layout.size_bytes * BACKUP_SHARE)),
        )


def _room_bytes(store: Store) -> int | None:
    """The limit of a store; None if it has no limit, does not know it, or cannot report it now."""
    try:
        size = size_of(store)
    except StoreError:
        return None
    return size.budget_bytes if size is not None else None
