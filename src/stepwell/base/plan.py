"""What a copy engine is told to do: frozen steps over page ids, and what came of them.

A plan names pages, never tree nodes, so the tree may split or shrink while it runs. Deciding happens
elsewhere; so does copying.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum

import numpy as np
import numpy.typing as npt

from stepwell.base.ids import JobId, Kind, Tier

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
    """Pages of one kind in one tier. For `Tier.ENGINE` the ids are the engine's own names."""

    tier: Tier
    kind: Kind
    ids: PageIds

    def __repr__(self) -> str:
        return f"Span({self.tier.label} {self.kind.label} x{len(self.ids)})"


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Copy:
    """Copies page `source.ids[i]` to `target.ids[i]`, for every i."""

    source: Span
    target: Span

    def __post_init__(self) -> None:
        assert self.source.kind is self.target.kind, f"{self.source} and {self.target} differ in kind"
        assert len(self.source.ids) == len(self.target.ids), f"{self.source} and {self.target} differ in length"


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
