"""What can be asked of a cache. Nothing here changes anything; the orders are in `facade.py`."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import ClassVar

from stepwell.base.config import CacheConfig
from stepwell.base.errors import BadTokens, ConfigError
from stepwell.base.ids import Kind, Tier
from stepwell.base.meters import Counters
from stepwell.base.prompt import Namespace, PageKey, Tokens, pack
from stepwell.base.spec import ModelSpec
from stepwell.cache.explain import Explanation
from stepwell.cache.question import STORE_WAIT_S, Question
from stepwell.cache.report import Stats, TenantStats, tenant_stats, tier_stats
from stepwell.jobs.executors import Arriving
from stepwell.memory.row_pages import RowPages
from stepwell.store_tier.tier import StoreTier
from stepwell.tiers import external, publish
from stepwell.tiers.lease import Lease, LeaseState
from stepwell.tiers.spill import TAIL_PAGES, hot_pages_of
from stepwell.tiers.state import CacheState, one_thread
from stepwell.tree.cached_now import cached_now
from stepwell.tree.feed import CacheEvent
from stepwell.tree.match import Match, find, find_again
from stepwell.tree.survey import Survey, survey


class ReadOnlyCache:
    """The half of a cache that only answers. On the cache's thread, but for counters."""

    _called: ClassVar[str] = "Cache"

    def __init__(self, state: CacheState, namespace: Namespace, store_tier: StoreTier) -> None:
        self._state = state
        self._namespace = namespace
        self._store_tier = store_tier
        self._owner = state.owner

    @property
    def counters(self) -> Counters:
        return self._state.counters

    @property
    def spec(self) -> ModelSpec:
        """What the model remembers, as one rank keeps it."""
        return self._state.spec

    @property
    def config(self) -> CacheConfig:
        return self._state.config

    @property
    def namespace(self) -> Namespace:
        """The namespace of requests that name no other."""
        return self._namespace

    @property
    def row_pages(self) -> RowPages | None:
        """Where the rows of device pages are, if they may spill: the engine applies the result of `drain` before each pass."""
        return self._state.row_pages

    @property
    def namespaces(self) -> tuple[Namespace, ...]:
        """Those that have something in memory."""
        known = self._state.namespaces
        return tuple(known[digest] for digest in self._state.tree.roots if digest in known)

    def namespace_of(self, digest: PageKey) -> Namespace | None:
        """Which namespace has this digest; None for one that nothing is known of any more."""
        return self._state.namespaces.get(digest)

    @one_thread
    def cached_now(self) -> list[CacheEvent]:
        """Everything that can be read in memory, as a feed would have reported it. Scans the whole tree: for new listeners,
        or those that lost events.
        """
        return cached_now(self._state.tree)

    @one_thread
    def survey(self, *, show: int, salted: bool = True) -> Survey:
        """The largest stretches of cached paths, and the checkpoints that save most. As much work for any size of the tree.

        Without `salted`, what is in namespaces with a salt is left out, for askers who do not know it.
        """
        known = self._state.namespaces

        def wanted(digest: PageKey) -> bool:
            namespace = known.get(digest)
            return salted or (namespace is not None and namespace.salt is None)

        return survey(self._state.tree, show=show, wanted=wanted)

    @property
    def compute_tokens_per_s(self) -> float | None:
        """How fast prompts were computed of late; None before that is known."""
        return self._state.compute_speed.per_s

    @property
    def copying(self) -> int:
        """Copies under way between memories; they hold pages until `step` has applied what came of them. Costs nothing to ask."""
        return self._state.copies.num_running

    @property
    def stores_awaited(self) -> int:
        """Stores with something under way that was not given up on: `step` will apply what comes of it. Costs nothing to ask."""
        return self._store_tier.num_awaited

    @one_thread
    def stats(self) -> Stats:
        """How full the tiers are, what is under way, and everything that was counted. Takes as long for any number of tenants
        and pages, so that routers may ask often.
        """
        tiers = {tier: tier_stats(arena) for tier, arena in self._state.tree.arenas.items()}
        return Stats(
            tiers=tiers,
            copying=self.copying,
            storing=self._store_tier.num_busy,
            deferred=self._store_tier.num_deferred,
            store=self._store_tier.link_state,
            breaker=self._store_tier.breaker_state,
            store_times={operation: times.copy() for operation, times in self._store_tier.times.items()},
            counters=self._state.counters.snapshot(),
        )

    @one_thread
    def tenants(self) -> Mapping[str, Mapping[Tier, TenantStats]]:
        """What each tenant has cached, by name: those that have something, or a quota. Takes longer the more there are."""
        return tenant_stats(self._state.tree)

    def namespace_for(self, *, adapter: str | None = None, salt: str | None = None, tenant: str | None = None) -> Namespace:
        """This model under an adapter, or for a tenant whose pages no other tenant may use."""
        return replace(self._namespace, adapter=adapter, salt=salt, tenant=tenant)

    @one_thread
    def lookup(self, tokens: Tokens, *, namespace: Namespace | None = None, limit_tokens: int | None = None) -> Match:
        """How much of a prompt is known and where it could resume. Pure. Raises BadTokens.

        `limit_tokens` caps the restore point, for requests that need logits of their prompt. Without it at least one token is
        left to compute; with it the whole prompt may be restored, for engines that compute its last token again themselves.
        """
        packed = pack(tokens, vocab_size=self._state.config.vocab_size)
        if not packed:
            raise BadTokens("an empty prompt: there is nothing to look up, and nothing to compute")
        if limit_tokens is not None and limit_tokens < 0:
            raise ConfigError(f"limit_tokens must be 0 or more, got {limit_tokens}")
        if namespace is not None and namespace.layout != self._namespace.layout:
            raise ConfigError("this namespace is of a model with another layout: make one with cache.namespace_for()")
        return find(self._state.tree, namespace or self._namespace, packed, limit_tokens)

    @one_thread
    def refresh(self, match: Match) -> Match:
        """The same question again; costs nothing while the cache has not changed. Pure. Raises LeaseError for a match of another
        cache.
        """
        return find_again(self._state.tree, match)

    @one_thread
    def explain(
        self, tokens: Tokens, *, namespace: Namespace | None = None, store_wait_s: float = STORE_WAIT_S
    ) -> Explanation:  # fmt: skip
        """Why a prompt would resume where it would, and not later. Changes nothing. Raises BadTokens.

        Waits at most `store_wait_s` for the store to say what it has, and says when that was not enough; with 0 it is not asked.
        An engine that must not wait uses `question`.
        """
        question = self.question(tokens, namespace=namespace, store_wait_s=store_wait_s)
        question.wait()
        return question.answer()

    @one_thread
    def question(
        self, tokens: Tokens, *, namespace: Namespace | None = None, limit_tokens: int | None = None,
        store_wait_s: float = STORE_WAIT_S,
    ) -> Question:  # fmt: skip
        """The same question without waiting: call `step` until it is ready, then `answer`. `limit_tokens` is as that of `lookup`.

        Raises BadTokens and ConfigError.
        """
        match = self.lookup(tokens, namespace=namespace, limit_tokens=limit_tokens)
        return Question(self._state, self._store_tier, match, store_wait_s=store_wait_s)

    def could_hold(self, tokens: int, *, chunk_tokens: int, spills_upto: int | None = None) -> bool:
        """Whether an empty device tier can hold one request of `tokens` tokens, computed in chunks of `chunk_tokens`.

        Where rows may spill, only what cannot spill counts, if an empty host can hold the rest. Tokens from `spills_upto` on are
        not published, and so do not spill: an answer's for some models, all of a request that computes for itself alone.
        """
        self._must_own_device("could_hold()")
        spec = self._state.spec
        window = min(spec.window_tokens + chunk_tokens, tokens) if spec.window_tokens else 0
        need = {
            Kind.PREFIX: -(-tokens // spec.page_tokens),
            Kind.WINDOW: -(-window // spec.window_page_tokens) + 1 if window else 0,
            Kind.POINT: 2 if spec.parts(Kind.POINT) else 0,  # its own, and the copy it goes on with
        }
        if spec.spill is not None:
            pages = need[Kind.PREFIX]
            spilling = pages if spills_upto is None else min(spills_upto // spec.page_tokens, pages)
            need[Kind.ROWS] = self._resident_rows(pages, spilling, chunk_tokens)
        return self._state.arena(Tier.DEVICE).fits_when_empty({kind: count for kind, count in need.items() if count})

    def _resident_rows(self, pages: int, spilling: int, chunk_tokens: int) -> int:
        """How many pages of rows a request of `pages` pages must have on the device if the first `spilling` may spill: hot
        ones, those of a chunk, and its tail, or the pages that may not.
        """
        if not self._state.arena(Tier.HOST).fits_when_empty({Kind.PREFIX: spilling}):
            return pages
        chunk = -(-chunk_tokens // self._state.spec.page_tokens)
        return min(pages, hot_pages_of(self._state) + max(TAIL_PAGES, pages - spilling) + chunk)

    @one_thread
    def next_stop(self, lease: Lease, *, after: int | None = None) -> int | None:
        """Where the engine must end its chunk next and commit; None for nowhere. `after` is where that chunk begins, if tokens
        before it are being computed and are not committed yet.
        """
        return publish.next_stop(self._state, lease, after)

    @one_thread
    def wants_checkpoint(self, lease: Lease, boundary: int) -> bool:
        """Whether the lease should leave a checkpoint at `boundary`: for engines that cannot stop where `next_stop` says, but
        have state at boundaries of their own.
        """
        return boundary > lease.position and self._wants_checkpoint(lease, boundary, last=False)

    @one_thread
    def can_load(self, lease: Lease) -> bool:
        """Without a device tier: whether `load` will find all it needs. A lease that waits may lose its checkpoint: another
        request's load of it failed, or memory was flushed. Release it and look the prompt up again.
        """
        self._must_not_own_device("can_load()")
        return external.can_load(lease)

    @one_thread
    def first_unsaved(self, lease: Lease) -> int:
        """Without a device tier: the first page that the next commit copies. Those before it need no name."""
        self._must_not_own_device("first_unsaved()")
        return external.first_unsaved(self._state, lease)

    @one_thread
    def arriving(self, lease: Lease) -> tuple[Arriving, ...]:
        """For a lease that is LOADING: what a pass may wait for layer by layer, instead of before it begins. Empty for none.

        A pass that has begun so is committed once `wait_arriving` has said that everything came.
        """
        return self._state.copies.arriving(lease.arrives_with) if lease.state is LeaseState.LOADING else ()

    def _must_own_device(self, call: str) -> None:
        if self._state.nearest is not Tier.DEVICE:
            raise ConfigError(f"{call} needs a device tier; without one the engine allocates its own pages")

    def _must_not_own_device(self, call: str) -> None:
        if self._state.nearest is Tier.DEVICE:
            raise ConfigError(f"{call} is for caches without a device tier; with one, acquire() loads what a lease needs")

    def _can_checkpoint(self, upto: int) -> bool:
        return self.spec.needs_checkpoint_at(upto) and self.spec.is_legal(upto)

    def _wants_checkpoint(self, lease: Lease, upto: int, last: bool) -> bool:
        return self._can_checkpoint(upto) and (last or publish.is_stop(self._state, lease, upto))
