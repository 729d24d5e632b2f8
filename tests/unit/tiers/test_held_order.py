"""Evictions while the time of a tier's order is frozen: the same victims, in the same order, as if it was found anew for each."""

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
from stepwell.tree.tree import Tree
from toys import ALL_MODELS, EVICTIONS, FULL, FULL_POINT, PAGE, SMALL_PAGES, Rig, text


class Played:
    """A cache after some random requests, a few still running. What was left of the device is taken, slab by slab."""

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

    def num_evicted(self) -> int:
        counters = self.rig.state.counters
        return counters["evicted_device_pages"] + counters["evicted_device_checkpoints"]

    def next_need(self) -> Need:
        """More prefix pages than there is space for now, and at times checkpoints too."""
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
            (tier, kind, *(each[kind].tolist() for each in (arena.refs, arena.tree_refs, arena.state)))
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
        (page, [_name(held) if held else None for held in each.residencies], each.follower.page if each.follower else None)
        for page, each in (node.checkpoints or {}).items()
    ]
    past = [(page, visit.at_s) for page, visit in tree.past.of(node).items()]
    lost = [dict(notes.of(node)) for notes in (tree.lost, tree.lost_checkpoints)]
    return node.start, node.num_pages, node.first, node.rest, runs, kids, checkpoints, lost, past, node.account.used_bytes


def same_either_way(monkeypatch: pytest.MonkeyPatch, model: str, seeds: int, **options: Any) -> int:
    """Asserts that making space evicts the same, in an order that is held and in one that is found anew for each victim.
    Returns the most that one call evicted.
    """
    most = 0
    for seed in range(seeds):
        held, anew = (Played(ALL_MODELS[model], seed, **options) for _ in range(2))
        monkeypatch.setattr(anew.rig.tree.ranking, "freeze_time", lambda _: False)
        assert held.everything() == anew.everything()
        for turn in range(10):
            need = held.next_need() if turn < 9 else {Kind.PREFIX: 1600}  # at last everything that is idle
            assert turn == 9 or need == anew.next_need()
            before = held.num_evicted()
            assert held.asks(need) == anew.asks(need)
            most = max(most, held.num_evicted() - before)
            assert held.told() == anew.told()
            assert held.everything() == anew.everything()
            audit(held.rig.tree)
            held.rig.state.arena(Tier.DEVICE).audit()
            if turn % 3 == 2:
                for each in (held, anew):
                    each.rig.settle()  # what was to be saved first has been
        for each in (held, anew):
            for lease in each.leases:
                each.rig.cache.release(lease)
            each.rig.tree.release_all(Span(tier=Tier.DEVICE, kind=kind, ids=ids) for kind, ids in each.taken.items())
            each.rig.idle_check()
    return most


@pytest.mark.parametrize("listens", [False, True], ids=["unheard", "heard"])
@pytest.mark.parametrize("lru", [False, True], ids=["value", "lru"])
@pytest.mark.parametrize("host_pages", [None, 200], ids=["device", "device and host"])
@pytest.mark.parametrize("model", sorted(ALL_MODELS))
def test_a_held_order_is_as_one_found_anew(
    monkeypatch: pytest.MonkeyPatch, model: str, host_pages: int | None, lru: bool, listens: bool
) -> None:  # fmt: skip
    assert same_either_way(monkeypatch, model, 4, host_pages=host_pages, lru=lru, listens=listens) > 10


@pytest.mark.parametrize("host_pages", [200, 2400], ids=["small host", "large host"])
@pytest.mark.parametrize("model", sorted(ALL_MODELS))
def test_the_same_where_some_is_saved_first(
    monkeypatch: pytest.MonkeyPatch, model: str, host_pages: int
) -> None:  # fmt: skip
    assert same_either_way(monkeypatch, model, 3, host_pages=host_pages, write=WritePolicy.EXCLUSIVE, listens=True) > 10


def test_no_more_leave_than_are_needed_once_a_slab_empties() -> None:
    """Points leave with the pages below them, and their slabs are memory for pages too."""
    rig = Rig(FULL_POINT, device_pages=1600)
    for name in range(60):
        rig.clock.advance(1.0)
        rig.serve_without_audit(text(name, PAGE + 1))
    arena = rig.state.arena(Tier.DEVICE)
    arena.alloc({Kind.PREFIX: next(count for count in range(1600, -1, -1) if arena.fits({Kind.PREFIX: count}))})
    before = rig.used(Tier.DEVICE, Kind.PREFIX)
    assert eviction.make_room(rig.state, Tier.DEVICE, {Kind.PREFIX: 40}).fits
    assert before - rig.used(Tier.DEVICE, Kind.PREFIX) <= 26, "slabs of points were not counted"


def test_what_a_request_holds_stays_while_others_are_evicted() -> None:
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
