"""The last hour in samples: one every few seconds, the oldest dropped, whatever happens between."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any, cast

from stepwell import Tier
from stepwell.base.meters import ManualClock
from stepwell.engine.requests.request import Delta, Finish, Usage
from stepwell.server.monitoring.history import EVERY_S, KEPT, History
from stepwell.tiers.lease import Sources


class Played:
    """An engine that has a clock, a queue and some memory."""

    def __init__(self) -> None:
        self.clock = ManualClock()
        self.scheduler = SimpleNamespace(active={1: None}, waiting={})
        self.used = 0
        self.cache = SimpleNamespace(stats=lambda: SimpleNamespace(tiers={Tier.DEVICE: SimpleNamespace(used_bytes=self.used)}))


def ended(**sources: int) -> Delta:
    made = Sources(**sources)
    usage = Usage(prompt_tokens=made.total, completion_tokens=1, sources=made)
    return Delta(request=1, tokens=(7,), finish=Finish.STOP, usage=usage)


def history() -> tuple[Played, History]:
    engine = Played()
    return engine, History(cast(Any, engine))


def test_what_happens_between_two_samples_is_summed() -> None:
    engine, kept = history()
    kept.after_step([ended(device=64, computed=10)])
    kept.after_step([ended(host=32, computed=1), Delta(request=2, tokens=(1, 2))])
    engine.clock.advance(EVERY_S)
    kept.after_step([])
    engine.used = 4096
    kept.after_step([ended(store=16)])
    found = cast(dict[str, Any], kept.read())
    assert found["prompt_tokens"] == {"device": [64, 0], "host": [32, 0], "store": [0, 16], "computed": [11, 0]}
    assert found["output_tokens"] == [4, 1] and found["used_bytes"] == {"device": [0, 4096]}
    assert (found["ago_s"], found["active"], found["waiting"]) == ([0.0, 0.0], [1, 1], [0, 0])


def test_a_request_that_never_began_has_no_sources() -> None:
    _, kept = history()
    usage = Usage(prompt_tokens=9, completion_tokens=0, sources=Sources(computed=9))
    kept.after_step([Delta(request=1, finish=Finish.ABORTED, usage=usage)])
    assert sum(map(sum, cast(dict[str, Any], kept.read())["prompt_tokens"].values())) == 0


def test_no_more_than_an_hour_is_kept() -> None:
    engine, kept = history()
    for _ in range(KEPT + 50):
        engine.clock.advance(EVERY_S)
        kept.after_step([ended(computed=1)])
    found = cast(dict[str, Any], kept.read())
    assert len(found["ago_s"]) == KEPT + 1 and found["ago_s"][0] == (KEPT - 1) * EVERY_S == 3595.0
    assert sum(found["prompt_tokens"]["computed"]) == KEPT


def test_a_long_pass_makes_one_sample_not_several() -> None:
    engine, kept = history()
    engine.clock.advance(EVERY_S * 10)
    kept.after_step([ended(computed=5)])
    kept.after_step([])
    assert len(cast(dict[str, Any], kept.read())["ago_s"]) == 2
