"""The keys that name pages of the tree in stores and events. They are chained, computed at first use, and kept in nodes."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from stepwell.base.prompt import KEY_BYTES, PageKey, page_keys
from stepwell.tree.node import Node

_KEY = np.dtype(f"V{KEY_BYTES}")


def path_keys(
    root: PageKey, path: Sequence[Node], packed: bytes, *, known: int, upto: int, page_bytes: int
) -> tuple[PageKey, ...]:
    """The keys of the first `upto` pages of a prompt. The nodes of `path` hold the first `known` pages."""
    keys: list[PageKey] = []
    for node in path:
        if node.start >= min(known, upto):
            break
        keys += node_keys(node, keys[-1] if keys else root, page_bytes)[: min(known, upto) - node.start]
    keys += page_keys(keys[-1] if keys else root, packed[len(keys) * page_bytes : upto * page_bytes], page_bytes)
    return tuple(keys)


def node_keys(node: Node, parent: PageKey, page_bytes: int) -> list[PageKey]:
    """The keys of all of a node's pages, chained on the key of the page before it."""
    _compute(node, parent, page_bytes)
    keys: list[PageKey] = np.frombuffer(node.keys, _KEY).tolist()  # nine times faster than slicing
    return keys


def end_key(node: Node, page_bytes: int) -> PageKey:
    """The key of a node's last page; for a root, its namespace's digest."""
    without_keys: list[Node] = []
    while node.parent is not None and len(node.keys) < node.num_pages * KEY_BYTES:
        without_keys.append(node)
        node = node.parent
    key = PageKey(node.keys[-KEY_BYTES:] if node.parent is not None else node.first)
    while without_keys:
        node = without_keys.pop()
        _compute(node, key, page_bytes)
        key = PageKey(node.keys[-KEY_BYTES:])
    return key


def keys_within(node: Node, first: int, upto: int, page_bytes: int) -> list[PageKey]:
    """The keys of pages `[first, upto)` of the path to a node, which holds the last of them."""
    pieces: list[bytes] = []
    while first < upto:
        assert node.parent is not None and node.start < upto <= node.end, f"page {upto - 1} is not in {node}"
        end_key(node, page_bytes)
        at = max(first, node.start)
        pieces.append(node.keys[(at - node.start) * KEY_BYTES : (upto - node.start) * KEY_BYTES])
        node, upto = node.parent, at
    keys: list[PageKey] = np.frombuffer(b"".join(reversed(pieces)), _KEY).tolist()
    return keys


def _compute(node: Node, parent: PageKey, page_bytes: int) -> None:
    done = len(node.keys) // KEY_BYTES
    if done < node.num_pages:
        last = PageKey(node.keys[-KEY_BYTES:]) if done else parent
        node.keys += b"".join(page_keys(last, (node.first + node.rest)[done * page_bytes :], page_bytes))
