"""Leases: what one request holds of a cache, and the set of open ones.

    open -> READY <-> LOADING -> FAILED      `Leases.settle`, once per step
    released (CLOSED) -> finished            when the last copy to or from the engine's own memory has ended

A lease is released exactly once; `with` does it. It holds a position on a path, pages, and the boundaries where checkpoints must
be left. It only stores state: the verbs that change it are in `restore.py`, `publish.py` and `external.py`, and engines call
them through the cache.
"""

from __future__ import annotations

from collections.abc import Callable, Container, Iterable, Iterator
from dataclasses import dataclass
from enum import Enum
from math import inf
from types import TracebackType

from stepwell.base.errors import LeaseError
from stepwell.base.ids import JobId, Kind, LeaseId
from stepwell.base.prompt import TOKEN_BYTES, Namespace
from stepwell.base.tasks import NO_PAGES, PageIds
from stepwell.memory.arena import DEAD, FILLING
from stepwell.policy.value import Visit
from stepwell.tiers.saving import save_committed
from stepwell.tiers.state import CacheState
from stepwell.tree.node import Checkpoint, Residency, Use


class LeaseState(Enum):
    LOADING = "loading"  # bytes it needs are being loaded, or bytes it would change are being copied
    READY = "ready"  # the engine may compute
    FAILED = "failed"  # bytes it needed did not arrive: release it and look the prompt up again
    CLOSED = "closed"


@dataclass(frozen=True, slots=True, kw_only=True)
class Sources:
    """Where a prompt's tokens came from. The sum is always the prompt's length."""

    device: int = 0
    host: int = 0
    store: int = 0
    computed: int = 0

    @property
    def total(self) -> int:
        return self.device + self.host + self.store + self.computed


@dataclass(frozen=True, slots=True, kw_only=True)
class RequestOptions:
    """What a caller specifies for a request in addition to its tokens."""

    hints: tuple[int, ...] = ()  # boundaries worth a checkpoint: the end of a system prompt, of tools
    priority: int = 0
    ttl_s: float | None = None

    def use(self, now: float, visit: Visit | None = None) -> Use:
        until = float("inf") if self.ttl_s is None else now + self.ttl_s
        return Use(at_s=now, priority=self.priority, expires_at_s=until, visit=visit)


class Lease:
    """One request's hold on the cache. Read it freely; change it only through the cache."""

    def __init__(
        self, number: LeaseId, *, namespace: Namespace, packed: bytes, resume: int, sources: Sources, request: RequestOptions,
        stops: tuple[int, ...], on_exit: Callable[[Lease], None],
    ) -> None:  # fmt: skip
        self.id = number
        self.namespace = namespace
        self.prompt_tokens = len(packed) // TOKEN_BYTES
        self.resume = resume  # the engine computes from this token on
        self.known = resume  # tokens already in the tree or in the store at acquire time; at least `resume`
        self.sources = sources
        self.request = request
        self.stops = stops  # boundaries of the prompt at which a prefill chunk must end with a commit
        self._state = LeaseState.READY
        self.position = resume  # everything before it is computed
        self.quiet_until = 0  # commits before this token only move `position`: they fill a page that the lease has
        self.prefix_pages: PageIds = NO_PAGES  # page i holds tokens [i, i + 1) * page_tokens
        self.window_pages: PageIds = NO_PAGES  # window page `first_window` and those after it
        self.first_window = 0
        self.first_resident = 0  # no page before it has rows on the device: rows that were shed stay shed
        self.hot_pages: PageIds = NO_PAGES  # ROWS pages for rows it reads often, once rows of it are on the host alone,
        self.hot_numbers: PageIds = NO_PAGES  # and the numbers under which passes know these
        self.hot_refused_at: int | None = None  # the page at which it got none: it does not try again before the next
        self.point_pages: PageIds = NO_PAGES  # the request's own point state, updated in place; one id or none
        self.spare_points: PageIds = NO_PAGES  # replaces the point once the lease has left its next checkpoint; one id or none
        self.point_copies: dict[int, PageIds] = {}  # boundary to page: reserved for a copy of its point there
        self.waits_for: list[tuple[Kind, PageIds]] = []  # pages without which it may not compute
        self.jobs: set[JobId] = set()  # copies to and from the engine's own memory that have not ended,
        self.waits_for_jobs: set[JobId] = set()  # those of them without which it may not compute,
        self.load_job: JobId | None = (
            None  # and the one whose failure fails the lease: after a failed save the engine still has the bytes
        )
        self.arrives_with: tuple[JobId, ...] = ()  # the loads that bring all it waits for, if a pass may begin before they end
        self.computing_since_s = 0.0  # since when the engine could compute what it commits next
        self.restored: Residency | None = None
        self.visit: Visit | None = None  # to which its computed pages belong
        self.visits: tuple[Visit, ...] = ()  # that one, and the one to which its restored path belongs
        self.num_published = 0  # pages offered to the tree so far
        self.publishes = True  # False on request, or once its namespace was cleared: its results stay private
        self.missing_states: dict[str, int] = {}  # optional states that its pages lack, and from which token on
        self.trail: Checkpoint | None = None  # the last checkpoint that its growing answer left
        self._packed = packed
        self._tail = bytearray()
        self._on_exit = on_exit

    @property
    def state(self) -> LeaseState:
        return self._state

    def must_wait(self, pages: Iterable[tuple[Kind, PageIds]] = (), job: JobId | None = None) -> None:
        """LOADING: it may not compute before pages have arrived, or a copy to or from the engine's memory has ended."""
        self.waits_for += [(kind, ids) for kind, ids in pages if len(ids)]
        if job is not None:
            self.jobs.add(job)
            self.waits_for_jobs.add(job)
        self._state = LeaseState.LOADING

    def may_compute(self) -> None:
        """READY: what it waited for has arrived."""
        self.must_be(LeaseState.LOADING)
        self.waits_for, self.waits_for_jobs, self.arrives_with = [], set(), ()
        self._state = LeaseState.READY

    def fail(self) -> None:
        """FAILED: what it waited for did not arrive."""
        self.must_be(LeaseState.LOADING)
        self._state = LeaseState.FAILED

    def close(self) -> None:
        """CLOSED: it was released."""
        self._state = LeaseState.CLOSED

    @property
    def ready(self) -> bool:
        return self.state is LeaseState.READY

    @property
    def failed(self) -> bool:
        return self.state is LeaseState.FAILED

    @property
    def num_tokens(self) -> int:
        return (len(self._packed) + len(self._tail)) // TOKEN_BYTES

    @property
    def packed(self) -> bytes:
        """All its tokens so far, as the tree compares them."""
        if self._tail:
            self._packed += bytes(self._tail)
            self._tail.clear()
        return self._packed

    def append_packed(self, packed: bytes) -> None:
        self._tail += packed

    def must_be(self, *states: LeaseState) -> None:
        if self.state not in states:
            wanted = " or ".join(state.value for state in states)
            raise LeaseError(f"lease #{self.id} is {self.state.value}, but must be {wanted}")

    def __enter__(self) -> Lease:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        if self.state is not LeaseState.CLOSED:
            self._on_exit(self)

    def __repr__(self) -> str:
        where = f"at token {self.position} of {self.num_tokens}"
        return f"Lease(#{self.id}, pages={len(self.prefix_pages)}, {where}, {self.state.value})"


