"""Passes that begin while their pages arrive: each layer is waited for, and answers are those of plain loading."""

from __future__ import annotations

from random import Random
from typing import Any

import pytest

from engine.arriving_loads import ArrivingLoads
from engine.small import alone, greedy, prompt, run, small, tokens_of
from stepwell.base.config import PrefetchPolicy, StoreConfig, WritePolicy
from stepwell.base.ids import Kind, Tier
from stepwell.base.tasks import Plan
from stepwell.engine import Engine, Finish, GenerateRequest, Limits
from stepwell.policy.store_use import StoreTuning
from stepwell.store.memory import MemoryStore
from stepwell.tiers.eviction import make_room
from waiting import empty_device, run_to_the_end, run_until, settle

pytest.importorskip("transformers")

FAMILIES = ["llama", "gemma3", "gpt_oss", "qwen3_next", "falcon_h1", "mamba2", "deepseek_v32", "deepseek_v4", "kimi_linear"]


def evict_to_host(engine: Engine) -> None:
    """The device keeps nothing."""
    empty_device(engine.cache)


def evict_idle(engine: Engine) -> None:
    """The device keeps what a request holds."""
    core = engine.cache._state
    make_room(core, Tier.DEVICE, {Kind.PREFIX: core.arena(Tier.DEVICE).layout.rows(Kind.PREFIX) + 1})


def served(engine: Engine, ask: GenerateRequest) -> list[int]:
    (deltas,) = run(engine, [ask])
    assert deltas[-1].error is None, deltas[-1].error
    return tokens_of(deltas)


@pytest.mark.parametrize("family", FAMILIES)
def test_a_pass_that_begins_while_layers_arrive_waits_for_each(family: str) -> None:
    known, ask = greedy(prompt(100)), greedy(prompt(100) + prompt(30, seed=1))
    with small(family) as engine:
        loads = ArrivingLoads(engine)
        served(engine, known)
        evict_to_host(engine)
        assert served(engine, ask) == alone(family, [ask])[0]
        assert loads.num_begun == 1
        spec = engine.cache.spec
        first = {each: loads.waits.index(each) for each in loads.waits}
        for kind in Kind:
            for part in spec.parts(kind):
                layers = [first[part.state, layer] for layer in range(part.layers)]
                assert layers == sorted(layers), "a layer is waited for when the pass comes to it"


@pytest.mark.parametrize("reads_later", [False, True])
@pytest.mark.parametrize("family", ["llama", "qwen3_next"])
def test_one_new_token_waits_like_many(family: str, reads_later: bool) -> None:
    known = greedy(prompt(97), 4)
    with small(family) as engine:
        engine.passing.reads_later = reads_later
        loads = ArrivingLoads(engine)
        loads.late = 3
        served(engine, known)
        evict_to_host(engine)
        assert served(engine, known) == alone(family, [known])[0]
        assert loads.num_begun == 1


@pytest.mark.parametrize("family", ["llama", "gemma3", "falcon_h1", "deepseek_v4"])
def test_a_load_that_fails_after_the_pass_began_puts_the_request_back(family: str) -> None:
    known, ask = greedy(prompt(100)), greedy(prompt(100) + prompt(30, seed=1))
    failing: list[Plan] = []

    def fails(plan: Plan) -> bool:
        failing.append(plan)
        return len(failing) == 1

    with small(family) as engine:
        loads = ArrivingLoads(engine)
        served(engine, known)
        evict_to_host(engine)
        loads.fails = fails
        number = engine.submit(ask)
        run_until(engine, lambda: bool(failing))
        assert engine.passes and not engine.scheduler.active[number].lease.ready  # type: ignore[union-attr]
        assert engine.cache.lookup(ask.tokens).restore_tokens == 0, "what the pass computed was offered to others"
        deltas = run_to_the_end(engine)
        assert tokens_of(deltas) == alone(family, [ask])[0] and deltas[-1].finish is Finish.LENGTH
        usage = deltas[-1].usage
        assert usage is not None and usage.sources.total == 130
        engine.cache.audit()


def test_a_request_that_ends_before_its_failed_load_is_reported_hurts_nobody() -> None:
    with small() as engine:
        loads = ArrivingLoads(engine)
        served(engine, greedy(prompt(100)))
        evict_to_host(engine)
        loads.fails = lambda plan: True
        number = engine.submit(greedy(prompt(120)))
        run_until(engine, lambda: loads.num_begun == 1)
        engine.abort(number)
        assert [delta.finish for delta in engine.step()] == [Finish.ABORTED]
        loads.fails = lambda plan: False
        ask = greedy(prompt(110, seed=2))
        assert served(engine, ask) == alone("llama", [ask])[0]


def test_an_abort_while_the_load_is_on_its_way_gives_everything_back() -> None:
    with small("gemma3") as engine:
        loads = ArrivingLoads(engine)
        served(engine, greedy(prompt(100)))
        evict_to_host(engine)
        loads.queued = lambda plan: False
        number = engine.submit(greedy(prompt(120)))
        run_until(engine, lambda: bool(loads.loads))
        engine.abort(number)
        assert [delta.finish for delta in engine.step()] == [Finish.ABORTED]
        engine.cache.audit()
        loads.queued = lambda plan: True
        loads.ends_early = lambda plan: True
        ask = greedy(prompt(100) + prompt(9, seed=3))
        assert served(engine, ask) == alone("gemma3", [ask])[0]


