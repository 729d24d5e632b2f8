"""Drives the production cache with the requests of a trace, one after the other, on a clock that follows the trace.

    clock      shows a request's arrival while it is served: copies and operations take no time on it
    answers    are not cached: a trace does not contain them
    seconds    to the first token are estimated for each request alone: no request waits for another

No logic of the cache is repeated here, and no page memory exists.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

from stepwell.base.config import PrefetchPolicy, StoreConfig
from stepwell.base.errors import ConfigError, NoRoom
from stepwell.base.ids import Kind, Tier
from stepwell.base.meters import Clock, ManualClock
from stepwell.base.units import counted
from stepwell.cache.build import build_cache
from stepwell.cache.facade import Cache
from stepwell.sim.executors import CountingExecutor, CountingStoreExecutor, Traffic
from stepwell.sim.report import Report
from stepwell.sim.setup import Setup
from stepwell.sim.store import CountingStore
from stepwell.sim.tally import Ceiling, Tally
from stepwell.sim.trace import Trace, TraceRequest, prompt_of
from stepwell.store_tier.ticket import Ticket
from stepwell.tiers.lease import Lease, Sources
from stepwell.tree.match import Match

CHUNK_TOKENS = 8192  # computed at a time, where a model's windows take memory for every token of a chunk,
LEAST_CHUNK_TOKENS, MOST_CHUNK_SHARE = 512, 1 / 32  # or fewer, while these take more than this share of the device
LEAST_STEP_S = 1e-6  # between two requests, so that each use is later than the one before
MOST_STEPS = 1_000_000  # for everything to settle; more is a bug
MOST_TRIES = 64  # to acquire a lease while memory is being freed


class Replay:
    """One cache and the requests it has served. One thread."""

    def __init__(self, setup: Setup, *, block_tokens: int, on_commit: Callable[[Lease], None] | None = None) -> None:
        """`on_commit` is called with a lease after each of its commits."""
        self._setup = setup
        self._on_commit = on_commit
        self._block_tokens = block_tokens
        self.clock = ManualClock()
        self._number = 0
        self._traffic = Traffic()
        self._chunk_tokens = _chunk_tokens(setup)
        self._ceiling = Ceiling(setup.spec, block_tokens, whole_blocks=setup.whole_blocks)
        self.cache = build_cache(
            setup.spec, setup.config, executor=CountingExecutor(setup.spec, self._traffic), clock=self.clock, model="replay",
            tuning=setup.tuning,
        )  # fmt: skip
        self.store = _attach_store(self.cache, setup, self._traffic)
        self.tally = Tally(setup, self.cache, self._traffic, self.store)

    def serve(self, request: TraceRequest) -> Sources:
        """Serves a whole request and returns where its prompt came from."""
        self.clock.advance(max(request.at_s - self.clock.now(), LEAST_STEP_S))
        self._number += 1
        setup = self._setup
        tokens = prompt_of(request, self._block_tokens, number=self._number, whole_blocks=setup.whole_blocks)
        loaded, fetched = self._traffic.loaded_bytes, self._traffic.read_bytes[Tier.STORE]
        match = self.cache.lookup(tokens)
        lease = self._acquire(match, self._fetched(match) if self.store is not None else None)
        if lease is None:
            sources, resumed_checkpoint = Sources(computed=request.prompt_tokens), False
        else:
            sources, resumed_checkpoint = _within(lease.sources, request.prompt_tokens), lease.restored is not None
            self._compute(lease)
            self._answer(lease, request.output_tokens)
        ttft_s = setup.hardware.request_latency_s + setup.hardware.prefill_s(sources.total - sources.computed, sources.total)
        ttft_s += setup.hardware.load_s(self._traffic.loaded_bytes - loaded)
        ttft_s += setup.hardware.fetch_s(self._traffic.read_bytes[Tier.STORE] - fetched)
        self.tally.add(
            request, sources, ttft_s=ttft_s, reusable_tokens=self._ceiling.reusable(request), fits=lease is not None,
            from_checkpoint=resumed_checkpoint,
        )  # fmt: skip
        return sources

    # ---- inside -----------------------------------------------------------------------------------

    def _fetched(self, match: Match) -> Ticket:
        """A ticket for everything in the store that is worth fetching, once it is fetched."""
        ticket = self.cache.prefetch(match)
        self._settle(lambda: ticket.ready)
        return ticket

    def _acquire(self, match: Match, ticket: Ticket | None) -> Lease | None:
        """A lease that is ready to compute; None if the prompt is larger than the device."""
        lease = self._leased(match, ticket)
        if lease is not None:
            self._settle(lambda: lease.ready)
            assert lease.ready, f"{lease} did not become ready"
        elif ticket is not None:
            ticket.close()
        return lease

    def _leased(self, match: Match, ticket: Ticket | None) -> Lease | None:
        for _ in range(MOST_TRIES):
            try:
                return self.cache.acquire(self.cache.refresh(match), ticket=ticket)
            except NoRoom as refusal:
                if not refusal.waiting:
                    return None
                self._settle()
        return None

    def _compute(self, lease: Lease) -> None:
        """Ends a chunk at every stop, as an engine does."""
        cache, prompt_tokens = self.cache, lease.prompt_tokens
        chunk = self._chunk_tokens or prompt_tokens
        while lease.position < prompt_tokens:
            stop = cache.next_stop(lease)
            end = min(lease.position + chunk, prompt_tokens if stop is None else min(stop, prompt_tokens))
            try:
                cache.grow(lease, end)
            except NoRoom as refusal:
                if not refusal.waiting:
                    break  # what is committed stays; the rest is computed and not cached
                self._settle()
                continue
            cache.commit(lease, end)
            if self._on_commit is not None:
                self._on_commit(lease)
            self._settle(lambda: lease.ready)

    def _answer(self, lease: Lease, tokens: int) -> None:
        """Ends a request with an answer of unknown tokens: it is not cached, but the cache sees its length."""
        self.cache.append(lease, range(tokens))
        self.cache.release(lease)
        self._settle()

    def _settle(self, until: Callable[[], bool] | None = None) -> None:
        """Steps until `until()` holds, or until nothing is in flight."""
        for _ in range(MOST_STEPS):
            if until is not None and until():
                return
            report = self.cache.step()
            if not report.running and not report.storing:
                return
        raise AssertionError(f"the cache did not settle: {self.cache.stats().pending=}")


def replay_trace(
    trace: Trace, setup: Setup, *, policy: str, clock: Clock, warm_up: int = 0, on_request: Callable[[], None] | None = None
) -> Report:
    """Serves a whole trace with an empty cache; figures begin after `warm_up` requests. `clock` times the replay itself.

    Raises TraceError for a trace that cannot be read, ConfigError for one that ends before figures begin.
    """
    started_s = clock.now()
    replay = Replay(setup, block_tokens=trace.block_tokens)
    served = 0
    for request in trace:
        if served == warm_up:
            replay.tally.restart()
        replay.serve(request)
        served += 1
        if on_request is not None:
            on_request()
    if 0 < served <= warm_up:
        raise ConfigError(f"a warm-up of {warm_up} leaves none to count of the {counted(served, 'request')} of {trace.name}")
    replay.cache.close()  # what still waits to be stored is counted too
    return replay.tally.report(trace=trace.name, policy=policy, wall_s=clock.now() - started_s)


def _chunk_tokens(setup: Setup) -> int | None:
    """Tokens of a prompt that are computed at a time; None for all, where that takes no memory beyond its pages."""
    spec, device_bytes = setup.spec, setup.config.device_bytes
    if not spec.window_tokens or device_bytes is None:
        return None
    chunk, window_bytes = CHUNK_TOKENS, spec.device_bytes(Kind.WINDOW)
    while chunk > LEAST_CHUNK_TOKENS and chunk // spec.window_page_tokens * window_bytes > MOST_CHUNK_SHARE * device_bytes:
        chunk //= 2
    return chunk


def _attach_store(cache: Cache, setup: Setup, traffic: Traffic) -> CountingStore | None:
    if setup.store_bytes is None:
        return None
    config = StoreConfig(prefetch=PrefetchPolicy.WAIT_COMPLETE, recompute_tokens_per_s=setup.hardware.prefill_tokens_per_s)
    store = CountingStore(setup.store_bytes)
    store_executor = CountingStoreExecutor(setup.spec, store, traffic, setup.hardware, readers=config.readers)
    cache.store.attach(store, config, executor=store_executor)
    return store


def _within(sources: Sources, prompt_tokens: int) -> Sources:
    """Sources of the prompt in the trace, after its last block was treated as full or its tail was left out."""
    excess = sources.total - prompt_tokens  # negative for a tail, which is computed
    if not excess:
        return sources
    computed = min(sources.computed, excess)
    left = excess - computed
    sources = replace(sources, computed=sources.computed - computed)
    for name in ("store", "host", "device"):
        cut = min(getattr(sources, name), left)
        left -= cut
        sources = replace(sources, **{name: getattr(sources, name) - cut})
    return sources
