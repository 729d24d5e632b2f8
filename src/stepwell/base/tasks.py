"""What executors are told to do, and what came of it: plans of copies between memories, and operations on a store.

Frozen steps over page ids and keys. They name pages, never tree nodes, so the tree may split or shrink while they run. Every
rank carries out the same task on its own memory and its own share of the store; it counts when all of them have. Deciding
happens elsewhere; so does copying.
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
    """Why bytes move; also the label their failures are counted under."""

    LOAD = "load"  # towards the model, because a request resumes
    SAVE = "save"  # away from the model, because they should outlive their tier
    FORK = "fork"  # a request's own copy of a state that the tree keeps


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Span:
    """Pages of one kind in one tier.

    For `Tier.ENGINE` the ids are the engine's own names: a number for each page, or a row of block numbers where it keeps a page
    in several blocks, `[page][block]`.
    """

    tier: Tier
    kind: Kind
    ids: PageIds

    def __repr__(self) -> str:
        return f"Span({self.tier.label} {self.kind.label} x{len(self.ids)})"


class Common(NamedTuple):
    """The bytes of a page that both sides of a copy hold: from where on in each, and how many."""

    source_start: int
    target_start: int
    size_bytes: int


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Copy:
    """Copies page `source.ids[i]` to `target.ids[i]`, for every i: what both hold of it.

    They are of one kind, or one is a host page and the other the ROWS of it.
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
        """Whether it is one half of a page's copy, and not the half that counts."""
        return Kind.ROWS in (self.source.kind, self.target.kind)

    def turns(self, spec: ModelSpec) -> bool:
        """Whether numbers change on the way: then bytes must not be copied as they are (`transfer/narrow_copies.py`)."""
        return {self.source.tier, self.target.tier} == {Tier.DEVICE, Tier.HOST} and spec.is_narrow(self.source.kind)

    def common(self, spec: ModelSpec) -> Common:
        """Which bytes are copied. Where rows may spill, a device object holds a range of what the host's page holds. Where
        checkpoints are narrow, bytes are the host's, and the device's object has other numbers of them.
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
    """Copies that count together: all of them on every rank, or none."""

    job: JobId
    purpose: Purpose
    copies: tuple[Copy, ...]
    awaited: bool = False  # a request cannot go on before it has ended


@dataclass(frozen=True, slots=True, kw_only=True)
class Completion:
    """A plan that every rank has answered for. `error` is the first failure, None when all succeeded."""

    job: JobId
    error: str | None = None


# ---- the store ----------------------------------------------------------------------------------


class ItemStatus(Enum):
    """What became of one item. Everything after OK is a miss, counted under its name."""

    OK = "ok"
    MISSING = "the store has it no more"
    INCOMPLETE = "a member of the checkpoint is missing from the store"
    MIXED = "a member is not the one that the checkpoint's manifest names"
    UNREADABLE = "what the store had was not written by us"
    VERSION = "the store's copy is of another format version"
    FOREIGN = "the store's copy belongs to another namespace"
    SWAPPED = "the store's copy is of other tokens"
    LENGTH = "the store's copy has another length"
    DAMAGED = "the store's copy is damaged"
    OTHER_KEY = "the store's copy was not written with the same store key"
    NO_ROOM = "the store had no room for it"
    CANCELLED = "it was called off"
    FAILED = "the store failed"

    @property
    def is_damage(self) -> bool:
        """Whether the store had something under this name that is not what was saved."""
        return self in _DAMAGE


_DAMAGE = frozenset(
    {
        ItemStatus.INCOMPLETE, ItemStatus.MIXED, ItemStatus.UNREADABLE, ItemStatus.VERSION, ItemStatus.FOREIGN,
        ItemStatus.SWAPPED, ItemStatus.LENGTH, ItemStatus.DAMAGED, ItemStatus.OTHER_KEY,
    }
)  # fmt: skip


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class FindItems:
    """Which pages, and which checkpoints, the store has: OK or MISSING for each, pages first."""

    pages: tuple[PageKey, ...]
    boundaries: tuple[PageKey, ...]  # the last page before each boundary in question


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class FetchPages:
    """Brings prefix pages into host pages `ids`."""

    keys: tuple[PageKey, ...]
    ids: PageIds


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class FetchCheckpoint:
    """Brings one checkpoint, all of it or nothing that counts. One item."""

    boundary: PageKey
    windows: PageIds
    points: PageIds


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class PutPages:
    """Stores prefix pages `first`, `first + 1`, ... of a path, parents before children."""

    parent: PageKey | None  # of the first of them; None at the start of a path
    first: int
    keys: tuple[PageKey, ...]
    ids: PageIds
    level: Level = Level.NORMAL  # also of those that are there already


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class PutCheckpoint:
    """Stores one checkpoint: its members, then the manifest that makes it exist. One item."""

    boundary: PageKey
    page: int  # the boundary, in pages
    window_keys: tuple[PageKey, ...]  # the prefix page that each window page ends in
    windows: PageIds
    points: PageIds
    level: Level = Level.NORMAL


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Relevel:
    """Says anew what pages and checkpoints are worth. A hint: what the store lacks is left alone. One item."""

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
    """A task under a number."""

    job: JobId
    namespace: Namespace
    task: Task


@dataclass(frozen=True, slots=True, kw_only=True)
class Outcome:
    """What came of a task: on one rank, or on all of them together."""

    statuses: tuple[ItemStatus, ...]
    moved_bytes: int = 0  # of one rank
    error: str | None = None
    unsettled: bool = False  # a read ended badly: what was not OK may still be written, for as long as the store's traits say


@dataclass(frozen=True, slots=True, kw_only=True)
class Reply:
    """An operation that every rank has answered for. `took_s` is the time it ran, waiting in line left out."""

    job: JobId
    outcome: Outcome
    took_s: float


def joint(outcomes: Sequence[Outcome]) -> Outcome:
    """All ranks' outcomes as one: an item is OK when it is OK everywhere, else it has the first status that was not."""
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
