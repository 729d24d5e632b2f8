"""The tasks of executors and their outcomes: plans of copies between memories, and operations on a store.

Tasks are immutable. They refer to pages and keys, never to tree nodes, so the tree may split or shrink while they run. Every rank
carries out the same task on its own memory and its own share of the store; a task is done when all ranks have answered.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from enum import Enum
from typing import NamedTuple, TypeAlias

import numpy as np
import numpy.typing as npt

from stepwell.base.ids import JobId, Kind, Level, Tier
from stepwell.base.prompt import Namespace, PageKey
from stepwell.base.spec import ModelSpec

PageIds = npt.NDArray[np.int32]

NO_PAGES: PageIds = np.empty(0, dtype=np.int32)
NO_PAGES.setflags(write=False)


class Purpose(Enum):
    """Why bytes are copied; also the label under which failures are counted."""

    LOAD = "load"  # towards the model, because a request resumes
    SAVE = "save"  # away from the model, because they should outlive their tier
    FORK = "fork"  # a request's own copy of a state that the tree keeps


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Span:
    """Pages of one kind in one tier.

    For `Tier.ENGINE` the ids are the engine's own: a number for each page, or a row of block numbers if a page has several
    blocks, `[page][block]`.
    """

    tier: Tier
    kind: Kind
    ids: PageIds

    def __repr__(self) -> str:
        return f"Span({self.tier.label} {self.kind.label} x{len(self.ids)})"


class Common(NamedTuple):
    """The bytes of a page that both sides of a copy hold: their start in each, and their number."""

    source_start: int
    target_start: int
    size_bytes: int


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Copy:
    """Copies page `source.ids[i]` to `target.ids[i]` for every i: the bytes that both sides hold.

    They are of one kind, or one is a host page and the other its ROWS.
    """

    source: Span
    target: Span

    def __post_init__(self) -> None:
        kinds = {(span.tier, span.kind) for span in (self.source, self.target)}
        alike = self.source.kind is self.target.kind or kinds == {(Tier.HOST, Kind.PREFIX), (Tier.DEVICE, Kind.ROWS)}
        assert alike, f"{self.source} and {self.target} differ in kind"
        assert len(self.source.ids) == len(self.target.ids), f"{self.source} and {self.target} differ in length"

    @property
    def is_of_rows(self) -> bool:
        """Whether it copies the rows of pages whose other part is a copy of its own."""
        return Kind.ROWS in (self.source.kind, self.target.kind)

    def turns(self, spec: ModelSpec) -> bool:
        """Whether the copy converts numbers, so that bytes must not be copied unchanged (`transfer/narrow_copies.py`)."""
        return {self.source.tier, self.target.tier} == {Tier.DEVICE, Tier.HOST} and spec.is_narrow(self.source.kind)

    def common(self, spec: ModelSpec) -> Common:
        """The bytes to copy. If rows may spill, a device object holds a range of the host page. If checkpoints are narrow,
        bytes are those of the host's object; the device's object has a different size.
        """
        tiers = (self.source.tier, self.target.tier)
        if tiers == (Tier.HOST, Tier.DEVICE):
            start, end = spec.cached_span(self.target.kind)
            return Common(start, 0, end - start)
        if tiers == (Tier.DEVICE, Tier.HOST):
            start, end = spec.cached_span(self.source.kind)
            return Common(0, start, end - start)
        on_device = tiers == (Tier.DEVICE, Tier.DEVICE)
        return Common(0, 0, spec.device_bytes(self.source.kind) if on_device else spec.object_bytes(self.source.kind))


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Plan:
    """Copies that succeed or fail together, on all ranks."""

    job: JobId
    purpose: Purpose
    copies: tuple[Copy, ...]
    awaited: bool = False  # a request cannot continue before it has ended


@dataclass(frozen=True, slots=True, kw_only=True)
class Completion:
    """A plan that every rank has answered. `error` is the first failure, or None."""

    job: JobId
    error: str | None = None


# ---- the store ----------------------------------------------------------------------------------


class ItemStatus(Enum):
    """The outcome of one item. Everything after OK is a miss, counted under its name."""

    OK = "ok"
    MISSING = "the store no longer has it"
    INCOMPLETE = "a member of the checkpoint is missing from the store"
    MIXED = "a member is not the one that the checkpoint's manifest names"
    UNREADABLE = "the store's value is in an unknown format"
    VERSION = "the store's copy is of another format version"
    FOREIGN = "the store's copy belongs to another namespace"
    SWAPPED = "the store's copy is of other tokens"
    LENGTH = "the store's copy has another length"
    DAMAGED = "the store's copy is damaged"
    OTHER_KEY = "the store's copy was not written with the same store key"
    NO_ROOM = "the store had no space for it"
    CANCELLED = "it was cancelled"
    FAILED = "the store failed"

    @property
    def is_damage(self) -> bool:
        """Whether the store had a value under this key that is not the one that was saved."""
        return self in _DAMAGE


_DAMAGE = frozenset(
    {
        ItemStatus.INCOMPLETE, ItemStatus.MIXED, ItemStatus.UNREADABLE, ItemStatus.VERSION, ItemStatus.FOREIGN,
        ItemStatus.SWAPPED, ItemStatus.LENGTH, ItemStatus.DAMAGED, ItemStatus.OTHER_KEY,
    }
)  # fmt: skip


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class FindItems:
    """Asks which pages and checkpoints the store has: OK or MISSING for each, pages first."""

    pages: tuple[PageKey, ...]
    boundaries: tuple[PageKey, ...]  # the last page before each boundary


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class FetchPages:
    """Reads prefix pages into host pages `ids`."""

    keys: tuple[PageKey, ...]
    ids: PageIds


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class FetchCheckpoint:
    """Reads one checkpoint, complete or not at all. One item."""

    boundary: PageKey
    windows: PageIds
    points: PageIds


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class PutPages:
    """Stores prefix pages `first`, `first + 1`, ... of a path, parents before children."""

    parent: PageKey | None  # of the first page; None at the start of a path
    first: int
    keys: tuple[PageKey, ...]
    ids: PageIds
    level: Level = Level.NORMAL  # also for pages that the store has already


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class PutCheckpoint:
    """Stores one checkpoint: its members, then the manifest that makes it visible. One item."""

    boundary: PageKey
    page: int  # the boundary, in pages
    window_keys: tuple[PageKey, ...]  # the prefix page in which each window page ends
    windows: PageIds
    points: PageIds
    level: Level = Level.NORMAL


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Relevel:
    """Changes the level of pages and checkpoints. A hint that ignores what the store lacks. One item."""

    pages: tuple[PageKey, ...]
    boundaries: tuple[PageKey, ...]
    level: Level


Task: TypeAlias = FindItems | FetchPages | FetchCheckpoint | PutPages | PutCheckpoint | Relevel


def num_items(task: Task) -> int:
    if isinstance(task, FindItems):
        return len(task.pages) + len(task.boundaries)
    return len(task.keys) if isinstance(task, (FetchPages, PutPages)) else 1


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class StoreOp:
    """A numbered task."""

    job: JobId
    namespace: Namespace
    task: Task


@dataclass(frozen=True, slots=True, kw_only=True)
class Outcome:
    """The outcome of a task, on one rank or on all ranks together."""

    statuses: tuple[ItemStatus, ...]
    moved_bytes: int = 0  # of one rank
    error: str | None = None
    unsettled: bool = False  # a read failed: pages that are not OK may still be written to, for as long as the store's traits say


@dataclass(frozen=True, slots=True, kw_only=True)
class Reply:
    """An operation that every rank has answered. `took_s` is the time it ran, without its time in a queue."""

    job: JobId
    outcome: Outcome
    took_s: float


def joint(outcomes: Sequence[Outcome]) -> Outcome:
    """Combines the outcomes of all ranks: an item is OK if it is OK on all, otherwise it has the first other status."""
    if len(outcomes) == 1:
        return outcomes[0]
    items = zip(*(outcome.statuses for outcome in outcomes), strict=True)
    statuses = [next((status for status in each if status is not ItemStatus.OK), ItemStatus.OK) for each in items]
    error = next((outcome.error for outcome in outcomes if outcome.error is not None), None)
    return Outcome(
        statuses=tuple(statuses),
        moved_bytes=max(outcome.moved_bytes for outcome in outcomes),
        error=error,
        unsettled=any(outcome.unsettled for outcome in outcomes),
    )
