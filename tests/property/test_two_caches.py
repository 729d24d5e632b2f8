"""Two caches in one process at once: neither takes what belongs to the other, and neither is changed by the attempt."""

from __future__ import annotations

from collections.abc import Callable
from random import Random

import pytest
from lives import VERBS, play_one, random_prompt
from toy_models import make_setup
from traffic import Traffic
from world import World

from stepwell import LeaseError, Tier
from stepwell.tiers.lease import LeaseState


def attempts(mine: World, theirs: World, tokens: list[int]) -> list[Callable[[], object]]:
    """Everything that one cache could be given that belongs to another."""
    cache, space = mine.cache, mine.setup.spaces[0]
    match, own = theirs.cache.lookup(tokens, namespace=space), cache.lookup(tokens, namespace=space)
    found: list[Callable[[], object]] = [
        lambda: cache.acquire(match), lambda: cache.refresh(match), lambda: cache.prefetch(match),
    ]  # fmt: skip
    ticket = theirs.cache.prefetch(match)
    found += [lambda: cache.acquire(own, ticket=ticket), lambda: cache.wait(ticket)]
    for held in theirs.held:
        lease = held.lease
        found += [lambda lease=lease: cache.release(lease)]
        if lease.state in (LeaseState.READY, LeaseState.LOADING):
            found += [
                lambda lease=lease: cache.grow(lease, lease.num_tokens), lambda lease=lease: cache.append(lease, [1]),
                lambda lease=lease: cache.copy_point(lease, lease.num_tokens), lambda lease=lease: cache.begins(lease),
                lambda lease=lease: cache.ask_checkpoint(lease, lease.position + 1), lambda lease=lease: cache.wait(lease),
            ]  # fmt: skip
        if lease.ready:
            found += [lambda lease=lease: cache.commit(lease, lease.position)]
    found += [lambda pinned=pinned: cache.pins.release(pinned.pin) for pinned in theirs.pinned]
    return found


def seen(world: World) -> object:
    used = [world.cache.stats().tier(tier).used_bytes for tier in (Tier.DEVICE, Tier.HOST)]
    return world.cache.counters.snapshot(), world.cache._state.tree.version, used, len(world.cache._leases)


@pytest.mark.parametrize("seed", range(12))
def test_what_belongs_to_another_cache_is_refused_and_changes_nothing(seed: int) -> None:
    rng = Random(seed)
    setup = make_setup(rng.choice)
    lives = [Traffic(World(setup)) for _ in range(2)]
    for verb in rng.choices(list(VERBS), list(VERBS.values()), k=60):
        for traffic in lives:
            play_one(traffic, verb, rng)
        mine, theirs = (traffic.world for traffic in rng.sample(lives, 2))
        tokens = random_prompt(rng, lives[0].page)
        for attempt in attempts(mine, theirs, tokens):
            before = seen(mine), seen(theirs)
            with pytest.raises(LeaseError):
                attempt()
            assert (seen(mine), seen(theirs)) == before
        for traffic in lives:
            traffic.world.check()
    for traffic in lives:
        traffic.world.close()


def test_a_match_of_another_cache_at_the_same_version_is_refused() -> None:
    setup = make_setup(Random(0).choice)
    one, other = World(setup), World(setup)
    for world, first in ((one, 1), (other, 2)):
        Traffic(world).serve([first] * 9 * world.spec.page_tokens, 0)
    tokens = [1] * 9 * one.spec.page_tokens
    match = one.cache.lookup(tokens, namespace=setup.spaces[0])
    assert match.restore_tokens > 0 and match.version == other.cache._state.tree.version
    with pytest.raises(LeaseError, match="another cache"):
        other.cache.acquire(match)
