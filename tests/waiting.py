"""Waiting for what other threads and processes do: for a condition, never for a number of steps or seconds.

The deadline is there for what hangs. A machine that is busy with something else does not meet it.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import TYPE_CHECKING, TypeVar

from stepwell import Cache, StepReport
from stepwell.base.ids import Kind, Tier
from stepwell.tiers.eviction import make_room

if TYPE_CHECKING:
    from stepwell.engine import Delta, Engine

PATIENCE_S = 180.0
PAUSE_S = 0.0005  # between two looks: a loop that only asks keeps the interpreter from those it waits for

T = TypeVar("T")


def wait_until(
    answer: Callable[[], T], what: object = "it", *, pause_s: float = PAUSE_S, patience_s: float = PATIENCE_S
) -> T:  # fmt: skip
    """Asks until the answer is true, and returns it."""
    deadline = time.monotonic() + patience_s
    while not (given := answer()):
        assert time.monotonic() < deadline, f"{what} did not come true within {patience_s:g} s"
        time.sleep(pause_s)
    return given


def step_until(cache: Cache, done: Callable[[], bool]) -> list[StepReport]:
    """Steps a cache until something is true of it; what the steps reported."""
    reports: list[StepReport] = []

    def stepped() -> bool:
        if done():
            return True
        reports.append(cache.step())
        return done()

    wait_until(stepped, done)
    return reports


def settle(cache: Cache, *, storing: bool = True) -> list[StepReport]:
    """Steps until nothing is copied, nor (if `storing`) on its way to the store."""
    reports: list[StepReport] = []

    def quiet() -> bool:
        reports.append(cache.step())
        return not reports[-1].running and not (storing and reports[-1].storing)

    wait_until(quiet, "nothing left to copy")
    return reports


def empty_device(cache: Cache) -> None:
    """Waits until everything is saved, and evicts all that the device has, under any write policy."""
    state = cache._state
    need = {Kind.PREFIX: state.arena(Tier.DEVICE).layout.rows(Kind.PREFIX) + 1}

    def emptied() -> bool:
        settle(cache)
        make_room(state, Tier.DEVICE, need)
        return not cache.stats().tier(Tier.DEVICE).used_bytes

    wait_until(emptied, "an empty device")


def run_until(engine: Engine, done: Callable[[], bool]) -> list[Delta]:
    """Steps an engine until something is true of it; what was added to answers."""
    deltas: list[Delta] = []
    deadline = time.monotonic() + PATIENCE_S
    while not done():
        assert time.monotonic() < deadline, f"not within {PATIENCE_S:g} s, with {engine.num_open} requests open"
        deltas += engine.step()
        if engine.idle:
            time.sleep(PAUSE_S)
    return deltas


def run_to_the_end(engine: Engine) -> list[Delta]:
    """Steps an engine until no request is open."""
    return run_until(engine, lambda: not engine.num_open) + engine.step()