@pytest.mark.parametrize("family", ["llama", "gemma3", "qwen3_next"])
def test_two_requests_that_share_the_arriving_prefix(family: str) -> None:
    asks = [greedy(prompt(100) + prompt(30, seed=seed)) for seed in (1, 2)]
    with small(family, limits=Limits(chunk_tokens=256)) as engine:
        loads = ArrivingLoads(engine)
        served(engine, greedy(prompt(100)))
        evict_to_host(engine)
        played = run(engine, asks)
        assert [tokens_of(deltas) for deltas in played] == alone(family, asks)
        assert loads.num_begun >= 1


def test_both_fail_when_the_load_they_share_does() -> None:
    asks = [greedy(prompt(100) + prompt(30, seed=seed)) for seed in (1, 2)]
    failed: list[Plan] = []
    with small(limits=Limits(chunk_tokens=256)) as engine:
        loads = ArrivingLoads(engine)
        served(engine, greedy(prompt(100)))
        evict_to_host(engine)
        loads.fails = lambda plan: not failed and failed.append(plan) is None
        played = run(engine, asks)
        assert failed and [tokens_of(deltas) for deltas in played] == alone("llama", asks)


def test_nobody_waits_for_the_layers_of_another() -> None:
    with small() as engine:
        loads = ArrivingLoads(engine)
        served(engine, greedy(prompt(100)))
        evict_to_host(engine)
        decoding = engine.submit(greedy(prompt(20, seed=5), 30))
        run_until(engine, lambda: engine._answering.requests[decoding].answer_tokens > 2)
        ask = greedy(prompt(100) + prompt(30, seed=1))
        number = engine.submit(ask)
        deltas = run_until(engine, lambda: decoding not in engine._answering.requests)
        assert not loads.waits and loads.loads and number in engine._answering.requests
        deltas += run_to_the_end(engine)
        assert loads.num_begun == 1
        assert [t for d in deltas if d.request == number for t in d.tokens] == alone("llama", [ask])[0]


def test_without_events_a_request_waits_for_its_whole_load() -> None:
    with small() as engine:
        loads = ArrivingLoads(engine)
        loads.queued = lambda plan: False
        served(engine, greedy(prompt(100)))
        evict_to_host(engine)
        ask = greedy(prompt(100) + prompt(30, seed=1))
        number = engine.submit(ask)
        run_until(engine, lambda: bool(loads.loads))
        passes = engine.passes
        for _ in range(5):
            engine.step()
        assert engine.passes == passes and engine.idle
        loads.ends_early = lambda plan: True
        assert [t for d in run_to_the_end(engine) if d.request == number for t in d.tokens] == alone("llama", [ask])[0]
        assert not loads.waits


@pytest.mark.parametrize("family", ["llama", "gemma3", "qwen3_next"])
def test_pages_from_a_store_go_on_to_the_device_while_others_are_read(family: str) -> None:
    known, ask = greedy(prompt(100)), greedy(prompt(100) + prompt(30, seed=1))
    wait = StoreConfig(prefetch=PrefetchPolicy.WAIT_COMPLETE, recompute_tokens_per_s=1.0, checkpoint_delay_s=0)
    with small(family, write=WritePolicy.THROUGH) as engine:
        loads = ArrivingLoads(engine)
        engine.cache.store.attach(MemoryStore(), wait, tuning=StoreTuning(fetch_chunk_bytes=1))  # a page at a time
        served(engine, known)
        settle(engine.cache)
        engine.cache.flush()
        (deltas,) = run(engine, [ask])
        assert tokens_of(deltas) == alone(family, [ask])[0]
        usage = deltas[-1].usage
        assert usage is not None and usage.sources.store >= 64
        assert engine.cache.counters["loaded_ahead_pages"] and loads.num_begun >= 1


@pytest.mark.parametrize("seed", range(6))
@pytest.mark.parametrize("family", ["llama", "gemma3", "falcon_h1"])
def test_a_random_schedule_answers_as_plain_loading(family: str, seed: int) -> None:
    """Little memory, so that prefixes leave the device; loads that are queued late, end early, or fail; aborts."""
    random = Random(seed)
    prompts = [prompt(random.randrange(40, 100), seed=at) for at in range(3)]
    asks = [greedy(random.choice(prompts) + prompt(random.randrange(1, 50), seed=at), 3) for at in range(20)]
    with small(family, device_memory="512KiB", limits=Limits(chunk_tokens=64, max_running=3)) as engine:
        loads = ArrivingLoads(engine)
        engine.passing.reads_later, loads.late = seed % 2 == 0, seed % 3  # the first as on CUDA
        loads.queued = lambda plan: random.random() < 0.8
        loads.ends_early = lambda plan: random.random() < 0.15
        loads.fails = lambda plan: random.random() < 0.15
        answers: dict[int, list[int]] = {}
        aborted: set[int] = set()
        waiting = list(asks)
        numbers: dict[int, GenerateRequest] = {}

        def note(deltas: list[Any]) -> None:
            for delta in deltas:
                answers.setdefault(delta.request, []).extend(delta.tokens)
                assert delta.error is None, delta.error

        while waiting or engine.num_open:
            if random.random() < 0.3:
                evict_idle(engine)
            if waiting and random.random() < 0.2:
                ask = waiting.pop()
                numbers[engine.submit(ask)] = ask
            note(engine.step())
            if random.random() < 0.03 and engine._answering.requests:
                aborted.add(number := random.choice(list(engine._answering.requests)))
                engine.abort(number)
            if random.random() < 0.1:
                engine.cache.audit()
        note(engine.step())
        engine.cache.audit()
        expected = alone(family, list(numbers.values()))
        for (number, _), wanted in zip(numbers.items(), expected, strict=True):
            got = answers.get(number, [])
            assert got == wanted[: len(got)] if number in aborted else got == wanted
        assert loads.num_begun > 0
