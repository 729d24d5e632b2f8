"""The vLLM connector, whole, below a toy engine that checks every byte it reads. Needs no vLLM: `tests/vllm` has the real one."""

from __future__ import annotations

import random
from pathlib import Path
from threading import Event
from typing import Any

import pytest
from toy_runs import Lora, Make, computed_by, counters, text
from toy_vllm import MODELS, ToyEngine

from stepwell import ConfigError
from stepwell.base.meters import ManualClock
from stepwell.connectors.vllm import engine_config
from stepwell.connectors.vllm.orders import WAITING_STEP_S, Pace
from stepwell.policy.store_use import StoreTuning
from stepwell.store.memory import MemoryStore
from stepwell.store.wrappers import Wrapper
from waiting import wait_until

STEPS = 400  # more than any round takes


@pytest.mark.parametrize("ranks", [1, 2])
@pytest.mark.parametrize("model", MODELS)
def test_a_prompt_resumes_from_the_host(make: Make, model: str, ranks: int) -> None:
    engine, prompt = make(model, ranks=ranks), text(1, 45)
    assert computed_by(engine, prompt) == 49
    again = computed_by(engine, prompt)
    assert again == 49 - 44 if model != "blocks of two sizes" else again == 49 - 40
    branch = prompt[:24]  # where a step ends, so that there is state to keep: the first that leaves here leaves a checkpoint
    computed_by(engine, branch + text(2, 21))
    assert computed_by(engine, branch + text(3, 21)) == 49 - 24


@pytest.mark.parametrize("model", MODELS)
def test_of_a_prompt_of_whole_pages_only_the_last_token_is_computed_where_pages_are_all_it_has(make: Make, model: str) -> None:
    engine, prompt = make(model), text(1, 48)
    assert computed_by(engine, prompt) == 52
    last_boundary = 40 if model == "blocks of two sizes" else 44
    assert computed_by(engine, prompt) == 52 - (47 if model == "full" else last_boundary)
    assert computed_by(engine, prompt + text(2, 8)) < 60  # and the next turn goes on


def test_the_last_page_alone_is_computed_and_not_loaded(make: Make) -> None:
    engine, prompt = make("full"), text(1, 48)
    computed_by(engine, prompt)
    for local, loaded in ((0, 48), (40, 8), (44, 0)):
        request = engine.submit(prompt)
        assert engine.connector.get_num_new_matched_tokens(request, local) == (loaded, loaded > 0)
        engine.abort(request)
    short = text(3, 4)
    computed_by(engine, short)
    assert engine.connector.get_num_new_matched_tokens(engine.submit(short), 0) == (0, False)


@pytest.mark.parametrize("model", MODELS)
def test_a_second_engine_resumes_from_the_log(make: Make, tmp_path: Path, model: str) -> None:
    store = {"store": f"log:{tmp_path}", "store_budget": "64MiB", "prefetch": "wait_complete"}
    first, prompt = make(model, **store), text(1, 45)
    computed_by(first, prompt)
    first.close()
    second = make(model, **store)
    assert computed_by(second, prompt) <= 9
    assert counters(second)["tokens_store"] >= 40


@pytest.mark.parametrize("model", MODELS)
def test_saves_that_the_last_step_began_are_stored_when_the_engine_ends(make: Make, tmp_path: Path, model: str) -> None:
    store = {"store": f"log:{tmp_path}", "store_budget": "64MiB", "prefetch": "wait_complete"}
    first, prompt = make(model, **store), text(1, 45)
    first.submit(prompt)
    wait_until(lambda: (first.step(), first.done)[1])  # and no copy is made before the end
    first.close()
    assert computed_by(make(model, **store), prompt) <= 9


