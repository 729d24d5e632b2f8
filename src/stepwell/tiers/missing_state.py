"""What an engine says of optional states that its pages do not hold, so that `explain` can name them.

A lease remembers it for the pages it will offer; the tree, for those it resumed from. Decides nothing.
"""

from __future__ import annotations

from stepwell.base.errors import LeaseError
from stepwell.tiers.lease import Lease
from stepwell.tiers.state import CacheState
from stepwell.tree import missing_state
from stepwell.tree.match import find


def note_missing_state(core: CacheState, lease: Lease, state: str, since: int) -> None:
    """From token `since` on this lease's pages lack a state, also those it will fill."""
    if any(each.name == state and each.required for each in core.spec.states):
        raise LeaseError(f"state {state!r} is required: pages without it cannot be offered")
    lease.missing_states[state] = min(since, lease.missing_states.get(state, since))
    if since >= lease.resume:
        return
    page_tokens = core.spec.page_tokens
    match = find(core.tree, lease.namespace, lease.packed, lease.resume)
    for node in match.path:
        if node.start <= since // page_tokens < min(node.end, match.known_tokens // page_tokens):
            missing_state.note(node, state, since, page_tokens)
