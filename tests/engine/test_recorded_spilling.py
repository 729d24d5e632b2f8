"""Decode steps over rows on the host that are recorded and played again, and that go ahead unread, with something that plays
without a GPU: the answers are those of engines whose rows are all on the device.

What is played computes from the tensors of its recording alone. So what a step needs and a replay would not do shows in answers.
"""

from __future__ import annotations

from collections.abc import Callable
from random import Random
from typing import Any

import pytest
import torch

from engine.small import PAGE, alone, greedy, prompt, run, tokens_of
from engine.test_graphs import Cuda, playing, recorded
from engine.test_spilling import engine_for
from parity.spilling import SPARSE, poison_freed, press, report
from stepwell.engine import Engine, Finish
from stepwell.engine.passes.batch import Batch
from stepwell.engine.requests.request import Chunk
from stepwell.engine.running import graphs
from stepwell.engine.running.graphs import Graphs, Recording
from stepwell.engine.scheduling.scheduler import Scheduler

pytest.importorskip("transformers")

ASKS = [greedy(prompt(length, seed=length), 24) for length in (150, 97, 30, 17, 200, 64, 260)]


def played(monkeypatch: pytest.MonkeyPatch, family: str, **settings: Any) -> tuple[Engine, Graphs]:
    """An engine that records and plays, as on CUDA with kernels that do not ask the host."""
    Cuda().replace(monkeypatch)
    monkeypatch.setattr(Graphs, "_record", playing)
    engine = engine_for(family, **settings)
    spilling = engine._runner._pages.spilling
    assert spilling is not None
    monkeypatch.setattr(spilling, "_asks_host", lambda: False)
    return engine, recorded(engine, "deepseek_v32")


