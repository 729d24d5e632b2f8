"""Victims that leave a tier together: the same ones as one by one, in the same order, and the cache is the same afterwards."""

from __future__ import annotations

from random import Random
from typing import Any

import pytest

from stepwell import Kind, Lease, ModelSpec, Tier, WritePolicy
from stepwell.base.tasks import Span
from stepwell.memory.arena import Need
from stepwell.tiers import eviction
from stepwell.tree.audit import audit
from stepwell.tree.node import Loss, LossReason, Node, Residency, Victim
from stepwell.tree.pruning import discard_ids
from stepwell.tree.together import Gone
from stepwell.tree.tree import Tree
from toys import ALL_MODELS, EVICTIONS, FULL, FULL_POINT, FULL_WINDOW, PAGE, SMALL_PAGES, Rig, text


class Played:
    """A cache after some random requests, a few of which still run. What was left of the device is taken, slab by slab."""

    def __init__(
        self, spec: ModelSpec, seed: int, *, host_pages: int | None = None, lru: bool = False, listens: bool = False,
        write: WritePolicy = WritePolicy.THROUGH,
    ) -> None:  # fmt: skip
        self.random = Random(seed)
        tuning = SMALL_PAGES if not lru else type(SMALL_PAGES)(page_alignment_bytes=16, eviction=EVICTIONS["lru"])
        self.rig = Rig(spec, device_pages=1600, host_pages=host_pages, tuning=tuning, write=write)
        self.feed = self.rig.cache.listen() if listens else None
        self.leases: list[Lease] = []
        served: list[list[int]] = []
        families = [text(name, PAGE * self.random.randrange(1, 9)) for name in range(4)]
        for name in range(10, 34):
            self.rig.clock.advance(self.random.choice((0.0, 1.0, 30.0)))
            tokens = self.random.choice(families) + text(name, self.random.randrange(1, 5 * PAGE))
            priority = self.random.choice((0, 0, 0, 2))
            if name % 8 == 7:
                self.leases.append(self.rig.ready([*self.random.choice(served), 1]))
            else:
                self.rig.serve_without_audit(tokens, priority=priority)
                served.append(tokens)
            if name % 5 == 0:
                families.append(tokens)
        self.taken = self.rig.state.arena(Tier.DEVICE).alloc({Kind.PREFIX: self.num_free()})

    def num_free(self) -> int:
        arena = self.rig.state.arena(Tier.DEVICE)
        return next(count for count in range(1600, -1, -1) if arena.fits({Kind.PREFIX: count}))

    def asks(self, need: Need) -> eviction.Room:
        return eviction.make_room(self.rig.state, Tier.DEVICE, need)

    def next_need(self) -> Need:
        """Room for some more prefix pages than there is now, and at times for checkpoints too."""
        arena = self.rig.state.arena(Tier.DEVICE)
        need = {Kind.PREFIX: self.num_free() + 1 + self.random.randrange(self.random.choice((2, 12, 60)))}
        others = [kind for kind in arena.layout.strides if kind is not Kind.PREFIX]
        if others and self.random.random() < 0.3:
            need[self.random.choice(others)] = self.random.randrange(1, 12)
        return need

    def told(self) -> list[Any]:
        return self.feed.take() if self.feed is not None else []

    def everything(self) -> dict[str, Any]:
        state = self.rig.state
        arrays = [
            (tier, kind, *(each[kind].tolist() for each in (arena.refs, arena.kept, arena.state)))
            for tier, arena in state.tree.arenas.items()
            for kind in arena.layout.strides
        ]
        leaving = {tier: [_name(each) for each in eviction.next_to_leave(state, tier, 1 << 40)] for tier in state.tree.tiers}
        counts = {name: count for name, count in state.counters.snapshot().items() if name.startswith("evicted")}
        nodes = [_told(state.tree, node) for node in state.tree.nodes()]
        return {"nodes": nodes, "arenas": arrays, "next to leave": leaving, "counters": counts}


def _name(victim: Victim) -> tuple[object, ...]:
    if isinstance(victim, Residency):
        return "checkpoint", victim.checkpoint.page, victim.windows.tolist(), victim.points.tolist(), victim.standing
    return "run", victim.node.start, victim.ids.tolist(), victim.standing


def _told(tree: Tree, node: Node) -> tuple[object, ...]:
    runs = [(run.ids.tolist(), run.num_pages, run.num_ready, bool(run.entry)) if run else None for run in node.runs]
    kids = (node.kids.below, node.kids.anchored, list(node.kids.by_page)) if node.kids else None
    checkpoints = [
        (page, [_name(held) if held else None for held in each.held], each.follower.page if each.follower else None)
        for page, each in (node.checkpoints or {}).items()
    ]
    past = [(page, visit.at_s) for page, visit in tree.past.of(node).items()]
    lost = [dict(notes.of(node)) for notes in (tree.lost, tree.lost_checkpoints)]
    return node.start, node.num_pages, node.first, node.rest, runs, kids, checkpoints, lost, past, node.account.used_bytes


