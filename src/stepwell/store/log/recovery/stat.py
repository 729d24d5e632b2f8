"""Figures of what a log store holds. Counts; changes nothing."""

from __future__ import annotations

from dataclasses import dataclass

from stepwell.store.log.state.index import Index
from stepwell.store.log.state.log_state import LogState


@dataclass(frozen=True, slots=True, kw_only=True)
class SpaceStat:
    digest: bytes
    label: str
    tenant: str
    values: int
    value_bytes: int  # as they were given
    disk_bytes: int  # as they lie on disk


@dataclass(frozen=True, slots=True, kw_only=True)
class TenantStat:
    tenant: str
    disk_bytes: int
    quota_bytes: int


@dataclass(frozen=True, slots=True, kw_only=True)
class LogStat:
    budget_bytes: int
    directory_bytes: int  # of all files in the directory: never above the budget
    segment_bytes: int
    segments: int
    max_segments: int
    values: int
    value_bytes: int
    disk_bytes: int
    marks: int  # tombstones in the log
    spaces: tuple[SpaceStat, ...]
    tenants: tuple[TenantStat, ...]  # those with a quota


def _count_spaces(index: Index) -> tuple[SpaceStat, ...]:
    """Every space that holds values, largest first."""
    stats = [
        SpaceStat(
            digest=space.digest,
            label=space.label,
            tenant=space.tenant,
            values=len(index.rows_of(space.digest)),
            value_bytes=index.value_bytes[number],
            disk_bytes=index.space_bytes[number],
        )
        for number, space in enumerate(index.spaces)
        if space is not None
    ]
    return tuple(sorted(stats, key=lambda stat: (-stat.disk_bytes, stat.digest)))


def stat_of(state: LogState) -> LogStat:
    """The figures of a log. The caller has the lock."""
    index = state.index
    spaces = _count_spaces(index)
    return LogStat(
        budget_bytes=state.budget.total_bytes,
        directory_bytes=state.disk.total_bytes(state.directory),
        segment_bytes=state.budget.segment_bytes,
        segments=len(state.segments.table),
        max_segments=state.max_segments,
        values=index.num_values,
        value_bytes=sum(space.value_bytes for space in spaces),
        disk_bytes=index.total_bytes,
        marks=sum(segment.tombstones for segment in state.segments.table.values()),
        spaces=spaces,
        tenants=tuple(
            TenantStat(tenant=tenant, disk_bytes=index.tenant_bytes(tenant), quota_bytes=quota)
            for tenant, quota in sorted(state.quotas.items())
        ),
    )
