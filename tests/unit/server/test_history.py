"""The last hour in samples: one every few seconds, the oldest dropped, whatever happens between."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any, cast

from stepwell import Tier
from stepwell.base.meters import ManualClock
from stepwell.server.monitoring.activity import MOST_SAMPLES, SAMPLE_EVERY_S, History
from stepwell.server.monitoring.progress import Totals


class Played:
    """An engine that has a clock, a queue and some memory."""

    def __init__(self) -> None:
        self.clock = ManualClock()
        self.scheduler = SimpleNamespace(active={1: None}, waiting={})
        self.used = 0
        self.totals = Totals()
        self.cache = SimpleNamespace(stats=lambda: SimpleNamespace(tiers={Tier.DEVICE: SimpleNamespace(used_bytes=self.used)}))

    def count(self, output: int, **prompt: int) -> None:
        self.totals.output += output
        for source, tokens in prompt.items():
            self.totals.prompt[source] += tokens


def history() -> tuple[Played, History]:
    engine = Played()
    return engine, History(cast(Any, engine), engine.totals)


def test_what_happens_between_two_samples_is_summed() -> None:
    engine, kept = history()
    engine.count(1, device=64, computed=10)
    kept.after_step()
    engine.count(3, host=32, computed=1)
    engine.clock.advance(SAMPLE_EVERY_S)
    kept.after_step()
    engine.used = 4096
    engine.count(1, store=16)
    kept.after_step()
    found = cast(dict[str, Any], kept.read())
    assert found["prompt_tokens"] == {"device": [64, 0], "host": [32, 0], "store": [0, 16], "computed": [11, 0]}
    assert found["output_tokens"] == [4, 1] and found["used_bytes"] == {"device": [0, 4096]}
    assert (found["ago_s"], found["active"], found["waiting"]) == ([0.0, 0.0], [1, 1], [0, 0])


def test_no_more_than_an_hour_is_kept() -> None:
    engine, kept = history()
    for _ in range(MOST_SAMPLES + 50):
        engine.clock.advance(SAMPLE_EVERY_S)
        engine.count(0, computed=1)
        kept.after_step()
    found = cast(dict[str, Any], kept.read())
    assert len(found["ago_s"]) == MOST_SAMPLES + 1 and found["ago_s"][0] == (MOST_SAMPLES - 1) * SAMPLE_EVERY_S == 3595.0
    assert sum(found["prompt_tokens"]["computed"]) == MOST_SAMPLES


def test_a_long_pass_makes_one_sample_not_several() -> None:
    engine, kept = history()
    engine.clock.advance(SAMPLE_EVERY_S * 10)
    kept.after_step()
    kept.after_step()
    assert len(cast(dict[str, Any], kept.read())["ago_s"]) == 2
