"""A router that follows the messages believes in what a lookup finds, through random lives of random caches."""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import replace
from random import Random

import pytest
from lives import SPILLING_VERBS, VERBS, play_one, random_prompt
from toy_models import Setup, make_setup, make_spec, make_spilling_setup
from traffic import Traffic
from world import World

from router_mirror import MirrorWatch
from stepwell import ModelSpec, Window

SEEDS = range(int(os.environ.get("STEPWELL_EXAMPLES", "8")))


def _live(setup: Setup, rng: Random, verbs: dict[str, float], steps: int = 100) -> MirrorWatch:
    world = World(setup)
    traffic = Traffic(world)
    for _ in range(4):  # before anybody listens
        traffic.serve(random_prompt(rng, traffic.page), 0)
    watch = MirrorWatch(world.cache)
    for verb in rng.choices(list(verbs), list(verbs.values()), k=steps):
        play_one(traffic, verb, rng)
        if rng.random() < 0.03:
            watch.lose()
        if rng.random() < 0.7:  # else several verbs come in one batch
            watch.check()
            for _ in range(3):
                watch.check_prompt(random_prompt(rng, traffic.page), rng.choice(setup.spaces))
    world.close()
    watch.check()
    assert not watch.translator.num_pages and not any(watch.mirror.blocks.values()), "something of an empty cache is kept"
    return watch


def _with_spec(rng: Random, fits: Callable[[ModelSpec], bool]) -> Setup:
    setup = make_setup(rng.choice)
    spec = setup.spec
    while not fits(spec):
        spec = make_spec(rng.choice)
    return replace(setup, spec=spec)


def _is_llama_shaped(spec: ModelSpec) -> bool:
    return not spec.needs_checkpoint


def _is_hybrid(spec: ModelSpec) -> bool:
    return spec.needs_checkpoint and spec.free_step is None


@pytest.mark.parametrize("seed", SEEDS)
def test_a_router_finds_what_lookups_find_where_prefix_pages_are_enough(seed: int) -> None:
    rng = Random(seed)
    _live(_with_spec(rng, _is_llama_shaped), rng, VERBS)


@pytest.mark.parametrize("seed", SEEDS)
def test_a_router_believes_in_pages_of_a_hybrid_up_to_its_restore_points(seed: int) -> None:
    rng = Random(seed)
    _live(_with_spec(rng, _is_hybrid), rng, VERBS)


@pytest.mark.parametrize("seed", SEEDS)
def test_a_router_believes_in_what_any_mix_of_states_can_resume_from(seed: int) -> None:
    rng = Random(seed)
    made = make_spilling_setup if seed % 3 == 0 else make_setup
    _live(made(rng.choice), rng, VERBS | (SPILLING_VERBS if seed % 3 == 0 else {}))


def test_lives_tell_routers_of_much() -> None:
    """Else the lives above would prove nothing."""
    watches = [_live(_with_spec(Random(seed), _is_hybrid), Random(seed), VERBS) for seed in range(4)]
    assert sum(each.num_told for each in watches) > 100 and sum(each.num_believed for each in watches) > 1000
    assert any(isinstance(state.shape, Window) for each in watches for state in each.cache.spec.states)
