"""Copies of device pages and checkpoints to the host, parents before children.

Determines what the host lacks, allocates exactly that, and starts the copy. If the host has no space, nothing is saved and the
skip is counted; that is never an error. Content evicted from the device is saved only if it is more valuable than what the host
would evict for it.
"""

from __future__ import annotations

from collections.abc import Callable
from enum import Enum

import numpy as np

from stepwell.base.errors import NoRoom
from stepwell.base.ids import Kind, Tier
from stepwell.base.tasks import NO_PAGES, Copy, PageIds, Purpose, Span
from stepwell.memory.arena import READY, Need
from stepwell.tiers.eviction import allocate
from stepwell.tiers.state import CacheState, Leaving
from stepwell.tree.checkpoints import add_residency, is_superseded, residency_arrived
from stepwell.tree.node import ABSENT, Node, Residency, Run, Victim, previous_checkpoint


class Save(Enum):
    """The result of an attempt to save something."""

    STARTED = "a copy is running"
    WAITING = "space on the host is being freed"
    SKIPPED = "there is nothing to save, or no space for it"


def save_path(state: CacheState, node: Node, *, evict: bool = True) -> None:
    """Saves every device page from the root to `node`, and the checkpoints on the way, that the host lacks.

    Without `evict`, stops where something would have to be evicted from the host.
    """
    save_runs(state, node, evict=evict)
    for each in node.path():
        host = each.runs[Tier.HOST]
        if host is None:
            return
        for checkpoint in list((each.checkpoints or {}).values()):
            residency = checkpoint.ready_in(Tier.DEVICE)
            if residency is None or checkpoint.residencies[Tier.HOST] is not None:
                continue
            if (host.ids[: checkpoint.page - each.start] != ABSENT).all():  # it is useless without the pages it depends on
                save_residency(state, residency, evict=evict)
        if host.num_pages < each.num_pages:
            return


def save_committed(state: CacheState, node: Node) -> None:
    """Saves a committed path if the write policy saves on commit, or is exclusive and the host has free memory for it."""
    write, below = state.config.write, state.below
    is_durable = below is not None and below.is_durable
    at_once = write.saves_on_commit or (is_durable and not write.is_exclusive)
    if at_once or write.is_exclusive:
        save_path(state, node, evict=at_once)
    if below is not None and is_durable:
        below.offer(node)


def write_back(state: CacheState, victim: Victim) -> Leaving:
    """Before something leaves the device: starts saving it if the host lacks it and has nothing less valuable to evict for it."""
    if isinstance(victim, Residency):
        if not victim.ready or victim.users or victim.checkpoint.residencies[Tier.HOST] is not None:
            return Leaving.NOW
    else:
        tail = state.tree.ranking.suffixes.of(victim)
        if tail is None or not len(missing_pages(state, victim.node)):
            return Leaving.NOW
        if tail.unreachable and (state.below is None or not state.below.must_store(victim.node)):
            return Leaving.NOW
    if not state.arena(Tier.HOST).fits(_need(state, victim)) and not _is_worth_room(state, victim):
        state.counters.add("save_skipped_worth_less")
        return Leaving.NOW
    if isinstance(victim, Residency):
        save = save_residency(state, victim)
    else:
        save = save_runs(state, victim.node, whole_path=state.below is not None and state.below.takes_paths)
        victim.unsaved = save is Save.SKIPPED and state.tree.ranking.suffixes.is_required_by_other_tier(victim)
    if save is Save.STARTED:
        victim.leaving = True
        return Leaving.LATER
    return Leaving.BLOCKED if save is Save.WAITING else Leaving.NOW


def _is_worth_room(state: CacheState, victim: Victim) -> bool:
    """Whether the host should evict content for a victim of the device: its own content depends on it, or is less valuable.

    A checkpoint that a later one replaces is not worth it: it would leave a hole where pages are short. Above a store all
    others are saved: what the host evicts for them is stored.
    """
    if isinstance(victim, Residency) and is_superseded(victim.checkpoint, milestone_pages=0):
        return False
    if state.below is not None and (state.below.takes_paths or state.below.takes_late):
        return True
    ranking = state.tree.ranking
    return (isinstance(victim, Run) and ranking.suffixes.is_required_by_other_tier(victim)) or ranking.is_worth_more(
        victim, Tier.HOST
    )


