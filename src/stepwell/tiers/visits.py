"""The effects of a new request: its path was used, and the reuse model learns of a return. Allocates no pages."""

from __future__ import annotations

from stepwell.tiers.lease import Lease
from stepwell.tiers.lifetime import note_expiry
from stepwell.tiers.saving import save_path
from stepwell.tiers.state import CacheState
from stepwell.tree.match import Match
from stepwell.tree.node import Node
from stepwell.tree.notes import key_of


def note_use(state: CacheState, match: Match, lease: Lease) -> None:
    """Marks what a request resumes from as used now: it is kept longer, and saved if the policy saves on use."""
    upto = match.restore_tokens // state.spec.page_tokens
    if not upto:
        return
    use = lease.request.use(state.clock.now())
    if match.checkpoint is not None:
        match.checkpoint.used_at = use.at_s
        match.checkpoint.uses += 1
        for residency in match.checkpoint.residencies:
            if residency is not None:
                residency.leaving = False
    if state.below is not None:
        state.below.before_use(match.path)
    deepest = state.tree.touch(match.path, upto, use)
    note_expiry(state, deepest)
    saves = state.config.write.saves_on_use(deepest.hits)
    if saves:
        save_path(state, deepest)
    if state.below is not None and (saves or state.below.is_durable):  # what the lower tier refused before may be stored now
        state.below.offer(deepest)


def note_visit(state: CacheState, match: Match, lease: Lease) -> None:
    """Reports a request to the reuse model: what it resumes from belongs to its visit from now on, and so does what it adds."""
    if state.reuse is None:
        return
    page_bytes, packed = state.tree.page_bytes, match.packed
    known = match.known_tokens // state.spec.page_tokens
    path = _path_now(state, match, known)
    known = path[-1].end if path else 0  # less if what follows the restore point was evicted
    deepest = path[-1] if path else state.tree.roots.get(match.namespace.digest)
    following = packed[known * page_bytes : (known + 1) * page_bytes]
    past = state.tree.past
    lost = past.of(deepest).get(key_of(following)) if deepest is not None else None
    again, fresh = state.reuse.arrive(
        state.clock.now(),
        known=known,
        end=max(known, match.prompt_tokens // state.spec.page_tokens),
        passed=[(node.visit, node.num_pages) for node in path],
        goes_on=bool(path) and path[-1].kids is None and not past.of(path[-1]),
        lost=lost,
    )
    for node in path:
        node.visit = again
    lease.visit, lease.visits = fresh, (again, fresh)


def _path_now(state: CacheState, match: Match, known: int) -> list[Node]:
    """The nodes of the first `known` pages as they are now, the last cut there."""
    path: list[Node] = []
    node = state.tree.roots.get(match.namespace.digest)
    size = state.tree.page_bytes
    while node is not None and (at := path[-1].end if path else 0) < known:
        node = node.child(match.packed[at * size : (at + 1) * size])
        if node is not None:
            path.append(node if node.end <= known else state.tree.split(node, known - node.start))
            node = path[-1]
    return path
