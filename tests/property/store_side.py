"""A world with a store below: tickets, operations that a test answers for, stores that come and go.

Everything that must hold whatever the store does is checked here; what it is good for, in `store_world.py`.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from ledger import TOKEN, space_of
from shelf import Shelf, StoreSetup
from store_ledger import LedgerStoreExecutor, StoreLedger
from watched import packed
from world import Held, World

from stepwell import Cause, Kind, Match, Namespace, Tier
from stepwell.base.config import PrefetchPolicy, StoreConfig
from stepwell.base.ids import JobId
from stepwell.base.prompt import page_keys
from stepwell.base.tasks import ItemStatus
from stepwell.cache.report import StepReport
from stepwell.policy.store_use import StoreTuning
from stepwell.store_tier.link import LinkState
from stepwell.store_tier.ticket import Ticket, TicketState
from stepwell.tiers.eviction import make_room
from stepwell.transfer.store_worker import StoreWorker

MOST_ROUNDS = 100  # after which something that does not settle never will
COOL_OFF_S = 61.0  # after which a store that was switched off is tried again


@dataclass(eq=False)
class Awaited:
    """A ticket, and what the test knows of it by itself."""

    ticket: Ticket
    namespace: Namespace
    tokens: list[int]
    after: int  # how many pages had arrived before any fetch was sent off that it could share


@dataclass(eq=False)
class Line:
    """An executor between the cache and one of the shelf's stores."""

    store_executor: LedgerStoreExecutor
    which: int
    config: StoreConfig
    tuning: StoreTuning


