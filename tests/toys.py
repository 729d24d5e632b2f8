"""Small models and a small cache around them, for tests. Nothing here sleeps, threads or decides.

In the toy models an object of any kind takes 32 bytes (page of 4 tokens), so that memory can be counted in pages.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from typing import TypeVar

import numpy as np

from stepwell import (
    CacheConfig,
    Kind,
    Lease,
    ModelSpec,
    NoRoom,
    PlacementConfig,
    Point,
    Prefix,
    Sources,
    Spill,
    StateSpec,
    StepReport,
    Tier,
    Window,
    build_cache,
)
from stepwell.base.config import PrefetchPolicy, StoreConfig
from stepwell.base.ids import JobId
from stepwell.base.meters import ManualClock
from stepwell.base.tasks import Purpose
from stepwell.cache.build import CacheTuning, layouts_for, numpy_memories
from stepwell.policy.placement import PlacementRules
from stepwell.policy.store_use import StoreTuning
from stepwell.policy.value import ValuePolicy
from stepwell.sim.policies import LeastRecent
from stepwell.store.api import Store, Traits
from stepwell.store.memory import MemoryStore
from stepwell.store_tier.ticket import Ticket
from stepwell.testing import DigestEngine, ScriptedExecutor, ScriptedStoreExecutor
from stepwell.tiers.eviction import make_room
from stepwell.transfer.copy_engine import NumpyCopyEngine
from stepwell.transfer.store_worker import StoreWorker

T = TypeVar("T")

PAGE = 4
OBJECT_BYTES = 32

KV = StateSpec(name="kv", shape=Prefix(), layers=2, row_bytes=4, dtype="u8")
SSM = StateSpec(name="ssm", shape=Point(), layers=1, row_bytes=32, dtype="u8")


def swa(tokens: int) -> StateSpec:
    return StateSpec(name="swa", shape=Window(tokens=tokens), layers=1, row_bytes=8, dtype="u8")


def model(*states: StateSpec, page_tokens: int = PAGE) -> ModelSpec:
    return ModelSpec(name="toy", page_tokens=page_tokens, states=states)


INDEX = StateSpec(name="index", shape=Prefix(), layers=1, row_bytes=3, dtype="u8")
SPILLING = replace(
    model(KV, INDEX), spill=Spill(states=("kv",), group_of={"kv": (0, 1)})
)  # 64 + 32 bytes a page on the device, 48 on the host

FULL = model(KV)
FULL_WINDOW = model(KV, swa(8))
FULL_POINT = model(KV, SSM)
HYBRID = model(KV, swa(8), SSM)
ALL_MODELS = {"full": FULL, "window": FULL_WINDOW, "point": FULL_POINT, "hybrid": HYBRID}

NO_INTERVALS = PlacementConfig(interval_tokens=0, decode_interval_tokens=0)
SMALL_PAGES = CacheTuning(page_alignment_bytes=16)
EVICTIONS: dict[str, ValuePolicy | None] = {"value": None, "lru": LeastRecent()}  # None: as it ships


def text(name: int, tokens: int) -> list[int]:
    """A prompt of its own: no two names share a token."""
    return [name * 100_000 + index for index in range(tokens)]


class LastingStore(MemoryStore):
    """A memory store that says it outlives the process: a test keeps it when it drops the cache above."""

    @property
    def traits(self) -> Traits:
        return replace(super().traits, durable=True)


class Rig:
    """A cache whose copies a test answers for, a model of digests that computes into it, and a clock that stands still.

    `device_pages` and `host_pages` count toy objects; None leaves the tier out. Freed pages are poisoned.
    """

    def __init__(
        self, spec: ModelSpec = FULL, *, device_pages: int | None = 256, host_pages: int | None = None, ranks: int = 1,
        placement: PlacementConfig | PlacementRules = NO_INTERVALS, tuning: CacheTuning = SMALL_PAGES, store: Store | None = None,
        store_config: StoreConfig | None = None, store_tuning: StoreTuning | None = None, clock: ManualClock | None = None,
        **config: object,
    ) -> None:  # fmt: skip
        self.spec = spec
        if isinstance(placement, PlacementRules):
            tuning = replace(tuning, placement=placement)
        else:
            config["placement"] = placement
        self.tuning = tuning
        self.config = CacheConfig(device_bytes=_bytes(device_pages), host_bytes=_bytes(host_pages), **config)  # type: ignore[arg-type]
        layouts = layouts_for(spec, self.config, alignment=tuning.page_alignment_bytes)
        self.memories = [numpy_memories(spec, layouts) for _ in range(ranks)]
        self.executor = ScriptedExecutor([NumpyCopyEngine(memory) for memory in self.memories])
        self.engine = DigestEngine(spec, self.memories)
        self.clock = clock or ManualClock()
        self.cache = build_cache(
            spec, self.config, executor=self.executor, clock=self.clock, on_free=self.engine.poison, model="toy weights",
            tuning=tuning,
        )  # fmt: skip
        self.engine.row_pages = self.cache.row_pages
        self.store_executor = ScriptedStoreExecutor(())
        if store is not None:
            self.attach(store, store_config, store_tuning)
        self.state = self.cache._state
        self.tree = self.state.tree

    # ---- what an engine does ----------------------------------------------------------------------

    def open(self, tokens: Sequence[int], **request: object) -> Lease:
        """Acquires and leaves the copies to the test."""
        return self.cache.acquire(self.cache.lookup(tokens), **request)  # type: ignore[arg-type]

    def ready(self, tokens: Sequence[int], **request: object) -> Lease:
        """Acquires and lets everything arrive; every byte restored is checked."""
        lease = self.patiently(lambda: self.open(tokens, **request))
        self.settle()
        assert lease.ready, f"{lease} did not become ready"
        self.engine.check(lease)
        return lease

    def compute(self, lease: Lease, upto: int, *, last: bool = False) -> None:
        """One chunk: pages, bytes, commit. Copies are left to the test."""
        self.cache.grow(lease, upto)
        self.engine.compute(lease, upto)
        self.cache.commit(lease, upto, last=last)

    def prefill(self, lease: Lease, upto: int | None = None) -> None:
        """Computes in chunks that end at every stop, letting copies finish in between."""
        upto = lease.num_tokens if upto is None else upto
        while lease.position < upto:
            stop = self.cache.next_stop(lease)
            end = min(stop or upto, upto)
            self.patiently(partial(self.compute, lease, end))
            self.settle()

    def decode(self, lease: Lease, tokens: Sequence[int]) -> None:
        """Appends and computes token by token."""
        for token in tokens:
            self.cache.append(lease, [token])
            self.patiently(lambda: self.compute(lease, lease.num_tokens))
            self.settle()

    def serve(self, tokens: Sequence[int], *, answer: Sequence[int] = (), **request: object) -> Sources:
        """A whole request, bytes checked before and after, ended with an audit; says where its prompt came from."""
        sources = self.serve_without_audit(tokens, answer=answer, **request)
        self.cache.audit()
        return sources

    def serve_without_audit(self, tokens: Sequence[int], *, answer: Sequence[int] = (), **request: object) -> Sources:
        """The same for large trees, where a test audits once at its end."""
        with self.ready(tokens, **request) as lease:
            self.prefill(lease)
            self.decode(lease, answer)
            self.engine.check(lease)
        self.settle()
        return lease.sources

    def serve_beside(self, tokens: Sequence[int]) -> int:
        """A whole request while older copies stay unanswered; says how many tokens it computed."""
        stuck = set(self.executor.pending)

        def settle() -> None:
            while mine := [job for job in self.executor.pending if job not in stuck]:
                for job in mine:
                    self.executor.finish(job)
                self.cache.step()

        with self.open(tokens) as lease:
            settle()
            self.engine.check(lease)
            while lease.position < lease.num_tokens:
                self.compute(lease, min(self.cache.next_stop(lease) or lease.num_tokens, lease.num_tokens))
                settle()
        settle()
        self.cache.audit()
        return lease.sources.computed

    def serve_beside_store(self, tokens: Sequence[int], ticket: Ticket) -> int:
        """A whole request while operations to the store stay unanswered; says how many tokens it computed."""
        with self.open(tokens, ticket=ticket) as lease:
            while lease.position < lease.num_tokens:
                self.compute(lease, min(self.cache.next_stop(lease) or lease.num_tokens, lease.num_tokens))
                self.executor.finish_all()
                self.cache.step()
            self.engine.check(lease)
        self.cache.audit()
        return lease.sources.computed

    def patiently(self, act: Callable[[], T]) -> T:
        """Tries again while an eviction that makes space is under way, as an engine would."""
        for _ in range(10):
            try:
                return act()
            except NoRoom as refusal:
                if not refusal.waiting:
                    raise
                self.settle()
        raise AssertionError("an eviction was under way ten times and never made space")

    # ---- the store --------------------------------------------------------------------------------

    def attach(self, store: Store, config: StoreConfig | None = None, tuning: StoreTuning | None = None) -> None:
        """Below workers of our own, which get the config's key."""
        config = config or StoreConfig(prefetch=PrefetchPolicy.WAIT_COMPLETE, checkpoint_delay_s=0)
        hosts, ranks, key = [memory[Tier.HOST] for memory in self.memories], len(self.memories), config.key
        self.store_workers = [StoreWorker(store, host, rank=rank, ranks=ranks, key=key) for rank, host in enumerate(hosts)]
        self.store_executor = ScriptedStoreExecutor(self.store_workers)
        self.cache.store.attach(store, replace(config, key=None), executor=self.store_executor, tuning=tuning)

    def fetched(self, tokens: Sequence[int], **request: object) -> Ticket:
        """A ticket for a prompt, with everything that the store has of it brought up."""
        ticket = self.cache.prefetch(self.cache.lookup(tokens), **request)  # type: ignore[arg-type]
        self.settle()
        assert ticket.complete, f"{ticket} is not complete with everything settled"
        return ticket

    def serve_fetched(self, tokens: Sequence[int], *, answer: Sequence[int] = ()) -> Sources:
        """A whole request that waits for the store first."""
        return self.serve(tokens, answer=answer, ticket=self.fetched(tokens))

    # ---- copies -----------------------------------------------------------------------------------

    def settle(self) -> StepReport:
        """Lets every copy succeed, and those that follow from it."""
        report = self.cache.step()
        while self.executor.pending or self.store_executor.pending or report.storing:
            self.executor.finish_all()
            self.store_executor.finish_all()
            report = self.cache.step()
        return report

    def fail_all(self) -> StepReport:
        for job in self.executor.pending:
            self.executor.finish(job, failing_rank=0)
        return self.cache.step()

    def pending(self, purpose: Purpose) -> list[JobId]:
        return [job for job in self.executor.pending if self.executor.plan(job).purpose is purpose]

    # ---- memory -----------------------------------------------------------------------------------

    def used(self, tier: Tier, kind: Kind) -> int:
        return self.state.arena(tier).used_pages(kind)

    def restore(self, tokens: Sequence[int]) -> int:
        return self.cache.lookup(tokens).restore_tokens

    def evict_all(self, tier: Tier) -> None:
        """Everything idle leaves the tier, saved first where the policy says so."""
        everything = {Kind.PREFIX: self.state.arena(tier).layout.rows(Kind.PREFIX)}
        while make_room(self.state, tier, everything).waiting:
            self.settle()

    def evict_idle(self, tier: Tier) -> None:
        """Everything idle leaves the tier now; copies go on running."""
        make_room(self.state, tier, {Kind.PREFIX: self.state.arena(tier).layout.rows(Kind.PREFIX)})

    def shrink(self, tier: Tier, pages: int) -> None:
        """Requests more and more space, page by page, until `pages` prefix pages have left the tier."""
        goal, need = self.used(tier, Kind.PREFIX) - pages, 1
        while self.used(tier, Kind.PREFIX) > goal:
            assert need < self.state.arena(tier).layout.rows(Kind.PREFIX), "nothing more can be evicted"
            make_room(self.state, tier, {Kind.PREFIX: need})
            need += 1

    def idle_check(self) -> None:
        """Everything the cache promises when no request uses it: the tree alone holds the pages in use."""
        self.settle()
        self.cache.audit()
        assert not self.cache._leases, f"leases left open: {list(self.cache._leases)}"
        for arena in self.state.tree.arenas.values():
            for kind, refs in arena.refs.items():
                refs = refs.copy()
                if self.cache.row_pages is not None and (arena.tier, kind) == (Tier.HOST, Kind.PREFIX):
                    np.subtract.at(refs, self.cache.row_pages.holders()[1], 1)  # rows of cached device pages
                assert kind is Kind.WINDOW or (refs <= 1).all(), f"{arena.tier.label} {kind.label} pages are still held"


def _bytes(pages: int | None) -> int | None:
    return None if pages is None else pages * OBJECT_BYTES
