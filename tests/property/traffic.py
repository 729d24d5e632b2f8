"""What requests do to a world: the verbs that the state machine and the seeded lives are made of.

Numbers choose: `pick` says which lease or job, modulo how many there are. A verb that finds nothing to act on does nothing.
"""

from __future__ import annotations

from collections.abc import Sequence

from toy_models import Regime
from world import Held, World

from stepwell import Kind, Match, Namespace, Tier
from stepwell.tiers.eviction import make_room

MAX_LEASES = 4


class Traffic:
    """Requests in all stages of their life over one world."""

    def __init__(self, world: World) -> None:
        self.world = world
        self.page = world.spec.page_tokens
        self.matches: list[tuple[Match, list[int], Namespace]] = []
        self.preempted: list[tuple[list[int], Namespace]] = []
        self.cleared = self.flushed = 0

    def space(self, pick: int) -> Namespace:
        """Mostly the same one, but for tenants."""
        setup = self.world.setup
        if setup.quotas:
            return setup.spaces[pick % len(setup.spaces)]
        return self.world.setup.spaces[max(pick % 12 - 9, 0)]

    def _ready(self, pick: int) -> Held | None:
        ready = [held for held in self.world.held if held.lease.ready and not held.finished]
        return ready[pick % len(ready)] if ready else None

    def _ttl(self, ttl_s: float | None) -> float | None:
        return None if self.world.regime.exact else ttl_s

    @property
    def _full(self) -> bool:
        return len(self.world.held) >= MAX_LEASES

    # ---- questions --------------------------------------------------------------------------------

    def look(self, tokens: list[int], pick: int) -> None:
        self.world.look(tokens, self.space(pick))

    def keep_a_match(self, tokens: list[int], pick: int) -> None:
        self.matches.append((self.world.look(tokens, self.space(pick)), tokens, self.space(pick)))

    # ---- requests ---------------------------------------------------------------------------------

    def acquire(self, tokens: list[int], pick: int, hints: tuple[int, ...], priority: int, ttl_s: float | None) -> None:
        if not self._full:
            self.world.acquire(tokens, self.space(pick), hints=hints, priority=priority, ttl_s=self._ttl(ttl_s))

    def acquire_an_old_match(self, pick: int) -> None:
        if self.matches and not self._full:
            match, tokens, namespace = self.matches.pop(pick % len(self.matches))
            self.world.acquire(tokens, namespace, match=match)

    def acquire_a_batch(self, batch: Sequence[list[int]], pick: int) -> None:
        """As a scheduler does: looks all prompts up, then leases one after the other through the matches it got."""
        matches = [(self.world.look(tokens, self.space(pick)), tokens) for tokens in batch]
        for match, tokens in matches:
            if not self._full:
                self.world.acquire(tokens, self.space(pick), match=match)

    def follow(self, pick: int, extra: int, *, pin: bool) -> None:
        """Another request goes on from where one stands now, answer included; or that place is pinned."""
        if not self.world.held:
            return
        leader = self.world.held[pick % len(self.world.held)]
        tokens = leader.tokens[: leader.lease.position] + [4] * extra
        if pin and len(self.world.pinned) < 3:
            self.world.pin(tokens, leader.namespace, None)
        elif not self._full:
            self.world.acquire(tokens, leader.namespace)

    def prefill(self, pick: int, chunk: int, *, obey: bool, again: bool) -> None:
        """One chunk, ending on the next stop if it obeys, and perhaps a second commit of the same tokens."""
        held = self._ready(pick)
        if held is None:
            return
        upto = min(held.lease.position + chunk, held.lease.num_tokens)
        stop = self.world.cache.next_stop(held.lease)
        if obey and stop is not None:
            upto = min(upto, stop)
        if self.world.advance(held, upto) and again and held.lease.ready:
            self.world.commit(held, upto)

    def serve(self, tokens: list[int], pick: int, ttl_s: float | None = None, *, last: bool = False) -> bool:
        """A whole request with every copy on time; false when it had to give up."""
        held = self.world.acquire(tokens, self.space(pick), ttl_s=self._ttl(ttl_s))
        return held is not None and self.finish_serving(held, last=last)

    def finish_serving(self, held: Held, *, last: bool = False) -> bool:
        world = self.world
        while held.lease.position < held.lease.num_tokens:
            if not held.lease.ready:
                world.settle()
            if not held.lease.ready:
                break
            world.check_lease(held)
            upto = min(world.cache.next_stop(held.lease) or held.lease.num_tokens, held.lease.num_tokens)
            if not world.advance(held, upto, last=last and upto == held.lease.num_tokens):
                break
        world.release(held)
        return held.lease.position == held.lease.num_tokens

    def decode(self, pick: int, letters: Sequence[int]) -> None:
        """An answer grows to its next stop, once for each letter."""
        held = self._ready(pick)
        if held is None or self.world.regime is Regime.SPILL or held.lease.num_tokens > 14 * self.page:
            return
        for letter in letters:
            if not held.lease.ready:
                self.world.settle()
            if not held.lease.ready:
                return
            stop = self.world.cache.next_stop(held.lease) or held.lease.num_tokens + self.page - 1
            if stop > held.lease.num_tokens:
                self.world.append(held, [letter] * (stop - held.lease.num_tokens))
            if not self.world.advance(held, stop):
                return

    def finish(self, pick: int) -> None:
        held = self._ready(pick)
        if held is None:
            return
        if self.world.advance(held, held.lease.num_tokens, last=True) and self.world.regime is Regime.SPILL:
            self.world.release(held)  # what an answer leaves is saved when its request ends

    def release(self, pick: int) -> None:
        """Ends any request, in whatever state it is: loading, failed, half computed."""
        if self.world.held:
            self.world.release(self.world.held[pick % len(self.world.held)])

    def abort_after_computing(self, pick: int) -> None:
        held = self._ready(pick)
        if held is not None:
            self.world.abandon(held, held.lease.num_tokens)

    def preempt(self, pick: int) -> None:
        held = self._ready(pick)
        if held is not None:
            self.preempted.append((held.tokens, held.namespace))
            self.world.release(held)

    def come_back(self) -> None:
        if self.preempted and not self._full:
            self.world.acquire(*self.preempted.pop())

    # ---- upkeep -----------------------------------------------------------------------------------

    def answer(self, pick: int, rank: int, *, fail: bool) -> None:
        """One rank answers for one job, in any order; it may fail where the regime lets it."""
        owed = self.world.executor.owed
        if owed:
            job = list(owed)[pick % len(owed)]
            self.world.answer(job, owed[job][rank % len(owed[job])], fail=fail and self.world.regime is Regime.FAULTY)

    def press(self, pick: int, *, may_spill: bool) -> None:
        """The device needs space, but for no request: idle pages leave it, and then rows of requests if they may spill."""
        if self.world.regime is not Regime.CALM:
            state = self.world.cache._state
            many = state.arena(Tier.DEVICE).layout.rows(Kind.PREFIX)
            need = {Kind.ROWS: 1 + 2 * pick} if state.row_pages is not None and may_spill else {Kind.PREFIX: many}
            make_room(state, Tier.DEVICE, need, may_spill=may_spill)

    def pin(self, tokens: list[int], pick: int, ttl_s: float | None) -> None:
        if len(self.world.pinned) < 3:
            self.world.pin(tokens, self.space(pick), self._ttl(ttl_s))

    def hand_out(self, tokens: list[int], pick: int) -> None:
        if len(self.world.pinned) < 3:
            self.world.hand_out(tokens, self.space(pick), 50.0)

    def flush(self, pick: int) -> None:
        """Memory is emptied, of one namespace or of all; not where an oracle foretells what is cached."""
        if not self.world.regime.exact and self.flushed < 3:
            self.flushed += 1
            self.world.flush(self.space(pick) if pick % 2 else None)

    def unpin(self, pick: int) -> None:
        if self.world.pinned:
            self.world.unpin(self.world.pinned[pick % len(self.world.pinned)])

    def clear(self, pick: int) -> None:
        if self.cleared < 2:  # an empty cache teaches little
            self.cleared += 1
            self.world.clear(self.space(pick))