class StoreSide(World):
    """What a world does with the store below it."""

    def __init__(self, setup: StoreSetup, shelf: Shelf | None = None) -> None:
        self.store_setup = setup
        self.shelf = shelf or Shelf(setup)
        super().__init__(setup.cache)
        self.shelf.sleep = self.clock.advance
        self.lines: list[Line] = []
        self.awaited: list[Awaited] = []
        self.spent: list[Awaited] = []  # tickets that were closed
        self.forgetful = False  # something was evicted by order
        self.attach(0)

    def _ledger(self) -> StoreLedger:
        return StoreLedger(self.spec, self.shelf, self.memories)

    @property
    def exact(self) -> bool:
        """What was committed may not be lost, whatever the store does."""
        return super().exact and not self.forgetful and not self.ledger.in_flight

    def _as_foretold(self, tokens: int, expected: range) -> bool:
        return tokens >= expected.start  # a store may know more than this cache

    def _check_tiers(self, match: Match) -> None:
        pass  # what a store brings is on the host

    # ---- requests ---------------------------------------------------------------------------------

    def prefetch(self, tokens: Sequence[int], namespace: Namespace, *, priority: int = 0, ttl_s: float | None = None) -> Awaited:
        self.ledger.learn(namespace, packed(tokens))
        match = self.look(tokens, namespace)
        after, sent = self.ledger.num_arrivals_before_fetches, len(self.pending)
        ticket = self.cache.prefetch(match, priority=priority, ttl_s=ttl_s)
        if ttl_s is not None:
            self.excuses.add(Cause.EXPIRED)
        barred = space_of(namespace) in self.ledger.barred
        if self.cache.store.state is LinkState.DETACHED or barred or match.restore_tokens == match.limit_tokens:
            assert ticket.complete and len(self.pending) == sent, f"{ticket} has nothing to wait for"
        elif self.attached is not None and self.attached.config.prefetch is PrefetchPolicy.BEST_EFFORT:
            assert ticket.ready, f"{ticket} waits although its policy is not to wait"
        self.stored.add((space_of(namespace), packed(tokens[: self.spec.page_tokens])))
        awaited = Awaited(ticket, namespace, list(tokens), after)
        self.awaited.append(awaited)
        self.trace.append(f"{ticket} may wait until {ticket.deadline_s}")
        return awaited

    def acquire_awaited(self, awaited: Awaited) -> Held | None:
        """A request begins, in whatever state its ticket is; without space it continues to wait."""
        before = awaited.ticket.state
        held = self.acquire(awaited.tokens, awaited.namespace, ticket=awaited.ticket)
        assert awaited.ticket.state is (TicketState.CLOSED if held else before), awaited.ticket
        if held is not None:
            self._spend(awaited)
        return held

    def close_ticket(self, awaited: Awaited) -> None:
        awaited.ticket.close()
        self._spend(awaited)

    def _spend(self, awaited: Awaited) -> None:
        if awaited in self.awaited:
            self.awaited.remove(awaited)
            self.spent.append(awaited)

    def acquire(self, tokens: Sequence[int], namespace: Namespace, **asked: object) -> Held | None:  # type: ignore[override]
        self.ledger.learn(namespace, packed(tokens))
        return super().acquire(list(tokens), namespace, **asked)  # type: ignore[arg-type]

    def append(self, held: Held, tokens: Sequence[int]) -> None:
        super().append(held, tokens)
        self.ledger.learn(held.namespace, packed(held.tokens))

    def _check_sources(self, held: Held, fresh: Match, ticket: Ticket | None) -> None:
        super()._check_sources(held, fresh, ticket)
        if ticket is not None:
            came = int(ticket.from_store[: held.lease.resume // self.spec.page_tokens].sum()) * self.spec.page_tokens
            store = held.lease.sources.store
            assert store <= came, f"{store} tokens are said to be the store's, {came} came from it"
            assert store == came, f"{store} tokens are said to be the store's, {came} came from it"

    # ---- stores -----------------------------------------------------------------------------------

    @property
    def pending(self) -> list[tuple[Line, JobId]]:
        """Every operation that was not answered."""
        return [(line, job) for line in self.lines for job in line.store_executor.pending]

    @property
    def attached(self) -> Line | None:
        return next((line for line in self.lines if not line.store_executor.detached), None)

    def attach(self, which: int, config: StoreConfig | None = None, tuning: StoreTuning | None = None) -> None:
        store, config = self.shelf.stores[which], config or self.store_setup.config
        tuning = tuning or self.store_setup.tuning
        ranks = len(self.memories)
        worker = [StoreWorker(store, memory[Tier.HOST], rank=rank, ranks=ranks) for rank, memory in enumerate(self.memories)]
        line = Line(LedgerStoreExecutor(worker, self.ledger, self.clock, eager=self.store_setup.eager), which, config, tuning)
        self.lines.append(line)
        self.cache.store.attach(store, config, executor=line.store_executor, tuning=tuning)

    def detach(self) -> None:
        line = self.attached
        assert line is not None
        self.cache.store.detach()
        line.store_executor.detached = True

    def answer_op(self, line: Line, job: JobId, *, status: ItemStatus | None = None, took_s: float = 0.0) -> None:
        line.store_executor.finish(job, status=status, took_s=took_s)

    def evict(self, tier: Tier) -> bool:
        """Everything idle is to leave a tier; true when some of it must be saved first."""
        self.forgetful = True
        self.excuses.add(Cause.EVICTED)
        state = self.cache._state
        return make_room(state, tier, {Kind.PREFIX: state.arena(tier).layout.rows(Kind.PREFIX)}).waiting

    def step(self) -> StepReport:
        report = super().step()
        for line in self.lines:
            line.store_executor.give_up(line.tuning.op_timeout_s)
        for store in report.detached:
            idle = [line for line in self.lines if line.store_executor.detached and not line.store_executor.pending]
            self.lines.remove(next(line for line in idle if self.shelf.stores[line.which] is store))
        assert report.storing >= len(self.pending), report
        if not self.pending:
            waiting = [each.ticket for each in self.awaited if not each.ticket.complete]
            assert not waiting, f"no operation runs, yet {waiting} wait for one"
        torn = self.shelf.torn()
        assert not torn, f"{len(torn)} manifests name members that are not stored"
        self.trace += self.ledger.lines
        self.ledger.lines.clear()
        return report

    def settle_everything(self) -> None:
        """Copies and operations end, with those that follow from them, until nothing is left to do."""
        for _ in range(MOST_ROUNDS):
            self.executor.finish_all()
            for line, job in self.pending:
                self.answer_op(line, job)
            report = self.step()
            if not report.running and not report.storing:
                assert not any(line.store_executor.detached for line in self.lines), "a store that nothing uses was not detached"
                return
            if not report.running and not self.pending:
                self.clock.advance(COOL_OFF_S)  # paths wait for a store that is switched off
        raise AssertionError(f"{report} after {MOST_ROUNDS} rounds")

    # ---- what must always hold --------------------------------------------------------------------

    def check(self) -> None:
        super().check()
        for awaited in self.awaited:
            self._check_ticket(awaited)

    def _check_ticket(self, awaited: Awaited) -> None:
        """What is said to have come from the store did, for this very path, while a request waited for it."""
        ticket = awaited.ticket
        assert ticket.ready or not ticket.complete, ticket
        keys = page_keys(awaited.namespace.digest, packed(awaited.tokens), self.spec.page_tokens * TOKEN)
        for came, key in zip(ticket.from_store.tolist(), keys, strict=False):
            assert not came or self.ledger.last_arrival.get(key, 0) > awaited.after, f"{ticket}: a page came that never came"

    def _check_explanation(self, match: Match, tokens: Sequence[int], namespace: Namespace) -> None:
        super()._check_explanation(match, tokens, namespace)
        cause, statuses = self.cache.explain(tokens, namespace=namespace).cause, self.ledger.statuses
        if cause is Cause.STORE:
            assert any(statuses[status] for status in ItemStatus if status not in (ItemStatus.OK, ItemStatus.CANCELLED)), (
                "nothing went wrong in a store"
            )
        elif cause is Cause.LATE:
            assert statuses[ItemStatus.CANCELLED] or self.spent, "nothing was called off"
        elif cause is Cause.IN_STORE:
            assert self.cache.store.state is LinkState.ATTACHED and space_of(namespace) not in self.ledger.barred
        elif cause is Cause.STORE_OFF:
            assert self.cache.store.state is LinkState.SWITCHED_OFF

    def close(self) -> None:
        for awaited in list(self.awaited):
            self.close_ticket(awaited)
        for held in list(self.held):
            self.release(held)
        for pinned in list(self.pinned):
            self.unpin(pinned)
        self.cache._store_tier.end_deferral()  # nothing is to become due while the last steps are counted
        self.settle_everything()
        for link in self.cache._store_tier.links:
            assert not link.tickets and not link.fetches and not link.fetch_of, f"{link} holds on to what no request wants"
            assert link.backup_bytes == 0, f"{link.backup_bytes} bytes are on their way down for ever"
        super().close()
