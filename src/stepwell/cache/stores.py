"""Stores come and go while the cache runs: the one that is attached, and those that still have something out.

Puts links together, steps them, and takes them away when nothing needs them any more; what a link is, is in `link.py`.
"""

from __future__ import annotations

from collections.abc import Container, Sequence
from functools import partial

from stepwell.base.config import StoreConfig, WritePolicy
from stepwell.base.errors import ConfigError
from stepwell.base.ids import Tier
from stepwell.cache.backup_checkpoints import can_be_stored, is_superseded, put_resting_of
from stepwell.cache.backup_paths import forget_beliefs, offer, offer_everything, pump
from stepwell.cache.core import Core
from stepwell.cache.errands import Errands
from stepwell.cache.link import LinkState, StoreLink
from stepwell.cache.porter import Porter, ThreadPorter
from stepwell.cache.prefetch import settle
from stepwell.cache.resting import Resting
from stepwell.policy.breaker import Breaker
from stepwell.policy.patience import Patience, Speed
from stepwell.policy.placement import milestone_step
from stepwell.store.api import Store, register
from stepwell.transfer.store_hands import HostPages, StoreHands
from stepwell.tree.node import Residency

RESTING_SHARE = 1 / 16  # of the host tier: checkpoints that rest there before they are stored
BACKUP_SHARE = 1 / 16  # of the host tier: on its way down at most
GIVE_BACK_S = 5.0  # that closing a cache waits for a store to forget the host's memory


