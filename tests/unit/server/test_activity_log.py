"""When a server says how fast it goes, and what it counts; how far weights are read."""

from __future__ import annotations

import logging
from types import SimpleNamespace
from typing import Any

import pytest

pytest.importorskip("torch")

import torch

from stepwell.base.meters import ManualClock
from stepwell.engine.loading.progress import WatchedSource
from stepwell.engine.loading.weights import HeldTensors
from stepwell.server.monitoring.activity import LOG_EVERY_S, ThroughputLog
from stepwell.server.monitoring.progress import Totals


class Engine:
    """As much of an engine as is looked at: a clock, and who runs."""

    def __init__(self) -> None:
        self.clock = ManualClock()
        self.scheduler = SimpleNamespace(active={}, waiting=[])
        self.totals = Totals()


@pytest.fixture(autouse=True)
def _all_is_said(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, logger="stepwell")


def fields(record: logging.LogRecord) -> dict[str, Any]:
    return dict(record.fields)  # type: ignore[attr-defined]


def test_nothing_is_said_while_there_is_nothing_to_do(caplog: pytest.LogCaptureFixture) -> None:
    engine = Engine()
    log = ThroughputLog(engine, engine.totals)  # type: ignore[arg-type]
    for _ in range(5):
        engine.clock.advance(LOG_EVERY_S)
        log.after_step()
    assert not caplog.records


def test_ten_seconds_of_work_are_one_line_with_tokens_as_they_came(caplog: pytest.LogCaptureFixture) -> None:
    engine = Engine()
    log = ThroughputLog(engine, engine.totals)  # type: ignore[arg-type]
    engine.scheduler.active[1] = object()
    engine.scheduler.waiting.append(object())
    for step in range(20):
        engine.totals.prompt["device" if step < 15 else "computed"] += 2
        engine.totals.output += 1
        log.after_step()
        engine.clock.advance(LOG_EVERY_S / 20)
    log.after_step()
    assert [fields(each) for each in caplog.records] == [
        {"prompt_tokens_per_s": 4.0, "output_tokens_per_s": 2.0, "running": 1, "waiting": 1, "hit_share": 0.75}
    ]
    engine.clock.advance(LOG_EVERY_S)
    engine.totals.output += 1
    engine.scheduler.active.clear()
    engine.scheduler.waiting.clear()
    log.after_step()
    assert fields(caplog.records[-1]) == {"prompt_tokens_per_s": 0.0, "output_tokens_per_s": 0.1, "running": 0, "waiting": 0}
    engine.clock.advance(LOG_EVERY_S)
    log.after_step()
    assert len(caplog.records) == 2


def test_an_answer_that_begins_and_ends_in_one_step_counts(caplog: pytest.LogCaptureFixture) -> None:
    engine = Engine()
    log = ThroughputLog(engine, engine.totals)  # type: ignore[arg-type]
    engine.totals.prompt["computed"] += 40
    log.after_step()
    engine.clock.advance(LOG_EVERY_S)
    log.after_step()
    assert fields(caplog.records[0])["prompt_tokens_per_s"] == 4.0


def test_a_load_that_takes_long_says_how_far_it_is(caplog: pytest.LogCaptureFixture) -> None:
    clock = ManualClock()
    source = WatchedSource(HeldTensors({name: torch.zeros(4, 5) for name in "abcd"}), clock)
    for name in source.names():
        clock.advance(3.0)
        source.read(name)
    assert [each.getMessage() for each in caplog.records] == ["weights: 50 % read after 6 s", "weights: 100 % read after 12 s"]
