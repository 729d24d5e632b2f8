"""The cache as an engine sees it: look a prompt up, lease it, commit what was computed, give it back.

    match = cache.lookup(tokens)                  a question; changes nothing
    with cache.acquire(match) as lease:           pages held, copies started
        ...                                       cache.step() until lease.ready
        cache.commit(lease, upto)                 at every stop the lease names
    cache.step()                                  once per engine step; never blocks

A cache belongs to one thread at a time, the engine's scheduler: the first that calls it, until it calls `hand_over` or ends.
From another one everything but counters raises WrongThread. Bytes are moved by the executor's threads, and what
came of it is applied in `step` alone.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from math import inf

from stepwell.base.config import MAX_PRIORITY
from stepwell.base.errors import BadTokens, ConfigError, LeaseError, LoadFailed
from stepwell.base.ids import Kind, Tier
from stepwell.base.meters import Counters
from stepwell.base.prompt import Namespace, Tokens, pack
from stepwell.base.spec import ModelSpec
from stepwell.cache.audit import audit
from stepwell.cache.explain import Explanation
from stepwell.cache.question import STORE_WAIT_S, Question
from stepwell.cache.report import Stats, StepReport, tier_stats
from stepwell.cache.store import StoreControl
from stepwell.jobs.executors import Arriving
from stepwell.memory.row_pages import RowPages
from stepwell.policy.loading import LEAST_CHUNK_TOKENS
from stepwell.store_tier.ticket import Ticket
from stepwell.store_tier.tier import StoreTier
from stepwell.tiers import external, publish, restore
from stepwell.tiers.external import EnginePages
from stepwell.tiers.lease import Lease, Leases, LeaseState, RequestOptions
from stepwell.tiers.lifetime import Pins, drop_expired
from stepwell.tiers.spill import TAIL_PAGES, hot_pages_of, spill
from stepwell.tiers.state import CacheState, one_thread
from stepwell.tree.match import Match, find
from stepwell.tree.node import LossReason
from stepwell.tree.pruning import clear

POLL_S = 0.0005  # between two steps of `wait`
ARRIVING_POLL_S = 0.00005  # the same of `wait_arriving`: the pass and the copies it waits for end together
DRAIN_S = 0.02  # between two steps of `close`: what one job hangs on must not hold up the others


class Cache:
    """A tiered prefix cache for one model. Make one with `stepwell.cache.build.build_cache`."""

    def __init__(self, state: CacheState, namespace: Namespace, store_tier: StoreTier) -> None:
        self._state = state
        self._store_tier = store_tier
        self.store = StoreControl(store_tier, state.owner)
        self._namespace = namespace
        self._leases = Leases(state)
        if state.row_pages is not None:
            state.spill = partial(spill, state, self._leases)
        self.pins = Pins(state, self.lookup)
        self._owner = state.owner
        self._unreported: StepReport | None = None  # what `wait` found, for the next `step` to tell

    # ---- questions --------------------------------------------------------------------------------

    @property
    def counters(self) -> Counters:
        return self._state.counters

    @property
    def spec(self) -> ModelSpec:
        """What the model remembers, as one rank keeps it."""
        return self._state.spec

    @property
    def namespace(self) -> Namespace:
        """The namespace of requests that name no other."""
        return self._namespace

    @property
    def row_pages(self) -> RowPages | None:
        """Where the rows of device pages are, if they may spill: whoever runs a pass applies what `drain` tells, before it."""
        return self._state.row_pages

    @property
    def namespaces(self) -> tuple[Namespace, ...]:
        """Those that have something in memory."""
        known = self._state.namespaces
        return tuple(known[digest] for digest in self._state.tree.roots if digest in known)

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
        """How full the tiers are, what is under way, and everything that was counted."""
        tiers = {tier: tier_stats(arena) for tier, arena in self._state.tree.arenas.items()}
        return Stats(
            tiers=tiers,
            copying=self.copying,
            storing=self._store_tier.num_busy,
            deferred=self._store_tier.num_deferred,
            store=self.store.state,
            counters=self._state.counters.snapshot(),
        )

    def namespace_for(self, *, adapter: str | None = None, salt: str | None = None, tenant: str | None = None) -> Namespace:
        """This model under an adapter, or for a tenant whose pages nobody else may see."""
        return replace(self._namespace, adapter=adapter, salt=salt, tenant=tenant)

    @one_thread
    def lookup(self, tokens: Tokens, *, namespace: Namespace | None = None, limit_tokens: int | None = None) -> Match:
        """How much of a prompt is known and where it could resume. Pure. Raises BadTokens.

        `limit_tokens` caps the restore point, for requests that need logits of their prompt.
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
        """The same question again: as cheap as nothing while the cache has not changed. Pure."""
        if match.version == self._state.tree.version:
            return match
        return find(self._state.tree, match.namespace, match.packed, match.limit_tokens)

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
        self, tokens: Tokens, *, namespace: Namespace | None = None, store_wait_s: float = STORE_WAIT_S
    ) -> Question:  # fmt: skip
        """The same question without waiting: call `step` until it is ready, then `answer`. Raises BadTokens and ConfigError."""
        return Question(self._state, self._store_tier, self.lookup(tokens, namespace=namespace), store_wait_s=store_wait_s)

    def could_hold(self, tokens: int, *, chunk_tokens: int) -> bool:
        """Whether an empty device tier has room for one request of so many tokens, computed in chunks of so many.

        Where rows may spill, for what it cannot spill, if an empty host has room for all of it.
        """
        spec = self._state.spec
        window = min(spec.window_tokens + chunk_tokens, tokens) if spec.window_tokens else 0
        need = {
            Kind.PREFIX: -(-tokens // spec.page_tokens),
            Kind.WINDOW: -(-window // spec.window_page_tokens) + 1 if window else 0,
            Kind.POINT: 2 if spec.parts(Kind.POINT) else 0,  # its own, and the copy it goes on with
        }
        if spec.spill is not None:
            need[Kind.ROWS] = self._resident_rows(need[Kind.PREFIX], chunk_tokens)
        return self._state.arena(Tier.DEVICE).fits_when_empty({kind: count for kind, count in need.items() if count})

    def _resident_rows(self, pages: int, chunk_tokens: int) -> int:
        """How many pages of rows a request of so many pages must have on the device: hot ones, its tail, and those of a chunk."""
        if not self._state.arena(Tier.HOST).fits_when_empty({Kind.PREFIX: pages}):
            return pages
        chunk = -(-chunk_tokens // self._state.spec.page_tokens)
        return min(pages, hot_pages_of(self._state) + TAIL_PAGES + chunk)

    @one_thread
    def next_stop(self, lease: Lease) -> int | None:
        """Where the engine must end its chunk next and commit; None for nowhere."""
        return publish.next_stop(self._state, lease)

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
        return external.can_load(lease)

    @one_thread
    def first_unsaved(self, lease: Lease) -> int:
        """Without a device tier: the first page that the next commit copies. Those before it need no name."""
        return external.first_unsaved(self._state, lease)

    @one_thread
    def arriving(self, lease: Lease) -> tuple[Arriving, ...]:
        """For a lease that is LOADING: what a pass may wait for layer by layer, instead of before it begins. Empty for none.

        A pass that has begun so is committed once `wait_arriving` has said that everything came.
        """
        return self._state.copies.arriving(lease.arrives_with) if lease.state is LeaseState.LOADING else ()

    # ---- a request's life -------------------------------------------------------------------------

    @one_thread
    def prefetch(self, match: Match, *, priority: int = 0, ttl_s: float | None = None) -> Ticket:
        """When a request arrives: starts bringing up what the store has of its prompt, and says how long to wait for it.

        Call `step` until the ticket is ready, then give it to `acquire`; or close it. Without a store it is ready at once.
        `priority` and `ttl_s` are those that `acquire` will be given: what arrives is entered under them.
        """
        return self._store_tier.open_prefetch(self.refresh(match), _request((), priority, ttl_s))

    @one_thread
    def acquire(
        self, match: Match, *, ticket: Ticket | None = None, hints: tuple[int, ...] = (), priority: int = 0,
        ttl_s: float | None = None, publish: bool = True,
    ) -> Lease:  # fmt: skip
        """Leases the prompt of a match: holds its restore point, takes pages for the rest, starts what must be copied.

        Raises NoRoom and holds nothing. The lease may be LOADING: call `step` until it is ready. Closes the ticket.
        Each step of `priority` (up to 10) doubles what the path is worth keeping, and one is lost every ten minutes.
        Without `publish` nobody else will see what the request computes.
        """
        request = _request(hints, priority, ttl_s)
        if ticket is not None and (ticket.namespace, ticket.packed) != (match.namespace, match.packed):
            raise LeaseError("this ticket is for another prompt")
        from_store = ticket.from_store if ticket is not None else None
        lease = restore.acquire(self._state, match, request, self._leases.next_id(), self.release, from_store)
        lease.computing_since_s = self._state.clock.now()
        lease.publishes = publish
        self._leases.add(lease)
        if ticket is not None:
            ticket.close(used_tokens=lease.sources.store)
        return lease

    @one_thread
    def ask_checkpoint(self, lease: Lease, boundary: int) -> bool:
        """Asks a running request to stop at `boundary` of its prompt too, since another wants to resume there.

        False when nobody will be able to: it is past it, or publishes nothing, or no request could resume there.
        """
        lease.must_be(LeaseState.READY, LeaseState.LOADING)
        spec = self._state.spec
        if not (lease.publishes and spec.is_legal(boundary) and lease.position < boundary < lease.prompt_tokens):
            return False
        if spec.needs_checkpoint_at(boundary):
            lease.stops = tuple(sorted({*lease.stops, boundary}))
        return True

    @one_thread
    def grow(self, lease: Lease, upto: int) -> None:
        """Gives the lease device pages for tokens up to `upto`; or raises NoRoom and gives none."""
        self._must_own_device("grow")
        lease.must_be(LeaseState.READY, LeaseState.LOADING)
        publish.grow(self._state, lease, upto)

    @one_thread
    def append(self, lease: Lease, tokens: Tokens) -> None:
        """Adds tokens the model has produced to the lease's path. Raises BadTokens."""
        lease.must_be(LeaseState.READY, LeaseState.LOADING)
        lease.append_packed(pack(tokens, vocab_size=self._state.config.vocab_size))

    @one_thread
    def load(self, lease: Lease, into: EnginePages, *, since: int = 0) -> None:
        """Without a device tier: starts copying the restored prefix into the engine's own memory.

        An engine that has tokens `[0, since)` itself names the pages after those only, of windows too. Raises LoadFailed when
        the checkpoint is gone, which `can_load` tells before.
        """
        if self._state.nearest is Tier.DEVICE:
            raise ConfigError("load() is for caches without a device tier; with one, acquire() loads")
        lease.must_be(LeaseState.READY)
        external.load(self._state, lease, into, since=since)

    @one_thread
    def commit(
        self, lease: Lease, upto: int, *, source: EnginePages | None = None, checkpoint: bool | None = None, last: bool = False
    ) -> bool:  # fmt: skip
        """Offers everything computed so far, tokens `[0, upto)`, to the cache; false when it could not take them.

        At a stop this leaves a checkpoint; a request with point state then loads until its own copy is made.
        `last` says that the request computes nothing more, which spares that copy. Without a device tier,
        `source` names the engine's memory to copy from, and the lease loads until a checkpoint was copied out of it, unless
        it was named `ahead`. `checkpoint` is for engines that know where they have state: True leaves one here, stop or not,
        False leaves none.
        """
        lease.must_be(LeaseState.READY)
        if not lease.position <= upto <= lease.num_tokens:
            raise LeaseError(
                f"{lease} cannot commit up to token {upto}: it stands at {lease.position} and has {lease.num_tokens} tokens"
            )
        if source is None or not source.ahead:
            self._measure(lease, upto)
        wanted = self._wants_checkpoint(lease, upto, last) if checkpoint is None else checkpoint and self._can_checkpoint(upto)
        if self._state.nearest is Tier.DEVICE:
            publish.commit(self._state, lease, upto, checkpoint=wanted, last=last)
            return lease.publishes
        if source is None:
            raise LeaseError("without a device tier, commit() needs `source`: the engine's pages to copy from")
        return external.commit(self._state, lease, upto, source, checkpoint=wanted)

    @one_thread
    def computed(self, tokens: int, took_s: float) -> None:
        """Says how long the engine took to compute so many tokens of prompts. Commits tell by themselves, unless they come
        `ahead` of the computation.
        """
        self._learn_speed(tokens, took_s)

    @one_thread
    def wait_arriving(self, lease: Lease) -> bool:
        """After a pass that began while the lease was LOADING: waits for what the pass has waited for on the device.

        False when some of it did not come: nothing of the pass may be used. `step` then reports the lease as failed.
        """
        lease.computing_since_s = inf  # how fast prompts are computed cannot be seen from this pass
        try:
            self._wait(lease, inf, ARRIVING_POLL_S)
        except LoadFailed:
            return False
        return True

    @one_thread
    def note_missing_state(self, lease: Lease, state: str, *, since: int) -> None:
        """Says that from token `since` on the lease's pages do not hold an optional state, nor will; `explain` then names it.

        Nothing else depends on it: what a match finds is the same. Raises LeaseError for a state that is required.
        """
        lease.must_be(LeaseState.READY)
        publish.note_missing_state(self._state, lease, state, since)

    @one_thread
    def release(self, lease: Lease) -> None:
        """Gives a lease back, at any moment, once. What it committed stays cached; the rest is free again.

        An engine that owns its device memory must leave what it named alone while `lease.jobs` is not empty; `step`
        reports the lease as finished when it is.
        """
        self._leases.release(lease)

    # ---- upkeep -----------------------------------------------------------------------------------

    @one_thread
    def step(self) -> StepReport:
        """Applies what copies and store operations have come to, settles leases, drops what expired. Never blocks."""
        report, earlier = self._advance(), self._unreported
        self._unreported = None
        return report.after(earlier) if earlier is not None else report

    def _advance(self) -> StepReport:
        state = self._state
        state.give_back_host()
        completions = state.copies.apply()
        errors = {done.job: done.error for done in completions if done.error is not None}
        timeout_s = state.copy_timeout_s
        errors |= dict.fromkeys(state.copies.give_up_overdue(timeout_s), f"no answer within {timeout_s:g} s")
        detached, store_failures = self._store_tier.step()
        self.pins.drop_expired()
        drop_expired(state, self.pins.nodes)
        settled = self._leases.settle(errors)
        return StepReport(
            completed=len(completions),
            failures=(*errors.values(), *store_failures),
            ready=settled.ready,
            failed=settled.failed,
            finished=settled.finished,
            running=state.copies.num_running,
            storing=self._store_tier.num_busy,
            detached=tuple(detached),
        )

    @one_thread
    def clear(self, *, namespace: Namespace | None = None) -> None:
        """Forgets everything cached under a namespace: after new weights, say.

        Requests keep what they hold until they release it, and what they go on to compute is no longer offered to others.
        A store keeps its values, but none is asked for this namespace again, whether it is attached now or later: new weights
        want a new model name.
        """
        digest = (namespace or self._namespace).digest
        self._store_tier.bar(digest)
        for lease in self._leases:
            lease.publishes &= lease.namespace.digest != digest
        clear(self._state.tree, digest, self._state.loss(LossReason.CLEARED, self._state.nearest))
        self._state.give_back_host()

    @one_thread
    def flush(self, *, namespace: Namespace | None = None) -> None:
        """Empties device and host memory of a namespace, or of all. The bytes were right: a store goes on serving its own.
        What was not backed up yet is sent to it first, and is of use once it has arrived.
        """
        digests = list(self._state.tree.roots) if namespace is None else [namespace.digest]
        self._store_tier.before_flush(digests)
        for digest in digests:
            clear(self._state.tree, digest, self._state.loss(LossReason.CLEARED, self._state.nearest))
        self._state.give_back_host()

    @one_thread
    def audit(self) -> None:
        """Asserts that every count, reference and promise of the cache holds. Slow: for tests and doubts."""
        audit(self._state, list(self._leases), list(self.pins), self._store_tier.links)

    @one_thread
    def wait(self, held: Lease | Ticket, *, timeout_s: float = inf) -> None:
        """Steps until a ticket or a lease is ready. For callers with nothing else to do: an engine calls `step` itself.

        Raises LoadFailed when the bytes of a lease did not arrive, LeaseError when it was given back or `timeout_s` has passed.
        """
        self._wait(held, timeout_s, POLL_S)

    def _wait(self, held: Lease | Ticket, timeout_s: float, poll_s: float) -> None:
        clock = self._state.clock
        deadline_s = clock.now() + timeout_s
        while not held.ready:
            if isinstance(held, Lease) and not held.failed:
                held.must_be(LeaseState.LOADING)
            self._unreported = self._advance().after(self._unreported or StepReport())
            if isinstance(held, Lease) and held.failed:
                raise LoadFailed(f"{held}: bytes it needed did not arrive; release it and look the prompt up again")
            if not held.ready:
                if clock.now() >= deadline_s:
                    raise LeaseError(f"{held} is not ready after {timeout_s:g} s")
                clock.sleep(poll_s)

    def hand_over(self) -> None:
        """Lets another thread have the cache: the next that calls it. Called by the one that had it, when it is done."""
        self._owner.release()

    @one_thread
    def close(self, *, timeout_s: float = 30.0) -> bool:
        """Waits for running copies and for what is to be backed up, and stops the workers. Leases must have been given back.

        Ranks and stores that hang or are slow are waited for `timeout_s` in all; what was given up on before is not waited
        for. False when something was left undone: what had not begun is called off, and calls that have may still be running.
        """
        state, deadline_s = self._state, self._state.clock.now() + timeout_s
        try:
            self._settle(deadline_s, lambda: state.copies.num_awaited, state.copies.drain)
            self._store_tier.end_deferral()
            self._settle(deadline_s, lambda: self._store_tier.num_awaited, self._store_tier.drain)
            undone = self.copying + self._store_tier.num_busy
        finally:
            state.copies.withdraw_all()
            self._store_tier.close()
            state.copies.close()
        return not undone

    # ---- inside -----------------------------------------------------------------------------------

    def _settle(self, deadline_s: float, num_awaited: Callable[[], int], drain: Callable[[float], None]) -> None:
        """Steps until nothing is awaited, or the time is over."""
        clock = self._state.clock
        self._advance()
        while num_awaited() and clock.now() < deadline_s:
            drain(min(deadline_s - clock.now(), DRAIN_S))
            self._advance()

    def _measure(self, lease: Lease, upto: int) -> None:
        now = self._state.clock.now()
        took_s, lease.computing_since_s = now - lease.computing_since_s, now
        if lease.position < lease.prompt_tokens and took_s >= 0:
            self._learn_speed(upto - lease.position, took_s)

    def _learn_speed(self, tokens: int, took_s: float) -> None:
        if tokens >= LEAST_CHUNK_TOKENS:
            self._state.compute_speed.measure(tokens, took_s, self._state.clock.now())
        self._store_tier.computed(tokens, took_s)

    def _can_checkpoint(self, upto: int) -> bool:
        return self.spec.needs_checkpoint_at(upto) and self.spec.is_legal(upto)

    def _wants_checkpoint(self, lease: Lease, upto: int, last: bool) -> bool:
        return self._can_checkpoint(upto) and (last or publish.is_stop(self._state, lease, upto))

    def _must_own_device(self, verb: str) -> None:
        if self._state.nearest is not Tier.DEVICE:
            raise ConfigError(f"{verb}() needs a device tier; without one the engine allocates its own pages")


def _request(hints: tuple[int, ...], priority: int, ttl_s: float | None) -> RequestOptions:
    if not 0 <= priority <= MAX_PRIORITY or (ttl_s is not None and ttl_s <= 0):
        raise ConfigError(f"priority must be 0 to {MAX_PRIORITY} and ttl_s positive, got {priority} and {ttl_s}")
    return RequestOptions(hints=hints, priority=priority, ttl_s=ttl_s)
