"""Engines with Quest or ClusterKV whose keys and values may be on the host alone: settings, lengths, traffic, drafts, recordings.

That no bit changes is proved in `tests/parity/test_spilled_keys_and_values.py`.
"""

from __future__ import annotations

from functools import cache
from random import Random
from typing import Any

import pytest
import torch

from engine.families import checkpoint
from engine.small import DEFAULTS, PAGE, greedy, prompt, run, small, tokens_of
from engine.test_graphs import Cuda, playing, recorded
from engine.test_spilling import LIMITS
from parity.spilling import poison_freed, press, report, short, spilled
from stepwell.base.errors import ConfigError
from stepwell.base.ids import Kind, Tier
from stepwell.base.spec.families import from_config
from stepwell.engine import Engine, EngineConfig, Finish, GenerateRequest, Sampling, build_engine
from stepwell.engine.ops import attention
from stepwell.engine.passes.rows import LayerPlaces
from stepwell.engine.running.graphs import Graphs, Recording

pytest.importorskip("transformers")

SELECTORS = ("quest", "clusterkv")
BUDGET = 112


def engine_for(selector: str, family: str = "llama", **settings: Any) -> Engine:
    """With rows that may spill, and a device for six requests of a thousand tokens at most."""
    defaults = {"sparse": selector, "sparse_budget": BUDGET, "hot_rows": 8 * PAGE, "limits": LIMITS}
    return build_engine(short(checkpoint(family)), EngineConfig(**(DEFAULTS | defaults | settings)))


def alone(selector: str, asks: list[GenerateRequest]) -> list[list[int]]:
    """What each answer is with no other request, nothing cached and all rows on the device."""
    return [list(_alone(selector, tuple(ask.tokens), ask.sampling)) for ask in asks]


@cache
def _alone(selector: str, tokens: tuple[int, ...], sampling: Sampling) -> tuple[int, ...]:
    with small("llama", sparse=selector, sparse_budget=BUDGET) as engine:
        return tuple(tokens_of(run(engine, [GenerateRequest(tokens=tokens, sampling=sampling, use_cache=False)])[0]))


# ---- settings and lengths ---------------------------------------------------------------------------


@pytest.mark.parametrize("selector", SELECTORS)
def test_stores_and_hosts_hold_the_same_bytes_and_the_device_keeps_the_summaries(selector: str) -> None:
    config = checkpoint("llama").config
    plain, spills = (from_config(config, sparse=selector, spills=each) for each in (False, True))
    assert plain.fingerprint == spills.fingerprint and plain.spill is None and spills.spill is not None
    assert spills.spill.group_of == {"kv": (0, 1, 2, 3)}, "every layer picks for itself"
    summaries = "bounds" if selector == "quest" else "clusters"
    assert [part.state for part in spills.device_parts(Kind.ROWS)] == ["kv"]
    assert [part.state for part in spills.device_parts(Kind.PREFIX)] == [summaries, "slot", "header"]


@pytest.mark.parametrize("selector", SELECTORS)
@pytest.mark.parametrize("family", ["gemma3", "mistral"])
def test_models_with_windows_are_refused(selector: str, family: str) -> None:
    with pytest.raises(ConfigError, match=r"leave hot_rows out|look at all of the past"):
        engine_for(selector, family)


def test_without_hot_rows_everything_stays_on_the_device() -> None:
    with engine_for("quest", hot_rows=None) as engine:
        assert engine.spilling is None and Kind.ROWS not in engine.cache._state.arena(Tier.DEVICE).layout.strides