class Stores:
    """Every link of one cache. One thread."""

    def __init__(self, core: Core, host_pages: Sequence[HostPages], *, ranks: int, names_weights: bool) -> None:
        self._core = core
        self._host_pages = host_pages
        self._ranks = ranks
        self._names_weights = names_weights  # the namespace says whose bytes these are, not only of what shape
        self.links: list[StoreLink] = []
        core.tree.on_left = self._forget_rest

    @property
    def state(self) -> LinkState:
        return self._core.link.state if self._core.link is not None else LinkState.DETACHED

    @property
    def num_busy(self) -> int:
        """Errands under way, and what waits to be backed up."""
        return sum(link.num_busy for link in self.links)

    @property
    def num_resting(self) -> int:
        """Checkpoints on the host that are to be stored later, if nothing supersedes them."""
        return sum(len(link.resting) for link in self.links)

    @property
    def host_memory(self) -> tuple[memoryview, ...]:
        """The host tier's memory, of every rank we know it of."""
        return tuple(pages.block for pages in self._host_pages)

    def attach(self, store: Store, config: StoreConfig, porter: Porter | None) -> None:
        """Attaches a store: what reaches the host from now on is offered to it, and what is there already."""
        core = self._core
        self._check(store)
        if porter is None:
            self._check_ranks()
        elif config.key is not None:
            raise ConfigError("a porter's hands stamp values with a key of their own: give it to them, not to StoreConfig")
        for old in self.links:
            if old.store is store:
                old.stop_giving_back()
        register(store, self.host_memory)
        porter = porter or self._porter(store, config)
        for old in self.links:  # the new one will be offered what they still have in line
            old.believed = False
            old.waiting.clear()
            old.resting.clear()
        host, breaker = core.arena(Tier.HOST), Breaker()
        errands = Errands(
            porter, host, core.mover, core.counters, core.clock, breaker,
            timeout_s=config.errand_timeout_s, late_write_s=store.traits.late_write_s,
        )  # fmt: skip
        patience = Patience(credit_s=config.wait_credit_s, share=config.wait_share)
        step = milestone_step(core.spec, core.config.placement)
        resting = Resting(
            rest_s=config.rest_s(shared=store.traits.shared),
            most_bytes=int(host.layout.size_bytes * RESTING_SHARE),
            is_superseded=partial(is_superseded, milestone_pages=step // core.spec.page_tokens),
            can_be_stored=can_be_stored,
            on_change=partial(core.tree.ranking.queue_residency, again=True),
            counters=core.counters,
        )
        core.link = StoreLink(
            store=store,
            config=config,
            errands=errands,
            breaker=breaker,
            patience=patience,
            resting=resting,
            most_backup_bytes=min(config.backup_bytes, int(host.layout.size_bytes * BACKUP_SHARE)),
        )
        self.links.append(core.link)
        if config.recompute_tokens_per_s is not None:
            core.compute = Speed(config.recompute_tokens_per_s)
        forget_beliefs(core)
        if core.config.write is not WritePolicy.BACK:  # then things go down when the host needs their room
            core.mover.on_saved = partial(offer, core, core.link)
            offer_everything(core, core.link)

    def detach(self) -> None:
        """Takes the attached store away. Its errands go on; nothing new is asked of it."""
        if self._core.link is None:
            raise ConfigError("no store is attached")
        self._core.link.detached = True
        self._core.link.resting.end_all(self._core.clock.now())
        self._core.link = None
        self._core.mover.on_saved = None

    def step(self) -> tuple[list[Store], list[str]]:
        """Applies what stores have answered and sends off what waits; returns stores no longer used, and what failed."""
        for link in self.links:
            link.errands.apply()
            settle(self._core, link)
            pump(self._core, link)
        idle = [link for link in self.links if link.detached and not link.num_busy]
        ended = [link for link in idle if not link.ended and link.has_given_back(self.host_memory)]
        failures = [why for link in self.links for why in link.take_failures()]
        for link in ended:
            link.ended = True
            link.errands.close()
        # Tickets may hold what arrived, and pages of transfers that failed have to be held for a while.
        self.links = [link for link in self.links if not link.ended or link.fetches or link.errands.held_bytes]
        return [link.store for link in ended], failures

    def put_resting_of(self, namespaces: Container[bytes]) -> None:
        """Sends off what rests of some namespaces, before memory is emptied of them."""
        if self._core.link is not None:
            put_resting_of(self._core, self._core.link, namespaces)

    def end_rests(self) -> None:
        """Lets nothing wait any longer before it is stored."""
        for link in self.links:
            link.resting.end_all(self._core.clock.now())

    @property
    def num_awaited(self) -> int:
        """Links with something under way that was not given up on."""
        return sum(1 for link in self.links if link.errands.num_running and not link.errands.overdue)

    def drain(self, timeout_s: float) -> None:
        """Waits until a link has nothing under way, or for so long."""
        for link in self.links:
            if link.errands.num_running and not link.errands.overdue:
                link.errands.drain(timeout_s)

    def close(self) -> None:
        """Drops what still waits to be backed up, takes back what has not begun, and lets the threads end."""
        for link in self.links:
            link.waiting.clear()
            link.errands.close()
            if not link.errands.num_running:  # else it is the store's to wait for, when it is closed
                link.has_given_back(self.host_memory, wait_s=GIVE_BACK_S)

    def _forget_rest(self, left: Residency) -> None:
        for link in self.links if left.tier is Tier.HOST else ():
            link.resting.forget(left.checkpoint)

    def _check(self, store: Store) -> None:
        if self._core.link is not None:
            raise ConfigError("a store is attached already; detach it first")
        if Tier.HOST not in self._core.tree.arenas:
            raise ConfigError("a store stands below host memory: give the cache host_bytes")
        traits = store.traits
        if (traits.durable or traits.shared) and not self._names_weights:
            raise ConfigError(
                f"a {traits.name} store outlives this process or is shared: say which weights its values are of, with "
                "build_cache(model=...), a digest where there is one"
            )

    def _check_ranks(self) -> None:
        if len(self._host_pages) != self._ranks:
            raise ConfigError(
                f"a store needs to reach the host memory of all {self._ranks} rank(s), and knows {len(self._host_pages)}: "
                "give build_cache() host_pages, one for each"
            )

    def _porter(self, store: Store, config: StoreConfig) -> Porter:
        key, ranks = config.key, self._ranks
        hands = [StoreHands(store, memory, rank=i, ranks=ranks, key=key) for i, memory in enumerate(self._host_pages)]
        return ThreadPorter(hands, self._core.clock, readers=config.readers, writers=config.writers)
