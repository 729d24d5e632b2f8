"""The cache beside an engine's scheduler: requests are looked up, loaded, committed and released as the scheduler goes on.

    asked       ->  lookup, prefetch; acquire when what the store has came          `found`
    allocated   ->  load what the engine lacks into its blocks                      `allocated`
    step        ->  commit what the step will compute; copies leave with the step   `step`
    output      ->  what came of copies; blocks that saves read are unpinned        `answered`
    finished    ->  release                                                         `finished`

Loads run between steps, never inside one. A request whose load failed is asked about again, looks up again, and after
`LOADS_TRIED` of them is computed. Commits name blocks before they are computed: saves begin when the step has run, from blocks
that are pinned until they end. One thread, the scheduler's. Imports no engine.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Protocol

from stepwell.base.errors import BadTokens, ConfigError
from stepwell.base.ids import JobId, Tier
from stepwell.base.meters import Clock
from stepwell.base.prompt import Namespace
from stepwell.base.tasks import Plan, Purpose
from stepwell.cache.explain import Explanation
from stepwell.cache.facade import Cache
from stepwell.cache.question import Question
from stepwell.connectors.vllm.commits import Commits, Computing
from stepwell.connectors.vllm.doubts import WeightDoubts, Weights
from stepwell.connectors.vllm.groups import Names, Table
from stepwell.connectors.vllm.orders import Answers, Order, Pace, StepOrders, WeightsAnswer, blocks_of
from stepwell.store_tier.ticket import Ticket
from stepwell.tiers.lease import Lease
from stepwell.tree.match import Match

LOADS_TRIED = 2  # of one request, before it is computed instead


class Blocks(Protocol):
    """The engine's blocks: pinned ones are neither freed nor given to another request."""

    def pin(self, blocks: Sequence[int]) -> None: ...

    def unpin(self, blocks: Sequence[int]) -> None: ...


@dataclass(slots=True, kw_only=True)
class Seen:
    """A request of the engine as the cache knows it."""

    tokens: Callable[[int], list[int]]  # its tokens from one on, prompt and answer, as far as they are known; raises BadTokens
    namespace: Namespace | None  # None: nothing of it is cached
    why_not: str | None = None  # for those of which nothing is
    may_read: bool = True  # else all of its prompt is computed
    match: Match | None = None
    ticket: Ticket | None = None
    lease: Lease | None = None
    started: bool = False  # it has blocks: when it is asked about again, it was preempted or its load failed
    since: int = 0  # tokens that the engine had itself
    failed_loads: int = 0
    may_store: bool = True  # else nobody else sees what it computes
    asks_why: bool = False  # its answer is to say where it resumed, and why not later
    asks_in_vain: bool = False  # it asks that, and may not
    question: Question | None = None
    explanation: Explanation | None = None


