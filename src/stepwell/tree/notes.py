"""Notes on what is gone from a tree: why it left, or whose visit it was. At most a given number, whatever the size of the tree.

A note belongs to the node at which the thing hung, under a key of 8 bytes: a hash of its first page, or its boundary. Two pages
with the same hash would be taken for one another: an explanation or an estimate of a return would be wrong then, never a byte.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Collection, Mapping
from types import MappingProxyType
from typing import Generic, TypeVar

from stepwell.tree.node import Node

T = TypeVar("T")

_NONE: Mapping[int, object] = MappingProxyType({})


def key_of(page: bytes) -> int:
    """The key of what begins with a page. Python computes it once for each object, and differently in each process."""
    return hash(page)


class Notes(Generic[T]):
    """Notes of one sort, the latest of each node and of the whole tree. One thread."""

    def __init__(self, *, most_of_node: int, most: int) -> None:
        """A note takes about 200 bytes with what it says, up to 450 where it is the only one of its node."""
        self._most_of_node = most_of_node
        self._most = most
        self._of: OrderedDict[Node, dict[int, T]] = OrderedDict()  # the node with the latest note comes last
        self._count = 0

    def __len__(self) -> int:
        return self._count

    def of(self, node: Node) -> Mapping[int, T]:
        """All notes of a node, oldest first. Not to be changed, nor kept."""
        return self._of.get(node, _NONE)  # type: ignore[arg-type]

    def add(self, node: Node, key: int, note: T) -> None:
        """Adds a note; the oldest one of the node makes way for it, or the oldest one of the node noted longest ago."""
        notes = self._of.get(node)
        if notes is None:
            notes = self._of[node] = {}
        else:
            self._of.move_to_end(node)
            if notes.pop(key, None) is not None:
                self._count -= 1
        notes[key] = note
        self._count += 1
        if len(notes) > self._most_of_node:
            self._drop_oldest(node, notes)
        if self._count > self._most:
            self._drop_oldest(*next(iter(self._of.items())))

    def remove(self, node: Node, key: int) -> None:
        """What a note is about has come back."""
        notes = self._of.get(node)
        if notes is not None and notes.pop(key, None) is not None:
            self._count -= 1
            if not notes:
                del self._of[node]

    def forget(self, node: Node) -> None:
        """A node has left the tree, or what hung below it is of no interest any more."""
        notes = self._of.pop(node, None)
        if notes is not None:
            self._count -= len(notes)

    def _drop_oldest(self, node: Node, notes: dict[int, T]) -> None:
        del notes[next(iter(notes))]
        self._count -= 1
        if not notes:
            del self._of[node]

    def audit(self, nodes: Collection[Node]) -> None:
        """Asserts that the limits hold, and that every note belongs to one of these nodes."""
        assert sum(map(len, self._of.values())) == self._count <= self._most, f"{self._count=} {self._most=}"
        for node, notes in self._of.items():
            assert 0 < len(notes) <= self._most_of_node, f"{node} has {len(notes)} notes"
            assert node in nodes, f"{node} has notes, and has left the tree"