def same_either_way(monkeypatch: pytest.MonkeyPatch, model: str, seeds: int, **options: Any) -> list[Gone]:
    """Asserts that what makes room leaves the same behind with victims that leave together and one by one; what left together."""
    taken: list[Gone] = []
    leave_together, may_leave_together = eviction.leave_together, eviction.may_leave_together

    def watched(*args: Any, **options: Any) -> Gone:
        taken.append(leave_together(*args, **options))
        return taken[-1]

    monkeypatch.setattr(eviction, "leave_together", watched)
    for seed in range(seeds):
        together, alone = (Played(ALL_MODELS[model], seed, **options) for _ in range(2))
        monkeypatch.setattr(alone.rig.tree.ranking, "hold", lambda _: False)  # its order is found anew for each victim
        assert together.everything() == alone.everything()
        for turn in range(10):
            need = together.next_need() if turn < 9 else {Kind.PREFIX: 1600}  # at last everything that is idle
            assert turn == 9 or need == alone.next_need()
            rooms = []
            for each, may in ((together, may_leave_together), (alone, lambda *_: False)):
                monkeypatch.setattr(eviction, "may_leave_together", may)
                rooms.append(each.asks(need))
            assert rooms[0] == rooms[1]
            assert together.told() == alone.told()
            assert together.everything() == alone.everything()
            audit(together.rig.tree)
            together.rig.state.arena(Tier.DEVICE).audit()
            if turn % 3 == 2:
                for each in (together, alone):
                    each.rig.settle()  # what was to be saved first has been
        for each in (together, alone):
            for lease in each.leases:
                each.rig.cache.release(lease)
            each.rig.tree.release_all(Span(tier=Tier.DEVICE, kind=kind, ids=ids) for kind, ids in each.taken.items())
            each.rig.idle_check()
    return taken


@pytest.mark.parametrize("listens", [False, True], ids=["unheard", "heard"])
@pytest.mark.parametrize("lru", [False, True], ids=["value", "lru"])
@pytest.mark.parametrize("host_pages", [None, 200], ids=["device", "device and host"])
@pytest.mark.parametrize("model", sorted(ALL_MODELS))
def test_together_is_as_one_by_one(
    monkeypatch: pytest.MonkeyPatch, model: str, host_pages: int | None, lru: bool, listens: bool
) -> None:  # fmt: skip
    taken = same_either_way(monkeypatch, model, 4, host_pages=host_pages, lru=lru, listens=listens)
    most = max(gone.num_pages + gone.num_checkpoints for gone in taken)
    assert most >= (6 if model == "full" else 2), "many never left together"


@pytest.mark.parametrize("host_pages", [200, 2400], ids=["small host", "large host"])
@pytest.mark.parametrize("write", [WritePolicy.ADAPTIVE, WritePolicy.BACK], ids=["adaptive", "back"])
@pytest.mark.parametrize("model", sorted(ALL_MODELS))
def test_what_the_host_has_leaves_together_where_the_rest_is_saved_first(
    monkeypatch: pytest.MonkeyPatch, model: str, write: WritePolicy, host_pages: int
) -> None:  # fmt: skip
    taken = same_either_way(monkeypatch, model, 3, host_pages=host_pages, write=write, listens=True)
    most = max((gone.num_pages + gone.num_checkpoints for gone in taken), default=0)
    if write is WritePolicy.ADAPTIVE and host_pages == 2400:  # what was committed is on the host too, if it had room
        assert most >= (6 if model == "full" else 2), "many never left together"


@pytest.mark.parametrize("together", [False, True], ids=["one by one", "together"])
def test_no_more_leave_than_are_needed_once_a_slab_empties(monkeypatch: pytest.MonkeyPatch, together: bool) -> None:
    """Points leave with the pages below them, and their slabs are room for pages too."""
    if not together:
        monkeypatch.setattr(eviction, "may_leave_together", lambda *_: False)
    rig = Rig(FULL_POINT, device_pages=1600)
    for name in range(60):
        rig.clock.advance(1.0)
        rig.serve_without_audit(text(name, PAGE + 1))
    arena = rig.state.arena(Tier.DEVICE)
    arena.alloc({Kind.PREFIX: next(count for count in range(1600, -1, -1) if arena.fits({Kind.PREFIX: count}))})
    before = rig.used(Tier.DEVICE, Kind.PREFIX)
    assert eviction.make_room(rig.state, Tier.DEVICE, {Kind.PREFIX: 40}).fits
    assert before - rig.used(Tier.DEVICE, Kind.PREFIX) <= 26, "slabs of points were not counted"


