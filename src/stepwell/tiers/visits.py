"""Tells the reuse model that a request has come, whose pages it came back to and whose it will leave, and how it ended."""

from __future__ import annotations

from stepwell.tiers.lease import Lease
from stepwell.tiers.state import CacheState
from stepwell.tree.match import Match
from stepwell.tree.node import Node


def note_visit(core: CacheState, match: Match, lease: Lease) -> None:
    """Enters known pages under this request's visit, and says under which it is to enter new ones."""
    if core.reuse is None:
        return
    page_bytes, packed = core.tree.page_bytes, match.packed
    known = match.known_tokens // core.spec.page_tokens
    path = _path(core, match, known)
    known = path[-1].end if path else 0  # less when room was made out of what follows the restore point
    deepest = path[-1] if path else core.tree.roots.get(match.namespace.digest)
    following = packed[known * page_bytes : (known + 1) * page_bytes]
    lost = deepest.past.get(following) if deepest is not None and deepest.past else None
    again, fresh = core.reuse.arrive(
        core.clock.now(),
        known=known,
        end=max(known, match.prompt_tokens // core.spec.page_tokens),
        passed=[(node.visit, node.num_pages) for node in path],
        goes_on=bool(path) and path[-1].kids is None and not path[-1].past,
        lost=lost,
    )
    for node in path:
        node.visit = again
    lease.visit, lease.visits = fresh, (again, fresh)


def note_answer(lease: Lease) -> None:
    """The request is over, and how long its answer was says something of when the next will come."""
    for visit in lease.visits:
        visit.answered(lease.num_tokens - lease.prompt_tokens)


def _path(core: CacheState, match: Match, known: int) -> list[Node]:
    """The nodes of the first `known` pages as they are now, the last cut there."""
    path: list[Node] = []
    node = core.tree.roots.get(match.namespace.digest)
    size = core.tree.page_bytes
    while node is not None and (at := path[-1].end if path else 0) < known:
        node = node.child(match.packed[at * size : (at + 1) * size])
        if node is not None:
            path.append(node if node.end <= known else core.tree.split(node, known - node.start))
            node = path[-1]
    return path
