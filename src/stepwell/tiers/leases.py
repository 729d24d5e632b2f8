"""The open leases of one cache: moved on when what they wait for has come, given back once, finished when nothing touches them.

open -> READY <-> LOADING -> FAILED      `settle`, once per step
given back -> finished                   when the last copy to or from the engine's own memory has ended
"""

from __future__ import annotations

from collections.abc import Container, Iterator
from dataclasses import dataclass

from stepwell.base.errors import LeaseError
from stepwell.base.ids import JobId, Kind, LeaseId
from stepwell.memory.arena import DEAD, FILLING
from stepwell.tiers.lease import Lease, LeaseState
from stepwell.tiers.saving import save_path
from stepwell.tiers.state import CacheState
from stepwell.tiers.visits import note_answer


@dataclass(frozen=True, slots=True, kw_only=True)
class Settled:
    """Leases that moved on in one step."""

    ready: tuple[Lease, ...]
    failed: tuple[Lease, ...]
    finished: tuple[Lease, ...]


class Leases:
    """One thread."""

    def __init__(self, core: CacheState) -> None:
        self._core = core
        self._open: dict[LeaseId, Lease] = {}
        self._closing: list[Lease] = []  # given back, with copies still in the engine's memory
        self._last_id = 0

    def __len__(self) -> int:
        return len(self._open)

    def __iter__(self) -> Iterator[Lease]:
        return iter(self._open.values())

    def next_id(self) -> LeaseId:
        self._last_id += 1
        return LeaseId(self._last_id)

    def add(self, lease: Lease) -> None:
        self._open[lease.id] = lease

    def release(self, lease: Lease) -> None:
        """Gives back everything that a lease holds. Raises LeaseError for one that is not open here."""
        if self._open.get(lease.id) is not lease:
            raise LeaseError(f"lease #{lease.id} was given back already, or belongs to another cache")
        del self._open[lease.id]
        core = self._core
        if lease.trail is not None and lease.trail.node is not None and core.config.write.saves_on_commit:
            save_path(core, lease.trail.node)
        if not lease.failed:
            for name in ("device", "host", "store", "computed"):
                core.counters.add(f"tokens_{name}", getattr(lease.sources, name))
        note_answer(lease)
        lease.close()
        if lease.jobs:
            self._closing.append(lease)
        if lease.restored is not None:
            core.refs.unpin(lease.restored)
            lease.restored = None
        pages = ((Kind.PREFIX, lease.prefix_pages), (Kind.WINDOW, lease.window_pages), (Kind.POINT, lease.point_pages))
        for kind, ids in pages:
            if len(ids):
                core.refs.release(core.nearest, kind, ids)

    def settle(self, failed_jobs: Container[JobId]) -> Settled:
        """Moves leases on, now that what came of copies was applied; `failed_jobs` are those that failed just now."""
        ready, failed = [], []
        for lease in self._open.values():
            if lease.state is LeaseState.LOADING:
                self._move_on(lease, load_failed=lease.load_job in failed_jobs)
                if lease.ready:
                    lease.computing_since_s = self._core.clock.now()
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
        core = self._core
        states = [core.arena(core.nearest).state[kind][ids] for kind, ids in lease.waits_for]
        if load_failed or any((state == DEAD).any() for state in states):
            lease.fail()
            return
        arriving = any((state == FILLING).any() for state in states)
        if not arriving and not any(map(core.copies.is_awaited, lease.waits_for_jobs)):
            lease.may_compute()

    def _forget_ended_jobs(self, lease: Lease) -> None:
        lease.jobs = {job for job in lease.jobs if self._core.copies.is_running(job)}
