"""The parts that the cache's verbs share, in one place, and the few words they all need."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

from stepwell.base.clock import Clock
from stepwell.base.config import CacheConfig
from stepwell.base.ids import Tier
from stepwell.base.keys import Namespace
from stepwell.base.spec import ModelSpec
from stepwell.cache.link import StoreLink
from stepwell.cache.mover import Mover
from stepwell.cache.one_thread import Owner
from stepwell.memory.arena import Arena
from stepwell.metrics.counters import Counters
from stepwell.policy.habits import Habits
from stepwell.policy.patience import Speed
from stepwell.tree.node import Loss, LossReason, Node, Victim
from stepwell.tree.tree import Tree

MOST_UNUSED_NAMESPACES = 1024


@dataclass(kw_only=True, eq=False)
class Core:
    """What stands behind one cache. Built by `build.py`; used on one thread."""

    spec: ModelSpec
    config: CacheConfig
    tree: Tree
    mover: Mover
    counters: Counters
    clock: Clock
    owner: Owner = field(default_factory=Owner)  # the thread that all of this belongs to
    habits: Habits | None = None  # what is learned about returns, where the value of things depends on it
    save_first: Callable[[Core, Victim], bool] | None = None  # starts saving what must not be lost; true if it did
    saves_on_eviction: bool = False  # what is nowhere below waits on the device until it is saved
    expiries: list[tuple[float, int, int, Node]] = field(default_factory=list)  # heap: when, deepest first, number, node
    expiry_number: int = 0
    link: StoreLink | None = None  # the store that is attached
    compute: Speed = field(default_factory=Speed)  # tokens a second that requests compute
    namespaces: dict[bytes, Namespace] = field(default_factory=dict)  # by digest, of requests seen
    barred: set[bytes] = field(default_factory=set)  # namespaces that were cleared: what any store has of them is not to be used

    def know(self, namespace: Namespace) -> None:
        """Remembers who is behind a digest; those whose paths have all left are forgotten in time."""
        self.namespaces[namespace.digest] = namespace
        if len(self.namespaces) > 2 * len(self.tree.roots) + MOST_UNUSED_NAMESPACES:
            self.namespaces = {digest: each for digest, each in self.namespaces.items() if digest in self.tree.roots}
            self.namespaces[namespace.digest] = namespace

    def storable_namespace(self, node: Node) -> Namespace | None:
        """Whose a node is; None when nothing of theirs may be stored."""
        digest = node.root.first
        return self.namespaces.get(digest) if digest not in self.barred else None

    @property
    def nearest(self) -> Tier:
        """The tier that requests compute into: the device, or the host under an engine that owns its device."""
        return self.tree.tiers[0]

    @property
    def has_both_tiers(self) -> bool:
        return len(self.tree.tiers) == 2

    def arena(self, tier: Tier) -> Arena:
        return self.tree.arenas[tier]

    def loss(self, reason: LossReason, tier: Tier) -> Loss:
        return Loss(at_s=self.clock.now(), reason=reason, tier=tier)
