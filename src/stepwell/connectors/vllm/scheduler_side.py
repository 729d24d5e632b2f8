"""The cache next to an engine's scheduler: looks requests up, loads them, commits what is computed, and releases them.

    asked       ->  lookup, prefetch; acquire when the store's pages have arrived   `found`
    allocated   ->  load missing pages into the engine's blocks                     `allocated`
    step        ->  commit what the step will compute; copies leave with the step   `step`
    output      ->  outcomes of copies; blocks that saves have read are unpinned    `answered`
    finished    ->  release                                                         `finished`

Loads run between steps, never inside one. A request whose load failed is looked up again, and computed after `LOADS_TRIED`
failures. Commits name blocks before they are computed: saves start when the step has run, from blocks that stay pinned until the
save ends. The scheduler's thread. Imports no engine.
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
from stepwell.connectors.vllm.groups import Names, Offered, Table
from stepwell.connectors.vllm.orders import Answers, Order, Pace, StepOrders, WeightsAnswer, blocks_of
from stepwell.connectors.vllm.weights import WeightCheck, Weights
from stepwell.store_tier.ticket import Ticket
from stepwell.tiers.lease import Lease
from stepwell.tree.match import Match


@dataclass(frozen=True, slots=True, kw_only=True)
class Computing:
    """What a step computes of one request: tokens `[computed, upto)`; `known` tokens have ids."""

    request: str
    computed: int
    upto: int
    known: int
    table: Callable[[], Table]
    offered: Offered  # blocks with state at boundaries, in addition to the table


class Commits:
    """Offers what steps compute to one cache, before they compute it. The cache's thread."""

    def __init__(self, cache: Cache, names: Names) -> None:
        self._cache = cache
        self._names = names

    def commit(self, lease: Lease, step: Computing, tokens: Callable[[int], list[int]]) -> None:
        """Offers what will be computed: first boundaries with a checkpoint, then all whole pages.

        `tokens` returns the request's tokens from an index on. Raises BadTokens.
        """
        page_tokens = self._cache.spec.page_tokens
        upto = min(step.upto, step.known)
        full = upto - upto % page_tokens
        if full <= lease.position:
            return
        if step.known > lease.num_tokens:
            self._cache.append(lease, tokens(lease.num_tokens))
        table = step.table()
        for boundary in self._boundaries(lease, step, full):
            source = self._names.with_checkpoint(
                table, self._unsaved(lease, boundary), boundary, ahead=True, offered=step.offered
            )  # fmt: skip
            if source is not None:
                self._cache.commit(lease, boundary, source=source, checkpoint=True)
        if full > lease.position:
            source = self._names.pages(table, self._unsaved(lease, full), full, ahead=True)
            self._cache.commit(lease, full, source=source, checkpoint=False)

    def _boundaries(self, lease: Lease, step: Computing, full: int) -> list[int]:
        """The boundaries for checkpoints, in order.

        Windows are complete at every boundary of a step. Recurrent state exists where the engine offers it, and where steps end.
        """
        if self._names.has_points:
            offered = {boundary for _, boundary in step.offered}
            ends = {boundary for boundary in (step.computed, step.upto) if self._cache.wants_checkpoint(lease, boundary)}
            wanted = {boundary for boundary in offered if self._cache.spec.is_legal(boundary)} | ends
            return sorted(boundary for boundary in wanted if lease.position < boundary <= full)
        page_tokens = self._cache.spec.page_tokens
        pages = range(lease.position // page_tokens + 1, full // page_tokens + 1)
        return [page * page_tokens for page in pages if self._cache.wants_checkpoint(lease, page * page_tokens)]

    def _unsaved(self, lease: Lease, upto: int) -> int:
        return min(self._cache.first_unsaved(lease) * self._cache.spec.page_tokens, upto)


LOADS_TRIED = 2  # failed loads of a request before it is computed


class Blocks(Protocol):
    """The engine's blocks. Pinned blocks are neither freed nor reused."""

    def pin(self, blocks: Sequence[int]) -> None: ...

    def unpin(self, blocks: Sequence[int]) -> None: ...


@dataclass(slots=True, kw_only=True)
class TrackedRequest:
    """The cache's view of one request."""

    tokens: Callable[[int], list[int]]  # known tokens from an index on, prompt and answer; raises BadTokens
    namespace: Namespace | None  # None: not cached
    why_not: str | None = None  # why it is not cached
    may_read: bool = True  # otherwise the whole prompt is computed
    match: Match | None = None
    ticket: Ticket | None = None
    lease: Lease | None = None
    started: bool = False  # has blocks; if looked up again, it was preempted or its load failed
    since: int = 0  # tokens in the engine's own cache
    failed_loads: int = 0
    may_store: bool = True  # otherwise its pages are not shared
    wants_explanation: bool = False  # its response must explain where it resumed
    explanation_refused: bool = False  # it asks for an explanation, which is disabled
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
        self._seen: dict[str, TrackedRequest] = {}
        self._loads: dict[JobId, str] = {}
        self._loading: dict[JobId, dict[Tier, int]] = {}  # tokens by source
        self._loaded: Counter[Tier] = Counter()
        self._pinned: dict[JobId, list[int]] = {}
        self._step: tuple[float, list[tuple[int, int]]] | None = None  # start of the step in flight, and the spans it computes
        self._weight_check = WeightCheck()
        self._pace = Pace(clock)

    def bind(self, blocks: Blocks) -> None:
        self._blocks = blocks

    # ---- a request's life ---------------------------------------------------------------------------

    def arrived(self, request: str, seen: TrackedRequest) -> None:
        """A new request: starts its prefetch from the store. A request with tokens outside of the vocabulary is not cached; the
        engine refuses or computes it.
        """
        self._seen[request] = seen
        if seen.namespace is None or self._weight_check.pending:
            return
        if seen.wants_explanation:
            self._ask(seen)  # before a prefetch changes anything
        else:
            self._may_be_looked_up(seen)

    def found(self, request: str, local_tokens: int) -> int | None:
        """The number of tokens after the engine's own `local_tokens` that can be loaded; None if not known yet."""
        seen = self._seen[request]
        page_tokens = self.cache.spec.page_tokens
        if seen.namespace is None or local_tokens % page_tokens:
            return 0
        self.cache.step()
        if self._weight_check.pending:
            self._weight_check.wanted = True
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
            return 0  # the last page is computed in part anyway: computing all of it is faster than a load
        return missing

    def allocated(self, request: str, table: Table, num_loaded: int) -> None:
        """The request has blocks. It waits for `num_loaded` tokens to load, if any."""
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
        """Commits what the step will compute; returns the copies to send with it."""
        self._step_ended()
        for each in computing:
            seen = self._seen.get(each.request)
            if seen is not None and seen.lease is not None and seen.lease.ready:
                try:
                    self._commits.commit(seen.lease, each, seen.tokens)
                except BadTokens:  # in its answer
                    self._release(seen)
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
        """The number of the last step sent."""
        return self._orders.num_steps

    def answered(self, answers: Answers, *, step: int) -> None:
        """Takes the workers' outcomes of copies, and the last step they computed."""
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
        """Tokens loaded since the last call, by source."""
        loaded, self._loaded = self._loaded, Counter()
        return dict(loaded)

    def loaded_from(self, request: str, num_loaded: int) -> dict[Tier, int]:
        """The sources of the tokens that a request loads. Tokens from the store come after those from the host."""
        lease = self._seen[request].lease
        stored = min(lease.sources.store, num_loaded) if lease is not None else 0
        found = {Tier.HOST: num_loaded - stored, Tier.STORE: stored}
        return {tier: tokens for tier, tokens in found.items() if tokens}

    def seen(self, request: str) -> TrackedRequest | None:
        """The state of a request."""
        return self._seen.get(request)

    def finished(self, request: str) -> TrackedRequest | None:
        """Ends a request and returns its state. Its copies continue on pinned blocks."""
        self._step_ended()
        seen = self._seen.pop(request, None)
        if seen is not None:
            self._release(seen)
        return seen

    def recheck_weights(self, *, keeps_contents: bool) -> None:
        """Weights may have changed. Running requests publish nothing more until they restart; others are looked up once workers
        have reported their weights. Without `keeps_contents`, host memory is emptied; a store is not.
        """
        self._weight_check.begin()
        for seen in self._seen.values():
            if not seen.started:
                self._release(seen)
            elif seen.lease is not None:
                seen.lease.publishes = False
        if not keeps_contents:
            self.cache.flush()

    def weights_question(self) -> int:
        """The number of the query for weights to send with this step; 0 for none. Sent once a request waits for it, because
        memory of a sleeping engine cannot be read.
        """
        return self._weight_check.question()

    def weights_answered(self, answers: Mapping[int, WeightsAnswer]) -> Weights | None:
        """Takes ranks' reports of their weights. Returns the combined result once all ranks have reported."""
        return self._weight_check.answered(answers, self._orders.num_ranks)

    def rename_model(self, model: str, *, clears: bool) -> None:
        """Renames the model of all requests. With `clears`, everything cached so far becomes unreachable for this process."""
        if clears:
            known = {seen.namespace for seen in self._seen.values() if seen.namespace is not None}
            for namespace in {self.cache.namespace, *self.cache.namespaces, *known}:
                self.cache.clear(namespace=namespace)
        for seen in self._seen.values():
            if seen.namespace is not None:
                seen.namespace = replace(seen.namespace, model=model)
                if not seen.started and seen.wants_explanation and seen.explanation is None:
                    self._ask(seen)

    @property
    def is_busy(self) -> bool:
        """Whether steps are needed without running requests, because copies or store operations are in flight."""
        return bool(self._orders.num_open) or self.cache.copying > 0 or self.cache.stores_awaited > 0

    @property
    def pins_blocks(self) -> bool:
        """Whether blocks will become free by themselves, because saves in flight pin them."""
        return bool(self._pinned)

    def close(self, is_done: Callable[[JobId], bool], *, timeout_s: float = 30.0) -> bool:
        """Ends the last step and waits for the store. False if backups are incomplete."""
        for seen in self._seen.values():
            self._release(seen)
        self._seen.clear()
        self._orders.end_all(is_done)
        return self.cache.close(timeout_s=timeout_s)

    # ---- inside -------------------------------------------------------------------------------------

    def _ask(self, seen: TrackedRequest) -> None:
        assert seen.namespace is not None
        tokens = seen.tokens(0)
        try:
            seen.question = self.cache.question(tokens, namespace=seen.namespace, limit_tokens=self._most(tokens))
        except BadTokens:
            seen.namespace = None

    def _look_up(self, seen: TrackedRequest) -> None:
        assert seen.namespace is not None
        tokens = seen.tokens(0)
        limit = self._most(tokens) if seen.may_read and seen.failed_loads < LOADS_TRIED else 0
        seen.match = self.cache.lookup(tokens, namespace=seen.namespace, limit_tokens=limit)
        seen.ticket = self.cache.prefetch(seen.match)

    def _may_be_looked_up(self, seen: TrackedRequest) -> bool:
        """Looks a request up; false if it has tokens that cannot be cached."""
        try:
            self._look_up(seen)
        except BadTokens:
            seen.namespace = None
        return seen.namespace is not None

    def _most(self, tokens: Sequence[int]) -> int | None:
        """The most tokens of a prompt to load: all of them if the model has only pages. vLLM then recomputes the last token."""
        spec = self.cache.spec
        return None if spec.needs_checkpoint or len(tokens) < 2 * spec.page_tokens else len(tokens)

    def _start_over(self, seen: TrackedRequest) -> None:
        """Restarts a request that was preempted, whose load failed, or whose pages are gone."""
        if seen.lease is not None and seen.lease.failed:
            seen.failed_loads += 1
        self._release(seen)
        seen.started = False

    def _release(self, seen: TrackedRequest) -> None:
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
            raise ConfigError("this engine has no block pool, so blocks could be reused while they are saved: use vLLM 0.32")
        self._pinned[plan.job] = blocks_of([plan])
        self._blocks.pin(self._pinned[plan.job])
        return Order(plan=plan)

    def _step_ended(self) -> None:
        """Reports the duration of the step that ended; commits precede the computation."""
        if self._step is not None:
            (began_s, spans), self._step = self._step, None
            self.cache.computed(spans, self._clock.now() - began_s)


def ended_in(shared_ended: Mapping[int, int]) -> Callable[[JobId], bool]:
    """Whether every rank had finished a job when it closed, from the last job of each."""
    last = min(shared_ended.values(), default=0)
    return lambda job: job <= last