class SchedulerSide:
    """All requests of one engine over one cache."""

    def __init__(self, cache: Cache, orders: StepOrders, names: Names, clock: Clock, *, audit: bool = False) -> None:
        self.cache = cache
        self._orders = orders
        self._names = names
        self._commits = Commits(cache, names)
        self._clock = clock
        self._audit = audit
        self._blocks: Blocks | None = None
        self._seen: dict[str, Seen] = {}
        self._loads: dict[JobId, str] = {}
        self._loading: dict[JobId, dict[Tier, int]] = {}  # tokens, by where they come from
        self._loaded: Counter[Tier] = Counter()
        self._pinned: dict[JobId, list[int]] = {}
        self._step: tuple[float, list[tuple[int, int]]] | None = None  # when the step under way began, and what it computes
        self._doubts = WeightDoubts()
        self._pace = Pace(clock)

    def bind(self, blocks: Blocks) -> None:
        self._blocks = blocks

    # ---- a request's life ---------------------------------------------------------------------------

    def arrived(self, request: str, seen: Seen) -> None:
        """A new request: what the store has of it is on its way from now on. One with tokens that the model's vocabulary lacks
        is the engine's to refuse or to compute; nothing of it is cached.
        """
        self._seen[request] = seen
        if seen.namespace is None or self._doubts.open:
            return
        if seen.asks_why:
            self._ask(seen)  # before anything is brought up for it
        else:
            self._may_be_looked_up(seen)

    def found(self, request: str, local_tokens: int) -> int | None:
        """How many tokens after the engine's own `local_tokens` can be loaded; None: not known yet, ask again."""
        seen = self._seen[request]
        page_tokens = self.cache.spec.page_tokens
        if seen.namespace is None or local_tokens % page_tokens:
            return 0
        self.cache.step()
        if self._doubts.open:
            self._doubts.wanted = True
            return None
        if seen.question is not None:
            if not seen.question.ready:
                return None
            seen.explanation, seen.question = seen.question.answer(quote_store=False), None
        if seen.started or (seen.lease is not None and not self.cache.can_load(seen.lease)):
            self._start_over(seen)
        if seen.lease is None:
            if seen.match is None and not self._may_be_looked_up(seen):
                return 0
            if seen.ticket is not None and not seen.ticket.ready:
                return None
            assert seen.match is not None
            seen.lease = self.cache.acquire(self.cache.refresh(seen.match), ticket=seen.ticket, publish=seen.may_store)
            seen.match = seen.ticket = None
        seen.since = local_tokens
        missing = max(seen.lease.resume - local_tokens, 0)
        if missing <= page_tokens and seen.lease.resume == seen.lease.num_tokens:
            return 0  # it computes something of its last page anyway: all of it is sooner than a load
        return missing

    def allocated(self, request: str, table: Table, num_loaded: int) -> None:
        """The request has blocks. With `num_loaded` tokens to load, it waits until they came."""
        seen = self._seen[request]
        seen.started = True
        lease = seen.lease
        if not num_loaded or lease is None:
            return
        assert seen.since + num_loaded == lease.resume, f"{seen.since=} {num_loaded=} {lease}"
        if lease.restored is not None:
            into = self._names.with_checkpoint(table, seen.since, lease.resume, ahead=False, held=seen.since)
            assert into is not None, f"no blocks for the checkpoint at {lease.resume}"
        else:
            into = self._names.pages(table, seen.since, lease.resume, ahead=False)
        self.cache.load(lease, into, since=seen.since)
        assert lease.load_job is not None, f"{lease} has nothing to load"
        self._loads[lease.load_job] = request
        self._loading[lease.load_job] = self.loaded_from(request, num_loaded)

    def step(self, computing: Sequence[Computing]) -> list[Order]:
        """Commits what the step will compute; returns the copies that go with it."""
        self._step_ended()
        for each in computing:
            seen = self._seen.get(each.request)
            if seen is not None and seen.lease is not None and seen.lease.ready:
                try:
                    self._commits.commit(seen.lease, each, seen.tokens)
                except BadTokens:  # in its answer
                    self._let_go(seen)
                    seen.namespace = None
        self.cache.step()
        if self._audit:
            self.cache.audit()
        spans = [(each.computed, each.upto) for each in computing]
        prefills = any(end - start > 1 for start, end in spans)
        self._step = (self._clock.now(), spans) if prefills else None
        orders = [self._ordered(plan) for plan in self._orders.take()]
        self._pace.step(waits=not computing and not orders and self.is_busy)
        return orders

    @property
    def num_steps(self) -> int:
        """The number of the last step that was given out."""
        return self._orders.num_steps

    def answered(self, answers: Answers, *, step: int) -> None:
        """What the workers say of copies, and up to which step they have computed."""
        self._step_ended()
        for job, error in self._orders.answer(answers, step=step).items():
            self._loads.pop(job, None)
            tokens = self._loading.pop(job, {})
            if error is None:
                self._loaded.update(tokens)
            if (blocks := self._pinned.pop(job, None)) is not None:
                assert self._blocks is not None
                self._blocks.unpin(blocks)
        self.cache.step()

    def take_loaded(self) -> dict[Tier, int]:
        """Tokens that loads brought since the last call, by where they came from."""
        loaded, self._loaded = self._loaded, Counter()
        return dict(loaded)

    def loaded_from(self, request: str, num_loaded: int) -> dict[Tier, int]:
        """Where the tokens come from that a request loads. What the store gave lies behind what the host had."""
        lease = self._seen[request].lease
        stored = min(lease.sources.store, num_loaded) if lease is not None else 0
        found = {Tier.HOST: num_loaded - stored, Tier.STORE: stored}
        return {tier: tokens for tier, tokens in found.items() if tokens}

    def seen(self, request: str) -> Seen | None:
        """A request as it is known now."""
        return self._seen.get(request)

    def finished(self, request: str) -> Seen | None:
        """The request has ended, in whatever way: returns what was known of it. Copies that it began go on, on pinned blocks."""
        self._step_ended()
        seen = self._seen.pop(request, None)
        if seen is not None:
            self._let_go(seen)
        return seen

    def doubt_weights(self, *, keeps_contents: bool) -> None:
        """Weights may be others from now on. Requests that run publish nothing more before they start over; others are looked up
        when workers have said which weights they hold. Without `keeps_contents` host memory is emptied; a store is not.
        """
        self._doubts.begin()
        for seen in self._seen.values():
            if not seen.started:
                self._let_go(seen)
            elif seen.lease is not None:
                seen.lease.publishes = False
        if not keeps_contents:
            self.cache.flush()

    def weights_question(self) -> int:
        """The number of a question that the workers must be asked with this step; 0 for none. Asked once a request waits for it:
        memory of an engine that sleeps cannot be read.
        """
        return self._doubts.question()

    def weights_named(self, answers: Mapping[int, WeightsAnswer]) -> Weights | None:
        """What ranks say of their weights; the answer of all ranks together, once."""
        return self._doubts.answered(answers, self._orders.num_ranks)

    def rename_model(self, model: str, *, clears: bool) -> None:
        """Requests go on under this name. With `clears` nothing that is cached so far is found again by this process."""
        if clears:
            known = {seen.namespace for seen in self._seen.values() if seen.namespace is not None}
            for namespace in {self.cache.namespace, *self.cache.namespaces, *known}:
                self.cache.clear(namespace=namespace)
        for seen in self._seen.values():
            if seen.namespace is not None:
                seen.namespace = replace(seen.namespace, model=model)
                if not seen.started and seen.asks_why and seen.explanation is None:
                    self._ask(seen)

    @property
    def is_busy(self) -> bool:
        """Whether steps are needed although no request runs: copies or stores have not answered yet, and still may."""
        return bool(self._orders.num_open) or self.cache.copying > 0 or self.cache.stores_awaited > 0

    @property
    def pins_blocks(self) -> bool:
        """Whether blocks will be free without anybody's doing: saves under way read them."""
        return bool(self._pinned)

    def close(self, is_done: Callable[[JobId], bool], *, timeout_s: float = 30.0) -> bool:
        """No more steps will come. Waits for the store; false when something was left undone."""
        for seen in self._seen.values():
            self._let_go(seen)
        self._seen.clear()
        self._orders.end_all(is_done)
        return self.cache.close(timeout_s=timeout_s)

    # ---- inside -------------------------------------------------------------------------------------

    def _ask(self, seen: Seen) -> None:
        assert seen.namespace is not None
        tokens = seen.tokens(0)
        try:
            seen.question = self.cache.question(tokens, namespace=seen.namespace, limit_tokens=self._most(tokens))
        except BadTokens:
            seen.namespace = None

    def _look_up(self, seen: Seen) -> None:
        assert seen.namespace is not None
        tokens = seen.tokens(0)
        limit = self._most(tokens) if seen.may_read and seen.failed_loads < LOADS_TRIED else 0
        seen.match = self.cache.lookup(tokens, namespace=seen.namespace, limit_tokens=limit)
        seen.ticket = self.cache.prefetch(seen.match)

    def _may_be_looked_up(self, seen: Seen) -> bool:
        """Looks a request up again; false when its answer has tokens by now that cannot be cached."""
        try:
            self._look_up(seen)
        except BadTokens:
            seen.namespace = None
        return seen.namespace is not None

    def _most(self, tokens: Sequence[int]) -> int | None:
        """How much of a prompt may be loaded: all of it where that is pages alone. vLLM then computes the last token again."""
        spec = self.cache.spec
        return None if spec.needs_checkpoint or len(tokens) < 2 * spec.page_tokens else len(tokens)

    def _start_over(self, seen: Seen) -> None:
        """It was preempted, or its load failed, or what it waited to load is gone."""
        if seen.lease is not None and seen.lease.failed:
            seen.failed_loads += 1
        self._let_go(seen)
        seen.started = False

    def _let_go(self, seen: Seen) -> None:
        if seen.question is not None:
            seen.question.cancel()
        if seen.ticket is not None:
            seen.ticket.close()
        if seen.lease is not None:
            self.cache.release(seen.lease)
        seen.match = seen.ticket = seen.lease = seen.question = None

    def _ordered(self, plan: Plan) -> Order:
        if plan.purpose is not Purpose.SAVE:
            return Order(plan=plan, request=self._loads[plan.job])
        if self._blocks is None:
            raise ConfigError("this engine gave no block pool, so blocks could be reused while they are saved: use vLLM 0.32")
        self._pinned[plan.job] = blocks_of([plan])
        self._blocks.pin(self._pinned[plan.job])
        return Order(plan=plan)

    def _step_ended(self) -> None:
        """How long the step took that is over: commits cannot tell, they come before it."""
        if self._step is not None:
            (began_s, spans), self._step = self._step, None
            self.cache.computed(spans, self._clock.now() - began_s)


def ended_in(shared_ended: Mapping[int, int]) -> Callable[[JobId], bool]:
    """Whether every rank had ended a job well when it closed, by the last job that each had."""
    last = min(shared_ended.values(), default=0)
    return lambda job: job <= last
