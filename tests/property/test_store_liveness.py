"""What a store is good for: what was served is in it, a prompt resumes where its pages and checkpoints allow; never more."""

from __future__ import annotations

import os
from dataclasses import replace
from random import Random

import pytest
from lives import play, random_prompt
from shelf import PATIENT, ROOMY, make_store_setup
from store_traffic import StoreTraffic
from store_world import BorrowedStoreWorld, StoreWorld
from toy_models import ROOMY_OBJECTS

from stepwell import Kind, WritePolicy
from stepwell.base.tasks import ItemStatus
from stepwell.store.wrappers import Faults

SEEDS = range(int(os.environ.get("STEPWELL_EXAMPLES", "24")))


def traffic_over_a_good_store(seed: int, random: Random) -> StoreTraffic:
    """Some prompts were served and stored; then, perhaps, the process began anew."""
    external = seed % 3 == 2
    setup = make_store_setup(random.choice, external=external)
    chunk_bytes = random.choice((1, max(2 * setup.cache.spec.object_bytes(Kind.PREFIX), 1), 2**20))
    tuning = replace(ROOMY, fetch_chunk_bytes=chunk_bytes, fallback_share=random.choice((0.0, 0.25, 1.0)))
    roomy = setup.cache.regime.exact or random.random() < 0.3
    cache = replace(setup.cache, write=WritePolicy.THROUGH, host_objects=ROOMY_OBJECTS if roomy else random.choice((16, 24, 48)))
    setup = replace(setup, sort="good", config=PATIENT, tuning=tuning, cache=cache)
    traffic = StoreTraffic((BorrowedStoreWorld if external else StoreWorld)(setup))
    for _ in range(random.randint(3, 6)):
        traffic.serve(random_prompt(random, traffic.page), 0)
        traffic.world.settle_everything()
    if random.random() < 0.7:
        traffic.restart()
    return traffic


@pytest.mark.parametrize("seed", SEEDS)
def test_a_prompt_resumes_as_deep_as_memory_and_store_allow(seed: int) -> None:
    random = Random(seed)
    traffic = traffic_over_a_good_store(seed, random)
    for _ in range(6):
        world = traffic.world
        less = random.choice((0, 0, 1, traffic.page, 2 * traffic.page + 1))
        tokens = traffic.again(random.randrange(12), less, random.choice((0, 1, 9)))
        if random.random() < 0.7:
            world.drop_memory()
        if random.random() < 0.4:  # memory has its beginning, and much else
            others = [random_prompt(random, traffic.page) for _ in range(2)]
            for each in (tokens[: len(tokens) // 2 + 1], *others):
                traffic.serve(each, 0)
                world.settle_everything()
            world.evict(world.nearest)
        for _ in range(random.choice((0, 0, 1, 3))):
            world.shelf.lose(random)
        world.recover(tokens, traffic.space(0), losing=random if random.random() < 0.4 else None)
        world.check()
    traffic.world.close()


@pytest.mark.parametrize("seed", SEEDS)
def test_what_is_served_is_stored_however_often_that_failed_before(seed: int) -> None:
    random = Random(seed)
    traffic = traffic_over_a_good_store(seed, random)
    traffic.restart()
    world = traffic.world
    for _ in range(random.choice((0, 0, 2, 4))):
        world.shelf.lose(random)  # nothing is believed of a store yet
    world.shelf.stores[0].faults = Faults(fail=0.15)
    for _ in range(5):
        if random.random() < 0.1:
            traffic.move_store(random.randrange(12))
        tokens = traffic.again(random.randrange(12), random.choice((0, 1, 5, 20)), random.choice((0, 1, 9)))
        if random.random() < 0.5:
            traffic.serve(tokens, 0)
        else:
            traffic.serve_awaited(tokens, 0)
        for line, job in world.pending:
            world.answer_op(line, job, status=random.choice((None, None, ItemStatus.FAILED)))
        world.step()
        world.check()
    world.shelf.make_well(well=True)
    if world.attached is None:
        world.attach(1)
    world.settle_everything()
    world.clock.advance(120.0)  # a store that was switched off is tried again
    for tokens in list(traffic.served[-4:]):
        traffic.serve_and_look(tokens, 0, anew=False)
    world.close()


@pytest.mark.parametrize("seed", SEEDS)
def test_damaged_values_never_reach_a_request(seed: int) -> None:
    random = Random(seed)
    traffic = traffic_over_a_good_store(seed, random)
    for _ in range(4):
        traffic.world.drop_memory()
        traffic.world.shelf.damage(Faults(flip=0.25, swap=0.25, short=0.25))
        traffic.serve_awaited(traffic.again(random.randrange(12), 0, 1), 0)
        traffic.world.shelf.make_well(well=True)
        traffic.world.check()
    traffic.world.close()


MEANWHILE = {
    "answer": 10, "answer_op": 30, "step": 12, "settle": 4, "time_out": 6, "fail_ops": 2, "evict": 4, "move_store": 4,
    "close_ticket": 6, "overtake": 6, "acquire_awaited": 6, "prefetch_twins": 6, "prefill": 8, "release": 4, "clear": 0.2,
}  # fmt: skip


@pytest.mark.parametrize("seed", SEEDS)
def test_anything_may_happen_while_requests_wait_for_a_store(seed: int) -> None:
    random = Random(seed)
    traffic = traffic_over_a_good_store(seed, random)
    traffic.restart()
    traffic.prefetch_twins(traffic.again(random.randrange(12), 0, 1), 0)
    play(traffic, MEANWHILE, random, steps=40)