def _need(state: CacheState, victim: Victim) -> Need:
    """The most that saving a victim would take."""
    if isinstance(victim, Residency):
        return _checkpoint_need(len(victim.windows), len(victim.points))
    return {Kind.PREFIX: len(missing_pages(state, victim.node))}


def _checkpoint_need(windows: int, points: int) -> Need:
    return {kind: count for kind, count in ((Kind.WINDOW, windows), (Kind.POINT, points)) if count}


def save_runs(
    state: CacheState, node: Node, *, evict: bool = True, whole_path: bool = True, beyond: Callable[[Node], int] | None = None
) -> Save:
    """Saves the pages of `node`, and of its ancestors unless `above` excludes them; in each node those after the first
    `beyond` pages.
    """
    if not state.has_both_tiers:
        return Save.SKIPPED
    if state.row_pages is not None and state.row_pages.num_backed:
        for each in node.path():
            _enter_backing(state, each)
    path = node.path() if whole_path else [node]
    pieces = [(each, missing) for each in path if len(missing := missing_pages(state, each))]
    if beyond is not None:
        pieces = [(each, after) for each, missing in pieces if len(after := missing[missing >= beyond(each)])]
    if not pieces:
        return Save.SKIPPED
    need = {Kind.PREFIX: sum(len(missing) for _, missing in pieces)}
    fits = state.arena(Tier.HOST).fits(need)
    if not fits and not evict:
        return Save.SKIPPED
    above = _host_pages(node) if not fits else NO_PAGES
    state.arena(Tier.HOST).retain(Kind.PREFIX, above)  # must not be evicted for their own successors
    try:
        ids = allocate(state, Tier.HOST, need, tenant=node.account.tenant)[Kind.PREFIX]
    except NoRoom as refusal:
        return _no_room(state, refusal)
    finally:
        state.tree.release(Tier.HOST, Kind.PREFIX, above)
    source, start = [NO_PAGES], 0
    runs: list[Run] = []
    for each, missing in pieces:
        device = each.runs[Tier.DEVICE]
        assert device is not None
        placed = np.full(each.num_pages, ABSENT, np.int32)
        placed[missing] = ids[start : start + len(missing)]
        start += len(missing)
        state.tree.attach(each, Tier.HOST, placed)
        source.append(device.ids[missing])
        runs.append(device)
    state.copies.copy(Purpose.SAVE, _page_copies(state, np.concatenate(source), ids), saves=tuple(runs))
    state.tree.release(Tier.HOST, Kind.PREFIX, ids)
    return Save.STARTED


def _no_room(state: CacheState, refusal: NoRoom) -> Save:
    if refusal.waiting and state.write_back is not None:
        return Save.WAITING
    state.counters.add("save_skipped_no_room")
    return Save.SKIPPED


def _enter_backing(state: CacheState, node: Node) -> None:
    """Returns host pages that hold the rows of a node's pages to the tree, if it had released them."""
    device, host = node.runs[Tier.DEVICE], node.runs[Tier.HOST]
    if device is None or state.row_pages is None or (host is not None and host.num_pages == node.num_pages):
        return
    ready = (device.ids != ABSENT) & (state.arena(Tier.DEVICE).state[Kind.PREFIX][device.ids] == READY)
    backing = np.where(ready, state.row_pages.host[device.ids], ABSENT)
    if (backing != ABSENT).any():
        state.tree.attach(node, Tier.HOST, backing)


def _page_copies(state: CacheState, pages: PageIds, host: PageIds) -> list[Copy]:
    """Device pages to host pages; if rows are pages of their own, those too."""
    target = Span(tier=Tier.HOST, kind=Kind.PREFIX, ids=host)
    copies = [Copy(source=Span(tier=Tier.DEVICE, kind=Kind.PREFIX, ids=pages), target=target)]
    if state.row_pages is not None:
        copies.append(Copy(source=Span(tier=Tier.DEVICE, kind=Kind.ROWS, ids=state.row_pages.rows[pages]), target=target))
    return copies