@pytest.mark.parametrize("family", SPARSE)
@pytest.mark.parametrize("hot_rows", [0, PAGE, 4 * PAGE])
def test_a_played_step_finds_rows_where_they_are_when_it_is_played(
    family: str, hot_rows: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Requests come, spill and go; rows leave the device between a recording and its replays."""
    engine, made = played(monkeypatch, family, hot_rows=hot_rows)
    plays = [0]
    play = Recording.play
    monkeypatch.setattr(Recording, "play", lambda self, batch: (plays.append(1), play(self, batch))[1])
    with engine:
        press(engine)
        assert [tokens_of(deltas) for deltas in run(engine, ASKS)] == alone(family, ASKS)
        assert sum(plays) > 20 and any(shape[2] for shape in made._recordings)
        assert report(engine).misses and (report(engine).fetched_bytes > 0) == (hot_rows > 0)


@pytest.mark.parametrize("family", SPARSE)
def test_steps_whose_rows_are_all_on_the_device_have_recordings_of_their_own(
    family: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With as many requests and pages: such a step looks nothing up and fetches nothing."""
    monkeypatch.setattr(graphs, "PAGES_STEP", 64)
    engine, made = played(monkeypatch, family)
    spilling = engine._runner._pages.spilling
    assert spilling is not None
    calls: list[str] = []

    def noted(name: str, of: Callable[..., Any]) -> Callable[..., Any]:
        return lambda *given: (calls.append(name), of(*given))[1]

    for name in ("_resolve", "_fetch", "_read"):
        monkeypatch.setattr(spilling, name, noted(name, getattr(spilling, name)))
    with engine:
        assert [tokens_of(deltas) for deltas in run(engine, ASKS)] == alone(family, ASKS)
        assert not calls and made._recordings and not any(shape[2] for shape in made._recordings)
        before = len(made._recordings)
        press(engine)
        assert [tokens_of(deltas) for deltas in run(engine, ASKS)] == alone(family, ASKS)
        assert {"_resolve", "_fetch", "_read"} == {*calls} and len(made._recordings) > before
        resident, spilled = ({(*shape[:2], *shape[3:]) for shape in made._recordings if shape[2] is how} for how in (False, True))
        assert resident & spilled, "the same but for where rows are"


def test_before_every_replay_the_device_is_told_where_rows_are(monkeypatch: pytest.MonkeyPatch) -> None:
    engine, _ = played(monkeypatch, "deepseek_v32", device_memory="800KiB")
    spilling = engine._runner._pages.spilling
    assert spilling is not None
    places = spilling.places
    with engine:
        for at in range(3):
            engine.submit(greedy(prompt(200 + 100 * at, seed=at), 20))
        while engine.num_open:
            before, now = engine.passes, int(places.now_1)
            engine.step()
            assert int(places.now_1) - now == engine.passes - before


def test_a_step_is_not_recorded_where_the_host_is_asked(monkeypatch: pytest.MonkeyPatch) -> None:
    """Plain torch finds rows by asking the device. It is computed, and what follows resident is recorded."""
    engine, made = played(monkeypatch, "deepseek_v32")
    with engine:
        spilling = engine._runner._pages.spilling
        assert spilling is not None
        monkeypatch.setattr(spilling, "_asks_host", lambda: True)
        press(engine)
        assert [tokens_of(deltas) for deltas in run(engine, ASKS)] == alone("deepseek_v32", ASKS)
        assert not any(shape[2] for shape in made._recordings) and report(engine).misses


# ---- ahead of what was read ---------------------------------------------------------------------------


@pytest.mark.parametrize("family", SPARSE)
@pytest.mark.parametrize("seed", range(3))
def test_steps_go_ahead_also_where_rows_must_leave_for_them(family: str, seed: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Devices are too small, and some requests are aborted."""
    memory = ("1000KiB", "1100KiB", "1300KiB")[seed] if family == "glm_moe_dsa" else ("700KiB", "680KiB", "800KiB")[seed]
    engine, _ = played(monkeypatch, family, device_memory=memory, host_memory="3MiB", hot_rows=(0, PAGE, 3 * PAGE)[seed])
    engine.passing.reads_later = True
    poison_freed(engine)
    ahead, shed, plan_ahead, random = [0], [0], Scheduler.plan_ahead, Random(seed)

    def watched(scheduler: Scheduler) -> Any:
        spilled = engine.cache.stats().counters.get("spilled_pages", 0)
        following = plan_ahead(scheduler)
        shed.append(engine.cache.stats().counters.get("spilled_pages", 0) - spilled)
        ahead.append(len(following))
        return following

    monkeypatch.setattr(Scheduler, "plan_ahead", watched)
    asks = [greedy(prompt(random.randrange(5, 300), seed=10 * seed + at), 30, priority=at % 2) for at in range(8)]
    with engine:
        numbers = [engine.submit(ask) for ask in asks]
        answers: dict[int, list[int]] = {number: [] for number in numbers}
        ends: dict[int, Finish] = {}
        while engine.num_open:
            if random.random() < 0.02 and len(left := [each for each in numbers if each not in ends]) > 4:
                engine.abort(left[0])
            for delta in engine.step():
                answers[delta.request] += delta.tokens
                assert delta.error is None, delta.error
                if delta.finish is not None:
                    ends[delta.request] = delta.finish
            engine.cache.audit()
        assert sum(ahead) > 20 and sum(shed) > 0, f"{ahead=} {shed=}"
    for number, expected in zip(numbers, alone(family, asks), strict=True):
        got = answers[number]
        assert got == (expected[: len(got)] if ends[number] is Finish.ABORTED else expected)


def test_a_batch_says_once_whether_rows_are_away() -> None:
    """What is decided for a pass holds for all its layers, whatever becomes of pages meanwhile."""
    with engine_for("deepseek_v32") as engine:
        press(engine)
        engine.submit(ASKS[0])
        for _ in range(8):
            engine.step()
        runner = engine._runner
        (request,) = engine.scheduler.active.values()
        batch = runner._batch([runner._segment(Chunk(request=request, start=len(request.tokens) - 1, end=len(request.tokens)))])
        spilled = batch.spilled
        assert isinstance(batch, Batch) and spilled is not None and batch.spilled is spilled
        assert batch.paging_of("kv") is batch.rows_paging and batch.paging_of("index") is batch.paging(None)
        rows = engine.cache.row_pages
        assert rows is not None and request.lease is not None
        last = request.lease.prefix_pages[(len(request.tokens) - 1) // PAGE]
        assert torch.equal(batch.rows_paging.page_N, torch.tensor([int(rows.rows[last])])), "where the token's row is written"
