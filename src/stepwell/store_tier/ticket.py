"""What one request has to do with the store before it begins: a ticket, and the fetches it waits for.

They only remember; `prefetch.py` changes them, and engines reach it through the cache. A ticket is closed exactly
once: by the `acquire` that uses it, or by `close`.
"""

from __future__ import annotations

from collections.abc import Callable
from enum import Enum
from math import inf
from types import TracebackType

import numpy as np

from stepwell.base.ids import JobId
from stepwell.base.meters import Clock
from stepwell.base.prompt import TOKEN_BYTES, Namespace, PageKey
from stepwell.base.tasks import PageIds
from stepwell.policy.store_use import Flags
from stepwell.store_tier.ops import Call
from stepwell.tiers.lease import RequestOptions
from stepwell.tree.match import Match
from stepwell.tree.node import Residency


class TicketState(Enum):
    ASKING = "asking"  # what the store has is not known yet
    FETCHING = "fetching"
    DONE = "done"  # nothing more will come
    CLOSED = "closed"


class Fetch:
    """Pages `start` .. `start + len(ids)` of one path on their way from the store, and the checkpoints among them.

    Holds the pages until nobody who wanted them is left.
    """

    def __init__(self, namespace: Namespace, start: int, keys: tuple[PageKey, ...], ids: PageIds) -> None:
        self.namespace = namespace
        self.start = start
        self.keys = keys  # of its pages
        self.ids = ids
        self.arrived: Flags = np.zeros(len(ids), np.bool_)
        self.residencies: list[Residency] = []
        self.jobs: set[JobId] = set()
        self.calls: dict[JobId, Call] = {}  # of operations that are out
        self.watchers: dict[Ticket, int] = {}  # and up to which page each of them shares its path
        self.size_bytes = 0
        self.sent_s = 0.0
        self.moved_bytes = 0  # that have arrived
        self.took_s: list[float] = []  # of each operation that was answered

    @property
    def end(self) -> int:
        return self.start + len(self.ids)

    @property
    def coming_bytes(self) -> int:
        """What is still to arrive."""
        return max(self.size_bytes - self.moved_bytes, 0) if self.jobs else 0

    def shared_with(self, ticket: Ticket) -> int:
        """Up to which page a ticket's path is this one."""
        theirs = ticket.keys[self.start : self.end]
        return self.start + next((i for i, (a, b) in enumerate(zip(self.keys, theirs, strict=False)) if a != b), len(theirs))


class Ticket:
    """One request's wait for the store. Read it freely; close it through the cache, or let `acquire` do so."""

    def __init__(
        self,
        *,
        match: Match,
        request: RequestOptions,
        clock: Clock,
        keys: tuple[PageKey, ...],
        on_exit: Callable[[Ticket, int], None],
        awaited: bool = True,
    ) -> None:
        self.tree = match.tree  # of the cache that it belongs to
        self.namespace = match.namespace
        self.packed = match.packed
        self.limit_tokens = match.limit_tokens
        self.request = request
        self.awaited = awaited  # by a request; or it is brought up for one that is still to come, and no wait is paid for
        self.state = TicketState.ASKING
        self.started_s = clock.now()
        self.deadline_s = inf  # not to wait longer than this
        self.done_s = inf  # when it had nothing more to wait for
        self.keys = keys  # of every page that could be reused
        self.first_asked = 0  # pages before it were known when it started
        self.has_page: Flags = np.zeros(len(keys), np.bool_)  # what the store said it has
        self.has_checkpoint: Flags = np.zeros(len(keys) + 1, np.bool_)  # by boundary
        self.from_store: Flags = np.zeros(len(keys), np.bool_)  # what has arrived from it since
        self.num_ahead = 0  # pages for which others were evicted from the device before the request began
        self.fetches: list[Fetch] = []
        self.tries_left = 16  # at finding room that is on its way
        self.plans_left = 3  # a fetch that failed may be followed by a shorter one
        self.call = Call()
        self._clock = clock
        self._on_exit = on_exit

    @property
    def prompt_tokens(self) -> int:
        return len(self.packed) // TOKEN_BYTES

    @property
    def asked(self) -> bool:
        """Whether the store was asked at all: not where there is none, or where it could not help."""
        return bool(self.keys)

    @property
    def known_pages(self) -> int:
        """How many pages of its prompt were known, first to memory and then to the store, though not all could be resumed."""
        missing = np.flatnonzero(~self.has_page[self.first_asked :])
        return self.first_asked + int(missing[0]) if len(missing) else len(self.keys)

    @property
    def complete(self) -> bool:
        """Whether all that can come has come."""
        return self.state in (TicketState.DONE, TicketState.CLOSED)

    @property
    def ended_s(self) -> float:
        """When waiting ended, or will as things stand: infinity for when everything has come."""
        return min(self.done_s, self.deadline_s)

    @property
    def given_up(self) -> bool:
        """Whether waiting ended with something still to come."""
        return not self.complete and self.ready

    @property
    def ready(self) -> bool:
        """Whether the request should go on now, with what there is; where there is none, whether all has come."""
        return self.complete or (self.awaited and self._clock.now() >= self.ended_s)

    def close(self, *, used_tokens: int = 0) -> None:
        """Says that nobody waits any more. What has arrived stays cached; a second close does nothing."""
        if self.state is not TicketState.CLOSED:
            self._on_exit(self, used_tokens)

    def __enter__(self) -> Ticket:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self.close()

    def __repr__(self) -> str:
        return f"Ticket({self.prompt_tokens} tokens, {int(self.from_store.sum())} pages arrived, {self.state.value})"
