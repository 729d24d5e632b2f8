"""Long lives of random caches, each drawn from one seed: the verbs of the state machine, many more of them, no shrinking.

`python lives.py STEPS SEED ...` prints digests of every decision the cache made, without and with a store: for a test.
"""

from __future__ import annotations

import hashlib
import sys
from dataclasses import replace
from random import Random

from borrowed_world import BorrowedWorld
from shelf import make_store_setup
from store_traffic import STATUSES, StoreTraffic
from store_world import BorrowedStoreWorld, StoreWorld
from toy_models import QUOTAS, TRUNKS, make_borrowed_setup, make_setup, make_spilling_setup, prompt
from traffic import Traffic
from world import World

VERBS = {
    "serve": 20, "acquire": 14, "acquire_a_batch": 4, "follow": 5, "prefill": 26, "decode": 12, "answer": 24, "step": 10,
    "settle": 5, "release": 8, "look": 4, "keep_a_match": 2, "acquire_an_old_match": 2, "finish": 2, "abort_after_computing": 1,
    "preempt": 2, "come_back": 2, "tick": 6, "pin": 1, "hand_out": 3, "unpin": 2, "clear": 0.5, "flush": 1,
}  # fmt: skip

SPILLING_VERBS = {"serve": 8, "acquire": 24, "settle": 14, "press": 14, "preempt": 8, "come_back": 12, "answer": 12}

STORE_VERBS = {
    "prefetch": 20, "close_ticket": 3, "acquire_awaited": 12, "serve_awaited": 8, "answer_op": 50, "settle_everything": 4,
    "move_store": 4, "evict": 24, "recover": 7, "restart": 2, "prefetch_twins": 8, "fail_ops": 4, "time_out": 4,
    "overtake": 4,
}  # fmt: skip


def live_spilling(seed: int, steps: int) -> World:
    """The same with rows that may spill, and more of what makes them."""
    rng = Random(seed)
    world = World(make_spilling_setup(rng.choice))
    play(Traffic(world), VERBS | SPILLING_VERBS, rng, steps)
    return world


def live_with_quotas(seed: int, steps: int) -> World:
    """The same among tenants with quotas, where memory is short."""
    rng = Random(seed)
    made = (make_spilling_setup if rng.random() < 0.3 else make_setup)(rng.choice)
    quotas = made.quotas or rng.choice([each for each in QUOTAS if each])
    world = World(replace(made, quotas=quotas))
    play(Traffic(world), VERBS, rng, steps)
    return world


def live(seed: int, steps: int, *, external: bool = False) -> World:
    """Runs a whole life, checking everything after each verb; returns the world it left behind, closed."""
    rng = Random(seed)
    world = BorrowedWorld(make_borrowed_setup(rng.choice)) if external else World(make_setup(rng.choice))
    traffic = Traffic(world)
    play(traffic, VERBS, rng, steps)
    return world


def live_with_store(seed: int, steps: int, *, external: bool = False) -> StoreWorld:
    """The same over a store that may be of any sort."""
    rng = Random(seed)
    setup = make_store_setup(rng.choice, external=external)
    traffic = StoreTraffic((BorrowedStoreWorld if external else StoreWorld)(setup))
    for _ in range(4):
        traffic.serve(random_prompt(rng, traffic.page), 0)
    if rng.random() < 0.5:
        traffic.restart()
    play(traffic, VERBS | STORE_VERBS, rng, steps)
    return traffic.world


def play(traffic: Traffic, verbs: dict[str, float], rng: Random, steps: int) -> None:
    for verb in rng.choices(list(verbs), list(verbs.values()), k=steps):
        play_one(traffic, verb, rng)
        traffic.world.check()
    traffic.world.close()


def random_prompt(rng: Random, page: int) -> list[int]:
    own = rng.choice(((), (), (), (1,), (2, 0)))
    return prompt(rng.randrange(len(TRUNKS)), rng.randrange(8), own, rng.randrange(16), page)


def _again(rng: Random, traffic: StoreTraffic) -> list[int]:
    if rng.random() < 0.2:
        return random_prompt(rng, traffic.page)
    return traffic.again(rng.randrange(12), rng.choice((0, 0, 0, 1, 5, 20)), rng.choice((0, 0, 1, 9)))


def play_one(traffic: Traffic, verb: str, rng: Random) -> None:
    pick, ttl_s = rng.randrange(12), rng.choice((None, None, None, 50.0))
    match verb:
        case "look" | "keep_a_match" | "hand_out":
            getattr(traffic, verb)(random_prompt(rng, traffic.page), pick)
        case "acquire":
            hints = tuple(rng.randrange(60) for _ in range(rng.randrange(3)))
            traffic.acquire(random_prompt(rng, traffic.page), pick, hints, rng.randrange(2), ttl_s)
        case "acquire_a_batch":
            traffic.acquire_a_batch([random_prompt(rng, traffic.page) for _ in range(rng.randint(2, 3))], pick)
        case "follow":
            traffic.follow(pick, rng.randint(1, traffic.page), pin=rng.random() < 0.2)
        case "serve":
            traffic.serve(random_prompt(rng, traffic.page), pick, ttl_s, last=rng.random() < 0.3)
        case "prefill":
            traffic.prefill(pick, rng.randint(1, 40), obey=rng.random() < 0.8, again=rng.random() < 0.1)
        case "decode":
            traffic.decode(pick, [rng.randrange(2) for _ in range(rng.randint(1, 5))])
        case "answer":
            traffic.answer(pick, rng.randrange(3), fail=rng.random() < 0.15)
        case "press":
            traffic.press(pick, may_spill=rng.random() < 0.6)
        case "pin":
            traffic.pin(random_prompt(rng, traffic.page), pick, ttl_s)
        case "tick":
            traffic.world.clock.advance(rng.choice((1.0, 5.0, 20.0, 60.0)))
        case "step" | "settle" | "settle_everything":
            getattr(traffic.world, verb)()
        case "come_back" | "restart" | "fail_ops" | "time_out":
            getattr(traffic, verb)()
        case "prefetch":
            traffic.prefetch(_again(rng, traffic), pick, rng.randrange(2), ttl_s)
        case "serve_awaited" | "prefetch_twins":
            getattr(traffic, verb)(_again(rng, traffic), pick)
        case "acquire_awaited":
            traffic.acquire_awaited(pick, spent=rng.random() < 0.1)
        case "answer_op":
            traffic.answer_op(pick, rng.choice(STATUSES), rng.choice((0.0, 0.0, 0.0, 0.1, 5.0)))
        case "recover":
            outage, serve, anew, drop = (rng.random() < chance for chance in (0.3, 0.5, 0.4, 0.8))
            traffic.recover(_again(rng, traffic), pick, outage=outage, serve=serve, anew=anew, drop=drop)
        case _:
            getattr(traffic, verb)(pick)


def digest(trace: list[str]) -> str:
    return hashlib.blake2b("\n".join(trace).encode(), digest_size=16).hexdigest()


if __name__ == "__main__":
    for number in sys.argv[2:]:
        for life in (live, live_with_store):
            sys.stdout.write(digest(life(int(number), int(sys.argv[1])).trace) + "\n")