@pytest.mark.parametrize("ranks", [1, 2])
@pytest.mark.parametrize("how", ["the computation raises", "its output never comes"])
@pytest.mark.parametrize("model", ["full", "all"])
def test_nothing_of_a_step_that_failed_is_stored(
    make: Make, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, model: str, how: str, ranks: int
) -> None:
    """The second engine asserts every byte that it reads."""
    store = {"store": f"log:{tmp_path}", "store_budget": "64MiB"}
    first, prompt = make(model, ranks=ranks, **store), text(1, 45)
    first.submit(prompt)
    compute = first._compute

    def failing(request: Any, count: int) -> None:
        if request.num_computed_tokens <= 24:
            compute(request, count)
        elif how == "the computation raises":
            raise MemoryError("fails on purpose")
        else:
            monkeypatch.setattr(first, "_collect", lambda outputs: pytest.fail("fails on purpose"))

    monkeypatch.setattr(first, "_compute", failing)
    with pytest.raises((MemoryError, pytest.fail.Exception), match="fails on purpose"):
        first.run()
    assert all(worker._side()._failed_once for worker in first.workers) == (how == "the computation raises")
    first.close()
    assert computed_by(make(model, ranks=ranks, **store), prompt) >= 49 - 24


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("ranks", [1, 2])
@pytest.mark.parametrize("model", MODELS)
def test_conversations_that_branch_on_a_small_pool_with_late_copies(make: Make, model: str, ranks: int, seed: int) -> None:
    """Preemptions, blocks that are wanted while they are saved, copies that fail, requests that are aborted."""
    rng = random.Random(seed)
    engine = make(model, ranks=ranks, blocks=16 * len(MODELS[model]) + 8, host_memory="64KiB")
    talks = [text(seed, 20) + text(9 + n, rng.randrange(4, 24)) for n in range(4)]
    for _ in range(4):
        asked = [engine.submit(talk, answer=rng.randrange(1, 12)) for talk in talks]
        for _ in range(STEPS):
            if not (engine.waiting or engine.running or engine.loading):
                break
            engine.step()
            _some_copies(engine, rng)
            if rng.random() < 0.02 and asked[0].status in ("waiting", "running", "loading"):
                engine.abort(asked[0])
        assert not (engine.waiting or engine.running or engine.loading), "it never ends"
        talks = [
            request.all_token_ids[: rng.randrange(20, request.num_tokens + 1)] + text(rng.randrange(99), 5) for request in asked
        ]
    engine.run()
    assert len(engine.pool.free) == len(engine.pool.blocks) - 1, "a block was pinned and never released"
    assert not engine.connector._scheduler.cache.copying
    assert sum(request.num_tokens for request in engine.done) > engine.computed / 2


def _some_copies(engine: ToyEngine, rng: random.Random) -> None:
    for copies in engine.copies:
        for job in copies.pending:
            if rng.random() < 0.2:
                copies.answer(job, error="fails on purpose" if rng.random() < 0.1 else None)
    if not engine.running and rng.random() < 0.5:
        engine.finish_copies()  # no request computes: waiting for copies alone


@pytest.mark.parametrize("ranks", [1, 2])
@pytest.mark.parametrize("model", MODELS)
def test_a_load_that_fails_is_computed(make: Make, model: str, ranks: int) -> None:
    engine, prompt = make(model, ranks=ranks), text(1, 45)
    computed_by(engine, prompt)
    engine.submit(prompt)
    engine.step()
    (job,) = engine.copies[-1].pending
    engine.copies[-1].answer(job, error="fails on purpose")  # on the last rank alone
    engine.run()
    assert engine.computed == 2 * 49 and counters(engine)["load_failures"] == 1
    assert computed_by(engine, prompt) < 15, "what was computed anew is cached again"


def test_a_request_whose_loads_keep_failing_is_computed_in_the_end(make: Make, tmp_path: Path) -> None:
    """The store delivers it each time: the request must not retry forever."""
    engine, prompt = make(store=f"log:{tmp_path}", store_budget="64MiB"), text(1, 45)
    computed_by(engine, prompt)
    engine.submit(prompt)
    failed = 0
    while engine.waiting or engine.running or engine.loading:
        engine.step()
        for job in engine.copies[0].pending:
            is_load = job in engine.connector._scheduler._loads
            failed += is_load
            engine.copies[0].answer(job, error="fails on purpose" if is_load else None)
        assert failed <= 2
    assert failed >= 1 and engine.computed == 2 * 49