def test_pages_behind_the_last_checkpoint_leave_with_it_and_are_not_queued(monkeypatch: pytest.MonkeyPatch) -> None:
    rig = Rig(FULL_POINT, device_pages=1600)
    for name in range(60):
        rig.clock.advance(1.0)
        rig.serve_without_audit(text(name, PAGE + 1))
    arena, ranking, queued, calls = rig.state.arena(Tier.DEVICE), rig.tree.ranking, [], []
    arena.alloc({Kind.PREFIX: next(count for count in range(1600, -1, -1) if arena.fits({Kind.PREFIX: count}))})
    push, leave_together = ranking._push, eviction.leave_together
    monkeypatch.setattr(ranking, "_push", lambda victim, standing: queued.append(victim) or push(victim, standing))
    monkeypatch.setattr(eviction, "leave_together", lambda *args, **options: calls.append(1) or leave_together(*args, **options))
    assert eviction.make_room(rig.state, Tier.DEVICE, {Kind.PREFIX: 40}).fits
    assert len(queued) <= 1, "runs were queued only to be taken out next"  # those behind the last may stay, and are then
    assert len(calls) == 1, "slabs of points that emptied were counted, so that nothing had to be looked at anew"
    audit(rig.tree)
    arena.audit()


def test_what_a_request_holds_stays_among_those_that_leave() -> None:
    rig = Rig(FULL, device_pages=256)
    rig.serve(text(1, 2 * PAGE + 1))
    with rig.ready(text(1, 2 * PAGE + 1)) as lease:
        for name in range(2, 12):
            rig.clock.advance(1.0)
            rig.serve_without_audit(text(name, 2 * PAGE + 1))
        run = next(node.runs[Tier.DEVICE] for node in rig.tree.nodes() if node.runs[Tier.DEVICE])
        assert run.entry, "it is no candidate, so this shows nothing"
        assert not eviction.make_room(rig.state, Tier.DEVICE, {Kind.PREFIX: 256}).fits
        assert rig.restore(text(1, 2 * PAGE + 1)) == 2 * PAGE
        rig.engine.check(lease)
    rig.idle_check()


def test_many_leaves_are_one_call_to_the_arena(monkeypatch: pytest.MonkeyPatch) -> None:
    rig = Rig(FULL, device_pages=256)
    for name in range(20):
        rig.serve_without_audit(text(1, 4 * PAGE) + text(10 + name, 2 * PAGE + 1))
    arena, calls = rig.state.arena(Tier.DEVICE), []
    drop = arena.drop
    monkeypatch.setattr(arena, "drop", lambda kind, ids: calls.append(len(ids)) or drop(kind, ids))
    free = 256 - rig.used(Tier.DEVICE, Kind.PREFIX)
    assert eviction.make_room(rig.state, Tier.DEVICE, {Kind.PREFIX: free + 30}).fits
    assert calls == [30]
    rig.cache.audit()


def test_windows_of_many_checkpoints_are_one_call_to_the_arena(monkeypatch: pytest.MonkeyPatch) -> None:
    """Neighbours share window pages: each is given back with the last that has it, and all at once."""
    rig = Rig(FULL_WINDOW, device_pages=1600)
    for name in range(40):
        rig.clock.advance(1.0)
        rig.serve_without_audit(text(1, 4 * PAGE) + text(10 + name, 2 * PAGE + 1))
    arena, calls, rounds = rig.state.arena(Tier.DEVICE), [], []
    arena.alloc({Kind.PREFIX: next(count for count in range(1600, -1, -1) if arena.fits({Kind.PREFIX: count}))})
    drop, drop_repeated, leave_together = arena.drop, arena.drop_repeated, eviction.leave_together
    monkeypatch.setattr(arena, "drop", lambda kind, ids: calls.append(kind) or drop(kind, ids))
    monkeypatch.setattr(arena, "drop_repeated", lambda kind, ids: calls.append(kind) or drop_repeated(kind, ids))
    monkeypatch.setattr(eviction, "leave_together", lambda *args, **options: rounds.append(1) or leave_together(*args, **options))
    assert eviction.make_room(rig.state, Tier.DEVICE, {Kind.PREFIX: 60}).fits
    left = rig.state.counters["evicted_device_checkpoints"]
    assert left > 4 and calls.count(Kind.WINDOW) <= len(rounds) < left, (left, calls, rounds)
    audit(rig.tree)
    arena.audit()


def test_a_checkpoint_that_the_host_has_without_its_pages_stays_when_it_leaves_the_device() -> None:
    """As one that was fetched alone, its pages being on the device."""
    rig = Rig(FULL_POINT, device_pages=256, host_pages=256)
    for name in range(6):
        rig.clock.advance(1.0)
        rig.serve_without_audit(text(1, 2 * PAGE) + text(10 + name, 2 * PAGE + 1))
    leaves = [node for node in rig.tree.nodes() if node.parent is not None and node.kids is None]
    for node in leaves:
        run = node.runs[Tier.HOST]
        assert run is not None and node.checkpoints
        discard_ids(rig.tree, Tier.HOST, run.ids.copy(), Loss(0.0, LossReason.FAILED, Tier.HOST))
    assert all(node.runs[Tier.HOST] is None and node.checkpoints for node in leaves), "this shows nothing"
    free = 1 + next(count for count in range(256, -1, -1) if rig.state.arena(Tier.DEVICE).fits({Kind.PREFIX: count}))
    eviction.make_room(rig.state, Tier.DEVICE, {Kind.PREFIX: free + 7})
    assert rig.state.counters["evicted_device_checkpoints"]
    rig.cache.audit()
