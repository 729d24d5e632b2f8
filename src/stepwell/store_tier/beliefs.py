"""What one store is believed to have of what is in memory: pages by node, and checkpoints.

A belief may be wrong: a store evicts without telling. It then costs a miss later, never more, since whoever sends something down
asks the store first. The tree tells of every node that it cuts and of everything that leaves it.
"""

from __future__ import annotations

from stepwell.tree.node import Checkpoint, Node


class Beliefs:
    """About one store. One thread."""

    def __init__(self) -> None:
        self._pages: dict[Node, int] = {}  # of its first pages, how many; nodes with none are left out
        self._checkpoints: set[Checkpoint] = set()
        self._arriving: set[Checkpoint] = set()

    def pages(self, node: Node) -> int:
        """How many of a node's first pages are believed to be in the store, or on their way there."""
        return self._pages.get(node, 0)

    def set_pages(self, node: Node, count: int) -> None:
        if count > 0:
            self._pages[node] = count
        else:
            self._pages.pop(node, None)

    def has(self, checkpoint: Checkpoint) -> bool:
        """Whether a checkpoint is believed to be in the store, or on its way there."""
        return checkpoint in self._checkpoints

    def has_arrived(self, checkpoint: Checkpoint) -> bool:
        """The same, once the store has answered for it."""
        return checkpoint in self._checkpoints and checkpoint not in self._arriving

    def add(self, checkpoint: Checkpoint, *, arriving: bool = False) -> None:
        self._checkpoints.add(checkpoint)
        if arriving:
            self._arriving.add(checkpoint)
        else:
            self._arriving.discard(checkpoint)

    def answered(self, checkpoint: Checkpoint, *, stored: bool) -> None:
        """The store has answered for one that was on its way, which may have left memory meanwhile."""
        if stored and checkpoint.node is not None:
            self.add(checkpoint)
        else:
            self.remove(checkpoint)

    def remove(self, checkpoint: Checkpoint) -> None:
        self._checkpoints.discard(checkpoint)
        self._arriving.discard(checkpoint)

    def node_split(self, upper: Node) -> None:
        """A node was cut in two; `upper` is the new first part, and what it was cut from its only child."""
        assert upper.kids is not None
        lower = next(iter(upper.kids.by_page.values()))
        count = self.pages(lower)
        self.set_pages(upper, min(count, upper.num_pages))
        self.set_pages(lower, count - upper.num_pages)

    def node_shortened(self, node: Node) -> None:
        """A node lost its last pages, or all of them."""
        if node in self._pages:
            self.set_pages(node, min(self._pages[node], node.num_pages))

    def audit(self) -> None:
        """Asserts that nothing is believed of what has left memory."""
        for node, count in self._pages.items():
            assert node.parent is not None and 0 < count <= node.num_pages, f"{count} page(s) believed of {node}"
        assert self._arriving <= self._checkpoints, f"{len(self._arriving - self._checkpoints)} arrive that are not believed"
        for checkpoint in self._checkpoints:
            assert checkpoint.node is not None, f"boundary {checkpoint.page} left memory, and is still believed to be stored"
