"""The offline reference, on traces small enough to know what it should have done."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
from small_traces import BLOCK, ListTrace, branching, lru_resumed, request

from stepwell.base.errors import ConfigError
from stepwell.base.spec import ModelSpec
from stepwell.sim.ceiling import Ceiling
from stepwell.sim.clairvoyant import Leaving, foresee, working_set_bytes
from stepwell.sim.clairvoyant_tree import NEVER_S, next_passes_s, tree_of
from stepwell.sim.trace import TraceRequest
from toys import ALL_MODELS, FULL, FULL_POINT, OBJECT_BYTES

ENDLESS = 10**9


def resumed(requests: Sequence[TraceRequest], spec: ModelSpec, budget: int, leaving: Leaving = Leaving.SEEN) -> int:
    """Tokens, with a tier of so many toy objects."""
    return foresee(ListTrace(requests=requests), spec, budget_bytes=budget * OBJECT_BYTES, leaving=leaving).resumed_tokens


def ceiling(requests: Sequence[TraceRequest], spec: ModelSpec) -> int:
    endless = Ceiling(spec, BLOCK, whole_blocks=False)
    return sum(endless.reusable(each) for each in requests)


# ---- the tree -------------------------------------------------------------------------------------


def test_places_are_ends_and_branches():
    requests = [request(0, [1, 2, 3, 4]), request(1, [1, 2, 9]), request(2, [1, 2, 3, 4, 5]), request(3, [])]
    tree = tree_of(ListTrace(requests=requests), page_tokens=BLOCK)
    assert tree.num_pages == 6
    paths = [[int(tree.depth_P[place]) for place in path] for path in tree.paths()]
    assert paths == [[2, 4], [2, 3], [2, 4, 5], []]
    assert [[int(tree.pages_P[place]) for place in path] for path in tree.paths()] == [[2, 2], [2, 1], [2, 2, 1], []]
    assert next_passes_s(tree, tree.paths())[0].tolist() == [1.0, 2.0]
    assert next_passes_s(tree, tree.paths())[1].tolist() == [2.0, NEVER_S]


@pytest.mark.parametrize("page_tokens", [2, 4, 6, 8, 12])
@pytest.mark.parametrize("seed", range(4))
def test_tree_knows_each_prompts_pages_whatever_their_size(page_tokens: int, seed: int):
    requests = branching(40, seed=seed, tails=(1,))
    tree = tree_of(ListTrace(requests=requests), page_tokens=page_tokens)
    pages = {
        (*each.blocks.tolist()[: -(-end // BLOCK)], end)
        for each in requests
        for end in range(page_tokens, each.prompt_tokens, page_tokens)
    }
    assert tree.num_pages == len(pages)
    for each, path in zip(requests, tree.paths(), strict=True):
        assert sum(int(tree.pages_P[place]) for place in path) == (each.prompt_tokens - 1) // page_tokens


def test_working_set_counts_each_page_once():
    tree = tree_of(ListTrace(requests=[request(0, [1, 2]), request(1, [1, 2]), request(2, [1, 3])]), page_tokens=BLOCK)
    assert working_set_bytes(tree, FULL) == 3 * OBJECT_BYTES


# ---- the policy -----------------------------------------------------------------------------------


@pytest.mark.parametrize("spec", ALL_MODELS.values(), ids=ALL_MODELS)
@pytest.mark.parametrize("seed", range(6))
def test_endless_memory_meets_the_ceiling(spec: ModelSpec, seed: int):
    requests = branching(80, seed=seed)
    assert resumed(requests, spec, ENDLESS, Leaving.WANTED) == ceiling(requests, spec)


@pytest.mark.parametrize("spec", ALL_MODELS.values(), ids=ALL_MODELS)
@pytest.mark.parametrize("leaving", Leaving)
@pytest.mark.parametrize("seed", range(6))
def test_never_above_the_ceiling_and_within_its_bytes(spec: ModelSpec, leaving: Leaving, seed: int):
    requests = branching(80, seed=seed)
    found = [resumed(requests, spec, budget, leaving) for budget in (1, 3, 8, 20, 50, 120, ENDLESS)]  # each run audits itself
    assert max(found) <= ceiling(requests, spec)
    assert found[-1] == max(found)


@pytest.mark.parametrize("seed", range(6))
@pytest.mark.parametrize("capacity", [26, 40, 60])
def test_beats_lru_on_plain_attention(seed: int, capacity: int):
    requests = branching(120, seed=seed)
    assert resumed(requests, FULL, capacity) >= sum(lru_resumed(requests, capacity)) * BLOCK


def test_keeps_what_comes_again_and_drops_what_never_does():
    kept, passing = [1, 2, 3], [[10 * n, 10 * n + 1, 10 * n + 2] for n in range(1, 6)]
    requests = [request(0, kept), *(request(n, path) for n, path in enumerate(passing, 1)), request(9, kept)]
    assert resumed(requests, FULL, 6) == 3 * BLOCK  # LRU, with room for two prompts, has lost it by then
    assert sum(lru_resumed(requests, 7)) == 0
    assert resumed(requests, FULL_POINT, 8) == 3 * BLOCK
    assert resumed(requests, FULL_POINT, 7, Leaving.WANTED) == 3 * BLOCK  # leaves no checkpoint of the others
    assert resumed(requests, FULL_POINT, 6, Leaving.WANTED) == 0  # the others' pages need room while they are computed


def test_gives_up_the_checkpoint_that_saves_least_for_its_bytes():
    long, short = list(range(1, 9)), [20]
    requests = [request(0, long), request(1, short), request(2, [30]), request(103, short), request(104, long)]
    assert resumed(requests, FULL_POINT, 11) == 8 * BLOCK  # nine objects for the long one, two for another


def test_checkpoint_where_a_later_request_leaves_is_there_the_first_time():
    requests = [request(0, [1, 2, 3, 4]), request(1, [1, 2, 9])]
    assert resumed(requests, FULL_POINT, ENDLESS) == 0
    assert resumed(requests, FULL_POINT, ENDLESS, Leaving.WANTED) == 2 * BLOCK


def test_prompt_larger_than_the_tier_keeps_its_beginning():
    requests = [request(0, [1, 2, 3, 4]), request(1, [1, 2, 3, 4])]
    assert resumed(requests, FULL, 3) == 3 * BLOCK
    assert resumed(requests, FULL_POINT, 3) == 0


@pytest.mark.parametrize("seed", range(3))
def test_same_trace_gives_the_same_figures(seed: int):
    requests = branching(60, seed=seed)
    assert resumed(requests, FULL_POINT, 20) == resumed(requests, FULL_POINT, 20)


@pytest.mark.parametrize("spec", [FULL, FULL_POINT], ids=["full", "point"])
def test_prompts_of_one_page_reach_the_best_of_all_choices(spec: ModelSpec):
    """Then giving up the farthest next use is known to be the best, and all other ways can be tried out."""
    order = [1, 2, 3, 1, 4, 2, 3, 1, 2, 5, 4, 1, 2]
    requests = [request(n, [page]) for n, page in enumerate(order)]
    room = 2 if spec is FULL else 4
    assert resumed(requests, spec, room) == _best(order, 2) * BLOCK


def _best(order: Sequence[int], slots: int) -> int:
    """The most hits of any way to replace pages, where each must be brought in when it is asked for."""
    states: dict[frozenset[int], int] = {frozenset(): 0}
    for page in order:
        following: dict[frozenset[int], int] = {}
        for held, hits in states.items():
            if page in held:
                choices, hits = [held], hits + 1
            elif len(held) < slots:
                choices = [held | {page}]
            else:
                choices = [held - {gone} | {page} for gone in held]
            for each in choices:
                following[each] = max(hits, following.get(each, 0))
        states = following
    return max(states.values())


def test_no_bytes_are_refused():
    with pytest.raises(ConfigError, match="budget_bytes"):
        foresee(ListTrace(requests=[]), FULL, budget_bytes=0)
