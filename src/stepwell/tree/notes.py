"""Notes about what left a tree: the reason, or the visit it belonged to. Their number is limited, whatever the size of the tree.

A note belongs to the node that the lost thing was attached to, under a key of 8 bytes: a hash of its first page, or its boundary.
If two pages have the same hash, an explanation or an estimate of returns may be wrong, but never a byte.
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
    """The key of a path that begins with a page. Python caches the hash in the object; it differs between processes."""
    return hash(page)


class Notes(Generic[T]):
    """The latest notes of one sort, limited for each node and for the whole tree. For one thread."""

    def __init__(self, *, most_of_node: int, most: int) -> None:
        """A note takes about 200 bytes with its content, and up to 450 if it is the only one of its node."""
        self._most_of_node = most_of_node
        self._most = most
        self._of: OrderedDict[Node, dict[int, T]] = OrderedDict()  # the node with the latest note comes last
        self._count = 0

    def __len__(self) -> int:
        return self._count

    def of(self, node: Node) -> Mapping[int, T]:
        """All notes of a node, oldest first. Callers must not change or keep the mapping."""
        return self._of.get(node, _NONE)  # type: ignore[arg-type]

    def add(self, node: Node, key: int, note: T) -> None:
        """Adds a note. If a limit is exceeded, drops the node's oldest note, or the oldest of the node noted longest ago."""
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
        """Drops the note about something that is cached again."""
        notes = self._of.get(node)
        if notes is not None and notes.pop(key, None) is not None:
            self._count -= 1
            if not notes:
                del self._of[node]

    def drop(self, node: Node) -> None:
        """Drops all notes of a node that left the tree, or whose lost children no longer matter."""
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
            assert node in nodes, f"{node} has notes, but left the tree"
