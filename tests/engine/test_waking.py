"""An engine that waits for a restore: its thread rests until the copy has ended, and is woken then."""

from __future__ import annotations

import time
from collections.abc import Callable
from queue import Queue
from threading import Event, Thread
from typing import Any

import pytest

from engine.small import alone, greedy, prompt, run, small, tokens_of
from stepwell.base.ids import Tier
from stepwell.base.tasks import Plan, Purpose
from stepwell.engine import Delta, Engine
from stepwell.engine.engine import UPKEEP_S
from stepwell.engine.loop import EngineLoop
from stepwell.transfer.copy_engine import CopyEngine, Work
from waiting import PATIENCE_S, empty_device, wait_until

pytest.importorskip("transformers")

ASKED = [*prompt(100), 1]


class HeldLoads:
    """A copy engine whose loads wait for `gate`."""

    def __init__(self, real: CopyEngine) -> None:
        self._real = real
        self.begun, self.gate = Event(), Event()

    def begin(self, plan: Plan) -> Work:
        work = self._real.begin(plan)
        return partial_hold(self, work) if plan.purpose is Purpose.LOAD else work


def partial_hold(loads: HeldLoads, work: Work) -> Work:
    def held() -> None:
        loads.begun.set()
        assert loads.gate.wait(PATIENCE_S)
        work()

    return held


def restoring() -> tuple[Engine, HeldLoads]:
    """An engine whose host has a prompt, and whose device has nothing."""
    engine = small()
    run(engine, [greedy(prompt(100))])
    empty_device(engine.cache)
    executor: Any = engine.cache._state.copies._executor
    loads = HeldLoads(executor._ranks[0])
    executor._ranks = [loads]
    return engine, loads


def answer(loop: EngineLoop) -> Queue[Delta]:
    deltas: Queue[Delta] = Queue()
    loop.submit(greedy(ASKED), deltas.put).result(PATIENCE_S)
    return deltas


def to_the_end(deltas: Queue[Delta]) -> list[int]:
    found = [deltas.get(timeout=PATIENCE_S)]
    while found[-1].finish is None:
        found.append(deltas.get(timeout=PATIENCE_S))
    assert found[-1].error is None
    return tokens_of(found)


def test_the_loop_does_not_spin_while_a_restore_is_on_its_way() -> None:
    engine, loads = restoring()
    steps: list[float] = []
    step = engine.step
    engine.step = lambda: (steps.append(time.monotonic()), step())[1]  # type: ignore[method-assign]
    loop = EngineLoop(engine)
    loop.start()
    deltas = answer(loop)
    assert loads.begun.wait(PATIENCE_S)
    first = len(steps) + 2
    wait_until(lambda: len(steps) > first + 10, "upkeep goes on")
    assert steps[first + 10] - steps[first] >= 9 * UPKEEP_S, "nothing has happened that a step is for"
    loads.gate.set()
    assert to_the_end(deltas) == alone("llama", [greedy(ASKED)])[0]
    loop.stop()


class WaitsForEver(Event):
    """In place of what ends a rest: time alone never does."""

    def wait(self, timeout: float | None = None) -> bool:
        return super().wait(PATIENCE_S)


def test_what_arrives_wakes_the_loop() -> None:
    """Without any timer: from the load to the answer, every wait is ended by what it waits for."""
    engine, loads = restoring()
    engine._woken = WaitsForEver()
    loop = EngineLoop(engine)
    loop.start()
    deltas = answer(loop)
    assert loads.begun.wait(PATIENCE_S)
    loads.gate.set()
    began_s = time.monotonic()
    assert to_the_end(deltas) == alone("llama", [greedy(ASKED)])[0]
    assert time.monotonic() - began_s < PATIENCE_S
    loop.stop()


def test_a_stream_of_an_engine_without_a_loop_is_woken_too() -> None:
    engine, loads = restoring()
    engine._woken = WaitsForEver()
    opens = Thread(target=lambda: (loads.begun.wait(PATIENCE_S), loads.gate.set()))
    opens.start()
    found = [token for delta in engine.stream(ASKED, max_tokens=8) for token in delta.tokens]
    assert found == alone("llama", [greedy(ASKED)])[0]
    opens.join()
    engine.close()


def test_waiting_for_a_lease_ends_with_its_copy_and_takes_no_steps_before() -> None:
    engine, loads = restoring()
    cache, steps = engine.cache, []
    advance: Callable[[], Any] = cache._upkeep._advance
    cache._upkeep._advance = lambda: (steps.append(time.monotonic()), advance())[1]  # type: ignore[method-assign]
    cache._state.wakeup.answered = WaitsForEver()
    lease = cache.acquire(cache.lookup(ASKED))
    assert lease.sources.host and not lease.ready
    opens = Thread(target=lambda: (loads.begun.wait(PATIENCE_S), loads.gate.set()))
    opens.start()
    cache.wait(lease)
    opens.join()
    assert lease.ready and len(steps) <= 3
    cache.release(lease)
    assert cache.stats().tier(Tier.DEVICE).used_bytes
    engine.close()
