"""The engine as a whole, on small random models: batching, waiting, preemption, sampling, ends."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch

from engine.small import PAGE, alone, greedy, prompt, run, small, tokens_of
from stepwell.base.errors import BadTokens, ConfigError, NoRoom
from stepwell.base.ids import Tier
from stepwell.engine import EngineConfig, Finish, GenerateRequest, Limits, Sampling
from stepwell.engine.building.settings import device_bytes_of, device_of, dtype_of, limits_for
from stepwell.engine.engine import UPKEEP_S
from stepwell.engine.models import registry
from stepwell.engine.start_pass import measure_speed
from waiting import run_to_the_end, run_until, settle

pytest.importorskip("transformers")


def test_the_first_calls_of_a_process_are_made_before_there_is_a_model(monkeypatch: pytest.MonkeyPatch) -> None:
    happened: list[str] = []
    parts = registry.Parts
    monkeypatch.setattr(registry, "make_first_calls", lambda: happened.append("first calls"))
    monkeypatch.setattr(registry, "Parts", lambda **fields: (happened.append("a model"), parts(**fields))[1])
    small().close()
    assert happened == ["first calls", "a model"]


@pytest.mark.parametrize("family", ["llama", "gemma3", "qwen3_next"])
def test_answers_do_not_depend_on_who_runs_beside(family: str) -> None:
    asks = [greedy(prompt(length, seed=length), 10) for length in (3, 20, 64, 65, 150)]
    with small(family) as engine:
        assert [tokens_of(deltas) for deltas in run(engine, asks)] == alone(family, asks)


@pytest.mark.parametrize(("family", "memory"), [("llama", "512KiB"), ("gemma3", "320KiB"), ("falcon_h1", "1MiB")])
def test_preempted_requests_resume_and_answer_the_same(family: str, memory: str) -> None:
    asks = [greedy(prompt(100, seed=seed), 60) for seed in range(6)]
    with small(family, device_memory=memory) as engine:
        played = run(engine, asks)
        usages = [deltas[-1].usage for deltas in played]
        assert sum(usage.preemptions for usage in usages if usage is not None) > 0, "the device was not small enough"
    assert [tokens_of(deltas) for deltas in played] == alone(family, asks)


@pytest.mark.parametrize("family", ["llama", "gemma3", "qwen3_next"])
def test_a_prefix_that_another_computes_is_waited_for(family: str) -> None:
    shared = prompt(10 * PAGE + 3)
    asks = [greedy(shared + prompt(20, seed=seed)) for seed in (1, 2, 3)]
    with small(family) as engine:
        played = run(engine, asks)
        sources = [deltas[-1].usage.sources for deltas in played if deltas[-1].usage is not None]
    assert sorted(each.device for each in sources) == [0, 10 * PAGE, 10 * PAGE], f"{sources}"
    assert [tokens_of(deltas) for deltas in played] == alone(family, asks)


def test_who_waits_for_a_prefix_goes_on_when_the_other_is_aborted() -> None:
    shared = prompt(20 * PAGE)
    with small() as engine:
        first = engine.submit(greedy([*shared, 1]))
        engine.step()
        second = engine.submit(greedy([*shared, 2]))
        engine.step()
        assert engine.scheduler.waiting
        engine.abort(first)
        ends = [delta for delta in run_to_the_end(engine) if delta.finish is not None]
    assert [(delta.request, delta.finish) for delta in ends] == [(first, Finish.ABORTED), (second, Finish.LENGTH)]


def test_an_aborted_request_gives_everything_back() -> None:
    with small("falcon_h1") as engine:
        for steps in range(6):
            number = engine.submit(greedy(prompt(200, seed=steps), 50))
            for _ in range(steps):
                engine.step()
            engine.abort(number)
            engine.abort(number)  # a second time does nothing
            assert [delta.finish for delta in engine.step()][-1:] == [Finish.ABORTED]
        settle(engine.cache)
        engine.cache.audit()
        layout = engine.cache.stats().tier(Tier.DEVICE).available_bytes
        engine.cache.flush()
        assert (
            engine.cache.stats().tier(Tier.DEVICE).available_bytes == layout
            and not engine.cache.stats().tier(Tier.DEVICE).used_bytes
        )


def test_urgent_requests_begin_first() -> None:
    with small(limits=Limits(chunk_tokens=64, max_running=1)) as engine:
        numbers = [engine.submit(greedy(prompt(30, seed=at), 2, priority=priority)) for at, priority in enumerate((0, 0, 5))]
        ended = [delta.request for delta in run_to_the_end(engine) if delta.finish is not None]
    assert ended.index(numbers[2]) == 0


def test_the_request_with_least_to_compute_begins_first() -> None:
    with small(limits=Limits(chunk_tokens=64, max_running=1)) as engine:
        known = prompt(10 * PAGE)
        run(engine, [greedy(known)])
        numbers = [engine.submit(greedy(prompt(150, seed=9), 2)), engine.submit(greedy([*known, 5], 2))]
        ended = [delta.request for delta in run_to_the_end(engine) if delta.finish is not None]
    assert ended == numbers[::-1]


def test_salted_requests_share_nothing_with_others() -> None:
    with small() as engine:
        ask = greedy(prompt(100))
        run(engine, [ask])
        for salt, cached in (("one", 0), ("one", 96), ("two", 0), (None, 96)):
            (deltas,) = run(engine, [greedy(prompt(100), salt=salt)])
            assert deltas[-1].usage is not None and deltas[-1].usage.sources.device == cached, f"{salt=}"


def test_sampling_is_the_seeds_alone() -> None:
    def ask(seed: int, **more: Any) -> GenerateRequest:
        return GenerateRequest(tokens=prompt(40), sampling=Sampling(max_tokens=12, temperature=1.0, seed=seed, **more))

    with small() as engine:
        together = [tokens_of(deltas) for deltas in run(engine, [ask(1), ask(2), ask(1)])]
        assert together[0] == together[2] != together[1]
        assert tokens_of(run(engine, [ask(1)])[0]) == together[0]
        assert tokens_of(run(engine, [ask(7, top_k=1)])[0]) == alone("llama", [greedy(prompt(40), 12)])[0]
        assert tokens_of(run(engine, [ask(7, top_p=1e-6)])[0]) == alone("llama", [greedy(prompt(40), 12)])[0]


def test_logprobs_name_the_token_and_its_rivals() -> None:
    with small() as engine:
        (deltas,) = run(engine, [GenerateRequest(tokens=prompt(20), sampling=Sampling(max_tokens=3, logprobs=4))])
    for delta in deltas:
        (logprob,) = delta.logprobs
        assert logprob.token == delta.tokens[0] == logprob.top[0][0] and logprob.logprob == pytest.approx(logprob.top[0][1])
        values = [value for _, value in logprob.top]
        assert len(values) == 4 and values == sorted(values, reverse=True) and max(values) < 0


def test_what_cannot_run_is_refused_when_it_comes() -> None:
    with small(device_memory="512KiB") as engine:
        with pytest.raises(ConfigError, match="exceed"):
            engine.submit(greedy(prompt(engine.max_context)))
        with pytest.raises(ConfigError, match="exceed"):
            engine.submit(greedy(prompt(10), engine.max_context))
        with pytest.raises(BadTokens, match="0 to 127"):
            engine.submit(greedy([5, 128]))
        with pytest.raises(BadTokens, match="empty"):
            engine.submit(greedy([]))
        with pytest.raises(ConfigError, match="tokenizer"):
            engine.submit(GenerateRequest(tokens=[1], sampling=Sampling(stop=("x",))))
        assert not engine.num_open
        (deltas,) = run(engine, [greedy(prompt(engine.max_context - 8), 8)])  # the longest there may be
        assert deltas[-1].finish is Finish.LENGTH and len(tokens_of(deltas)) == 8


def test_a_request_that_wants_no_cache_leaves_nothing_behind() -> None:
    with small("gemma3") as engine:
        run(engine, [GenerateRequest(tokens=prompt(200), sampling=Sampling(max_tokens=4), use_cache=False)])
        assert engine.cache.lookup(prompt(200)).known_tokens == 0


def test_sizes_that_do_not_fit_say_what_would() -> None:
    with pytest.raises(ConfigError, match="free"):
        small(host_memory="9000TiB")
    with pytest.raises(ConfigError, match="must be at least"):
        small(device_memory="1KiB")
    with pytest.raises(ConfigError, match="host tier"):
        small(host_memory=0, store="memory:")


def test_warming_up_leaves_nothing_behind() -> None:
    with small() as engine:
        assert engine.warm_up() > 0
        assert engine.num_open == 0 and engine.cache.stats().tier(Tier.DEVICE).used_bytes == 0


def test_the_start_measures_how_long_prompts_take_and_leaves_nothing_behind() -> None:
    with small(store="memory:") as engine:
        engine.generate([1] * 40, max_tokens=1)
        measure_speed(engine)
        compute = engine.cache._store_tier.compute
        assert engine.num_open == 0 and engine.cache.lookup([13, 7932 % engine.vocab_size, *[1] * 40]).restore_tokens == 0
        long_s, short_s = compute.seconds(0, 400), compute.seconds(0, 100)
        assert long_s is not None and short_s is not None and long_s > short_s > 0


def test_what_building_kernels_took_is_no_measure_of_computing() -> None:
    with small(store="memory:") as engine:
        engine.cache.computed([(0, 64)], 168.0)  # a first pass that waited for a compiler
        measure_speed(engine)
        seconds = engine.cache._store_tier.compute.seconds(0, 64)
        assert seconds is not None and seconds < 16.8


@pytest.mark.parametrize("share", ["0%", "100%", "%", "-5%", "half%"])
def test_a_share_of_memory_that_cannot_be_is_refused(share: str) -> None:
    with pytest.raises(ConfigError, match="from 1% to 99%"):
        small(device_memory=share)


def test_what_a_gpu_gets_by_default(monkeypatch: pytest.MonkeyPatch) -> None:
    """The weights leave 100 GB: 88 % for the device tier, or the requested share; long passes, many requests."""
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device: (100 * 10**9, 140 * 10**9))
    config = EngineConfig()
    assert device_of(config) == "cuda" and dtype_of(config) == "bf16"
    assert limits_for(config) == Limits(max_running=64, chunk_tokens=8192)
    assert device_bytes_of(config, "cuda") == 88 * 10**9
    assert device_bytes_of(replace(config, device_memory="70%"), "cuda") == 70 * 10**9
    assert device_bytes_of(replace(config, device_memory="8GiB"), "cuda") == 8 * 2**30


def test_who_waits_for_room_leaves_the_processor_to_the_copies_that_make_it(monkeypatch: pytest.MonkeyPatch) -> None:
    ask = greedy(prompt(5 * PAGE), 8)
    with small() as engine:
        number = engine.submit(ask)
        deltas = run_until(engine, lambda: engine.passes > 1)

        def no_room_yet(*args: Any) -> None:
            raise NoRoom("a copy makes space", waiting=True)

        monkeypatch.setattr(engine.cache, "grow", no_room_yet)
        deltas += run_until(engine, lambda: engine.passing.unread is None)
        deltas += engine.step()
        passes = engine.passes
        assert engine.scheduler.active and engine.step() == [] and engine.passes == passes
        assert engine.idle and engine.pause_s == UPKEEP_S, "the engine asks again and again while others need the processor"
        monkeypatch.undo()
        deltas += run_to_the_end(engine)
    assert [token for delta in deltas if delta.request == number for token in delta.tokens] == alone("llama", [ask])[0]