def save_residency(state: CacheState, residency: Residency, *, evict: bool = True) -> Save:
    """Saves one checkpoint. Window pages that the host has already are shared."""
    if not state.has_both_tiers:
        return Save.SKIPPED
    checkpoint = residency.checkpoint
    node = checkpoint.node
    assert node is not None
    shared = _shared_windows(state, node, checkpoint.page)
    span = state.spec.window_span(checkpoint.page * state.spec.page_tokens)
    fresh = [index for index, at in enumerate(span) if at not in shared]
    need = _checkpoint_need(len(fresh), len(residency.points))
    if not evict and not state.arena(Tier.HOST).fits(need):
        return Save.SKIPPED
    state.arena(Tier.HOST).retain(Kind.WINDOW, _array(shared.values())) if shared else None
    state.tree.pin(residency)  # freeing space for its copy must not evict it
    pages, outcome = None, Save.SKIPPED
    try:
        pages = allocate(state, Tier.HOST, need, tenant=node.account.tenant)
    except NoRoom as refusal:
        outcome = _no_room(state, refusal)
    finally:
        state.tree.unpin(residency)
    if pages is None or checkpoint.node is None:
        _give_back(state, shared, pages or {})
        return outcome
    _start_save(state, residency, span, shared, fresh, pages)
    return Save.STARTED


def _start_save(
    state: CacheState, residency: Residency, span: range, shared: dict[int, int], fresh: list[int], pages: dict[Kind, PageIds]
) -> None:
    windows = pages.get(Kind.WINDOW, NO_PAGES)
    points = pages.get(Kind.POINT, NO_PAGES)
    placed = dict(zip((span[index] for index in fresh), windows.tolist(), strict=True)) | shared
    checkpoint = residency.checkpoint
    assert checkpoint.node is not None
    target = add_residency(
        state.tree,
        checkpoint.node,
        checkpoint.page,
        Tier.HOST,
        windows=_array(placed[at] for at in span),
        points=points,
        ready=False,
        now=checkpoint.used_at,
    )
    assert target is not None, "a checkpoint was saved twice"
    copies = [
        Copy(
            source=Span(tier=Tier.DEVICE, kind=Kind.WINDOW, ids=residency.windows[fresh]),
            target=Span(tier=Tier.HOST, kind=Kind.WINDOW, ids=windows),
        ),
        Copy(
            source=Span(tier=Tier.DEVICE, kind=Kind.POINT, ids=residency.points),
            target=Span(tier=Tier.HOST, kind=Kind.POINT, ids=points),
        ),
    ]
    if state.copies.copy(Purpose.SAVE, copies, reads=(residency,), writes=target) is None:
        residency_arrived(state.tree, target)  # all of its pages were there already
    _give_back(state, shared, {Kind.WINDOW: windows})


def _give_back(state: CacheState, shared: dict[int, int], pages: dict[Kind, PageIds]) -> None:
    """Releases the references that kept pages alive until the tree and the copy had theirs."""
    arena = state.arena(Tier.HOST)
    if shared:
        arena.release(Kind.WINDOW, _array(shared.values()))
    for kind, ids in pages.items():
        arena.release(kind, ids)


def _shared_windows(state: CacheState, node: Node, page: int) -> dict[int, int]:
    """Host window pages, by index on the path, that the previous checkpoint already has."""
    spec = state.spec
    before = previous_checkpoint(node, page)
    residency = before.ready_in(Tier.HOST) if before is not None else None
    if before is None or residency is None or not len(residency.windows):
        return {}
    theirs = dict(zip(spec.window_span(before.page * spec.page_tokens), residency.windows.tolist(), strict=True))
    return {at: theirs[at] for at in spec.window_span(page * spec.page_tokens) if at in theirs}


def _host_pages(node: Node) -> PageIds:
    """Every host page from the root to `node`."""
    runs = [each.runs[Tier.HOST] for each in node.path()]
    ids: PageIds = np.concatenate([NO_PAGES, *(run.ids for run in runs if run is not None)])
    return np.asarray(ids[ids != ABSENT])


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


def _array(ids: object) -> PageIds:
    return np.fromiter(ids, np.int32)  # type: ignore[call-overload, no-any-return]
