"""Failures in the engine: each stays with its own request, no request waits for ever, and no answer is wrong."""

from __future__ import annotations

import logging
import time
from random import Random
from typing import Any

import pytest
import torch

from engine.small import alone, greedy, prompt, run, small, tokens_of
from stepwell.base.config import StoreConfig, WritePolicy
from stepwell.base.errors import ConfigError, StepwellError
from stepwell.base.meters import ManualClock
from stepwell.base.tasks import Purpose
from stepwell.engine import Engine, Finish, GenerateRequest, Limits, Sampling
from stepwell.engine.running import runner as runner_module
from stepwell.engine.trouble import TroubleLog
from stepwell.policy import store_use
from stepwell.store.registry import open_store
from stepwell.store.wrappers import Faults, Faulty
from stepwell.store_tier.link import LinkState
from waiting import run_to_the_end, run_until

pytest.importorskip("transformers")


@pytest.mark.parametrize("family", ["gemma3", "gpt_oss", "mistral"])
@pytest.mark.parametrize("memory", ["240KiB", "320KiB", "400KiB"])
def test_a_prefill_may_be_preempted_by_another_in_the_same_plan(family: str, memory: str) -> None:
    asks = [greedy(prompt(150 + 20 * seed, seed=seed), 12, priority=seed % 2) for seed in range(5)]
    with small(family, device_memory=memory, limits=Limits(chunk_tokens=200)) as engine:
        played = run(engine, [ask for ask in asks if len(ask.tokens) + 12 <= engine.max_context])
    for ask, deltas in zip([ask for ask in asks if len(ask.tokens) + 12 <= engine.max_context], played, strict=True):
        assert deltas[-1].error is None and tokens_of(deltas) == alone(family, [ask])[0]


@pytest.mark.parametrize("temperature", [1e-7, 1e-40, 1e-46, 5e-324])  # the last two are 0 as 32-bit numbers
def test_the_smallest_temperature_hurts_nobody(temperature: float) -> None:
    cold = GenerateRequest(tokens=prompt(30), sampling=Sampling(max_tokens=5, temperature=temperature, seed=1))
    with small() as engine:
        played = run(engine, [cold, greedy(prompt(30, seed=1), 5)])
    assert [deltas[-1].finish for deltas in played] == [Finish.LENGTH, Finish.LENGTH]
    assert tokens_of(played[0]) == alone("llama", [greedy(prompt(30), 5)])[0]


def test_what_gave_no_number_is_not_cached() -> None:
    with small() as engine:
        ours = engine.submit(greedy(prompt(40), 5))
        runner = engine._runner
        compute = runner.run
        runner.run = lambda chunks: _spoil(compute(chunks), [c.request.id for c in chunks if c.completes], ours)  # type: ignore
        ends = [delta for delta in run_to_the_end(engine) if delta.finish is not None]
        assert [delta.finish for delta in ends] == [Finish.FAILED]
        assert engine.cache.lookup(prompt(40)).restore_tokens == 0, "rows that may be no numbers were offered to others"


def test_output_that_is_no_number_ends_its_own_request() -> None:
    with small() as engine:
        ours, theirs = engine.submit(greedy(prompt(30), 5)), engine.submit(greedy(prompt(40), 5))
        runner = engine._runner
        compute = runner.run
        runner.run = lambda chunks: _spoil(compute(chunks), [c.request.id for c in chunks if c.completes], ours)  # type: ignore
        ends = {delta.request: delta for delta in run_to_the_end(engine) if delta.finish is not None}
        assert ends[ours].finish is Finish.FAILED and "not a number" in str(ends[ours].error)
        assert ends[theirs].finish is Finish.LENGTH
        engine.cache.audit()


def _spoil(logits: torch.Tensor, numbers: list[int], victim: int) -> torch.Tensor:
    spoiled = logits.clone()
    if victim in numbers:
        spoiled[numbers.index(victim), 3] = torch.nan
    return spoiled


