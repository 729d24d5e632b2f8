"""Notes of optional states that pages do not hold: for each node and state, the first token that lacks it.

    pages    | all there | all there | draft from here on missing | missing |
    node                              ^ one note: the path lacks it from there on, whatever comes below

For explanations alone: no match reads them. They say what somebody has noticed, and leave with the pages they are about.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping

import numpy as np

from stepwell.base.ids import Tier
from stepwell.base.tasks import PageIds
from stepwell.tree.node import Node


def note(node: Node, state: str, token: int, page_tokens: int) -> None:
    """Notes that a page of this node lacks a state from `token` on, unless an earlier one is known to."""
    assert node.start <= token // page_tokens < node.end, f"token {token} is not in {node}"
    known = node.missing_states or {}
    node.missing_states = {**known, state: min(token, known.get(state, token))}


def note_offered(
    deepest: Node, tier: Tier, ids: PageIds, since: int, missing_states: Mapping[str, int], page_tokens: int
) -> None:  # fmt: skip
    """For pages `ids[since:]` of a path, just offered: notes what they lack, where it is they that the tree has taken."""
    for state, token in missing_states.items():
        first = max(since, token // page_tokens)
        for node in deepest.path():
            run = node.runs[tier]
            at = max(first, node.start)
            if run is None or at >= node.end:
                continue
            mine = np.flatnonzero(run.ids[at - node.start : len(ids) - node.start] == ids[at : node.end])
            if len(mine):
                note(node, state, max(token, (at + int(mine[0])) * page_tokens), page_tokens)
                break


def missing_states_before(path: Iterable[Node], upto: int) -> dict[str, int]:
    """For each state that the path lacks before token `upto`, the first token that does."""
    found: dict[str, int] = {}
    for node in path:
        for state, token in (node.missing_states or {}).items():
            if token < upto:
                found.setdefault(state, token)
    return found


def share(upper: Node, lower: Node, page_tokens: int) -> None:
    """Deals the notes of a node that was split."""
    border = upper.end * page_tokens
    known = lower.missing_states or {}
    upper.missing_states = {state: token for state, token in known.items() if token < border} or None
    lower.missing_states = {state: token for state, token in known.items() if token >= border} or None


def forget_cut(node: Node, page_tokens: int) -> None:
    """Drops what is noted of pages that the node does not have any more."""
    if node.missing_states:
        node.missing_states = {
            state: token for state, token in node.missing_states.items() if token < node.end * page_tokens
        } or None
