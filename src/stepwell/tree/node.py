"""What the prefix tree is made of. Plain records; the rules that keep them true are in `tree.py`.

node     pages start .. end of one path: their tokens, and per memory tier a run of page ids
run      where those pages are in one tier (-1: not in this tier)
checkpoint   what a model needs beside prefix pages to resume at one boundary, at any page inside a node
residency    the pages of one checkpoint in one tier: all of them, or the residency does not exist

They refer to each other, and the garbage collector looks at none of them (`base/untracked.py`). What leaves the tree lets go of
its neighbours, so that it is freed at once; `Tree` takes apart what is left when it is freed itself.
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
    """Why something that was cached is not any more."""

    EVICTED = "evicted to make room"
    OVER_QUOTA = "evicted to make room, its tenant being over its quota"
    FAILED = "its copy failed"
    EXPIRED = "its time to live ran out"
    CLEARED = "cleared on request"
    STORE = "the store's copy could not be used"
    DEVICE = "it was on a device that was lost"
    LATE = "it had not arrived from the store when the request went on"


class Loss(NamedTuple):  # not a dataclass: one is made for everything that is evicted
    """A note of what is gone: when, why, and from which tier last."""

    at_s: float
    reason: LossReason
    tier: Tier
    detail: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class Use:
    """What a request says of the path it uses: when, how much it matters (0 to MAX_PRIORITY), and until when it may stay."""

    at_s: float
    priority: int = 0
    expires_at_s: float = float("inf")
    visit: Visit | None = None  # under which pages are entered that the path did not have


class Run:
    """A node's prefix pages in one tier. `num_ready` of `num_pages` present ones can be read."""

    __slots__ = ("entry", "ids", "leaving", "node", "num_pages", "num_ready", "standing", "tier", "unsaved")

    def __init__(self, node: Node, tier: Tier, ids: PageIds) -> None:
        self.node = node
        self.tier = tier
        self.ids = ids  # one per page of the node, ABSENT where this tier has none
        self.num_pages = 0
        self.num_ready = 0
        self.entry = 0  # number of the live entry in the eviction order, 0 for none
        self.standing = 0  # the rank of that entry
        self.unsaved = False  # a write-back failed: evict without trying again
        self.leaving = False  # it was saved because its room is needed, and not used since: the copy is no mere repetition
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
        self.users = 0  # how often it is pinned (`Tree.pin`), each time with a reference to every page: not to be evicted
        self.entry = self.standing = 0
        self.unsaved = self.leaving = False
        self.backup_deferred = False  # it is to be copied below later: worth more until then
        self.size_bytes = len(windows) * strides.get(Kind.WINDOW, 0) + len(points) * strides.get(Kind.POINT, 0)
        untrack(self)

    def spans(self) -> tuple[tuple[Kind, PageIds], ...]:
        """Its pages by kind, leaving out kinds it has none of."""
        windows, points = self.windows, self.points
        if not len(points):
            return ((Kind.WINDOW, windows),) if len(windows) else ()
        return ((Kind.WINDOW, windows), (Kind.POINT, points)) if len(windows) else ((Kind.POINT, points),)


class Checkpoint:
    """Everything of window and point shape at one boundary (in pages from the root)."""

    __slots__ = ("answers", "following", "held", "leader", "node", "page", "trigger", "used_at", "uses")

    def __init__(self, node: Node, page: int, now: float) -> None:
        self.node: Node | None = node  # None once it left the tree
        self.page = page
        self.following: Checkpoint | None = None  # the one below it that was left last, which may be gone: see `follower`
        self.leader: Checkpoint | None = None  # whose `following` it is, unless that follows another branch by now
        self.held: list[Residency | None] = [None, None]
        self.used_at = now
        self.uses = 0
        self.answers = 0  # whose last checkpoint it is: of those that grow, and of those that ended here
        self.trigger: Trigger | None = None  # why it was left here, once the request that left it has said so
        untrack(self.held)
        untrack(self)

    def ready_in(self, tier: Tier) -> Residency | None:
        residency = self.held[tier]
        return residency if residency is not None and residency.ready else None

    @property
    def follower(self) -> Checkpoint | None:
        """The next checkpoint below it, on the branch where one was left last."""
        return self.following if self.following is not None and self.following.node is not None else None

    @property
    def in_use(self) -> bool:
        return any(residency is not None and residency.users for residency in self.held)

    @property
    def ready(self) -> bool:
        return self.ready_in(Tier.DEVICE) is not None or self.ready_in(Tier.HOST) is not None


class Kids:
    """A node's children, and for each tier how many of them lead to pages or to checkpoints in it."""

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
        self.parent = parent  # None for a root, and once it left the tree
        self.account = account  # whose it is: its root's
        self.start = start
        self.first = first  # tokens of the first page: also the key in the parent, so stored once; a root's namespace
        self.rest = rest  # tokens of the others
        self.num_pages = num_pages
        self.kids: Kids | None = None
        self.runs: list[Run | None] = [None, None]
        self.checkpoints: dict[int, Checkpoint] | None = None
        self.visit: Visit | None = None  # the latest to its pages
        self.missing_states: dict[str, int] | None = None  # optional ones, from which token on
        self.keys = b""  # chained keys of its first pages, as many as somebody asked for (`match.py`)
        self.used_at = 0.0
        self.hits = 0
        self.urgent_until = 0.0  # when the last step of the priority that a use gave it is lost
        self.expiry_noted = False  # whoever drops what ran out will look at it when the time comes
        self.expires_at = 0.0  # never before that of anything below it, since every use covers a whole path
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
                run.unsaved = run.leaving = False  # it is worth another try

    @property
    def root(self) -> Node:
        """Its namespace's root: the one above it that hangs below nothing."""
        here = self
        while here.parent is not None:
            here = here.parent
        return here

    def path(self) -> list[Node]:
        """The nodes from the first below the root to this one."""
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
        """The deepest boundary in this node with a checkpoint in `tier` (or in any); `start` when there is none."""
        if not self.checkpoints:
            return self.start
        if tier is None:
            return max(self.checkpoints)
        last = self.start
        for page, each in self.checkpoints.items():
            if page > last and each.held[tier] is not None:
                last = page
        return last

    def __repr__(self) -> str:
        return f"Node(pages {self.start}..{self.end}, kids={len(self.kids.by_page) if self.kids else 0})"


def previous_checkpoint(node: Node, page: int) -> Checkpoint | None:
    """The deepest checkpoint on the path that lies before boundary `page`."""
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
    """From which boundary on a node's checkpoint at boundary `page` saves computing, and how many pages nothing else would need
    if it went: back to that boundary, or to a branch.

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