@dataclass(frozen=True, slots=True, kw_only=True)
class Settled:
    """Leases whose state changed in one step."""

    ready: tuple[Lease, ...]
    failed: tuple[Lease, ...]
    finished: tuple[Lease, ...]


class Leases:
    """The open leases of one cache. One thread."""

    def __init__(self, state: CacheState) -> None:
        self._state = state
        self._open: dict[LeaseId, Lease] = {}
        self._closing: list[Lease] = []  # released, with copies still in the engine's memory
        self._last_id = 0

    def __len__(self) -> int:
        return len(self._open)

    def __iter__(self) -> Iterator[Lease]:
        return iter(self._open.values())

    def next_id(self) -> LeaseId:
        self._last_id += 1
        return LeaseId(self._last_id)

    def must_be(self, lease: Lease, *states: LeaseState) -> None:
        """Raises LeaseError unless a lease is in one of these states, and belongs to this cache."""
        lease.must_be(*states)
        if self._open.get(lease.id) is not lease:
            raise LeaseError(f"lease #{lease.id} belongs to another cache")

    def add(self, lease: Lease) -> None:
        self._open[lease.id] = lease

    def release(self, lease: Lease) -> None:
        """Releases everything that a lease holds. Raises LeaseError for one that is not open here."""
        if self._open.get(lease.id) is not lease:
            raise LeaseError(f"lease #{lease.id} was released already, or belongs to another cache")
        del self._open[lease.id]
        state = self._state
        if lease.trail is not None and lease.trail.node is not None:
            save_committed(state, lease.trail.node)
        if not lease.failed:
            for name in ("device", "host", "store", "computed"):
                state.counters.add(f"tokens_{name}", getattr(lease.sources, name))
        for visit in lease.visits:  # the length of the answer helps to predict the next request
            visit.answered(lease.num_tokens - lease.prompt_tokens)
        lease.close()
        if lease.jobs:
            self._closing.append(lease)
        if lease.restored is not None:
            state.tree.unpin(lease.restored)
            lease.restored = None
        if state.row_pages is not None:
            state.row_pages.unassign_hot(lease.hot_numbers)
        pages = (
            (Kind.PREFIX, lease.prefix_pages), (Kind.WINDOW, lease.window_pages), (Kind.POINT, lease.point_pages),
            (Kind.POINT, lease.spare_points), (Kind.ROWS, lease.hot_pages),
            *((Kind.POINT, copy) for copy in lease.point_copies.values()),
        )  # fmt: skip
        for kind, ids in pages:
            if len(ids):
                state.tree.release(state.nearest, kind, ids)
        state.give_back_host()

    def settle(self, failed_jobs: Container[JobId]) -> Settled:
        """Updates the state of leases after copies were applied; `failed_jobs` are those that failed in this step."""
        ready, failed = [], []
        for lease in self._open.values():
            if lease.state is LeaseState.LOADING:
                self._move_on(lease, load_failed=lease.load_job in failed_jobs)
                if lease.ready:
                    if lease.computing_since_s != inf:  # else a pass has computed already
                        lease.computing_since_s = self._state.clock.now()
                    ready.append(lease)
                elif lease.failed:
                    failed.append(lease)
            self._forget_ended_jobs(lease)
        for lease in self._closing:
            self._forget_ended_jobs(lease)
        finished = tuple(lease for lease in self._closing if not lease.jobs)
        self._closing = [lease for lease in self._closing if lease.jobs]
        return Settled(ready=tuple(ready), failed=tuple(failed), finished=finished)

    def _move_on(self, lease: Lease, *, load_failed: bool) -> None:
        state = self._state
        pages = [state.arena(state.nearest).state[kind][ids] for kind, ids in lease.waits_for]
        if load_failed or any((each == DEAD).any() for each in pages):
            lease.fail()
            return
        arriving = any((each == FILLING).any() for each in pages)
        if not arriving and not any(map(state.copies.is_awaited, lease.waits_for_jobs)):
            lease.may_compute()

    def _forget_ended_jobs(self, lease: Lease) -> None:
        lease.jobs = {job for job in lease.jobs if self._state.copies.is_running(job)}