@pytest.mark.parametrize(("selector", "hot_rows"), [("quest", 0), ("clusterkv", 4 * PAGE)])
def test_rows_of_answers_stay_so_requests_with_long_ones_are_shorter(selector: str, hot_rows: int) -> None:
    """Rows computed with a selector are not published to other requests. The longest answer that is admitted can be computed."""
    with engine_for(selector, device_memory="700KiB", hot_rows=hot_rows) as engine:
        assert BUDGET + 2 * PAGE < engine.max_alone < engine.max_context, "otherwise the test shows nothing"
        for length in (40, engine.max_alone, engine.max_context - 1):
            tokens, most = prompt(length), engine._builder.most_tokens(greedy(prompt(length)))
            assert engine.max_alone <= most <= engine.max_context
            assert most < engine.max_context or length > engine.max_alone
            with pytest.raises(ConfigError, match=f"{length} prompt tokens and .* exceed the {most} .*ask for less$"):
                engine.submit(greedy(tokens, most - length + 1))
            (deltas,) = run(engine, [greedy(tokens, most - length)])
            assert deltas[-1].error is None and deltas[-1].finish is Finish.LENGTH and len(tokens_of(deltas)) == most - length
            assert deltas[-1].usage is not None and deltas[-1].usage.preemptions <= 1, "it may be packed once"
        number = engine.submit(GenerateRequest(tokens=prompt(40), sampling=Sampling(ignore_eos=True)))
        assert engine._answering.requests[number].max_tokens == engine._builder.most_tokens(greedy(prompt(40))) - 40
        engine.abort(number)


def test_how_long_a_request_may_be_is_found_once_for_as_many_pages(monkeypatch: pytest.MonkeyPatch) -> None:
    with engine_for("quest", device_memory="700KiB", hot_rows=0) as engine:
        calls, could_hold = [0], type(engine.cache).could_hold
        monkeypatch.setattr(type(engine.cache), "could_hold", lambda *a, **k: (calls.append(1), could_hold(*a, **k))[1])
        found = [engine._builder.most_tokens(greedy(prompt(13 * PAGE + more))) for more in (0, 3, PAGE - 1)]
        searched = sum(calls)
        assert len({*found}) == 1 and searched > 3 and found[0] < engine.max_context
        assert engine._builder.most_tokens(greedy(prompt(13 * PAGE + 5))) == found[0] and sum(calls) == searched
        assert engine._builder.most_tokens(greedy(prompt(14 * PAGE))) > found[0] and sum(calls) > searched


# ---- traffic ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("selector", SELECTORS)
@pytest.mark.parametrize("seed", range(3))
def test_answers_are_the_same_whatever_is_shed_preempted_and_aborted(selector: str, seed: int) -> None:
    """Conversations that share beginnings and part, more of them than fit, some aborted at any moment."""
    random = Random(seed)
    shared = prompt(random.randrange(100, 250), seed=seed)
    asks = [
        greedy([*shared[: random.randrange(len(shared))], *prompt(random.randrange(5, 250), seed=100 * seed + at)], 25,
               priority=random.randrange(3), use_cache=random.random() < 0.9)
        for at in range(10)
    ]  # fmt: skip
    memory, hot_rows = ("800KiB", "900KiB", "1200KiB")[seed], (0, 2 * PAGE, 8 * PAGE)[seed]
    with engine_for(selector, device_memory=memory, host_memory="3MiB", hot_rows=hot_rows) as engine:
        poison_freed(engine)
        numbers = [engine.submit(ask) for ask in asks]
        victims, answers = set(random.sample(numbers, 3)), {number: [] for number in numbers}  # type: ignore[var-annotated]
        ends: dict[int, Finish] = {}
        preemptions = 0
        while engine.num_open:
            if random.random() < 0.05 and (left := victims - ends.keys()):
                engine.abort(min(left))
            for delta in engine.step():
                answers[delta.request] += delta.tokens
                assert delta.error is None, delta.error
                if delta.finish is not None:
                    ends[delta.request] = delta.finish
                    preemptions += delta.usage.preemptions if delta.usage is not None else 0
            engine.cache.audit()
        assert engine.cache.stats().counters["spilled_pages"] > 0 and preemptions > 0
        assert report(engine).misses and report(engine).hot_pages == 0, "hot pages go with their leases"
    expected = dict(zip(numbers, alone(selector, asks), strict=True))
    for number, tokens in answers.items():
        if ends[number] is Finish.ABORTED:
            assert tokens == expected[number][: len(tokens)]
        else:
            assert tokens == expected[number]


