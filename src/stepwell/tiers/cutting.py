"""How much of a long run goes down at a time when it has to leave the device. Cuts nodes; saves nothing."""

from __future__ import annotations

from stepwell.base.ids import Kind, Tier
from stepwell.tiers.state import CacheState
from stepwell.tree.node import Run

SAVED_AT_ONCE = 1 / 32  # of the device at least: small copies cost more than a little repetition
LEAST_PAGES = 8


def cut_end(state: CacheState, run: Run, wanted: int) -> Run:
    """The end of a device run that is to be saved now: what is wanted, and some more. Until the rest has to leave too, a copy of
    it would only repeat it. Not cut where somebody uses its beginning, and knows it as it is.
    """
    node, host, arena = run.node, run.node.runs[Tier.HOST], state.arena(Tier.DEVICE)
    layout, is_used = arena.layout, bool(arena.refs[Kind.PREFIX][run.ids[0]] > 1)
    most = max(wanted, int(SAVED_AT_ONCE * layout.size_bytes) // layout.prefix_stride, LEAST_PAGES)
    missing = node.num_pages - (host.num_pages if host is not None else 0)
    if is_used or run.num_pages < node.num_pages or missing <= most + most // 4:
        return run
    state.tree.split(node, node.num_pages - most)
    end = node.runs[Tier.DEVICE]
    assert end is not None, f"{node} has no pages left where {run} had some"
    state.tree.ranking.take_out(end)
    return end
