"""The records of the prefix tree. `tree.py` keeps them consistent.

node         pages start .. end of one path: their tokens, and per memory tier a run of page ids
run          where those pages are in one tier (-1: not in this tier)
checkpoint   everything besides prefix pages that a model needs to resume at one boundary, at any page inside a node
residency    the pages of one checkpoint in one tier: all of them, or the residency does not exist

They refer to each other, and the garbage collector does not track them (`base/untracked.py`). A record that leaves the tree drops
its references to its neighbours, so that it is freed at once; `Tree` clears the remaining ones when it is freed itself.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from enum import Enum
from typing import NamedTuple, TypeAlias

from stepwell.base.config import PRIORITY_STEP_S
from stepwell.base.ids import Kind, Tier
from stepwell.base.tasks import PageIds
from stepwell.base.untracked import untrack
from stepwell.policy.placement import Trigger
from stepwell.policy.value import Visit
from stepwell.tree.accounts import Account

ABSENT = -1  # in a run's id array


class LossReason(Enum):
    """Why something is no longer cached."""

    EVICTED = "evicted to free memory"
    OVER_QUOTA = "evicted to free memory, since its tenant was over its quota"
    FAILED = "its copy failed"
    EXPIRED = "its time to live ran out"
    CLEARED = "cleared on request"
    STORE = "the store's copy could not be used"
    DEVICE = "it was on a device that was lost"
    LATE = "it had not arrived from the store when the request went on"


class Loss(NamedTuple):  # not a dataclass, because one is made for each eviction
    """A note of something lost: when, why, and the last tier it was in."""

    at_s: float
    reason: LossReason
    tier: Tier
    detail: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class Use:
    """One use of a path by a request: the time, the priority (0 to MAX_PRIORITY), and when the path expires."""

    at_s: float
    priority: int = 0
    expires_at_s: float = float("inf")
    visit: Visit | None = None  # the visit of pages that this use adds to the path


class Run:
    """A node's prefix pages in one tier: `num_pages` are present, and `num_ready` of them are readable."""

    __slots__ = ("entry", "ids", "leaving", "node", "num_pages", "num_ready", "standing", "tier", "unsaved")

    def __init__(self, node: Node, tier: Tier, ids: PageIds) -> None:
        self.node = node
        self.tier = tier
        self.ids = ids  # one per page of the node, ABSENT if this tier does not have the page
        self.num_pages = 0
        self.num_ready = 0
        self.entry = 0  # number of the live entry in the eviction order, 0 for none
        self.standing = 0  # the rank of that entry
        self.unsaved = False  # a write-back failed: evict without trying to save again
        self.leaving = False  # it was saved in order to be evicted, and not used since: the saved copy is no duplicate
        untrack(self)


class Residency:
    """One checkpoint's pages in one tier. Window pages are in path order and may be shared with neighbours."""

    __slots__ = (
        "backup_deferred",
        "checkpoint",
        "entry",
        "leaving",
        "points",
        "ready",
        "size_bytes",
        "standing",
        "tier",
        "unsaved",
        "users",
        "windows",
    )

    def __init__(
        self, checkpoint: Checkpoint, tier: Tier, *, windows: PageIds, points: PageIds, ready: bool, strides: Mapping[Kind, int]
    ) -> None:
        self.checkpoint = checkpoint
        self.tier = tier
        self.windows = windows
        self.points = points  # one id, or none for models without point states
        self.ready = ready
        self.users = 0  # the number of pins (`Tree.pin`), each with a reference to every page; not evicted while above 0
        self.entry = self.standing = 0
        self.unsaved = self.leaving = False
        self.backup_deferred = False  # it will be copied to the store later, and is worth more until then
        self.size_bytes = len(windows) * strides.get(Kind.WINDOW, 0) + len(points) * strides.get(Kind.POINT, 0)
        untrack(self)

    def spans(self) -> tuple[tuple[Kind, PageIds], ...]:
        """Its pages by kind, without empty kinds."""
        windows, points = self.windows, self.points
        if not len(points):
            return ((Kind.WINDOW, windows),) if len(windows) else ()
        return ((Kind.WINDOW, windows), (Kind.POINT, points)) if len(windows) else ((Kind.POINT, points),)


class Checkpoint:
    """All window and point states at one boundary (in pages from the root)."""

    __slots__ = ("answers", "following", "leader", "node", "page", "residencies", "trigger", "used_at", "uses")

    def __init__(self, node: Node, page: int, now: float) -> None:
        self.node: Node | None = node  # None once it left the tree
        self.page = page
        self.following: Checkpoint | None = None  # the one below it that was added last; see `follower`
        self.leader: Checkpoint | None = None  # the one whose `following` it is, unless that now follows another branch
        self.residencies: list[Residency | None] = [None, None]
        self.used_at = now
        self.uses = 0
        self.answers = 0  # the number of answers, growing or ended, whose last checkpoint it is
        self.trigger: Trigger | None = None  # why it was left here, once the request has reported it
        untrack(self.residencies)
        untrack(self)

    def ready_in(self, tier: Tier) -> Residency | None:
        residency = self.residencies[tier]
        return residency if residency is not None and residency.ready else None

    @property
    def follower(self) -> Checkpoint | None:
        """The next checkpoint below it, on the branch that got one last."""
        return self.following if self.following is not None and self.following.node is not None else None

    @property
    def in_use(self) -> bool:
        return any(residency is not None and residency.users for residency in self.residencies)

    @property
    def ready(self) -> bool:
        return self.ready_in(Tier.DEVICE) is not None or self.ready_in(Tier.HOST) is not None


