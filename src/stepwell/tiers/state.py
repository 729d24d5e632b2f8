"""The state that the cache's verbs share, and the one thread that owns it.

Nothing inside a cache is locked: a call from a second thread is detected, and refused.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from enum import Enum
from functools import wraps
from threading import Lock, current_thread, local
from typing import ClassVar, Concatenate, ParamSpec, Protocol, TypeVar
from weakref import ref

import numpy as np

from stepwell.base.config import CacheConfig
from stepwell.base.errors import WrongThread
from stepwell.base.ids import Kind, Tier
from stepwell.base.meters import Clock, Counters
from stepwell.base.prompt import Namespace
from stepwell.base.spec import ModelSpec
from stepwell.base.tasks import NO_PAGES
from stepwell.jobs.wakeup import Wakeup
from stepwell.memory.arena import Arena, Need
from stepwell.memory.row_pages import RowPages
from stepwell.policy.placement import PlacementRules
from stepwell.policy.store_use import Speed
from stepwell.policy.value import ReuseModel
from stepwell.tiers.copies import CopyJobs
from stepwell.tree.node import Loss, LossReason, Node, Victim
from stepwell.tree.tree import Tree

MOST_UNUSED_NAMESPACES = 1024

P = ParamSpec("P")
R = TypeVar("R")


class _Mark:
    """One thread's own object. It dies with the thread; thread numbers are reused."""

    __slots__ = ("__weakref__", "name")

    def __init__(self) -> None:
        self.name = current_thread().name


class _Here(local):
    def __init__(self) -> None:
        self.mark = _Mark()


_here = _Here()


class Owner:
    """The thread that owns something: the first that uses it, until it releases it or ends."""

    def __init__(self) -> None:
        self._mark: ref[_Mark] | None = None
        self._lock = Lock()

    def check(self, *names: str) -> None:
        """Raises WrongThread unless the calling thread is the owner, or becomes it. `names` say what was called: joined by dots,
        and only for the message.
        """
        mine, mark = _here.mark, self._mark
        if mark is not None and mark() is mine:
            return
        with self._lock:
            theirs = self._mark() if self._mark is not None else None
            if theirs is not None:
                raise WrongThread(
                    f"{'.'.join(names)}() was called from thread {mine.name!r}, but the cache belongs to {theirs.name!r}: "
                    "call it from one thread, or have that one call hand_over() first"
                )
            self._mark = ref(mine)

    def release(self) -> None:
        """Releases ownership: the next calling thread takes it. Called by the owner."""
        self.check("Cache.hand_over")
        self._mark = None


class Owned(Protocol):
    _owner: Owner
    _called: ClassVar[str]  # what users write before the name of a method


S = TypeVar("S", bound=Owned)


def one_thread(method: Callable[Concatenate[S, P], R]) -> Callable[Concatenate[S, P], R]:
    """A method that only the owner may call."""
    verb = method.__name__

    @wraps(method)
    def checked(self: S, /, *args: P.args, **kwargs: P.kwargs) -> R:
        self._owner.check(self._called, verb)
        return method(self, *args, **kwargs)

    return checked


class Leaving(Enum):
    """How the lower tier answers when something is about to be evicted."""

    NOW = "nothing below will store it, or has it already"
    LATER = "it is being copied to the lower tier, and a candidate again afterwards"
    BLOCKED = "it is worth keeping, and space for it below is being freed"
    AT_ONCE = "it is being copied to the lower tier, and the copy holds the pages it needs"


class Below(Protocol):
    """The tier below the host, as the two memory tiers see it. Called on the cache's thread; never waits."""

    @property
    def takes_paths(self) -> bool:
        """Whether it stores pages as soon as they reach the host, and only after those before them."""
        ...

    @property
    def takes_late(self) -> bool:
        """Whether it stores pages when they leave the host, and not before."""
        ...

    @property
    def is_durable(self) -> bool:
        """Whether committed content is stored soon, whatever the write policy says, so that it outlives the process."""
        ...

    @property
    def putting_bytes(self) -> int:
        """Bytes of the host that are held until they are stored, and that an eviction may wait for."""
        ...

    def offer(self, node: Node) -> None:
        """The path to a node was committed or used, and may have content that the lower tier lacks."""
        ...

    def must_store(self, node: Node) -> bool:
        """Whether pages of a node must be stored before they leave memory, though nothing in memory could use them."""
        ...

    def before_use(self, path: Sequence[Node]) -> None:
        """A request is about to use a path: its stored copies are less valuable while memory has it."""
        ...

    def before_eviction(self, victim: Victim) -> Leaving:
        """Something is about to leave the host: starts to store it if it must not be lost."""
        ...


@dataclass(kw_only=True, eq=False)
class CacheState:
    """The state of one cache. Built by `build.py`; used on one thread."""

    spec: ModelSpec
    config: CacheConfig
    tree: Tree
    copies: CopyJobs
    counters: Counters
    clock: Clock
    wakeup: Wakeup
    placement: PlacementRules
    copy_timeout_s: float
    compute_speed: Speed = field(default_factory=Speed)  # tokens a second, measured on chunks that are large enough
    owner: Owner = field(default_factory=Owner)  # the thread that owns all of this
    reuse: ReuseModel | None = None  # what is learned about returns, if the value of content depends on it
    below: Below | None = None  # the lower tier, which stores what is on the host
    spill: Callable[[Need], bool] | None = None  # frees space on the device by shedding rows of running requests; True if it did
    write_back: Callable[[CacheState, Victim], Leaving] | None = None  # starts saving what is on the device alone
    expiries: list[tuple[float, int, int, Node]] = field(default_factory=list)  # heap: when, deepest first, number, node
    expiry_number: int = 0
    namespaces: dict[bytes, Namespace] = field(default_factory=dict)  # by digest, of requests seen

    def know(self, namespace: Namespace) -> None:
        """Records the namespace of a digest when content of it is entered; those without a path are dropped in time."""
        self.namespaces[namespace.digest] = namespace
        if len(self.namespaces) > 2 * len(self.tree.roots) + MOST_UNUSED_NAMESPACES:
            self.namespaces = {digest: each for digest, each in self.namespaces.items() if digest in self.tree.roots}
            self.namespaces[namespace.digest] = namespace

    @property
    def nearest(self) -> Tier:
        """The tier that requests compute into: the device, or the host under an engine that owns its device."""
        return self.tree.tiers[0]

    @property
    def has_both_tiers(self) -> bool:
        return len(self.tree.tiers) == 2

    @property
    def row_pages(self) -> RowPages | None:
        """Where the rows of device pages are, if they may spill."""
        return self.tree.row_pages

    def give_back_host(self) -> None:
        """Releases host pages that had the rows of device pages that no longer exist. Never during a change of the tree."""
        left = self.row_pages.unreferenced_host_pages() if self.row_pages is not None else NO_PAGES
        while len(left):  # a page is named once for each reference
            once, at = np.unique(left, return_index=True)
            self.tree.release(Tier.HOST, Kind.PREFIX, once)
            left = np.delete(left, at)

    def arena(self, tier: Tier) -> Arena:
        return self.tree.arenas[tier]

    def loss(self, reason: LossReason, tier: Tier) -> Loss:
        return Loss(at_s=self.clock.now(), reason=reason, tier=tier)
