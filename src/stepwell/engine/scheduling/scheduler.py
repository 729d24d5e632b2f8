"""Who computes what in the next pass: admission, waiting for each other's prefixes, chunks, preemption.

    waiting   no lease: its pages may be on their way from the store, another may be computing its prefix, or there is no room
    active    has a lease; runs once its bytes are there, or are on their way and nobody else would run

Every request that runs gets its next tokens: one that decodes its single token and room for those that a draft may guess,
others a chunk, up to a budget in all. Computes nothing, samples nothing. One thread.
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

MAX_FAILED_LEASES = 3  # after which a request computes its whole prompt, for itself alone
NO_ROOM = "the device tier has no room for this request, even alone; shorten it"
Ahead = Callable[[Request, int], int]  # how many tokens may be guessed for a request, when so many decode
HasRoom = Callable[[Request, int, list[Chunk]], bool]  # pages for a request up to a token, beside chunks that are planned
TOLD_AT_ONCE = 256  # tokens of prompts whose logits a pass keeps: as many rows of the vocabulary's length
PROMPT_SHARE = 4  # one part in so many of a pass is kept for prompts
COMPARED = 32  # waiting requests that are put in order; the others keep their turn


@dataclass(frozen=True, slots=True, kw_only=True)
class Limits:
    """How much is done at once."""

    max_running: int = 32
    chunk_tokens: int = 512  # computed in one pass, over all requests
    patience_s: float = 10.0  # after which a request is served in its turn, however little is cached or urgent others are

    @property
    def prompt_tokens(self) -> int:
        """The share of a pass that prompts have however many requests decode: without it those would starve prompts."""
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
        self._has_points = bool(cache.spec.parts(Kind.POINT))  # which passes copy at a stop
        self._clock = clock
        # Tokens shared with waiting requests, by lease, then by request and the length of its prompt, which preemption changes.
        self._compared: dict[LeaseId, dict[tuple[int, int], int]] = {}
        self._full = False  # since a preemption nobody has left: admitting one would only preempt another

    # ---- coming and going -------------------------------------------------------------------------

    def enter(self, request: Request) -> None:
        """Queues a request, and starts to bring up what the store has of it. Raises BadTokens, and queues nothing."""
        self._prefetch(request)
        self.waiting[request.id] = request

    def leave(self, request: Request) -> None:
        """Takes a request out, wherever it stands, and gives back what it holds."""
        self.waiting.pop(request.id, None)
        self.active.pop(request.id, None)
        self._let_go(request)
        self._full = False

    def put_back(self, request: Request) -> None:
        """Takes an active request's memory and lets it wait again, before all others. What it computed stays cached for now."""
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
        """How soon a waiting request stops waiting for the store, whatever has come by then: infinity where none has a limit."""
        now = self._clock.now()
        tickets = (each.ticket for each in self.waiting.values())
        return min((each.ended_s - now for each in tickets if each is not None and each.awaited and not each.ready), default=inf)

    # ---- admission --------------------------------------------------------------------------------

    def admit(self) -> None:
        """Leases as many waiting requests as there is room for, those with the least to compute first."""
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
                return  # nobody overtakes it: a large request would never begin
            except Exception as error:  # whatever is wrong with one request, the others go on
                self.failed.append((request, f"{type(error).__name__}: {error}"))

    def _in_order(self) -> list[tuple[Request, Match]]:
        """Those who waited too long, as they came; then the urgent; among these, who was preempted, then the least to compute."""
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
        """Whether an active request is about to compute more of this prompt than is cached: then it is worth waiting for."""
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
        """Tokens that a lease and a waiting request begin with alike, to the last boundary that the request could resume at.

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
        """The chunks of the next pass, with room for all of them; those of one token first. All that was started is read."""
        arriving = self._arriving()
        running = [each for each in self.active.values() if each.runs or each.id in arriving]
        return self._cut(running, self._room_for, arriving)

    def plan_ahead(self) -> list[Chunk]:
        """The chunks of the pass behind the one in flight: every request goes on from where that leaves it.

        Empty if some request would need pages of another: none are taken before what was computed in them is cached. Empty also
        if a request must publish its point state first: a stop that was asked for later, or had no page, has no copy of it.
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
                continue  # another took its room
            start, ahead = request.reached, self._ahead_of(request, len(decoding))
            if ahead or has_room(request, start + 1, chunks):
                loads = arriving.get(request.id, ())
                chunks.append(Chunk(request=request, start=start, end=start + 1, ahead=ahead, arriving=loads))
        # Guesses come on top: prompts are cut as they are without.
        budget = max(self.limits.chunk_tokens - len(chunks), self.limits.prompt_tokens)
        told = TOLD_AT_ONCE
        for request in [each for each in running if len(each.tokens) - each.reached > 1]:
            if budget <= 0:
                break
            if request.id not in self.active:
                continue  # another took its room
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
        return sorted(chunks, key=lambda chunk: (chunk.size > 1, chunk.end))  # alike lengths side by side

    def _note_first(self, chunks: Sequence[Chunk]) -> None:
        for request in (chunk.request for chunk in chunks if chunk.request.computes_s is None):
            request.computes_s = self._clock.now()

    def _goes_on(self, request: Request) -> bool:
        """Whether a request can be computed further before what was started of it is read: not behind its last token."""
        lease = request.lease
        is_last = request.reached == len(request.tokens) and request.answer_tokens + 1 >= request.max_tokens
        return lease is not None and lease.ready and not is_last

    def _copying(self, chunk: Chunk) -> Chunk:
        """With the page for its point, where it ends at a stop. Only once all chunks have room: a checkpoint is not worth one."""
        assert chunk.request.lease is not None
        copy = self._cache.copy_point(chunk.request.lease, chunk.end)
        return chunk if copy is None else replace(chunk, point_copy=copy)

    def _hands_over_next(self, request: Request) -> bool:
        """Whether what was started of a request and is not read ends at one of its stops, without a copy of its point state."""
        lease = request.lease
        if lease is None or not lease.ready or not lease.publishes or request.started_copies:
            return False
        return request.reached == self._cache.next_stop(lease)

    def _grown(self, request: Request, upto: int, _planned: list[Chunk]) -> bool:
        """Gets pages for a chunk, if they can be had without taking anybody's. Raises NoRoom."""
        assert request.lease is not None
        self._cache.grow(request.lease, upto)
        return True

    def _arriving(self) -> dict[int, tuple[Arriving, ...]]:
        """Who may begin while its bytes are on their way, and with what they come: the first whose load is queued, and those who
        wait for nothing else.

        Nobody does while another runs: that one would wait for bytes it does not need, and its passes hide the load as well.
        Nor where there is a draft: it looks at the pages of a lease from the host.
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
        """How many tokens are guessed for a request that decodes, with room for them; nobody else's is taken for guesses."""
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
        """Gets pages for a chunk, if need be by taking those of whoever matters least; false when it must wait."""
        while True:
            assert request.lease is not None
            try:
                self._cache.grow(request.lease, upto)
                return True
            except NoRoom as error:
                if error.waiting or self._cache.copying:
                    return False  # room is on its way: what copies read is free when they end
                victim = min(self.active.values(), key=lambda each: (each.submitted.priority, -each.arrived_s))
                if victim is request and len(self.active) == 1:
                    self._make_alone_fit(request)
                    return False
                planned[:] = [chunk for chunk in planned if chunk.request is not victim]
                self._preempt(victim)
                if victim is request:
                    return False

    def _make_alone_fit(self, request: Request) -> None:
        """Its pages lie scattered over the device: a fresh start packs them, once. What it had leaves the device for that: it
        would be found again where it lies.
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
    """When a request waited for the store no more; None where the store was not asked."""
    return min(ticket.ended_s, now_s) if ticket is not None and ticket.asked else None


def _shared_bytes(one: bytes, other: bytes, unit: int) -> int:
    """Bytes that two prompts begin with alike, in whole units. Looks at twice as much each time: most differ soon."""
    start, size, end = 0, unit, min(len(one), len(other)) // unit * unit
    while start < end and one.startswith(other[start : start + size], start):
        start, size = start + size, min(2 * size, end - start - size)
    if size <= unit:
        return min(start, end)
    return start + common_pages(one[start : start + size], other[start : start + size], unit) * unit
