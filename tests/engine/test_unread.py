"""Passes that begin before the host has read the tokens they go on from: answers and what is cached are those without."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from random import Random
from typing import Any

import pytest
import torch

from engine.small import greedy, prompt, run, small, tokens_of
from stepwell.engine import Engine, GenerateRequest, Limits, Sampling
from stepwell.engine.requests.request import Chunk
from waiting import run_to_the_end

pytest.importorskip("transformers")

FAMILIES = ["llama", "mistral", "gemma3", "qwen3_next", "deepseek_v3"]


def ahead(family: str = "llama", **settings: Any) -> Engine:
    """As on CUDA: what the device chooses is read one pass later."""
    engine = small(family, **settings)
    engine.passing.reads_later = True
    return engine


def asks(seed: int) -> list[GenerateRequest]:
    draw = Random(seed)
    shared = prompt(40, seed=seed)
    made = []
    for at in range(9):
        tokens = [*shared[: draw.randrange(40)], *prompt(draw.randrange(1, 60), seed=100 * seed + at)]
        count = draw.choice([1, 2, 5, 40, 70])
        sampling = Sampling(
            max_tokens=count, temperature=draw.choice([0, 0, 0.8, 1.4]), seed=at, logprobs=draw.choice([None, None, 2])
        )
        made.append(GenerateRequest(tokens=tokens, sampling=sampling, priority=draw.randrange(3)))
    return made


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("seed", range(3))
def test_answers_are_those_of_an_engine_that_reads_at_once(family: str, seed: int) -> None:
    limits = Limits(chunk_tokens=48, max_running=5)
    with small(family, limits=limits) as engine:
        expected = [tokens_of(deltas) for deltas in run(engine, asks(seed))]
    with ahead(family, limits=limits) as engine:
        assert [tokens_of(deltas) for deltas in run(engine, asks(seed))] == expected


@pytest.mark.parametrize("family", FAMILIES)
def test_what_an_answer_left_in_the_cache_is_resumed_to_the_same_answer(family: str) -> None:
    """Checkpoints in an answer are taken before the next pass overwrites what they are of."""
    first = greedy(prompt(30), 90)
    with small(family) as engine:
        answered = tokens_of(run(engine, [first])[0])
        follow = greedy([*first.tokens, *answered, *prompt(5, seed=9)], 20)
        expected = tokens_of(run(engine, [follow])[0])
    with ahead(family) as engine:
        assert tokens_of(run(engine, [first])[0]) == answered
        (deltas,) = run(engine, [follow])
        assert tokens_of(deltas) == expected
        assert deltas[-1].usage is not None and deltas[-1].usage.sources.computed < len(follow.tokens) // 2


@pytest.mark.parametrize(
    "sampling", [Sampling(), Sampling(temperature=0.9, top_k=40, top_p=0.95, seed=3)], ids=["greedy", "drawn"]
)
def test_most_passes_begin_before_the_tokens_they_go_on_from_are_read(sampling: Sampling) -> None:
    with ahead() as engine:
        run_pass, followed = engine._runner.run, []

        def noted(chunks: Sequence[Chunk], **more: Any) -> torch.Tensor:
            followed.append(sum(chunk.follows for chunk in chunks))
            return run_pass(chunks, **more)

        engine._runner.run = noted  # type: ignore[method-assign]
        run(engine, [GenerateRequest(tokens=prompt(20, seed=at), sampling=replace(sampling, max_tokens=60)) for at in range(3)])
        assert sum(followed) > 3 * 60 * 0.8


def test_too_little_room_and_preemption_change_no_answer() -> None:
    limits = Limits(chunk_tokens=48, max_running=6)
    many = [greedy(prompt(60, seed=at), 100) for at in range(8)]
    with small(limits=limits) as engine:
        expected = [tokens_of(deltas) for deltas in run(engine, many)]
    with ahead(limits=limits, device_memory="384KiB", host_memory="1MiB") as engine:
        found = run(engine, many)
        assert [tokens_of(deltas) for deltas in found] == expected
        assert sum(deltas[-1].usage.preemptions for deltas in found) > 0, "this was to be tight"


def test_an_aborted_request_leaves_the_others_as_they_are() -> None:
    with ahead() as engine:
        expected = tokens_of(run(engine, [greedy(prompt(20), 50)])[0])
    with ahead() as engine:
        kept, gone = engine.submit(greedy(prompt(20), 50)), engine.submit(greedy(prompt(33, seed=4), 50))
        deltas = [delta for _ in range(12) for delta in engine.step()]
        engine.abort(gone)
        deltas += run_to_the_end(engine)
        assert tokens_of([delta for delta in deltas if delta.request == kept]) == expected
        assert engine.passing.unread is None
        engine.cache.audit()


def test_one_request_whose_numbers_break_ends_alone() -> None:
    with ahead() as engine:
        numbers = [engine.submit(greedy(prompt(20, seed=at), 30)) for at in range(3)]
        run_pass, turns = engine._runner.run, []

        def spoiled(chunks: Sequence[Chunk], **more: Any) -> torch.Tensor:
            logits_BV = run_pass(chunks, **more).clone()
            turns.append(all(chunk.follows for chunk in chunks))
            if sum(turns) == 6:
                logits_BV[[each.request.id for each in chunks].index(numbers[1])] = torch.nan
            return logits_BV

        engine._runner.run = spoiled  # type: ignore[method-assign]
        ends = {delta.request: delta for delta in run_to_the_end(engine) if delta.finish is not None}
        assert [ends[number].finish.value for number in numbers] == ["length", "error", "length"]


def test_a_pass_that_fails_gives_no_page_back_while_the_one_before_it_runs(monkeypatch: pytest.MonkeyPatch) -> None:
    waited: list[int] = []
    with ahead() as engine:
        number = engine.submit(greedy(prompt(20), 60))
        for _ in range(6):
            engine.step()
        assert engine.passing.unread is not None

        def failing(*_: object, **more: object) -> None:
            raise RuntimeError("the kernel broke")

        monkeypatch.setattr(engine._runner, "run", failing)
        monkeypatch.setattr(engine._runner, "wait", lambda: waited.append(len(engine.scheduler.active)))
        with pytest.raises(RuntimeError, match="the kernel broke"):
            engine.step()
        assert waited == [1], "it is waited for while its request still has its pages"
        assert [delta.finish.value for delta in engine.step() if delta.request == number] == ["error"]
        engine.cache.audit()
    assert waited == [1, 0], "and once more at the end"


def test_a_request_that_cannot_begin_is_told_so_while_others_go_on(monkeypatch: pytest.MonkeyPatch) -> None:
    with ahead() as engine:
        kept = engine.submit(greedy(prompt(20), 60))
        for _ in range(6):
            engine.step()
        begin = engine.scheduler._begin

        def failing(request: Any, match: Any) -> None:
            if request.id != kept:
                raise RuntimeError("it cannot begin")
            begin(request, match)

        monkeypatch.setattr(engine.scheduler, "_begin", failing)
        lost = engine.submit(greedy(prompt(30, seed=3), 5))
        deltas = [*engine.step(), *engine.step()]
        assert [delta.error for delta in deltas if delta.request == lost] == ["RuntimeError: it cannot begin"]
        assert not engine.scheduler.failed


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_tokens_of_a_lease_that_was_given_back_are_dropped(temperature: float) -> None:
    """Its request begins again with another lease, whose pages are not computed yet."""
    ask = GenerateRequest(tokens=prompt(20), sampling=Sampling(max_tokens=30, temperature=temperature, seed=5))
    with small() as engine:
        expected = tokens_of(run(engine, [ask])[0])
    with ahead() as engine:
        number = engine.submit(ask)
        deltas = [delta for _ in range(6) for delta in engine.step()]
        assert engine.passing.unread is not None
        engine.scheduler.put_back(engine._answering.requests[number])
        deltas += run_to_the_end(engine)
        assert tokens_of(deltas) == expected
        engine.cache.audit()