@pytest.mark.parametrize("hot_rows", [0, 8 * PAGE])
@pytest.mark.parametrize("draft_tokens", [3, 10])
def test_guesses_are_verified_over_rows_on_the_host(hot_rows: int, draft_tokens: int) -> None:
    """Several query rows of a request pick together, enough of them to be staged, too. Draft rows stay on the device."""
    asks = [greedy(prompt(length, seed=length), 24) for length in (40, 180, 250)]
    settings = DEFAULTS | {"sparse": "quest", "sparse_budget": BUDGET, "draft_tokens": draft_tokens, "limits": LIMITS}
    made = short(checkpoint("llama"))
    with build_engine(made, EngineConfig(**settings, hot_rows=hot_rows), draft=made) as engine:
        press(engine)
        played = run(engine, asks)
        found = report(engine)
    assert [tokens_of(deltas) for deltas in played] == alone("quest", asks)
    assert sum(deltas[-1].usage.accepted_tokens for deltas in played if deltas[-1].usage is not None) > 0
    assert found.misses and (found.read_through == found.misses) == (hot_rows == 0)


# ---- recordings -------------------------------------------------------------------------------------


@pytest.mark.parametrize("selector", SELECTORS)
@pytest.mark.parametrize("hot_rows", [0, 2 * PAGE, 8 * PAGE])
def test_a_played_step_finds_rows_where_they_are_when_it_is_played(
    selector: str, hot_rows: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Requests come, spill and go; rows leave the device between a recording and its replays."""
    Cuda().replace(monkeypatch)
    monkeypatch.setattr(Graphs, "_record", playing)
    plays, play = [0], Recording.play
    monkeypatch.setattr(Recording, "play", lambda self, batch: (plays.append(1), play(self, batch))[1])
    asks = [greedy(prompt(length, seed=length), 24) for length in (150, 97, 30, 17, 200, 64, 260)]
    expected = alone(selector, asks)
    with engine_for(selector, hot_rows=hot_rows) as engine:
        spilling = engine._runner._pages.spilling
        assert spilling is not None
        monkeypatch.setattr(spilling, "_asks_host", lambda: False)
        made = recorded(engine, "llama")
        press(engine)
        assert [tokens_of(deltas) for deltas in run(engine, asks)] == expected
        assert sum(plays) > 20 and any(shape[2] for shape in made._recordings)
        assert report(engine).misses and (report(engine).fetched_bytes > 0) == (hot_rows > 0)


def test_keys_of_a_unit_that_a_step_completes_are_read_where_they_were_written() -> None:
    """Single tokens complete units while earlier pages are on the host: the summaries equal those of engines without a host."""
    tokens = prompt(250, seed=3)
    kept: list[torch.Tensor] = []
    for hot_rows in (None, 0):
        with engine_for("quest", hot_rows=hot_rows) as engine:
            if hot_rows is not None:
                press(engine)
            engine.submit(greedy(tokens, 60))
            while sum(len(request.tokens) for request in engine.scheduler.active.values()) < 300:
                engine.step()
            (request,) = engine.scheduler.active.values()
            assert request.lease is not None
            pages = torch.from_numpy(request.lease.prefix_pages[: request.position // PAGE]).long()
            kept.append(engine._runner._pages.state_PLRE("bounds")[pages].clone())
    assert len(kept[0]) == len(kept[1]) >= 18 and torch.equal(*kept)


def test_single_tokens_of_prompts_are_looked_at_a_few_requests_at_a_time(monkeypatch: pytest.MonkeyPatch) -> None:
    """Their rows are copied whole for it, and that memory is not counted."""
    known = prompt(20 * PAGE, seed=1)
    asks = [greedy([*known, token], 3) for token in range(1, 7)]
    expected, gathered = alone("quest", asks), list[int]()
    monkeypatch.setattr(attention, "READ_AT_ONCE_BYTES", 1)
    whole = LayerPlaces.whole
    monkeypatch.setattr(LayerPlaces, "whole", lambda self, table: (gathered.append(len(table)), whole(self, table))[1])
    made = spilled("llama", hot_rows=8 * PAGE, sparse="quest", sparse_budget=BUDGET)
    made.play(known)
    assert [tokens_of(each) for each in run(made.engine, asks)] == expected
    made.close()
    assert gathered and set(gathered) == {1}
