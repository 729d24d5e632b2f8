"""How long paths are kept, independent of their value: a time to live ends them, a pin keeps one copy of them.

A path leaves the tree when the longest time limit of its uses has passed; a use without a limit has no end. Every use covers a
whole path from the root, so a node never expires before those below it. Pinned paths stay until their pins are released, and
leave then if they have expired.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator
from dataclasses import dataclass
from heapq import heappop, heappush
from math import inf
from types import TracebackType
from typing import ClassVar, Protocol

import numpy as np

from stepwell.base.errors import ConfigError, LeaseError
from stepwell.base.ids import Kind, Tier
from stepwell.base.prompt import Namespace, Tokens
from stepwell.base.tasks import PageIds
from stepwell.memory.arena import READY
from stepwell.tiers.state import CacheState, one_thread
from stepwell.tree.match import Match, ids_of
from stepwell.tree.node import ABSENT, LossReason, Node, Residency, Use
from stepwell.tree.pruning import truncate


def note_expiry(state: CacheState, node: Node | None) -> None:
    """Records when a path's nodes expire, if they do. An entry that is too early is postponed when its time comes."""
    while node is not None and node.parent is not None and node.expires_at < inf:
        if not node.expiry_noted:
            _remember(state, node)
        node = node.parent


def note_split(state: CacheState, upper: Node) -> None:
    """Records the expiry of the upper part of a node that was split: the code that splits it need not."""
    if upper.expires_at < inf:
        _remember(state, upper)


def drop_expired(state: CacheState, pinned: Callable[[], Collection[Node]]) -> int:
    """Removes expired nodes; returns their number. Leases keep their pages.

    Does not remove pinned nodes; releasing a pin records its path again.
    """
    now, dropped = state.clock.now(), 0
    kept: Collection[Node] | None = None
    while state.expiries and state.expiries[0][0] <= now:
        *_, node = heappop(state.expiries)
        node.expiry_noted = False
        if node.parent is None:
            continue
        if node.expires_at > now:
            if node.expires_at < inf:
                _remember(state, node)
            continue
        kept = pinned() if kept is None else kept  # computed only if something has expired
        if node in kept:
            continue
        truncate(state.tree, node, 0, state.loss(LossReason.EXPIRED, state.nearest))
        dropped += 1
    state.counters.add("expired_nodes", dropped)
    return dropped


def _remember(state: CacheState, node: Node) -> None:
    node.expiry_noted = True
    state.expiry_number += 1
    heappush(state.expiries, (node.expires_at, -node.start, state.expiry_number, node))


class Lookup(Protocol):
    def __call__(self, tokens: Tokens, *, namespace: Namespace | None = None) -> Match:
        """How much of a prompt is known and where it could resume."""
        ...


@dataclass(slots=True, kw_only=True, eq=False)
class Pin:
    """A reference to every page of a prefix and of its checkpoint, in the lowest tier that has each.

    While it is `held`, none of these pages is freed or reused: not by eviction, `flush`, `clear` or a copy that fails.
    Released through the cache, or when its time limit has passed.
    """

    state: CacheState
    tokens: int
    expires_at_s: float
    pages: tuple[tuple[Tier, PageIds], ...]
    residency: Residency | None
    on_exit: Callable[[Pin], None]
    held: bool = True  # False once it was released or has expired

    def __enter__(self) -> Pin:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        if self.held:  # it may have expired meanwhile
            self.on_exit(self)

    def nodes(self) -> set[Node]:
        """The nodes to which its pages belong now: the whole path, or nothing once that was cleared."""
        owners = [owner for tier, ids in self.pages for owner in self.state.tree.owner[tier][ids]]
        return {owner for owner in owners if owner is not None}

    def let_go(self) -> None:
        self.held = False
        note_expiry(self.state, max(self.nodes(), key=lambda node: node.start, default=None))
        for tier, ids in self.pages:
            self.state.tree.release(tier, Kind.PREFIX, ids)
        if self.residency is not None:
            self.state.tree.unpin(self.residency)

    def __repr__(self) -> str:
        return f"Pin({self.tokens} tokens)"


def _take(state: CacheState, match: Match, ttl_s: float | None, on_exit: Callable[[Pin], None]) -> Pin:
    """Holds everything up to the match's restore point."""
    upto = match.restore_tokens // state.spec.page_tokens
    open_ = np.ones(upto, np.bool_)  # pages that no tier visited so far can keep
    pages = []
    for tier in reversed(state.tree.tiers):
        ids = ids_of(match.path, tier, upto)
        kept = open_ & (ids != ABSENT) & (state.arena(tier).state[Kind.PREFIX][ids] == READY)
        state.arena(tier).retain(Kind.PREFIX, ids[kept])
        pages.append((tier, ids[kept]))
        open_ &= ~kept
    checkpoint = match.checkpoint
    residency = (checkpoint.ready_in(Tier.HOST) or checkpoint.ready_in(Tier.DEVICE)) if checkpoint is not None else None
    if residency is not None:
        state.tree.pin(residency)
    until = inf if ttl_s is None else state.clock.now() + ttl_s
    if upto:  # a use that does not change when the path expires: the pin's end is not the path's
        state.tree.touch(match.path, upto, Use(at_s=state.clock.now(), expires_at_s=0.0))
    return Pin(
        state=state, tokens=match.restore_tokens, expires_at_s=until, pages=tuple(pages), residency=residency, on_exit=on_exit
    )


class Pins:
    """The pins of one cache, oldest first. One thread."""

    _called: ClassVar[str] = "Cache.pins"

    def __init__(self, state: CacheState, lookup: Lookup) -> None:
        self._state = state
        self._lookup = lookup
        self._owner = state.owner
        self._pins: list[Pin] = []

    def __iter__(self) -> Iterator[Pin]:
        return iter(tuple(self._pins))  # they may be released meanwhile

    def nodes(self) -> set[Node]:
        """All pinned nodes, which do not expire."""
        return {node for pin in self._pins for node in pin.nodes()}

    @one_thread
    def add(self, tokens: Tokens, *, namespace: Namespace | None = None, ttl_s: float | None = None) -> Pin:
        """Keeps one copy of everything up to the prompt's restore point until the pin is released or expires.

        `Pin.tokens` says how much that is: 0 if nothing of the prompt can be resumed from. `with` releases it.
        """
        if ttl_s is not None and ttl_s <= 0:
            raise ConfigError(f"ttl_s must be positive, got {ttl_s}; leave it None for a pin that does not expire")
        pin = _take(self._state, self._lookup(tokens, namespace=namespace), ttl_s, self.release)
        self._pins.append(pin)
        return pin

    @one_thread
    def release(self, pin: Pin) -> None:
        """Releases a pin. Raises LeaseError if it was released before, has expired, or belongs to another cache."""
        if pin not in self._pins:
            raise LeaseError("this pin was released already, or has expired, or belongs to another cache")
        self._pins.remove(pin)
        pin.let_go()

    def drop_expired(self) -> None:
        now = self._state.clock.now()
        for pin in [pin for pin in self._pins if pin.expires_at_s <= now]:
            self.release(pin)