class Kids:
    """A node's children, and for each tier the number of children that lead to pages or to checkpoints in it."""

    __slots__ = ("anchored", "below", "by_page")

    def __init__(self) -> None:
        self.by_page: dict[bytes, Node] = {}
        self.below = [0, 0]
        self.anchored = [0, 0]
        for each in (self.below, self.anchored, self):
            untrack(each)

    def add(self, child: Node) -> None:
        self.by_page[child.first] = child
        untrack(self.by_page)


class Node:
    """A run of pages on one path from a namespace's root."""

    __slots__ = (
        "account",
        "checkpoints",
        "expires_at",
        "expiry_noted",
        "first",
        "hits",
        "keys",
        "kids",
        "missing_states",
        "num_pages",
        "parent",
        "rest",
        "runs",
        "start",
        "urgent_until",
        "used_at",
        "visit",
    )  # fmt: skip

    def __init__(
        self, parent: Node | None, *, account: Account, start: int, first: bytes, rest: bytes, num_pages: int
    ) -> None:  # fmt: skip
        self.parent = parent  # None for a root, and after it left the tree
        self.account = account  # of its root's tenant
        self.start = start
        self.first = first  # tokens of the first page, and the key in the parent; a root's namespace digest
        self.rest = rest  # tokens of the other pages
        self.num_pages = num_pages
        self.kids: Kids | None = None
        self.runs: list[Run | None] = [None, None]
        self.checkpoints: dict[int, Checkpoint] | None = None
        self.visit: Visit | None = None  # the latest visit to its pages
        self.missing_states: dict[str, int] | None = None  # optional states that its pages lack, with the first token
        self.keys = b""  # the chained keys of its first pages that were computed so far (`keys.py`)
        self.used_at = 0.0
        self.hits = 0
        self.urgent_until = 0.0  # when the last step of its priority is lost
        self.expiry_noted = False  # it is listed for the check at its expiry
        self.expires_at = 0.0  # never earlier than that of a node below it, since every use covers a whole path
        untrack(self.runs)
        untrack(self)

    @property
    def end(self) -> int:
        return self.start + self.num_pages

    def note_use(self, use: Use) -> None:
        self.used_at = use.at_s
        if use.priority:
            self.urgent_until = max(self.urgent_until, use.at_s + use.priority * PRIORITY_STEP_S)
        self.expires_at = max(self.expires_at, use.expires_at_s)
        for run in self.runs:
            if run is not None:
                run.unsaved = run.leaving = False  # saving it is worth another attempt

    @property
    def root(self) -> Node:
        """The root of its namespace."""
        here = self
        while here.parent is not None:
            here = here.parent
        return here

    def path(self) -> list[Node]:
        """The nodes from the root's child to this one."""
        nodes: list[Node] = []
        here: Node | None = self
        while here is not None and here.parent is not None:
            nodes.append(here)
            here = here.parent
        return nodes[::-1]

    def child(self, page: bytes) -> Node | None:
        return self.kids.by_page.get(page) if self.kids else None

    def leads_to_pages(self, tier: Tier) -> bool:
        return self.runs[tier] is not None or (self.kids is not None and self.kids.below[tier] > 0)

    def leads_to_checkpoints(self, tier: Tier) -> bool:
        return self.last_checkpoint(tier) > self.start or (self.kids is not None and self.kids.anchored[tier] > 0)

    def last_checkpoint(self, tier: Tier | None = None) -> int:
        """The deepest boundary in this node with a checkpoint in `tier` (or in any tier); `start` if there is none."""
        if not self.checkpoints:
            return self.start
        if tier is None:
            return max(self.checkpoints)
        last = self.start
        for page, each in self.checkpoints.items():
            if page > last and each.residencies[tier] is not None:
                last = page
        return last

    def __repr__(self) -> str:
        return f"Node(pages {self.start}..{self.end}, kids={len(self.kids.by_page) if self.kids else 0})"


def previous_checkpoint(node: Node, page: int) -> Checkpoint | None:
    """The deepest checkpoint on the path before boundary `page`."""
    here: Node | None = node
    while here is not None:
        if here.checkpoints:
            before = -1
            for each in here.checkpoints:
                if before < each < page:
                    before = each
            if before >= 0:
                return here.checkpoints[before]
        here = here.parent
    return None


def reach_of(node: Node, page: int) -> tuple[int, int]:
    """The boundary from which a node's checkpoint at `page` saves computing, and the number of pages that only this checkpoint
    needs: those after that boundary, or after a branch.

    pages    0 ....... before ........ branch ....... page
             |           o---------------+--------------o
    alone                                |--------------|
    """
    alone = -1 if node.kids is None else 0  # not known yet
    if node.checkpoints and len(node.checkpoints) > 1:
        alone = alone if max(node.checkpoints) <= page else 0
        before = max((each for each in node.checkpoints if each < page), default=-1)
        if before >= 0:
            return before, alone if alone >= 0 else page - before
    here, above = node, node.parent
    while above is not None:
        if alone < 0 and above.kids is not None and len(above.kids.by_page) > 1:
            alone = page - here.start
        if above.checkpoints:
            before = max(above.checkpoints)
            return before, alone if alone >= 0 else page - before
        here, above = above, above.parent
    return 0, alone if alone >= 0 else page


def previous_boundary(node: Node, page: int) -> int:
    checkpoint = previous_checkpoint(node, page)
    return checkpoint.page if checkpoint is not None else 0


Victim: TypeAlias = Run | Residency
