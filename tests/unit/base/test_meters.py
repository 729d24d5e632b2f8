"""Clocks: what counts as time."""

from __future__ import annotations

import time

import pytest

from stepwell.base.meters import SystemClock


@pytest.mark.skipif(not hasattr(time, "CLOCK_BOOTTIME"), reason="this system has no clock that counts while it is suspended")
def test_time_goes_on_while_the_machine_is_suspended(monkeypatch: pytest.MonkeyPatch) -> None:
    clock, read, slept_s = SystemClock(), time.clock_gettime, 3600.0
    before_s, wall_s = clock.now(), clock.wall_s(clock.now())

    def after_sleep(which: int) -> float:
        return read(which) + (slept_s if which == time.CLOCK_BOOTTIME else 0.0)

    monkeypatch.setattr(time, "clock_gettime", after_sleep)
    assert clock.now() - before_s >= slept_s
    assert clock.wall_s(before_s) <= wall_s - slept_s + 60, "a moment before that is longer ago"
