"""A tree over two arenas with nothing around it, spoken to in pages: page 7 is the page whose tokens are all 7."""

from __future__ import annotations

from stepwell import Kind, ModelSpec, Namespace, Tier
from stepwell.base.prompt import pack, unpack
from stepwell.base.tasks import PageIds
from stepwell.memory.arena import Arena
from stepwell.memory.layout import lay_out
from stepwell.policy.value import ValuePolicy
from stepwell.sim.policies import LeastRecent
from stepwell.tree.audit import audit
from stepwell.tree.checkpoints import add_residency
from stepwell.tree.match import Match, find, ids_of
from stepwell.tree.node import Loss, LossReason, Node, Residency, Use
from stepwell.tree.tree import Tree
from toys import HYBRID

SPACE = Namespace(model="m", layout="l")
GONE = Loss(at_s=1.0, reason=LossReason.EVICTED, tier=Tier.DEVICE)


class Bench:
    """Keeps the reference its own allocations come with, so pages stay alive when the tree drops them."""

    def __init__(
        self,
        spec: ModelSpec = HYBRID,
        *,
        pages: int = 512,
        value: ValuePolicy | None = None,
        quotas: dict[str, float] | None = None,
    ) -> None:
        layout = lay_out(spec, budget_bytes=pages * 32, alignment=16)
        self.spec = spec
        arenas = {tier: Arena(tier, layout) for tier in (Tier.DEVICE, Tier.HOST)}
        self.tree = Tree(spec, arenas, value or LeastRecent(), quotas)

    def arena(self, tier: Tier = Tier.DEVICE) -> Arena:
        return self.tree.arenas[tier]

    def alloc(self, count: int, tier: Tier = Tier.DEVICE, *, ready: bool = True) -> PageIds:
        ids = self.arena(tier).alloc({Kind.PREFIX: count})[Kind.PREFIX]
        if ready:
            self.arena(tier).mark_ready(Kind.PREFIX, ids)
        return ids

    def insert(
        self, path: list[int], *, space: Namespace = SPACE, use: Use | None = None, tier: Tier = Tier.DEVICE,
        ready: bool = True, release: bool = False,
    ) -> PageIds:  # fmt: skip
        """Offers fresh pages for a path; `release` leaves them to the tree alone."""
        ids = self.alloc(len(path), tier, ready=ready)
        self.tree.insert(space, self.packed(path), tier, ids, use or Use(at_s=0.0))
        if release:
            self.tree.release(tier, Kind.PREFIX, ids)
        return ids

    def checkpoint(
        self, path: list[int], page: int, tier: Tier = Tier.DEVICE, *, ready: bool = True, now: float = 0.0
    ) -> Residency | None:
        node = next(node for node in self.path(path) if node.start < page <= node.end)
        held = self.arena(tier).alloc({Kind.WINDOW: len(self.spec.window_span(page * 4)), Kind.POINT: 1})
        for kind, ids in held.items():
            if ready:
                self.arena(tier).mark_ready(kind, ids)
        residency = add_residency(
            self.tree, node, page, tier, windows=held[Kind.WINDOW], points=held[Kind.POINT], ready=ready, now=now
        )
        self.arena(tier).release(Kind.WINDOW, held[Kind.WINDOW])
        if residency is None:
            self.arena(tier).release(Kind.POINT, held[Kind.POINT])  # else it was handed over
        return residency

    # ---- questions --------------------------------------------------------------------------------

    def packed(self, path: list[int]) -> bytes:
        return pack([token for page in path for token in [page] * self.spec.page_tokens])

    def match(self, path: list[int], extra_tokens: int = 1, limit_tokens: int | None = None) -> Match:
        return find(self.tree, SPACE, self.packed(path) + pack([99] * extra_tokens), limit_tokens)

    def path(self, path: list[int]) -> tuple[Node, ...]:
        return self.match(path).path

    def known(self, path: list[int]) -> int:
        return self.match(path).known_tokens // self.spec.page_tokens

    def restore(self, path: list[int]) -> int:
        return self.match(path).restore_tokens // self.spec.page_tokens

    def ids(self, path: list[int], tier: Tier = Tier.DEVICE) -> list[int]:
        return ids_of(self.path(path), tier, self.known(path)).tolist()

    def refs(self, ids: PageIds, tier: Tier = Tier.DEVICE) -> list[int]:
        return self.arena(tier).refs[Kind.PREFIX][ids].tolist()

    def shape(self, space: Namespace = SPACE) -> dict[tuple[int, ...], int]:
        """Every node of a namespace: the pages from its root to its end, and how many of them are its own."""
        found: dict[tuple[int, ...], int] = {}
        stack: list[tuple[Node, tuple[int, ...]]] = [(self.tree.roots[space.digest], ())]
        while stack:
            node, above = stack.pop()
            mine = above
            if node.parent is not None:
                mine = (*above, *unpack(node.first + node.rest)[:: self.spec.page_tokens].tolist())
                found[mine] = node.num_pages
            stack += [(child, mine) for child in (node.kids.by_page.values() if node.kids else ())]
        return found

    def check(self) -> None:
        audit(self.tree)
        for arena in self.tree.arenas.values():
            arena.audit()