@pytest.mark.parametrize("model", ["full", "all"])
def test_a_request_that_is_aborted_while_it_loads_leaves_nothing_behind(make: Make, model: str) -> None:
    engine, prompt = make(model), text(1, 45)
    computed_by(engine, prompt)
    request = engine.submit(prompt)
    engine.step()
    assert request.status == "loading"
    engine.abort(request)
    engine.run()
    assert len(engine.pool.free) == len(engine.pool.blocks) - 1 and not engine.connector._scheduler.cache.copying
    assert computed_by(engine, prompt) < 15


def test_a_store_that_hangs_is_not_stepped_for_forever(make: Make) -> None:
    go_on = Event()

    class Hung(Wrapper):
        def write_from(self, space: Any, writes: Any) -> Any:
            go_on.wait()
            return super().write_from(space, writes)

    engine = make()
    cache = engine.connector._scheduler.cache
    cache.store.attach(Hung(MemoryStore()), tuning=StoreTuning(op_timeout_s=0.05))
    computed_by(engine, text(1, 45))  # runs until nothing is pending
    assert cache.stats().storing and not engine.connector.has_pending_push_work()
    go_on.set()


def test_blocks_that_saves_read_are_waited_for_before_anybody_is_preempted(make: Make) -> None:
    engine = make(blocks=16)
    engine.submit(text(1, 30), answer=1)
    engine.run(late=True)
    assert not engine.connector.has_pending_block_frees()
    first = [engine.submit(text(seed, 25), answer=1) for seed in (2, 3)]
    engine.step()
    assert engine.connector.has_pending_block_frees()
    engine.run()
    assert all(request.status == "finished" for request in first)


def test_an_engine_without_a_block_pool_is_told(make: Make) -> None:
    engine = make()
    engine.connector._scheduler._blocks = None
    with pytest.raises(ConfigError, match="no block pool"):
        computed_by(engine, text(1, 45))


def test_salts_are_apart(make: Make) -> None:
    engine, prompt = make(), text(1, 45)
    assert computed_by(engine, prompt, cache_salt="a") == 49
    assert computed_by(engine, prompt, cache_salt="b") == 49
    assert computed_by(engine, prompt) == 49
    assert computed_by(engine, prompt, cache_salt="a") == 5


def test_adapters_are_apart_by_their_weights(make: Make, tmp_path: Path) -> None:
    engine, prompt = make(), text(1, 45)
    weights = tmp_path / "adapter.safetensors"
    lora, reloaded = (Lora(number, str(tmp_path)) for number in (1, 2))
    assert computed_by(engine, prompt, lora_request=lora) == 49, "no weights: it has no name, and is not cached"
    assert computed_by(engine, prompt, lora_request=lora) == 49
    weights.write_bytes(b"one")
    assert computed_by(engine, prompt, lora_request=lora) == 49
    assert computed_by(engine, prompt, lora_request=lora) == 5
    weights.write_bytes(b"two")
    for _ in range(2):
        assert computed_by(engine, prompt, lora_request=lora) == 49, "it is unknown which of the two the engine has"
    assert computed_by(engine, prompt, lora_request=reloaded) == 49, "the same name, other weights"
    assert computed_by(engine, prompt, lora_request=reloaded) == 5
    assert computed_by(engine, prompt) == 49


