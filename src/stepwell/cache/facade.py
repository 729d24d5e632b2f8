"""The cache's interface for engines: look a prompt up, lease it, commit computed tokens, release the lease.

    match = cache.lookup(tokens)                  a question; changes nothing
    with cache.acquire(match) as lease:           pages held, copies started
        ...                                       cache.step() until lease.ready
        cache.commit(lease, upto)                 at every stop the lease names
    cache.step()                                  once per engine step; never blocks

A cache belongs to one thread at a time, the engine's scheduler: the first that calls it, until it calls `hand_over` or ends.
From another one everything but counters raises WrongThread. Bytes are moved by the executor's threads, and what
came of it is applied in `step` alone. What changes nothing is in `read_only.py`, what a step is in `upkeep.py`.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from math import inf

from stepwell.base.config import MAX_PRIORITY
from stepwell.base.errors import ConfigError, LeaseError, LoadFailed
from stepwell.base.ids import Tier
from stepwell.base.prompt import Namespace, Tokens, pack
from stepwell.cache.audit import audit
from stepwell.cache.read_only import ReadOnlyCache
from stepwell.cache.report import StepReport
from stepwell.cache.store import StoreControl
from stepwell.cache.upkeep import Upkeep
from stepwell.policy.store_use import Speed
from stepwell.store_tier.hand_out import HandOut, hand_out, is_on_host
from stepwell.store_tier.ticket import Ticket
from stepwell.store_tier.tier import StoreTier
from stepwell.tiers import external, publish, restore
from stepwell.tiers.eviction import make_room
from stepwell.tiers.external import EnginePages
from stepwell.tiers.lease import Lease, Leases, LeaseState, RequestOptions
from stepwell.tiers.lifetime import Pins
from stepwell.tiers.spill import spill
from stepwell.tiers.state import CacheState, one_thread
from stepwell.tree.feed import MOST_PAGES, EventFeed
from stepwell.tree.match import Match
from stepwell.tree.node import LossReason
from stepwell.tree.pruning import clear, lose_device

LEAST_CHUNK_TOKENS = 64  # a few tokens do not say how fast many are computed


class Cache(ReadOnlyCache):
    """A tiered prefix cache for one model. Make one with `stepwell.cache.build.build_cache`."""

    def __init__(self, state: CacheState, namespace: Namespace, store_tier: StoreTier) -> None:
        super().__init__(state, namespace, store_tier)
        self.store = StoreControl(store_tier, state.owner)
        self._leases = Leases(state)
        if state.row_pages is not None:
            state.spill = partial(spill, state, self._leases)
        self.pins = Pins(state, self.lookup)
        self._upkeep = Upkeep(state, store_tier, self._leases, self.pins)

    # ---- a request's life -------------------------------------------------------------------------

    @one_thread
    def prefetch(self, match: Match, *, priority: int = 0, ttl_s: float | None = None, awaited: bool = True) -> Ticket:
        """When a request arrives: starts bringing up what the store has of its prompt, and says how long to wait for it.

        Call `step` until the ticket is ready, then give it to `acquire`; or close it. Without a store it is ready at once.
        `priority` and `ttl_s` are those that `acquire` will be given: what arrives is entered under them. Not `awaited`: for a
        request that is still to come. Then it goes no further than the host, is ready when all has come, and no wait is paid for.
        """
        return self._store_tier.open_prefetch(self.refresh(match), _request((), priority, ttl_s), awaited=awaited)

    @one_thread
    def acquire(
        self, match: Match, *, ticket: Ticket | None = None, hints: tuple[int, ...] = (), priority: int = 0,
        ttl_s: float | None = None, publish: bool = True,
    ) -> Lease:  # fmt: skip
        """Leases the prompt of a match: holds its restore point, takes pages for the rest, starts what must be copied.

        Raises NoRoom and holds nothing; LeaseError for a match or ticket of another cache. The lease may be LOADING: call `step`
        until it is ready. Closes the ticket.
        Each step of `priority` (up to 10) doubles what the path is worth keeping, and one is lost every ten minutes.
        Without `publish` no other request can reuse what this one computes.
        """
        request = _request(hints, priority, ttl_s)
        if ticket is not None and (ticket.namespace, ticket.packed) != (match.namespace, match.packed):
            raise LeaseError("this ticket is for another prompt")
        if ticket is not None and ticket.tree is not self._state.tree:
            raise LeaseError("this ticket belongs to another cache")
        fetched = (ticket.from_store, ticket.known_pages) if ticket is not None else (None, 0)
        lease = restore.acquire(self._state, match, request, self._leases.next_id(), self.release, *fetched)
        lease.computing_since_s = self._state.clock.now()
        lease.publishes = publish
        self._leases.add(lease)
        if ticket is not None:
            ticket.close(used_tokens=lease.sources.store)
        return lease

    @one_thread
    def ask_checkpoint(self, lease: Lease, boundary: int, *, begun: int = 0) -> bool:
        """Asks a running request to stop at `boundary` of its prompt too, since another wants to resume there. Tokens before
        `begun` are being computed, and what is left at stops among them is settled.

        False if none will be able to: the lease is past it, or publishes nothing, or no request could resume there.
        """
        self._leases.must_be(lease, LeaseState.READY, LeaseState.LOADING)
        spec = self._state.spec
        if not (lease.publishes and spec.is_legal(boundary) and lease.position < boundary < lease.prompt_tokens):
            return False
        if spec.needs_checkpoint_at(boundary):
            if boundary < begun:
                return boundary in lease.stops
            lease.stops = tuple(sorted({*lease.stops, boundary}))
        return True

    @one_thread
    def grow(self, lease: Lease, upto: int) -> None:
        """Gives the lease device pages for tokens up to `upto`; or raises NoRoom and gives none.

        Rows of running requests may leave the device for it, also while a pass still reads them: the pages must not be
        written before that pass has ended. On a GPU, passes follow each other on one stream, and copies wait for it.
        """
        self._must_own_device("grow()")
        self._leases.must_be(lease, LeaseState.READY, LeaseState.LOADING)
        publish.grow(self._state, lease, upto)

    @one_thread
    def copy_point(self, lease: Lease, upto: int) -> int | None:
        """Reserves a device page for a copy of the lease's point state at `upto`. None where `upto` is no stop, the model has no
        such state, or no page is free.

        The engine copies the state to this page on the device, behind the pass that ends at `upto` and before the next one, and
        names the page in `commit(upto, point_copy=page)`. The next pass may then be queued before this one is committed. Without
        that the cache makes the copy after the commit, and the lease is LOADING until it is made. Nothing needs to be done for a
        page whose pass is cancelled: the next call for `upto` returns it again, and `release` frees it.
        """
        self._must_own_device("copy_point()")
        self._leases.must_be(lease, LeaseState.READY, LeaseState.LOADING)
        return publish.copy_point(self._state, lease, upto)

    @one_thread
    def append(self, lease: Lease, tokens: Tokens) -> None:
        """Adds tokens the model has produced to the lease's path. Raises BadTokens."""
        self._leases.must_be(lease, LeaseState.READY, LeaseState.LOADING)
        lease.append_packed(pack(tokens, vocab_size=self._state.config.vocab_size))

    @one_thread
    def load(self, lease: Lease, into: EnginePages, *, since: int = 0) -> None:
        """Without a device tier: starts copying the restored prefix into the engine's own memory.

        An engine that has tokens `[0, since)` itself names the pages after those only, of windows too. Raises LoadFailed when
        the checkpoint is gone, which `can_load` reports before.
        """
        self._must_not_own_device("load()")
        self._leases.must_be(lease, LeaseState.READY)
        external.load(self._state, lease, into, since=since)

    @one_thread
    def commit(
        self, lease: Lease, upto: int, *, source: EnginePages | None = None, checkpoint: bool | None = None, last: bool = False,
        point_copy: int | None = None,
    ) -> bool:  # fmt: skip
        """Offers everything computed so far, tokens `[0, upto)`, to the cache; false when it could not take them.

        At a stop this leaves a checkpoint; a request with point state then loads until its own copy is made, unless the engine
        made one: `point_copy` is the page from `copy_point(upto)`, once it holds the state there. `last` says that the request
        computes nothing more, so that no copy is needed. Without a device tier `source` names the engine's memory to copy from,
        and the lease loads until a checkpoint was copied out of it, unless it was named `ahead`. `checkpoint` is for engines
        that know where they have state: True leaves one here, stop or not, False leaves none.
        """
        self._leases.must_be(lease, LeaseState.READY)
        if not lease.position <= upto <= lease.num_tokens:
            raise LeaseError(
                f"{lease} cannot commit up to token {upto}: it stands at {lease.position} and has {lease.num_tokens} tokens"
            )
        if upto < lease.quiet_until and not (checkpoint or last):
            lease.position = upto  # most tokens of answers
            return lease.publishes
        if source is None or not source.ahead:
            self._measure(lease, upto)
        wanted = self._wants_checkpoint(lease, upto, last) if checkpoint is None else checkpoint and self._can_checkpoint(upto)
        if self._state.nearest is Tier.DEVICE:
            if source is not None:
                self._must_not_own_device("commit(source=...)")
            publish.commit(self._state, lease, upto, checkpoint=wanted, last=last, point_copy=point_copy)
            return lease.publishes
        if point_copy is not None:
            self._must_own_device("commit(point_copy=...)")
        if source is None:
            raise LeaseError("without a device tier, commit() needs `source`: the engine's pages to copy from")
        return external.commit(self._state, lease, upto, source, checkpoint=wanted)

    @one_thread
    def computed(self, spans: Sequence[tuple[int, int]], took_s: float) -> None:
        """Reports how long the engine took for one pass over tokens `start` .. `end` of prompts. Commits report it themselves,
        unless they come `ahead` of the computation.
        """
        self._learn_speed(spans, took_s)

    @one_thread
    def forget_speeds(self) -> None:
        """Drops the measurements of computing so far, for example of passes that also built kernels."""
        self._state.compute_speed = Speed()
        self._store_tier.forget_compute_time()

    @one_thread
    def begins(self, lease: Lease) -> None:
        """Says that what the lease commits next is computed from now on: the device was busy with others until now."""
        self._leases.must_be(lease, LeaseState.READY, LeaseState.LOADING)
        lease.computing_since_s = self._state.clock.now()

    @one_thread
    def wait_arriving(self, lease: Lease) -> bool:
        """After a pass that began while the lease was LOADING: waits for what the pass has waited for on the device.

        False when some of it did not come: nothing of the pass may be used. `step` then reports the lease as failed.
        """
        self._leases.must_be(lease, LeaseState.READY, LeaseState.LOADING, LeaseState.FAILED)
        lease.computing_since_s = inf  # how fast prompts are computed cannot be seen from this pass
        try:
            self._upkeep.wait(lease, inf)
        except LoadFailed:
            return False
        return True

    @one_thread
    def note_missing_state(self, lease: Lease, state: str, *, since: int) -> None:
        """Says that from token `since` on the lease's pages do not hold an optional state, nor will; `explain` then names it.

        Nothing else depends on it: what a match finds is the same. Raises LeaseError for a state that is required.
        """
        self._leases.must_be(lease, LeaseState.READY)
        publish.note_missing_state(self._state, lease, state, since)

    @one_thread
    def release(self, lease: Lease) -> None:
        """Gives a lease back, at any moment, once. What it committed stays cached; the rest is free again.

        An engine that owns its device memory must leave what it named alone while `lease.jobs` is not empty; `step`
        reports the lease as finished when it is.
        """
        self._leases.release(lease)

    @one_thread
    def hand_out(self, tokens: Tokens, *, namespace: Namespace | None = None, ttl_s: float) -> HandOut | None:
        """Holds what a prompt could resume with on the host for `ttl_s`, for another server to read: all states, or None.

        None where nothing can be resumed, or while something of it is on the device alone. `cache.pins.release(out.pin)` ends
        it sooner. Raises BadTokens and ConfigError.
        """
        match = self.lookup(tokens, namespace=namespace)
        if not is_on_host(self._state, match):
            return None
        return hand_out(self._state, match, self.pins.add(tokens, namespace=namespace, ttl_s=ttl_s))

    # ---- upkeep -----------------------------------------------------------------------------------

    @one_thread
    def step(self) -> StepReport:
        """Applies what copies and store operations have come to, settles leases, drops what expired. Never blocks."""
        return self._upkeep.step()

    @one_thread
    def clear(self, *, namespace: Namespace | None = None) -> None:
        """Drops everything cached under a namespace, for example after new weights.

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
    def lose_device(self) -> None:
        """Drops all that is on the device: its memory is gone, and so are the ranks that copied to and from it. Host and store
        stay as they are. No copy may still be carried out. Raises LeaseError while leases are open.
        """
        self._must_own_device("lose_device()")
        self._must_have_no_leases("the device tier is given up")
        self._state.copies.take_back_all()
        lose_device(self._state.tree, self._state.loss(LossReason.DEVICE, Tier.DEVICE))
        self._state.give_back_host()

    @one_thread
    def evict_idle(self) -> None:
        """Evicts from the device all that no request uses, as far as it may leave at once. Host and store keep what they have."""
        self._must_own_device("evict_idle()")
        layout = self._state.arena(Tier.DEVICE).layout
        make_room(self._state, Tier.DEVICE, {kind: layout.rows(kind) + 1 for kind in layout.strides}, may_spill=False)

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
    def listen(self, *, most_pages: int = MOST_PAGES) -> EventFeed:
        """A feed of what is stored and evicted from now on, in every tier; closed by the caller.

        Take from it now and then: it keeps events of `most_pages` pages at most, and loses the oldest. Raises ConfigError.
        """
        return self._state.tree.feeds.listen(self._owner.check, most_pages=most_pages)

    @one_thread
    def audit(self) -> None:
        """Asserts that every count, reference and promise of the cache holds. Slow: for tests and doubts."""
        audit(self._state, list(self._leases), list(self.pins), self._store_tier.links)

    @one_thread
    def wait(self, held: Lease | Ticket, *, timeout_s: float = inf) -> None:
        """Steps until a ticket or a lease is ready. For callers with nothing else to do: an engine calls `step` itself.

        Raises LoadFailed when the bytes of a lease did not arrive, LeaseError when it was released or `timeout_s` has passed.
        """
        if isinstance(held, Lease):
            self._leases.must_be(held, LeaseState.READY, LeaseState.LOADING, LeaseState.FAILED)
        elif held.tree is not self._state.tree:
            raise LeaseError("this ticket belongs to another cache")
        self._upkeep.wait(held, timeout_s)

    @property
    def wakes(self) -> bool:
        """Whether every answer wakes: otherwise only `step` finds some, and must be called often."""
        return not self._state.wakeup.polled

    def wake_by(self, wake: Callable[[], None]) -> None:
        """From now on calls `wake` whenever `step` has something to apply, on the thread that has answered: it must be quick."""
        self._state.wakeup.listener = wake

    def wake(self) -> None:
        """Wakes a thread that waits for this cache. From any thread."""
        self._state.wakeup.set()

    def hand_over(self) -> None:
        """Lets another thread have the cache: the next that calls it. Called by the one that had it, when it is done."""
        self._owner.release()

    @one_thread
    def close(self, *, timeout_s: float = 30.0) -> bool:
        """Waits for running copies, for store operations and for pending backups, and stops the workers. Under
        `exclusive` everything that is worth keeping is backed up, what only the device has last. Raises LeaseError while leases
        are open, and closes nothing then.

        Ranks and stores that hang or are slow are waited for `timeout_s` in all, but for operations that exceeded their own time
        limit before. False when something was left undone: what had not begun is cancelled, and calls that have begun may still
        be running.
        """
        self._must_have_no_leases("the cache is closed")
        return self._upkeep.close(timeout_s)

    # ---- inside -----------------------------------------------------------------------------------

    def _must_have_no_leases(self, before: str) -> None:
        if len(self._leases):
            raise LeaseError(f"{len(self._leases)} lease(s) are open; release them before {before}")

    def _measure(self, lease: Lease, upto: int) -> None:
        now = self._state.clock.now()
        took_s, lease.computing_since_s = now - lease.computing_since_s, now
        if lease.position < lease.prompt_tokens and took_s >= 0:
            self._learn_speed([(lease.position, upto)], took_s)

    def _learn_speed(self, spans: Sequence[tuple[int, int]], took_s: float) -> None:
        tokens = sum(end - start for start, end in spans)
        if tokens >= LEAST_CHUNK_TOKENS:
            self._state.compute_speed.measure(tokens, took_s)
        self._store_tier.computed(spans, took_s)


def _request(hints: tuple[int, ...], priority: int, ttl_s: float | None) -> RequestOptions:
    if not 0 <= priority <= MAX_PRIORITY or (ttl_s is not None and ttl_s <= 0):
        raise ConfigError(f"priority must be 0 to {MAX_PRIORITY} and ttl_s positive, got {priority} and {ttl_s}")
    return RequestOptions(hints=hints, priority=priority, ttl_s=ttl_s)
