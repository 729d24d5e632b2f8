"""What an engine says of optional states that its pages do not hold, so that `explain` can name them.

A lease remembers it for the pages it will offer; the tree, for those it resumed from. Decides nothing.
"""

from __future__ import annotations

from stepwell.base.errors import LeaseError
from stepwell.cache.core import Core
from stepwell.cache.lease import Lease
from stepwell.tree import lacking
from stepwell.tree.match import find


def note_lacking(core: Core, lease: Lease, state: str, since: int) -> None:
    """From token `since` on this lease's pages lack a state, also those it will fill."""
    if any(each.name == state and each.required for each in core.spec.states):
        raise LeaseError(f"state {state!r} is required: pages without it cannot be offered")
    lease.lacking[state] = min(since, lease.lacking.get(state, since))
    if since >= lease.resume:
        return
    page_tokens = core.spec.page_tokens
    match = find(core.tree, lease.namespace, lease.packed, lease.resume)
    for node in match.path:
        if node.start <= since // page_tokens < min(node.end, match.known_tokens // page_tokens):
            lacking.note(node, state, since, page_tokens)