def test_settings_that_cannot_be_are_refused_at_once() -> None:
    for wrong in ({"priority": -1}, {"ttl_s": 0.0}, {"hints": (-5,)}):
        with pytest.raises(ConfigError):
            GenerateRequest(tokens=[1], **wrong)
    for wrong in ({"seed": 2**64}, {"temperature": -1.0}, {"top_p": 0.0}, {"max_tokens": 0}, {"stop": ("",)}, {"logprobs": 99}):
        with pytest.raises(ConfigError):
            Sampling(**wrong)


def test_a_request_that_cannot_be_leased_ends_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    with small() as engine:
        acquire = engine.cache.acquire

        def failing(match: Any, **more: Any) -> Any:
            if match.prompt_tokens == 33:
                raise RuntimeError("something unforeseen")
            return acquire(match, **more)

        monkeypatch.setattr(engine.cache, "acquire", failing)
        played = run(engine, [greedy(prompt(33)), greedy(prompt(34))])
    assert [deltas[-1].finish for deltas in played] == [Finish.FAILED, Finish.LENGTH]
    assert "something unforeseen" in str(played[0][-1].error)


def test_copies_of_state_that_always_fail_do_not_keep_a_request_for_ever(monkeypatch: pytest.MonkeyPatch) -> None:
    with small("falcon_h1") as engine:
        submit = engine.cache._state.copies._executor.submit

        def failing(plan: Any) -> None:
            submit(plan if plan.purpose is not Purpose.FORK else _broken(plan))

        monkeypatch.setattr(engine.cache._state.copies._executor, "submit", failing)
        asks = [greedy(prompt(80), 40)]
        (deltas,) = run(engine, asks)
    assert tokens_of(deltas) == alone("falcon_h1", asks)[0]


def _broken(plan: Any) -> Any:
    from dataclasses import replace

    copy = plan.copies[0]
    ids = copy.target.ids + 10**6  # beyond the arena
    return replace(plan, copies=(replace(copy, target=replace(copy.target, ids=ids)),))


@pytest.mark.parametrize("family", ["llama", "qwen3_next", "falcon_h1"])
def test_a_pass_that_fails_ends_its_requests_and_publishes_nothing_wrong(family: str) -> None:
    ask = greedy(prompt(60), 12)
    with small(family) as engine:
        layers: Any = engine._runner.model.layers
        last, left = layers[-1], [3]

        def failing(*given: Any) -> torch.Tensor:
            left[0] -= 1
            if left[0] == 0:
                raise RuntimeError("out of memory")
            return last(*given)

        layers[-1] = failing
        number = engine.submit(ask)
        with pytest.raises(RuntimeError, match="out of memory"):
            run_to_the_end(engine)
        ends = engine.step()
        assert [(delta.request, delta.finish) for delta in ends if delta.finish] == [(number, Finish.FAILED)]
        layers[-1] = last
        (deltas,) = run(engine, [ask])
    assert tokens_of(deltas) == alone(family, [ask])[0]


def test_a_failing_choice_of_tokens_ends_the_requests_of_its_pass(monkeypatch: pytest.MonkeyPatch) -> None:
    with small() as engine:
        engine.submit(greedy(prompt(20)))
        with monkeypatch.context() as patched:
            patched.setattr(runner_module, "Choices", _fail)
            with pytest.raises(RuntimeError, match="no choice"):
                run_to_the_end(engine)
        assert [delta.finish for delta in engine.step()] == [Finish.FAILED] and not engine.num_open
        assert tokens_of(run(engine, [greedy(prompt(20))])[0]) == alone("llama", [greedy(prompt(20))])[0]


def _fail(*given: object) -> Any:
    raise RuntimeError("no choice")


def test_two_streams_beside_each_other_both_get_all_of_their_tokens() -> None:
    with small() as engine:
        one, other = engine.stream(prompt(20), max_tokens=6), engine.stream(prompt(25), max_tokens=6)
        pairs = list(zip(one, other, strict=True))
    assert len(pairs) == 6
    with small() as engine, pytest.raises(StepwellError, match="exceed"):
        engine.generate(prompt(20), max_tokens=10**9)


