"""The wrappers do what they say and nothing else."""

from __future__ import annotations

from random import Random

import pytest

from stepwell import StoreError
from stepwell.base.meters import ManualClock
from stepwell.store.api import Read, ReadOutcome
from stepwell.store.memory import MemoryStore
from stepwell.store.seal import Verdict, verify
from stepwell.store.wrappers import Faults, Faulty, Slow
from stepwell.testing.store_contract import fetch, key, offer, space

HERE = space("here")


def test_slow_takes_its_latency_and_its_bandwidth() -> None:
    clock = ManualClock()
    store = Slow(MemoryStore(), sleep=clock.advance, latency_s=0.5, bytes_per_s=1000)
    store.write_from(HERE, [offer(HERE, "a", 1000), offer(HERE, "b", 500)])
    assert clock.now() == pytest.approx(0.5 + 1.5)
    fetch(store, HERE, "a", 1000)
    assert clock.now() == pytest.approx(2.0 + 0.5 + 1.0)


def test_slow_hears_a_cancellation_in_the_middle_of_a_batch() -> None:
    clock = ManualClock()
    store = Slow(MemoryStore(), sleep=clock.advance, bytes_per_s=1000)
    store.write_from(HERE, [offer(HERE, name) for name in "abcd"])
    reads = [Read(key=key(name), into=memoryview(bytearray(1000))) for name in "abcd"]
    started_s = clock.now()
    outcomes = [r.outcome for r in store.read_into(HERE, reads, cancelled=lambda: clock.now() >= started_s + 2)]
    assert outcomes == [ReadOutcome.FOUND, ReadOutcome.FOUND, ReadOutcome.CANCELLED, ReadOutcome.CANCELLED]


@pytest.mark.parametrize("fault", ["flip", "short", "swap"])
def test_spoiled_values_are_delivered_as_found_and_do_not_verify(fault: str) -> None:
    store = Faulty(MemoryStore(), Faults(**{fault: 1.0}), random=Random(3), sleep=lambda seconds: None)
    store.write_from(HERE, [offer(HERE, name) for name in "abcd"])
    reads = [Read(key=key(name), into=memoryview(bytearray(1000))) for name in "abcd"]
    results = store.read_into(HERE, reads)
    assert all(result.outcome is ReadOutcome.FOUND for result in results)
    verdicts = [verify(HERE, read.key, read.into, result.stamp) for read, result in zip(reads, results, strict=True)]
    assert any(verdict is not Verdict.INTACT for verdict in verdicts)


def test_faulty_fails_hangs_and_loses() -> None:
    clock, inner = ManualClock(), MemoryStore()
    with pytest.raises(StoreError):
        Faulty(inner, Faults(fail=1.0), random=Random(1), sleep=clock.advance).contains(HERE, [])
    Faulty(inner, Faults(hang=1.0, hang_s=7.0), random=Random(1), sleep=clock.advance).contains(HERE, [])
    assert clock.now() == 7.0
    Faulty(inner, Faults(lose=1.0), random=Random(1), sleep=clock.advance).write_from(HERE, [offer(HERE, "a")])
    assert inner.contains(HERE, [key("a")]) == [False]
