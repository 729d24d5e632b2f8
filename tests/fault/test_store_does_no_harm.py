"""A store that is slow or broken never makes a workload more than 5 % slower than having none. On a virtual clock.

Sessions come back at random, some soon and some after memory has evicted them. Time spent waiting for the store is also
looked at by itself: a broken store that changes what memory evicts could hide it in the total.
"""

from __future__ import annotations

from collections.abc import Callable
from random import Random

import pytest

from stepwell import Lease, NoRoom, Tier
from stepwell.base.config import PrefetchPolicy, StoreConfig
from stepwell.base.meters import ManualClock
from stepwell.store.api import Store
from stepwell.store.memory import MemoryStore
from stepwell.store.wrappers import Faults, Faulty, Slow
from stepwell.testing import TimedStoreExecutor
from stepwell.transfer.store_worker import StoreWorker
from toys import FULL_POINT, PAGE, Rig, text

TOKENS_PER_S = 200.0
SESSIONS, TURNS, TURN_TOKENS = 24, 6, 15 * PAGE
REQUESTS, WORKLOADS = 144, 3
Make = Callable[[Store, Callable[[float], None]], Store]

STORES: dict[str, Make] = {
    "slow to answer": lambda store, sleep: Slow(store, sleep=sleep, latency_s=2.0),
    "very slow to answer": lambda store, sleep: Slow(store, sleep=sleep, latency_s=60.0),
    "slow to deliver": lambda store, sleep: Slow(store, sleep=sleep, bytes_per_s=100.0),
    "a little slower than computing": lambda store, sleep: Slow(store, sleep=sleep, bytes_per_s=OBJECT_BYTES_PER_S / 8),
    "always failing": lambda store, sleep: Faulty(store, Faults(fail=1.0), random=Random(1), sleep=sleep),
    "often failing": lambda store, sleep: Slow(
        Faulty(store, Faults(fail=0.3), random=Random(1), sleep=sleep), sleep=sleep, latency_s=0.5
    ),
    "often hanging": lambda store, sleep: Faulty(store, Faults(hang=0.2), random=Random(1), sleep=sleep),
    "always hanging": lambda store, sleep: Faulty(store, Faults(hang=1.0), random=Random(1), sleep=sleep),
    "damaging everything": lambda store, sleep: Slow(
        Faulty(store, Faults(flip=1.0), random=Random(1), sleep=sleep), sleep=sleep, latency_s=0.3
    ),
    "losing everything": lambda store, sleep: Slow(
        Faulty(store, Faults(lose=1.0), random=Random(1), sleep=sleep), sleep=sleep, latency_s=0.3
    ),
}
OBJECT_BYTES_PER_S = TOKENS_PER_S / PAGE * 32


class World:
    """Sessions that take turns at one engine, with tiers too small for them; computing and waiting take virtual time."""

    def __init__(self, make: Make | None, policy: PrefetchPolicy, seed: int) -> None:
        self.seed = seed
        self.clock = ManualClock()
        self.waited_s = 0.0
        self.rig = Rig(FULL_POINT, device_pages=160, host_pages=320, clock=self.clock)
        self.store_executor = TimedStoreExecutor(self.clock)
        if make is not None:
            store = make(MemoryStore(), self.store_executor.sleep)
            self.store_executor.serve([StoreWorker(store, self.rig.memories[0][Tier.HOST])])
            self.rig.cache.store.attach(store, StoreConfig(prefetch=policy), executor=self.store_executor)

    def play(self) -> float:
        """Seconds from the first arrival to the last answer."""
        turns = [0] * SESSIONS
        choice = Random(self.seed)
        for _ in range(REQUESTS):
            session = min(choice.randrange(SESSIONS), choice.randrange(SESSIONS))  # some are busier than others
            turns[session] = turns[session] % TURNS + 1
            self._serve(text(session, turns[session] * TURN_TOKENS))
        return self.clock.now()

    def _serve(self, tokens: list[int]) -> None:
        cache = self.rig.cache
        arrived_s = self.clock.now()
        ticket = cache.prefetch(cache.lookup(tokens))
        while not ticket.ready:
            next_s = min(self.store_executor.next_answer_s(), ticket.ended_s)
            self.clock.advance(max(next_s - self.clock.now(), 0.0) + 1e-6)
            cache.step()
        self.waited_s += self.clock.now() - arrived_s
        lease: Lease | None = None
        while lease is None:
            try:
                lease = cache.acquire(cache.lookup(tokens), ticket=ticket)
            except NoRoom:
                self._settle()
        with lease:
            self._settle()
            while lease.position < len(tokens):
                upto = min(cache.next_stop(lease) or len(tokens), lease.position + 4 * PAGE, len(tokens))
                cache.grow(lease, upto)
                self.clock.advance((upto - lease.position) / TOKENS_PER_S)
                cache.commit(lease, upto)
                self._settle()

    def _settle(self) -> None:
        """Copies between device and host take no time here."""
        self.rig.cache.step()
        while self.rig.executor.pending:
            self.rig.executor.finish_all()
            self.rig.cache.step()


def total(make: Make | None, policy: PrefetchPolicy) -> tuple[float, float]:
    """Seconds that a few workloads took, and of those the seconds spent waiting for the store."""
    worlds = [World(make, policy, seed) for seed in range(WORKLOADS)]
    took_s = sum(world.play() for world in worlds)
    for world in worlds:
        world.rig.cache.audit()
    return took_s, sum(world.waited_s for world in worlds)


@pytest.fixture(scope="module")
def without_a_store() -> float:
    return total(None, PrefetchPolicy.TIMEOUT)[0]


CASES = [(kind, PrefetchPolicy.TIMEOUT) for kind in STORES]
CASES += [(kind, PrefetchPolicy.BEST_EFFORT) for kind in ("slow to answer", "slow to deliver", "always hanging")]


@pytest.mark.parametrize(("kind", "policy"), CASES, ids=[f"{kind}, {policy.value}" for kind, policy in CASES])
def test_a_workload_is_at_most_five_percent_slower(kind: str, policy: PrefetchPolicy, without_a_store: float) -> None:
    took_s, waited_s = total(STORES[kind], policy)
    assert took_s <= 1.05 * without_a_store, f"{took_s:.1f} s with the store, {without_a_store:.1f} s without"
    assert waited_s <= 0.05 * without_a_store, f"{waited_s:.1f} s of waiting, {without_a_store:.1f} s without a store"


def test_a_good_store_makes_it_faster(without_a_store: float) -> None:
    def good(store: Store, sleep: Callable[[float], None]) -> Store:
        return Slow(store, sleep=sleep, latency_s=0.001, bytes_per_s=1e9)

    took_s, _ = total(good, PrefetchPolicy.TIMEOUT)
    assert took_s < 0.7 * without_a_store, f"{took_s:.1f} s with the store, {without_a_store:.1f} s without"