def test_urgent_requests_are_seen_however_many_wait() -> None:
    with small(limits=Limits(chunk_tokens=64, max_running=1)) as engine:
        for seed in range(40):
            engine.submit(greedy(prompt(20, seed=seed), 1))
        urgent = engine.submit(greedy(prompt(20, seed=99), 1, priority=3))
        ended = [delta.request for delta in run_to_the_end(engine) if delta.finish is not None]
    assert ended[0] == urgent


def test_waiting_prompts_cost_a_full_engine_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    with small(limits=Limits(chunk_tokens=64, max_running=1)) as engine:
        for seed in range(10):
            engine.submit(greedy(prompt(100, seed=seed), 20))
        engine.step()
        monkeypatch.setattr(engine.cache, "lookup", _fail)
        monkeypatch.setattr(engine.cache, "refresh", _fail)
        run_until(engine, lambda: engine.passes == 10)  # of the first one's 21


def test_slow_saves_are_waited_for_and_preempt_nobody(monkeypatch: pytest.MonkeyPatch) -> None:
    asks = [greedy(prompt(100, seed=seed), 40) for seed in range(3)]
    with small(device_memory="512KiB") as engine:
        slow(engine, monkeypatch)
        played = run(engine, asks)
    assert [tokens_of(deltas) for deltas in played] == alone("llama", asks)
    assert all(deltas[-1].error is None for deltas in played)


def slow(engine: Engine, monkeypatch: pytest.MonkeyPatch) -> None:
    """Copies that take a while, as over a busy bus."""
    copy_engine = engine.cache._state.copies._executor._ranks[0]  # type: ignore[attr-defined]
    begin = copy_engine.begin

    def slowly(plan: Any) -> Any:
        work = begin(plan)

        def later() -> None:
            time.sleep(0.02)
            work()

        return later

    monkeypatch.setattr(copy_engine, "begin", slowly)


def test_a_store_that_fails_is_told_in_the_log_with_the_reason_and_when_it_is_used_again(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(store_use, "FIRST_COOL_OFF_S", 0.01)
    store = Faulty(open_store("memory:", options={"budget": "8MiB"}), Faults(fail=1.0), random=Random(1), sleep=time.sleep)
    with caplog.at_level(logging.INFO), small(write=WritePolicy.THROUGH) as engine:
        engine.cache.store.attach(store, StoreConfig())
        for seed in range(4):
            run(engine, [greedy(prompt(80, seed=seed))])
        run_until(engine, lambda: engine.cache.store.state is LinkState.SWITCHED_OFF)
        store.faults = Faults()
        run_until(engine, lambda: bool(run(engine, [greedy(prompt(80))])) and engine.cache.store.state is LinkState.ATTACHED)
        engine.step()
        engine.cache.store.detach()
    said = [each.getMessage() for each in caplog.records if each.name == "stepwell.engine.trouble"]
    failed, off, *_ = said
    assert failed.startswith("copies or store operations failed: ") and failed.endswith("StoreError: a fault was injected")
    assert off == "the store is suspended after failures, and tried again later: StoreError: a fault was injected"
    assert said[-1] == "the store is used again"


def test_what_fails_a_hundred_times_a_second_is_told_once_a_minute(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING), small() as engine:
        clock = ManualClock()
        log = TroubleLog(engine.cache, clock)
        for number in range(300):
            log.after_step([f"failure {number}", f"failure {number} and a half"])
            clock.advance(0.5)
        log.after_step([])
    assert [each.getMessage().partition(": ")[2] for each in caplog.records] == [
        "2, the latest: failure 0 and a half",
        "240, the latest: failure 120 and a half",
        "240, the latest: failure 240 and a half",
    ]


def test_a_store_that_fails_at_the_end_is_told_in_the_log(caplog: pytest.LogCaptureFixture) -> None:
    store = Faulty(open_store("memory:", options={"budget": "8MiB"}), Faults(fail=1.0), random=Random(1), sleep=time.sleep)
    with caplog.at_level(logging.WARNING), small(write=WritePolicy.EXCLUSIVE) as engine:
        run(engine, [greedy(prompt(80))])
        engine.cache.store.attach(store, StoreConfig())
    assert any("operations of the store failed at the end" in each.getMessage() for each in caplog.records)
