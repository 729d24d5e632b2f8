"""Notes of optional states that pages lack: for each node and state, the first token without it.

    pages    | all there | all there | draft from here on missing | missing |
    node                              ^ one note: the path lacks it from there on, whatever comes below

Only for explanations; matches do not read them. Engines report missing states, and a note is dropped with the pages it is about.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping

import numpy as np

from stepwell.base.ids import Tier
from stepwell.base.tasks import PageIds
from stepwell.tree.node import Node


def note(node: Node, state: str, token: int, page_tokens: int) -> None:
    """Notes that a page of this node lacks a state from `token` on, unless an earlier token is noted."""
    assert node.start <= token // page_tokens < node.end, f"token {token} is not in {node}"
    known = node.missing_states or {}
    node.missing_states = {**known, state: min(token, known.get(state, token))}


def note_offered(
    deepest: Node, tier: Tier, ids: PageIds, since: int, missing_states: Mapping[str, int], page_tokens: int
) -> None:  # fmt: skip
    """Notes what the just offered pages `ids[since:]` of a path lack, for those that the tree has taken over."""
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
    """The first token without it, for each state that the path lacks before token `upto`."""
    found: dict[str, int] = {}
    for node in path:
        for state, token in (node.missing_states or {}).items():
            if token < upto:
                found.setdefault(state, token)
    return found


def share(upper: Node, lower: Node, page_tokens: int) -> None:
    """Divides the notes of a node that was split."""
    border = upper.end * page_tokens
    known = lower.missing_states or {}
    upper.missing_states = {state: token for state, token in known.items() if token < border} or None
    lower.missing_states = {state: token for state, token in known.items() if token >= border} or None


def drop_notes_past_end(node: Node, page_tokens: int) -> None:
    """Drops the notes about pages that the node no longer has."""
    if node.missing_states:
        node.missing_states = {
            state: token for state, token in node.missing_states.items() if token < node.end * page_tokens
        } or None
