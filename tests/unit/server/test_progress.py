"""What is counted of requests, and when: once for each token, whatever happens to a request on its way."""

from __future__ import annotations

from collections import Counter
from types import SimpleNamespace
from typing import Any, cast

import pytest

pytest.importorskip("prometheus_client")

from stepwell.engine.requests.request import Delta, Finish, GenerateRequest, Usage
from stepwell.server.monitoring.progress import Progress, Totals
from stepwell.tiers.lease import Sources

SOURCES = Sources(device=32, host=16, computed=40)
ASK = GenerateRequest(tokens=[0] * SOURCES.total, tenant="alice", arrived_s=1.0)


class Metrics:
    """Counts what it is given."""

    def __init__(self) -> None:
        self.prompts: Counter[tuple[str, str | None]] = Counter()
        self.output: Counter[str | None] = Counter()
        self.queued: list[float] = []
        self.first: list[float] = []
        self.ends: list[Finish | None] = []

    def prompt(self, count: int, source: str, tenant: str | None) -> None:
        self.prompts[source, tenant] += count

    def generated(self, count: int, tenant: str | None) -> None:
        self.output[tenant] += count

    def began(self, queued_s: float) -> None:
        self.queued.append(queued_s)

    def first_token(self, after_s: float) -> None:
        self.first.append(after_s)

    def ended(self, delta: Delta, tenant: str | None) -> None:
        self.ends.append(delta.finish)


class Play:
    """A request in a scheduler, moved by hand."""

    def __init__(self) -> None:
        self.scheduler = SimpleNamespace(active={}, waiting={})
        self.metrics = Metrics()
        self.progress = Progress(cast(Any, SimpleNamespace(scheduler=self.scheduler)), cast(Any, self.metrics))
        self.request = SimpleNamespace(
            submitted=ASK, sources=SOURCES, arrived_s=1.0, began_s=3.0, first_token_s=None, position=48, runs=False
        )

    def begin(self) -> None:
        self.scheduler.active[7] = self.request

    def step(self, *deltas: Delta, position: int | None = None, runs: bool = True) -> Counter[str]:
        """One step; the prompt tokens counted so far, by source."""
        self.request.runs = runs
        if position is not None:
            self.request.position = position
        if any(delta.finish is not None for delta in deltas):
            self.scheduler.active.clear()  # as the engine does before it says so
        for delta in deltas:
            self.progress.added(ASK, delta)
        self.progress.after_step()
        return Counter({source: count for (source, _), count in self.metrics.prompts.items()})


def ended(finish: Finish = Finish.LENGTH, *, tokens: tuple[int, ...] = (5,), answer: int = 1) -> Delta:
    usage = Usage(
        prompt_tokens=SOURCES.total, completion_tokens=answer, sources=SOURCES, queued_s=2.0, first_token_s=4.0, total_s=6.0
    )
    return Delta(request=7, tokens=tokens, finish=finish, usage=usage)


def test_a_prompt_is_counted_as_it_is_restored_and_computed() -> None:
    play = Play()
    play.begin()
    assert play.step(runs=False) == {}, "its bytes are on their way"
    assert play.metrics.queued == [2.0], "and its waiting is over"
    assert play.step() == {"device": 32, "host": 16}
    assert play.step(position=68) == {"device": 32, "host": 16, "computed": 20}
    play.request.first_token_s = 5.0
    assert play.step(Delta(request=7, tokens=(1,)), position=88) == {"device": 32, "host": 16, "computed": 40}
    assert play.metrics.first == [4.0] and play.metrics.output == {"alice": 1}
    play.step(Delta(request=7, tokens=(2,)), position=89)
    play.step(ended(answer=3), position=90)
    assert play.progress.totals == Totals(prompt={"device": 32, "host": 16, "store": 0, "computed": 40}, output=3)
    assert play.metrics.ends == [Finish.LENGTH] and not play.progress._seen


def test_what_a_preempted_request_computes_again_is_not_counted_again() -> None:
    play = Play()
    play.begin()
    play.step(position=78)
    for position in (48, 58, 78):
        assert play.step(position=position)["computed"] == 30
    assert play.step(position=88)["computed"] == 40 and play.metrics.queued == [2.0]


def test_an_answer_that_begins_and_ends_in_one_step_is_counted_with_its_tenant() -> None:
    play = Play()
    assert play.step(ended()) == {"device": 32, "host": 16, "computed": 40}
    assert set(play.metrics.prompts) == {(source, "alice") for source in ("device", "host", "computed")}
    assert (play.metrics.queued, play.metrics.first, play.metrics.output) == ([2.0], [4.0], {"alice": 1})


def test_a_draft_may_have_an_answer_begin_and_end_in_several_deltas_of_one_step() -> None:
    play = Play()
    play.step(Delta(request=7, tokens=(1,)), Delta(request=7, tokens=(2,)), ended(answer=3))
    assert play.metrics.first == [4.0] and play.metrics.output == {"alice": 3} and play.metrics.ends == [Finish.LENGTH]


def test_a_request_that_is_aborted_leaves_what_was_computed_of_its_prompt() -> None:
    play = Play()
    play.begin()
    play.step(position=68)
    assert play.step(ended(Finish.ABORTED, tokens=(), answer=0))["computed"] == 20
    assert play.metrics.first == [] and play.metrics.ends == [Finish.ABORTED] and not play.progress._seen
