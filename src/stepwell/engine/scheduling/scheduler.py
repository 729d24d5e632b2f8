"""The requests that compute in the next pass: admission, waiting for shared prefixes, chunks, preemption.

    waiting   no lease: its pages are being fetched, another request computes its prefix, or there is no space
    active    has a lease; runs once its bytes have arrived, or while they arrive if no other request would run

Every request that runs gets its next tokens: a decoding one its single token and space for guesses of a draft, others a chunk,
up to a budget in all. Computes nothing, samples nothing. One thread.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from math import inf

from stepwell.base.errors import ConfigError, NoRoom
from stepwell.base.ids import Kind, LeaseId
from stepwell.base.meters import Clock
from stepwell.base.prompt import TOKEN_BYTES, common_pages
from stepwell.cache.facade import Cache
from stepwell.engine.requests.request import Chunk, Request
from stepwell.jobs.executors import Arriving
from stepwell.store_tier.ticket import Ticket
from stepwell.tiers.lease import Lease
from stepwell.tree.match import Match

MAX_FAILED_LEASES = 3  # after which a request computes its whole prompt, unpublished
NO_ROOM = "the device tier has no space for this request, even alone; shorten it"
Ahead = Callable[[Request, int], int]  # how many tokens may be guessed for a request, given the number of decoding ones
HasRoom = Callable[[Request, int, list[Chunk]], bool]  # pages for a request up to a token, in addition to planned chunks
MAX_PROMPT_LOGPROBS = 256  # tokens of prompts whose logits a pass keeps: each keeps one vocabulary-sized row
PROMPT_SHARE = 4  # the fraction of a pass that is kept for prompts is 1 / PROMPT_SHARE
COMPARED = 32  # waiting requests that are put in order; the others keep their turn


@dataclass(frozen=True, slots=True, kw_only=True)
class Limits:
    """How much is done at once."""

    max_running: int = 32
    chunk_tokens: int = 512  # computed in one pass, over all requests
    patience_s: float = 10.0  # after which a request is served in its turn, regardless of cached tokens and priorities

    @property
    def prompt_tokens(self) -> int:
        """The share of a pass reserved for prompts, whatever the number of decoding requests: these would starve prompts."""
        return max(self.chunk_tokens // PROMPT_SHARE, 1)

    def __post_init__(self) -> None:
        if self.max_running < 1 or self.chunk_tokens < 1 or self.patience_s < 0:
            raise ConfigError(f"max_running and chunk_tokens must be at least 1, got {self.max_running} and {self.chunk_tokens}")


class Scheduler:
    def __init__(self, cache: Cache, limits: Limits, clock: Clock, ahead: Ahead | None = None) -> None:
        self.limits = limits
        self._ahead = ahead
        self.waiting: dict[int, Request] = {}  # in order of arrival; those that were preempted first
        self.active: dict[int, Request] = {}  # in the order in which they began
        self.failed: list[tuple[Request, str]] = []  # that cannot run, and why, for the engine to end
        self._cache = cache
        self._step = cache.spec.boundary_step
        self._has_points = bool(cache.spec.parts(Kind.POINT))  # copied by passes at a stop
        self._clock = clock
        # Tokens shared with waiting requests, by lease, then by request and the length of its prompt, which preemption changes.
        self._compared: dict[LeaseId, dict[tuple[int, int], int]] = {}
        self._full = False  # no active request has ended since a preemption: admitting one would only preempt another

    # ---- coming and going -------------------------------------------------------------------------

    def enter(self, request: Request) -> None:
        """Queues a request, and starts to fetch what the store has of it. Raises BadTokens, and queues nothing."""
        self._prefetch(request)
        self.waiting[request.id] = request

    def leave(self, request: Request) -> None:
        """Removes a request in any state, and releases what it holds."""
        self.waiting.pop(request.id, None)
        self.active.pop(request.id, None)
        self._let_go(request)
        self._full = False

    def put_back(self, request: Request) -> None:
        """Preempts an active request: releases its memory and queues it first. What it computed stays cached for now."""
        del self.active[request.id]
        self._let_go(request)
        request.match, request.waits_since_s = None, self._clock.now()
        self.waiting = {request.id: request, **self.waiting}
        self._prefetch(request)

    def _prefetch(self, request: Request) -> None:
        submitted, match = request.submitted, self._lookup(request)
        if request.looked_up_s is None:
            request.looked_up_s = self._clock.now()
        if submitted.use_cache:
            request.ticket = self._cache.prefetch(match, priority=submitted.priority, ttl_s=submitted.ttl_s)

    def _let_go(self, request: Request) -> None:
        if request.ticket is not None:
            request.ticket.close()
            request.ticket = None
        if request.lease is not None:
            self._compared.pop(request.lease.id, None)
            self._cache.release(request.lease)
            request.lease, request.started, request.started_copies = None, 0, False

    def limit_in_s(self) -> float:
        """How soon a waiting request stops waiting for the store, whatever has arrived by then: infinity without a limit."""
        now = self._clock.now()
        tickets = (each.ticket for each in self.waiting.values())
        return min((each.ended_s - now for each in tickets if each is not None and each.awaited and not each.ready), default=inf)

    # ---- admission --------------------------------------------------------------------------------

    def admit(self) -> None:
        """Leases waiting requests while there is space, those with the least to compute first."""
        if not self.waiting or (self._full and self.active) or len(self.active) >= self.limits.max_running:
            return
        for request, match in self._in_order():
            if len(self.active) >= self.limits.max_running:
                return
            if self._awaits_another(request, match):
                continue
            try:
                self._begin(request, match)
            except NoRoom as error:
                if not self.active and not error.waiting and not self._cache.copying:
                    self.failed.append((request, NO_ROOM))
                return  # others must not overtake it: a large request would never begin
            except Exception as error:  # an error of one request must not stop the others
                self.failed.append((request, f"{type(error).__name__}: {error}"))

    def _in_order(self) -> list[tuple[Request, Match]]:
        """Requests that waited too long in order; then urgent ones; among these, preempted ones, then the least to compute."""
        now = self._clock.now()

        def turn(request: Request) -> tuple[bool, float]:
            late = now - request.waits_since_s > self.limits.patience_s
            return not late, request.arrived_s if late else -request.submitted.priority

        def order(pair: tuple[Request, Match]) -> tuple[tuple[bool, float], float, int]:
            request, match = pair
            came = request.arrived_s if request.preemptions else now
            return turn(request), came, match.prompt_tokens - match.restore_tokens

        ready = sorted((each for each in self.waiting.values() if each.ticket is None or each.ticket.ready), key=turn)
        return sorted(((each, self._lookup(each)) for each in ready[:COMPARED]), key=order)

    def _begin(self, request: Request, match: Match) -> None:
        submitted, waited = request.submitted, request.ticket
        request.lease = self._cache.acquire(
            match,
            ticket=request.ticket,
            hints=submitted.hints,
            priority=submitted.priority,
            ttl_s=submitted.ttl_s,
            publish=self._trusts_cache(request),
        )
        request.ticket = request.match = None
        del self.waiting[request.id]
        self.active[request.id] = request
        if request.sources is None:
            request.sources, request.began_s = request.lease.sources, self._clock.now()
            request.fetched_s = _waited_until(waited, request.began_s)
            request.computes_s = None

    def _lookup(self, request: Request) -> Match:
        if request.match is not None:
            request.match = self._cache.refresh(request.match)
        else:
            limit = None if self._trusts_cache(request) else 0
            request.match = self._cache.lookup(request.tokens, namespace=request.namespace, limit_tokens=limit)
        return request.match

    @staticmethod
    def _trusts_cache(request: Request) -> bool:
        return request.submitted.use_cache and request.failures < MAX_FAILED_LEASES

    def _awaits_another(self, request: Request, match: Match) -> bool:
        """Whether an active request is about to compute more of this prompt than is cached: then waiting for it pays."""
        if not self._trusts_cache(request):
            return False
        step = self._step
        for other in self.active.values():
            lease = other.lease
            assert lease is not None, f"{other} is active without a lease"
            if lease.namespace.digest != request.namespace.digest or lease.position >= lease.prompt_tokens:
                continue
            boundary = min(self._shared(lease, request.id, match), (lease.prompt_tokens - 1) // step * step)
            if boundary <= max(match.restore_tokens, lease.position):
                continue
            if self._cache.ask_checkpoint(lease, boundary, begun=other.reached):
                return True
        return False

    def _shared(self, lease: Lease, number: int, match: Match) -> int:
        """The length of the common prefix of a lease and a waiting request, to the last boundary where the request could resume.

        Their prompts do not change while one runs and the other waits, so they are compared once and not in every step.
        """
        known, key = self._compared.setdefault(lease.id, {}), (number, match.prompt_tokens)
        if key not in known:
            step = self._step
            shared = _shared_bytes(lease.packed, match.packed, step * TOKEN_BYTES) // TOKEN_BYTES
            known[key] = min(shared, (match.prompt_tokens - 1) // step * step)
        return known[key]

    # ---- the next pass ----------------------------------------------------------------------------

    def plan(self) -> list[Chunk]:
        """The chunks of the next pass, with space for all of them; single tokens first. No pass may be in flight."""
        arriving = self._arriving()
        running = [each for each in self.active.values() if each.runs or each.id in arriving]
        return self._cut(running, self._room_for, arriving)

    def plan_ahead(self) -> list[Chunk]:
        """The chunks of the pass after the one in flight: every request continues from where that leaves it.

        Empty if some request would need pages of another: preemption must wait until their content is cached. Empty also if a
        request must publish its point state first: a stop that was requested later, or had no page, has no copy of it.
        """
        if self._has_points and any(self._hands_over_next(each) for each in self.active.values()):
            return []
        try:
            return self._cut([each for each in self.active.values() if self._goes_on(each)], self._grown, {})
        except NoRoom:
            return []

    def _cut(self, running: Sequence[Request], has_room: HasRoom, arriving: Mapping[int, tuple[Arriving, ...]]) -> list[Chunk]:
        chunks: list[Chunk] = []
        decoding = [each for each in running if len(each.tokens) - each.reached <= 1]
        for request in decoding:
            if request.id not in self.active:
                continue  # another request took its space
            start, ahead = request.reached, self._ahead_of(request, len(decoding))
            if ahead or has_room(request, start + 1, chunks):
                loads = arriving.get(request.id, ())
                chunks.append(Chunk(request=request, start=start, end=start + 1, ahead=ahead, arriving=loads))
        # Guesses are additional: prompts are divided as without them.
        budget = max(self.limits.chunk_tokens - len(chunks), self.limits.prompt_tokens)
        told = MAX_PROMPT_LOGPROBS
        for request in [each for each in running if len(each.tokens) - each.reached > 1]:
            if budget <= 0:
                break
            if request.id not in self.active:
                continue  # another request took its space
            if request.wants_prompt_logprobs and not told:
                continue
            start, end = request.reached, self._chunk_end(request, min(budget, told) if request.wants_prompt_logprobs else budget)
            if has_room(request, end, chunks):
                chunks.append(Chunk(request=request, start=start, end=end, arriving=arriving.get(request.id, ())))
                budget -= chunks[-1].size
                told -= chunks[-1].size if request.wants_prompt_logprobs else 0
        self._note_first(chunks)
        if self._has_points:
            chunks = [self._copying(chunk) for chunk in chunks]
        return sorted(chunks, key=lambda chunk: (chunk.size > 1, chunk.end))  # similar lengths next to each other

    def _note_first(self, chunks: Sequence[Chunk]) -> None:
        for request in (chunk.request for chunk in chunks if chunk.request.computes_s is None):
            request.computes_s = self._clock.now()

    def _goes_on(self, request: Request) -> bool:
        """Whether a request can be computed further before its started passes are read: not after its last token."""
        lease = request.lease
        is_last = request.reached == len(request.tokens) and request.answer_tokens + 1 >= request.max_tokens
        return lease is not None and lease.ready and not is_last

    def _copying(self, chunk: Chunk) -> Chunk:
        """Adds the page for its point, if it ends at a stop. Only once all chunks have space: never worth a preemption."""
        assert chunk.request.lease is not None
        copy = self._cache.copy_point(chunk.request.lease, chunk.end)
        return chunk if copy is None else replace(chunk, point_copy=copy)

    def _hands_over_next(self, request: Request) -> bool:
        """Whether a request's pass in flight ends at one of its stops, without a copy of its point state."""
        lease = request.lease
        if lease is None or not lease.ready or not lease.publishes or request.started_copies:
            return False
        return request.reached == self._cache.next_stop(lease)

    def _grown(self, request: Request, upto: int, _planned: list[Chunk]) -> bool:
        """Allocates pages for a chunk, without preempting another request. Raises NoRoom."""
        assert request.lease is not None
        self._cache.grow(request.lease, upto)
        return True

    def _arriving(self) -> dict[int, tuple[Arriving, ...]]:
        """Requests that may begin while their bytes arrive, with their loads: the first whose load is queued, and those that wait
        for nothing else.

        None while another request runs: it would wait for bytes that it does not need, and its passes hide the load as well.
        None with a draft either: it reads the pages of a lease from the host.
        """
        if self._ahead is not None or any(each.runs for each in self.active.values()):
            return {}
        found: dict[int, tuple[Arriving, ...]] = {}
        for request in self.active.values():
            assert request.lease is not None, f"{request} is active without a lease"
            loads = self._cache.arriving(request.lease)
            if loads and (not found or set(loads) <= set(next(iter(found.values())))):
                found[request.id] = loads
        return found

    def _ahead_of(self, request: Request, decoding: int) -> int:
        """The number of tokens to guess for a decoding request, with space for them; guesses never preempt another request."""
        ahead = self._ahead(request, decoding) if self._ahead is not None else 0
        if ahead:
            assert request.lease is not None
            try:
                self._cache.grow(request.lease, len(request.tokens) + ahead)
            except NoRoom:
                return 0
        return ahead

    def _chunk_end(self, request: Request, budget: int) -> int:
        assert request.lease is not None
        end = min(len(request.tokens), request.reached + budget)
        stop = self._cache.next_stop(request.lease, after=request.reached)
        return end if stop is None else min(end, stop)

    def _room_for(self, request: Request, upto: int, planned: list[Chunk]) -> bool:
        """Allocates pages for a chunk, preempting the least urgent requests if necessary; False if it must wait."""
        while True:
            assert request.lease is not None
            try:
                self._cache.grow(request.lease, upto)
                return True
            except NoRoom as error:
                if error.waiting or self._cache.copying:
                    return False  # space is being freed: what copies read is free when they end
                victim = min(self.active.values(), key=lambda each: (each.submitted.priority, -each.arrived_s))
                if victim is request and len(self.active) == 1:
                    self._make_alone_fit(request)
                    return False
                planned[:] = [chunk for chunk in planned if chunk.request is not victim]
                self._preempt(victim)
                if victim is request:
                    return False

    def _make_alone_fit(self, request: Request) -> None:
        """Its pages are scattered over the device: a fresh start packs them, once. Its content is evicted for that:
        otherwise it would be found again in the same places.
        """
        if request.repacked_at == request.position:
            self.failed.append((request, NO_ROOM))
            return
        request.repacked_at = request.position
        self._preempt(request)
        self._cache.evict_idle()

    def _preempt(self, request: Request) -> None:
        request.preemptions += 1
        self.put_back(request)
        self._full = True


def _waited_until(ticket: Ticket | None, now_s: float) -> float | None:
    """When a request stopped waiting for the store; None if the store was not queried."""
    return min(ticket.ended_s, now_s) if ticket is not None and ticket.asked else None


def _shared_bytes(one: bytes, other: bytes, unit: int) -> int:
    """The length of the common prefix of two prompts, in whole units. Compares twice as much each time: most differ soon."""
    start, size, end = 0, unit, min(len(one), len(other)) // unit * unit
    while start < end and one.startswith(other[start : start + size], start):
        start, size = start + size, min(2 * size, end - start - size)
    if size <= unit:
        return min(start, end)
    return start + common_pages(one[start : start + size], other[start : start + size], unit) * unit
