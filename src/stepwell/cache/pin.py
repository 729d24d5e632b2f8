"""Pins: one copy of a prefix, kept whatever else needs room."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from math import inf
from types import TracebackType

import numpy as np

from stepwell.base.ids import Kind, Tier
from stepwell.base.plan import PageIds
from stepwell.cache.core import Core
from stepwell.cache.expiry import note_expiry
from stepwell.memory.arena import READY
from stepwell.tree.match import Match, ids_of
from stepwell.tree.node import ABSENT, Residency, Use


@dataclass(slots=True, kw_only=True, eq=False)
class Pin:
    """A hold on the pages of a prefix, in the lowest tier that has each. Released through the cache, or when its time is up."""

    core: Core
    tokens: int
    expires_at_s: float
    pages: tuple[tuple[Tier, PageIds], ...]
    residency: Residency | None
    on_exit: Callable[[Pin], None]
    held: bool = True  # false once it was released, or ran out

    def __enter__(self) -> Pin:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        if self.held:  # its time may have run out meanwhile
            self.on_exit(self)

    def let_go(self) -> None:
        self.held = False
        for tier, ids in self.pages:
            self.core.mover.release(tier, Kind.PREFIX, ids)
        if self.residency is not None:
            self.core.mover.unpin(self.residency)

    def __repr__(self) -> str:
        return f"Pin({self.tokens} tokens)"


def take_pin(core: Core, match: Match, ttl_s: float | None, on_exit: Callable[[Pin], None]) -> Pin:
    """Holds everything up to the match's restore point."""
    upto = match.restore_tokens // core.spec.page_tokens
    open_ = np.ones(upto, np.bool_)  # pages that no tier looked at so far can keep
    pages = []
    for tier in reversed(core.tree.tiers):
        ids = ids_of(match.path, tier, upto)
        kept = open_ & (ids != ABSENT) & (core.arena(tier).state[Kind.PREFIX][ids] == READY)
        core.arena(tier).retain(Kind.PREFIX, ids[kept])
        pages.append((tier, ids[kept]))
        open_ &= ~kept
    checkpoint = match.checkpoint
    residency = (checkpoint.ready_in(Tier.HOST) or checkpoint.ready_in(Tier.DEVICE)) if checkpoint is not None else None
    if residency is not None:
        residency.users += 1
    until = inf if ttl_s is None else core.clock.now() + ttl_s
    if upto:  # a pinned path must not run out before its pin does
        note_expiry(core, core.tree.touch(match.path, upto, Use(at_s=core.clock.now(), expires_at_s=until)))
    return Pin(
        core=core, tokens=match.restore_tokens, expires_at_s=until, pages=tuple(pages), residency=residency, on_exit=on_exit
    )
