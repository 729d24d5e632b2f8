"""What requests and operators do to a world with a store: the verbs of `traffic.py`, and those that a store adds."""

from __future__ import annotations

from collections.abc import Sequence

from ledger import space_of
from shelf import PATIENT, ROOMY
from store_side import Awaited
from store_world import StoreWorld
from traffic import Traffic

from stepwell import WritePolicy
from stepwell.base.tasks import ItemStatus

MAX_TICKETS = 4
MOST_SERVED = 12
STATUSES = (
    None,
    None,
    None,
    None,
    ItemStatus.FAILED,
    ItemStatus.CANCELLED,
    ItemStatus.MISSING,
    ItemStatus.DAMAGED,
)  # None: what the store makes of it


class StoreTraffic(Traffic):
    """Requests that wait for a store, operations that end in any order, and stores that come and go."""

    world: StoreWorld

    def __init__(self, world: StoreWorld) -> None:
        super().__init__(world)
        self.served: list[list[int]] = []  # prompts that a store may have

    def _ticket(self, pick: int, among: Sequence[Awaited]) -> Awaited | None:
        return among[pick % len(among)] if among else None

    # ---- requests ---------------------------------------------------------------------------------

    def serve(self, tokens: list[int], pick: int, ttl_s: float | None = None, *, last: bool = False) -> bool:
        self.served = [*self.served[1 - MOST_SERVED :], tokens]
        return super().serve(tokens, pick, ttl_s, last=last)

    def again(self, pick: int, less: int, more: int) -> list[int]:
        """A prompt that was served before, perhaps with another end."""
        tokens = self.served[pick % len(self.served)] if self.served else []
        return [*tokens[: max(len(tokens) - less, 0)], *[6] * more] or [6]

    def prefetch(self, tokens: list[int], pick: int, priority: int = 0, ttl_s: float | None = None) -> None:
        if len(self.world.awaited) < MAX_TICKETS:
            self.world.prefetch(tokens, self.space(pick), priority=priority, ttl_s=self._ttl(ttl_s))

    def prefetch_twins(self, tokens: list[int], pick: int) -> None:
        """Two requests that begin alike and end apart wait for what the store has of both."""
        self.prefetch(tokens, pick)
        self.prefetch([*tokens[: len(tokens) * 2 // 3], *[7] * self.page], pick)

    def close_ticket(self, pick: int) -> None:
        awaited = self._ticket(pick, self.world.awaited)
        if awaited is not None:
            self.world.close_ticket(awaited)

    def acquire_awaited(self, pick: int, *, spent: bool = False) -> None:
        awaited = self._ticket(pick, self.world.spent[-3:] if spent else self.world.awaited)
        if awaited is not None and not self._full:
            self.world.acquire_awaited(awaited)

    def overtake(self, pick: int) -> None:
        """Another request for the same prompt does not wait."""
        awaited = self._ticket(pick, self.world.awaited)
        if awaited is not None and not self._full:
            held = self.world.acquire(awaited.tokens, awaited.namespace)
            if held is not None:
                self.finish_serving(held)
            if pick % 2:
                self.world.acquire_awaited(awaited)

    def serve_awaited(self, tokens: list[int], pick: int) -> None:
        """A request as it should be: asks, waits, begins."""
        if not self._full and len(self.world.awaited) < MAX_TICKETS:
            awaited = self.world.prefetch(tokens, self.space(pick))
            self.world.settle_everything()
            held = self.world.acquire_awaited(awaited)
            if held is None:
                self.world.close_ticket(awaited)
            else:
                self.finish_serving(held)

    # ---- stores -----------------------------------------------------------------------------------

    def answer_op(self, pick: int, status: ItemStatus | None = None, took_s: float = 0.0) -> None:
        """The store answers one operation, in any order; or it is answered for without it."""
        pending = self.world.pending
        if pending:
            self.world.answer_op(*pending[pick % len(pending)], status=status, took_s=took_s)

    def fail_ops(self) -> None:
        """The store is out of reach."""
        for line, job in self.world.pending:
            self.world.answer_op(line, job, status=ItemStatus.FAILED)
        self.world.step()

    def time_out(self) -> None:
        """The store says nothing until every wait for it has timed out."""
        self.world.clock.advance(self.world.store_setup.tuning.op_timeout_s + 1)
        self.world.step()

    def move_store(self, pick: int) -> None:
        """Whatever is attached goes; the same store, another or none takes its place."""
        if self.world.attached is not None:
            self.world.detach()
        if pick % 4:
            self.world.attach(pick % 2)

    def evict(self, pick: int) -> None:
        """Everything idle is to leave one tier, or all of them."""
        tiers = self.world.cache._state.tree.tiers
        for tier in tiers[pick % 4 : pick % 4 + 1] or tiers:
            self.world.evict(tier)

    def recover(self, tokens: list[int], pick: int, *, outage: bool, serve: bool, anew: bool, drop: bool) -> None:
        """Lets everything end well, perhaps after an outage, and then asks for a prompt that may have been served just before."""
        if self._full or len(self.world.awaited) >= MAX_TICKETS:
            return
        world = self.world
        if outage:
            self.serve(tokens, pick)
            world.settle()
            self.fail_ops()
        world.shelf.make_well(well=True)
        world.settle_everything()
        if anew or world.attached is None:
            if world.attached is not None:
                world.detach()
            world.attach(pick % 2, PATIENT, ROOMY)
        world.settle_everything()
        if serve:
            self.serve_and_look(tokens, pick, anew=anew)
        if drop:
            world.drop_memory()
        world.recover(tokens, self.space(pick))
        world.shelf.make_well(well=False)

    def serve_and_look(self, tokens: list[int], pick: int, *, anew: bool) -> None:
        world, before = self.world, self.world.shortfalls()
        served = self.serve(tokens, pick)
        world.settle_everything()
        line = world.attached
        assert line is not None
        if line.config.checkpoint_delay_s:  # never None here
            world.clock.advance(line.config.checkpoint_delay_s)
            world.settle_everything()
        sort = world.store_setup.sort
        keeps = sort in ("good", "failing") or (anew and "small" not in sort)
        keeps = line.which or (keeps and not world.shelf.num_torn(0))  # a torn checkpoint is taken for stored until it is fetched
        written = world.setup.write is WritePolicy.THROUGH or world.setup.durable
        written = written and space_of(self.space(pick)) not in world.ledger.barred
        if served and keeps and written and world.shortfalls() == before:
            world.check_stored(tokens, self.space(pick))

    def restart(self) -> None:
        """The process ends, and another begins over the same stores."""
        old = self.world
        old.close()
        self.world = type(old)(old.store_setup, old.shelf)
        self.world.trace = old.trace + self.world.trace
        self.world.recovered = old.recovered
        self.matches, self.cleared = [], 0
