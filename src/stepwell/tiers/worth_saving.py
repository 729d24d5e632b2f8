"""Whether what leaves the device has to go down to the host, and is worth its room there. Pure: saves nothing."""

from __future__ import annotations

import numpy as np

from stepwell.base.ids import Kind, Tier
from stepwell.base.tasks import NO_PAGES, PageIds
from stepwell.memory.arena import READY, Need
from stepwell.tiers.state import CacheState
from stepwell.tree.checkpoints import is_superseded
from stepwell.tree.node import ABSENT, Node, Residency, Run, Victim


def is_lost_without(state: CacheState, victim: Victim) -> bool:
    """Whether a candidate of the device has something that the host lacks, and that could be used."""
    if isinstance(victim, Residency):
        return victim.ready and not victim.users and victim.checkpoint.held[Tier.HOST] is None
    tail = state.tree.ranking.tails.of(victim)
    if tail is None or not len(missing_pages(state, victim.node)):
        return False
    return not tail.dead or (state.below is not None and state.below.owes(victim.node))


def is_worth_saving(state: CacheState, victim: Victim) -> bool:
    """Whether the host has free room for what leaves the device, or should make some."""
    return state.arena(Tier.HOST).fits(_need(state, victim)) or _is_worth_room(state, victim)


def _is_worth_room(state: CacheState, victim: Victim) -> bool:
    """Whether the host should give something up for what leaves the device: what it has stands on this, or is worth less.

    A checkpoint that a later one serves for is not worth it: it would leave a hole where pages are short. Above a store all
    others go down: what leaves the host for them is stored.
    """
    if isinstance(victim, Residency) and is_superseded(victim.checkpoint, milestone_pages=0):
        return False
    if state.below is not None and (state.below.takes_paths or state.below.takes_late):
        return True
    ranking = state.tree.ranking
    return (isinstance(victim, Run) and ranking.tails.is_stood_on(victim)) or ranking.is_worth_more(victim, Tier.HOST)


def _need(state: CacheState, victim: Victim) -> Need:
    """What saving something would take, at most."""
    if isinstance(victim, Residency):
        return checkpoint_need(len(victim.windows), len(victim.points))
    return {Kind.PREFIX: len(missing_pages(state, victim.node))}


def checkpoint_need(windows: int, points: int) -> Need:
    return {kind: count for kind, count in ((Kind.WINDOW, windows), (Kind.POINT, points)) if count}


def missing_pages(state: CacheState, node: Node) -> PageIds:
    """Indices of the node's pages that can be read on the device and are not on the host."""
    device, host = node.runs[Tier.DEVICE], node.runs[Tier.HOST]
    if device is None or (host is not None and host.num_pages == node.num_pages):
        return NO_PAGES
    page_states = state.arena(Tier.DEVICE).state[Kind.PREFIX]
    wanted = (device.ids != ABSENT) & (page_states[device.ids] == READY)
    if host is not None:
        wanted &= host.ids == ABSENT
    if state.row_pages is not None:
        wanted &= ~state.row_pages.backed(device.ids)  # their rows are on the host
    return np.flatnonzero(wanted).astype(np.int32)