def test_an_adapter_that_cannot_be_read_is_not_cached(make: Make, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from stepwell.connectors import weight_files

    def fails(path: Path, name: str) -> bytes:
        raise PermissionError(f"{path} {name}: fails on purpose")

    engine, prompt = make(), text(1, 45)
    (tmp_path / "adapter.safetensors").write_bytes(b"one")
    monkeypatch.setattr(weight_files, "_signature", fails)
    for _ in range(2):
        assert computed_by(engine, prompt, lora_request=Lora(1, str(tmp_path))) == 49


def test_tokens_that_the_vocabulary_lacks_are_computed_and_not_cached(make: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    engine, prompt, odd = make(), text(1, 45), [*text(1, 45), 10**7]
    for _ in range(2):
        assert computed_by(engine, odd) == 50
    monkeypatch.setattr(engine, "next_token", lambda tokens: 10**7)  # in an answer
    assert computed_by(engine, prompt, answer=12) == 57
    assert computed_by(engine, prompt, answer=12) == 57 - 44
    assert len(engine.pool.free) == len(engine.pool.blocks) - 1


def test_a_request_that_is_preempted_with_such_a_token_in_its_answer_is_computed_again(
    make: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It lies in a page that is not whole yet, so that no check has covered it."""
    engine, prompt = make(), text(1, 45)
    monkeypatch.setattr(engine, "next_token", lambda tokens: 10**7)
    request = engine.submit(prompt)
    while request.num_tokens == len(prompt):
        engine.step()
    engine._preempt(request, {})
    engine.run()
    assert request in engine.done and len(engine.pool.free) == len(engine.pool.blocks) - 1


@pytest.mark.parametrize("what", [{"prompt_embeds": object()}, {"pooling_params": object()}, {"resumable": True}])
def test_what_tokens_do_not_tell_is_not_cached(make: Make, what: dict[str, Any]) -> None:
    engine, prompt = make(), text(1, 45)
    computed_by(engine, prompt)
    assert computed_by(engine, prompt, **what) == 49 and computed_by(engine, text(2, 45), **what) == 49
    assert computed_by(engine, text(2, 45)) == 49
    assert computed_by(engine, prompt) == 5


def test_a_request_that_wants_all_of_its_prompt_computed_is(make: Make) -> None:
    engine, prompt = make(), text(1, 45)
    computed_by(engine, prompt)
    assert computed_by(engine, prompt, skip_reading_prefix_cache=True) == 49


def test_hits_say_where_they_come_from(make: Make, tmp_path: Path) -> None:
    store = {"store": f"log:{tmp_path}", "store_budget": "64MiB", "prefetch": "wait_complete"}
    first, prompt = make(**store), text(1, 45)
    computed_by(first, prompt)
    first.close()
    engine, seen = make(**store), []
    inner = engine.connector.get_external_cache_hit_sources
    engine.connector.get_external_cache_hit_sources = lambda *args: seen.append(inner(*args))
    for _ in range(2):
        computed_by(engine, prompt)
    assert [{source.value: tokens for source, tokens in each.items()} for each in seen] == [{"disk": 44}, {"host": 44}]


def test_a_store_that_hangs_delays_a_prompt_for_no_longer_than_it_may(make: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    hangs = Event()

    class Hanging(MemoryStore):
        def contains(self, *args: Any, **more: Any) -> Any:
            hangs.wait()
            return super().contains(*args, **more)

    monkeypatch.setattr(engine_config, "open_store", lambda *_, **__: Hanging())
    engine, prompt = make(store="memory:", prefetch_timeout_s=0.1), text(1, 45)
    engine.submit(prompt)
    try:
        wait_until(lambda: (engine.step(), engine.finish_copies(), engine.done)[2])
        assert engine.computed == 49
    finally:
        hangs.set()


@pytest.mark.parametrize("step_s", [0.0, 0.0004, 0.01])
def test_an_engine_that_only_waits_steps_once_in_a_millisecond(step_s: float) -> None:
    clock = ManualClock()
    pace = Pace(clock)
    for waits in (False, True, False, True):  # one waiting step is as good as any other
        pace.step(waits=waits)
        assert clock.now() == 0
    for count in range(1, 4):
        clock.advance(step_s)
        pace.step(waits=True)
        assert clock.now() == pytest.approx(count * max(step_s, WAITING_STEP_S))
    before = clock.now()
    pace.step(waits=False)
    assert clock.now() == before
