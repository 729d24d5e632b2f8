"""What the reuse model learns when a request comes: whose pages it came back to, and where it left them."""

from __future__ import annotations

from dataclasses import replace

import pytest

from stepwell import ModelSpec, NoRoom, Tier
from stepwell.policy.value import Visit
from stepwell.sim.policies import LeastRecent
from stepwell.tree.node import Node
from toys import EVICTIONS, FULL, HYBRID, PAGE, SMALL_PAGES, Rig, text


def _path(rig: Rig, tokens: list[int]) -> list[Node]:
    return list(rig.cache.lookup(tokens).path)


def _visit(node: Node) -> Visit:
    assert node.visit is not None
    return node.visit


def _watched(rig: Rig) -> list[tuple[int, int]]:
    """Pages that wait under each visit, and how often its path had come back."""
    assert rig.state.reuse is not None
    return [(visit.pages, visit.returns) for visit in rig.state.reuse._waiting]


def _later(rig: Rig, tokens: list[int], seconds: float = 10.0) -> None:
    rig.clock.advance(seconds)
    rig.serve(tokens)


def test_a_prompt_that_goes_on_comes_back_as_a_whole() -> None:
    rig = Rig(FULL)
    turn = text(1, 17)
    rig.serve(turn)
    _later(rig, [*turn[:16], *text(2, 17)])
    (node,) = _path(rig, [*turn[:16], *text(2, 17)])
    assert (_visit(node).returns, _visit(node).gap_s, _visit(node).end) == (1, 10.0, 8)
    assert _watched(rig) == [(0, 0), (8, 1)]


def test_a_request_that_leaves_inside_a_node_cuts_it_there() -> None:
    rig = Rig(FULL)
    prompt, branch = text(1, 33), [*text(1, 12), *text(2, 9)]
    rig.serve(prompt)
    _later(rig, branch)
    shared, rest = _path(rig, prompt)
    assert (shared.end, rest.start) == (3, 3)
    assert (_visit(shared).returns, _visit(rest).returns, _visit(_path(rig, branch)[1]).returns) == (1, 0, 0)
    assert _watched(rig) == [(5, 0), (3, 1), (2, 0)], "a path without a return still waits"


def test_a_lease_that_computes_nothing_has_still_come_back() -> None:
    rig = Rig(FULL)
    rig.serve(text(1, 17))
    rig.clock.advance(5.0)
    rig.cache.release(rig.ready(text(1, 17)))
    assert _visit(_path(rig, text(1, 17))[0]).returns == 1
    rig.idle_check()


def test_a_lookup_and_a_request_without_room_tell_nothing() -> None:
    rig = Rig(FULL, device_pages=16)
    rig.serve(text(1, 17))
    before = _watched(rig)
    rig.cache.lookup(text(1, 17))
    with pytest.raises(NoRoom):
        rig.open([*text(1, 16), *text(2, 40 * PAGE)])
    assert _watched(rig) == before and _visit(_path(rig, text(1, 17))[0]).returns == 0


def test_least_recent_notes_nothing_and_cuts_nothing() -> None:
    rig = Rig(FULL, tuning=replace(SMALL_PAGES, eviction=LeastRecent()))
    rig.serve(text(1, 33))
    lease = rig.ready([*text(1, 12), *text(2, 9)])
    assert rig.state.reuse is None and lease.visit is None
    rig.cache.release(lease)
    rig.evict_all(Tier.DEVICE)
    assert all(node.visit is None for node in rig.tree.nodes()) and not len(rig.tree.past)


@pytest.mark.parametrize("kept_pages", [0, 3])
def test_a_path_that_was_evicted_goes_on_with_its_returns_and_rhythm(kept_pages: int) -> None:
    rig = Rig(FULL)
    prompt = text(1, 33)
    rig.serve(prompt)
    for _ in range(2):
        _later(rig, prompt)
    lease = rig.ready(prompt[: kept_pages * PAGE + 1]) if kept_pages else None
    rig.evict_idle(Tier.DEVICE) if lease else rig.evict_all(Tier.DEVICE)
    if lease is not None:
        rig.cache.release(lease)
    assert rig.cache.lookup(prompt).known_tokens == kept_pages * PAGE
    _later(rig, prompt)
    returned = _visit(_path(rig, prompt)[-1])
    assert returned.returns >= 3 and returned.gap_s == pytest.approx(10.0)


def test_a_stranger_after_a_leaf_that_lost_its_branches_is_new() -> None:
    """A system prompt whose conversations were all evicted is a leaf, but not the end of a request."""
    rig = Rig(FULL)
    system = text(1, 16)
    for name in (2, 3):
        rig.serve([*system, *text(name, 17)])
    holder = rig.ready([*system, 5])
    rig.evict_idle(Tier.DEVICE)
    _later(rig, [*system, *text(9, 17)])
    shared, fresh = _path(rig, [*system, *text(9, 17)])
    assert _visit(shared).returns > 0 and _visit(fresh).returns == 0
    rig.cache.release(holder)


def test_fetched_or_found_pages_without_a_visit_are_taken_over() -> None:
    rig = Rig(FULL)
    rig.serve(text(1, 17))
    node = _path(rig, text(1, 17))[0]
    node.visit = None
    _later(rig, text(1, 17))
    assert _visit(node).returns == 0 and _visit(node).at_s == 10.0


@pytest.mark.parametrize("spec", [FULL, HYBRID])
def test_what_returns_outlives_what_never_did(spec: ModelSpec) -> None:
    """A prompt used every 14 s stays, although strangers that fill the tier meanwhile were used more lately; LRU loses it."""
    found = {}
    for policy, eviction in EVICTIONS.items():
        rig = Rig(spec, device_pages=96, tuning=replace(SMALL_PAGES, eviction=eviction))
        rig.serve(text(1, 33))
        restored = []
        for name in range(2, 200):
            rig.clock.advance(1.0)
            rig.serve_without_audit(text(name, 33))
            if name % 14 == 0:
                restored.append(rig.serve(text(1, 33)).device)
        found[policy] = restored[-8:]
    assert found == {"value": [32] * 8, "lru": [0] * 8}


def test_the_length_of_an_answer_is_noted_when_the_request_ends() -> None:
    rig = Rig(FULL)
    rig.serve(text(1, 17), answer=text(2, 300))
    rig.serve(text(3, 17), answer=text(4, 2))
    long, short = (_visit(_path(rig, tokens)[0]) for tokens in (text(1, 17), text(3, 17)))
    assert long.group != short.group == Visit(0.0, end=4).group


def test_who_branches_off_answers_for_what_it_came_back_to_as_well() -> None:
    rig = Rig(FULL)
    prompt, branch = text(1, 33), [*text(1, 12), *text(2, 9)]
    rig.serve(prompt)
    rig.clock.advance(10.0)
    rig.serve(branch, answer=text(5, 300))
    shared, rest = (_visit(node) for node in _path(rig, branch))
    quiet = Visit(0.0, end=1, returns=shared.returns, gap_s=shared.gap_s)
    assert shared is not rest and shared.group != quiet.group and rest.group != Visit(0.0, end=1).group
