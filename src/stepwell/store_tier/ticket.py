"""The state between one request and the store before the request begins: a ticket, and the fetches it waits for.

They only store state; `prefetch.py` changes them, and engines use them through the cache. A ticket is closed exactly once:
by the `acquire` that uses it, or by `close`.
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
    ASKING = "asking"  # the query is not answered yet
    FETCHING = "fetching"
    DONE = "done"  # nothing more will come
    CLOSED = "closed"


class Fetch:
    """Pages `start` .. `start + len(ids)` of one path in flight from the store, and the checkpoints among them.

    Holds the pages for as long as a ticket wants them.
    """

    def __init__(self, namespace: Namespace, start: int, keys: tuple[PageKey, ...], ids: PageIds) -> None:
        self.namespace = namespace
        self.start = start
        self.keys = keys  # of its pages
        self.ids = ids
        self.arrived: Flags = np.zeros(len(ids), np.bool_)
        self.residencies: list[Residency] = []
        self.jobs: set[JobId] = set()
        self.calls: dict[JobId, Call] = {}  # of operations in flight
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
        """The bytes that have not arrived yet."""
        return max(self.size_bytes - self.moved_bytes, 0) if self.jobs else 0

    def shared_with(self, ticket: Ticket) -> int:
        """The page up to which a ticket's path is the same."""
        theirs = ticket.keys[self.start : self.end]
        return self.start + next((i for i, (a, b) in enumerate(zip(self.keys, theirs, strict=False)) if a != b), len(theirs))


class Ticket:
    """One request's wait for the store. Read it freely; close it through the cache, or by `acquire`."""

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
        self.awaited = awaited  # by a request; False for a later request: no waiting time is counted then
        self.state = TicketState.ASKING
        self.started_s = clock.now()
        self.deadline_s = inf  # the request does not wait longer than this
        self.done_s = inf  # when it had nothing more to wait for
        self.keys = keys  # of every page that could be reused
        self.first_asked = 0  # pages before it were known when it started
        self.has_page: Flags = np.zeros(len(keys), np.bool_)  # according to the store
        self.has_checkpoint: Flags = np.zeros(len(keys) + 1, np.bool_)  # by boundary
        self.from_store: Flags = np.zeros(len(keys), np.bool_)  # what has arrived from it since
        self.num_ahead = 0  # pages for which others were evicted from the device before the request began
        self.fetches: list[Fetch] = []
        self.tries_left = 16  # to find space that is being freed
        self.plans_left = 3  # a fetch that failed may be followed by a shorter one
        self.call = Call()
        self._clock = clock
        self._on_exit = on_exit

    @property
    def prompt_tokens(self) -> int:
        return len(self.packed) // TOKEN_BYTES

    @property
    def asked(self) -> bool:
        """Whether the store was queried at all: not if there is none, or if it could not help."""
        return bool(self.keys)

    @property
    def known_pages(self) -> int:
        """How many pages of its prompt were known, first to memory and then to the store, though not all could be resumed."""
        missing = np.flatnonzero(~self.has_page[self.first_asked :])
        return self.first_asked + int(missing[0]) if len(missing) else len(self.keys)

    @property
    def complete(self) -> bool:
        """Whether everything that can arrive has arrived."""
        return self.state in (TicketState.DONE, TicketState.CLOSED)

    @property
    def ended_s(self) -> float:
        """When waiting ended, or will end as things stand: infinity until everything has arrived."""
        return min(self.done_s, self.deadline_s)

    @property
    def given_up(self) -> bool:
        """Whether waiting ended before everything arrived."""
        return not self.complete and self.ready

    @property
    def ready(self) -> bool:
        """Whether the request should go on now, with what has arrived; without a limit, whether everything has arrived."""
        return self.complete or (self.awaited and self._clock.now() >= self.ended_s)

    def close(self, *, used_tokens: int = 0) -> None:
        """Ends the wait. What has arrived stays cached; a second close does nothing."""
        if self.state is not TicketState.CLOSED:
            self._on_exit(self, used_tokens)

    def __enter__(self) -> Ticket:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self.close()

    def __repr__(self) -> str:
        return f"Ticket({self.prompt_tokens} tokens, {int(self.from_store.sum())} pages arrived, {self.state.value})"
