"""Finds how much of a prompt is cached, and the deepest boundary it can resume from, over all states and tiers.

    tokens   0 ........................................................ prompt
             |----------------- known path -----------------|           the tree has these tokens
             |-------- every page has arrived --------|                 each in some tier
             |---- restore point ----|                                  with a complete checkpoint at its end

Pure: reads nodes, returns a Match. Allocates no pages, touches no recency, splits nothing.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from stepwell.base.errors import LeaseError
from stepwell.base.ids import Kind, Tier
from stepwell.base.prompt import TOKEN_BYTES, Namespace, common_pages
from stepwell.base.tasks import PageIds
from stepwell.memory.arena import READY
from stepwell.tree.node import ABSENT, Checkpoint, Node
from stepwell.tree.tree import Tree


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Match:
    """What the cache has of a prompt, in tokens; valid while `tree` is at `version`."""

    tree: Tree
    namespace: Namespace
    packed: bytes
    prompt_tokens: int
    limit_tokens: int  # the search for a restore point stopped here
    known_tokens: int
    arrived_tokens: int
    restore_tokens: int
    device_tokens: int
    host_tokens: int
    checkpoint: Checkpoint | None
    path: tuple[Node, ...]
    version: int

    def __repr__(self) -> str:
        return (
            f"Match(restore {self.restore_tokens} of {self.prompt_tokens} tokens: "
            f"{self.device_tokens} device, {self.host_tokens} host; known {self.known_tokens})"
        )


def find(tree: Tree, namespace: Namespace, packed: bytes, limit_tokens: int | None = None) -> Match:
    """Follows the path of a prompt as far as it is known, or to a boundary at or below `limit_tokens`."""
    spec = tree.spec
    prompt_tokens = len(packed) // TOKEN_BYTES
    most = spec.usable(prompt_tokens) if limit_tokens is None else spec.floor(min(limit_tokens, prompt_tokens))
    limit = most // spec.page_tokens
    path, known = _walk(tree, namespace, packed, limit)
    arrived = _arrived_pages(tree, path, known)
    checkpoint = _deepest_checkpoint(path, arrived) if spec.needs_checkpoint else None
    restore = checkpoint.page if checkpoint is not None else 0
    if spec.free_step is not None:
        free = arrived * spec.page_tokens // spec.free_step * spec.free_step // spec.page_tokens
        if free > restore:
            restore, checkpoint = free, None
    on_device = _whole_pages(tree, path, restore)
    return Match(
        tree=tree,
        namespace=namespace,
        packed=packed,
        prompt_tokens=prompt_tokens,
        limit_tokens=limit * spec.page_tokens,
        known_tokens=known * spec.page_tokens,
        arrived_tokens=arrived * spec.page_tokens,
        restore_tokens=restore * spec.page_tokens,
        device_tokens=on_device * spec.page_tokens,
        host_tokens=(restore - on_device) * spec.page_tokens,
        checkpoint=checkpoint,
        path=path,
        version=tree.version,
    )


def find_again(tree: Tree, match: Match) -> Match:
    """The same match if the tree has not changed, otherwise a new one. Raises LeaseError for a match of another cache."""
    if match.tree is not tree:
        raise LeaseError("this match belongs to another cache: look the prompt up in the cache that you use it with")
    if match.version == tree.version:
        return match
    return find(tree, match.namespace, match.packed, match.limit_tokens)


def ids_of(path: tuple[Node, ...], tier: Tier, upto: int) -> PageIds:
    """The path's first `upto` page ids in `tier`, ABSENT where it has none."""
    if not upto:
        return np.empty(0, np.int32)
    pieces = []
    for node in path:
        if node.start >= upto:
            break
        run = node.runs[tier]
        count = min(node.num_pages, upto - node.start)
        pieces.append(run.ids[:count] if run is not None else np.full(count, ABSENT, np.int32))
    return np.concatenate(pieces)


def _walk(tree: Tree, namespace: Namespace, packed: bytes, limit: int) -> tuple[tuple[Node, ...], int]:
    """The nodes that share tokens with the prompt, and the number of shared pages, up to `limit`."""
    size = tree.page_bytes
    node = tree.roots.get(namespace.digest)
    path: list[Node] = []
    page = 0
    while node is not None and page < limit:
        node = node.child(packed[page * size : (page + 1) * size])
        if node is None:
            break
        path.append(node)
        offset = (page + 1) * size
        if node.end <= limit and packed.startswith(node.rest, offset):
            page = node.end
            continue
        page += 1 + common_pages(node.rest, packed[offset : min(limit, node.end) * size], size)
        break
    return tuple(path), page


def _arrived_pages(tree: Tree, path: tuple[Node, ...], known: int) -> int:
    """The number of leading pages of the path, up to `known`, that are readable in some tier."""
    for node in path:
        if any(run is not None and run.num_ready == node.num_pages for run in node.runs):
            continue
        ready = np.zeros(node.num_pages, np.bool_)
        for run in node.runs:
            if run is not None:
                ready |= (run.ids != ABSENT) & (tree.arenas[run.tier].state[Kind.PREFIX][run.ids] == READY)
        if not ready.all():
            return min(node.start + int(ready.argmin()), known)
    return known


def _whole_pages(tree: Tree, path: tuple[Node, ...], upto: int) -> int:
    """How many of the path's first `upto` pages are readable on the device, including their rows."""
    count = 0
    some_backed = tree.row_pages is not None and tree.row_pages.num_backed > 0
    for node in path:
        if node.start >= upto:
            break
        run = node.runs[Tier.DEVICE]
        if run is None:
            continue
        if node.end <= upto and not some_backed:
            count += run.num_ready
        else:
            ids = run.ids[: upto - node.start]
            count += int(np.count_nonzero(whole_on_device(tree, ids[ids != ABSENT])))
    return count


def whole_on_device(tree: Tree, ids: PageIds) -> npt.NDArray[np.bool_]:
    """Which of these device pages are readable, including their rows."""
    ready = tree.arenas[Tier.DEVICE].state[Kind.PREFIX][ids] == READY
    return np.asarray(ready if tree.row_pages is None else ready & ~tree.row_pages.backed(ids))


def _deepest_checkpoint(path: tuple[Node, ...], arrived: int) -> Checkpoint | None:
    for node in reversed(path):
        if node.start < arrived and node.checkpoints:
            for page in sorted(node.checkpoints, reverse=True):
                if page <= arrived and node.checkpoints[page].ready:
                    return node.checkpoints[page]
    return None
