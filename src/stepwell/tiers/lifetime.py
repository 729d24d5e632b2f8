"""How long paths are kept, whatever they are worth: a time to live ends them, a pin keeps one copy of them.

A path leaves the tree when the longest limit that any use of it was given runs out; a use without a limit is for ever. Every use
covers a whole path from the root, so a node never expires before what is below it. What is pinned stays until its pins are
gone, and leaves then if its time was up.
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
    """Remembers when a path's nodes run out, if they do. An entry that is too early is put off when it comes up."""
    while node is not None and node.parent is not None and node.expires_at < inf:
        if not node.expiry_noted:
            _remember(state, node)
        node = node.parent


def note_split(state: CacheState, upper: Node) -> None:
    """The upper part of a node that was cut runs out by itself: whoever cut it need not think of that."""
    if upper.expires_at < inf:
        _remember(state, upper)


def drop_expired(state: CacheState, pinned: Callable[[], Collection[Node]]) -> int:
    """Takes out what has run out by now; returns how many nodes. Leases keep their pages.

    Leaves alone what is pinned; whoever lets go of a pin notes its path again.
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
        kept = pinned() if kept is None else kept  # asked only when something has run out
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

    While it is `held`, none of these pages is freed or used for anything else: not by eviction, `flush`, `clear` or a copy that
    fails. Released through the cache, or when its time is up.
    """

    state: CacheState
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

    def nodes(self) -> set[Node]:
        """What its pages belong to now: the whole path, or nothing once that was cleared."""
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
    open_ = np.ones(upto, np.bool_)  # pages that no tier looked at so far can keep
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
    if upto:  # a use, and one that changes nothing about when the path runs out: the pin's end is not the path's
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
        """All that is pinned: does not run out."""
        return {node for pin in self._pins for node in pin.nodes()}

    @one_thread
    def add(self, tokens: Tokens, *, namespace: Namespace | None = None, ttl_s: float | None = None) -> Pin:
        """Keeps one copy of everything up to the prompt's restore point until the pin is released or runs out.

        `Pin.tokens` says how much that is: 0 when nothing of the prompt can be resumed from. `with` releases it.
        """
        if ttl_s is not None and ttl_s <= 0:
            raise ConfigError(f"ttl_s must be positive, got {ttl_s}; leave it None for a pin without an end")
        pin = _take(self._state, self._lookup(tokens, namespace=namespace), ttl_s, self.release)
        self._pins.append(pin)
        return pin

    @one_thread
    def release(self, pin: Pin) -> None:
        """Releases a pin. Raises LeaseError when it was released before, ran out, or belongs to another cache."""
        if pin not in self._pins:
            raise LeaseError("this pin was released already, or ran out, or belongs to another cache")
        self._pins.remove(pin)
        pin.let_go()

    def drop_expired(self) -> None:
        now = self._state.clock.now()
        for pin in [pin for pin in self._pins if pin.expires_at_s <= now]:
            self.release(pin)
