"""Biases, penalties and banned tokens work as documented, in every batch and every kind of pass."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import replace
from math import log
from random import Random
from typing import Any

import numpy as np
import pytest
import torch

from engine.drafted import Letters, engine_for
from engine.small import alone, prompt, run, small, tokens_of
from stepwell.base.errors import BadTokens, ConfigError
from stepwell.engine import Delta, Engine, Finish, GenerateRequest, Limits, Sampling
from stepwell.engine.ops.drawing import NAN_LOGITS, pick
from stepwell.engine.ops.editing import FORBIDDEN, Edit, edited
from stepwell.engine.requests.request import Chunk
from stepwell.engine.scheduling.scheduler import Scheduler

pytest.importorskip("transformers")


def ids(*numbers: int) -> Any:
    return np.array(numbers, np.int32)


def some_edit(random: Random, vocab: int) -> Edit:
    def some(count: int) -> Any:
        return np.array(random.sample(range(vocab), count), np.int32)

    words = np.array([random.getrandbits(32) | 1 for _ in range(-(-vocab // 32))], np.uint32).view(np.int32)
    return Edit(
        biased=some(3), biases=np.array([random.uniform(-100, 100) for _ in range(3)]), repeated=some(5),
        repetition=random.choice([0.5, 1.0, 1.3]), used=some(4), penalties=np.array([random.uniform(-2, 4) for _ in range(4)]),
        forbidden=some(2), allowed=words if random.random() < 0.5 else ids(), within=random.choice([None, 0.5, 3.0]),
    )  # fmt: skip


def by_hand(logits: list[float], edit: Edit) -> list[float]:
    made = [np.float32(each) for each in logits]
    for token, bias in zip(edit.biased, edit.biases, strict=True):
        made[token] = made[token] + np.float32(bias)
    for token in edit.repeated:
        repetition = np.float32(edit.repetition)
        made[token] = made[token] / repetition if made[token] > 0 else made[token] * repetition
    for token, penalty in zip(edit.used, edit.penalties, strict=True):
        made[token] = made[token] - np.float32(penalty)
    allowed = [not len(edit.allowed) or bool(int(edit.allowed[at // 32]) >> at % 32 & 1) for at in range(len(made))]
    made = [each if kept and at not in edit.forbidden else np.float32(FORBIDDEN)
            for at, (each, kept) in enumerate(zip(made, allowed, strict=True))]  # fmt: skip
    if edit.within is not None:
        least = max(made) - np.float32(edit.within)
        made = [each if each >= least else np.float32(FORBIDDEN) for each in made]
    return [float(each) for each in made]


@pytest.mark.parametrize("seed", range(20))
def test_rows_are_edited_as_by_hand_and_others_are_left_alone(seed: int) -> None:
    random, vocab = Random(seed), 75
    logits_BV = torch.randn(6, vocab, generator=torch.Generator().manual_seed(seed)) * 3
    before = logits_BV.clone()
    edits = [some_edit(random, vocab) if random.random() < 0.7 else None for _ in range(6)]
    found = edited(logits_BV, edits)
    assert torch.equal(logits_BV, before), "logprobs are of these"
    for row, edit in enumerate(edits):
        assert found[row].tolist() == (before[row].tolist() if edit is None else by_hand(before[row].tolist(), edit))


def test_tokens_that_may_not_come_are_not_drawn_and_rows_that_are_no_numbers_stay_so() -> None:
    logits_BV = torch.zeros(2, 40)
    logits_BV[1, 7] = torch.nan
    edits = [Edit(allowed=ids(1 << 5, 0)), Edit(allowed=ids(1 << 5, 0), forbidden=ids(7))]
    assert pick(edited(logits_BV, edits), [None, None]).tolist() == [5, NAN_LOGITS]


SETTINGS: list[dict[str, Any]] = [
    {"frequency_penalty": 1.5, "presence_penalty": 0.5}, {"repetition_penalty": 1.7}, {"min_p": 0.3, "temperature": 1.2},
    {"logit_bias": ((3, 20.0), (9, -100.0)), "temperature": 0.8}, {"min_tokens": 30, "stop_token_ids": tuple(range(40, 90))},
    {"presence_penalty": -1.0, "repetition_penalty": 0.9, "temperature": 0.7, "top_k": 30, "min_p": 0.02},
    {}, {"logprobs": 1, "frequency_penalty": 2.0},
]  # fmt: skip


def asks(count: int = 40) -> list[GenerateRequest]:
    return [
        GenerateRequest(tokens=prompt(10 + 9 * at, seed=at), sampling=Sampling(**{"max_tokens": count, "seed": at, **settings}))
        for at, settings in enumerate(SETTINGS)
    ]


def ahead(**settings: Any) -> Engine:
    engine = small(**settings)
    engine.passing.reads_later = True
    return engine


def test_answers_in_a_batch_are_those_of_requests_alone() -> None:
    expected = alone("llama", asks())
    with small() as engine:
        assert [tokens_of(deltas) for deltas in run(engine, asks())] == expected
    with ahead() as engine:
        assert [tokens_of(deltas) for deltas in run(engine, asks())] == expected
    plain = alone("llama", [replace(ask, sampling=Sampling(max_tokens=40, seed=0)) for ask in asks()])
    assert sum(one != other for one, other in zip(expected, plain, strict=True)) >= 6, "the settings were to change something"


def test_preemption_changes_no_answer() -> None:
    limits = Limits(chunk_tokens=48, max_running=8)
    expected = alone("llama", asks(100))
    with small(limits=limits, device_memory="384KiB", host_memory="1MiB") as engine:
        found = run(engine, asks(100))
        assert [tokens_of(deltas) for deltas in found] == expected
        assert sum(deltas[-1].usage.preemptions for deltas in found if deltas[-1].usage is not None) > 0, "this was to be tight"


@pytest.mark.parametrize("drafted", ["llama", "near"])
def test_guesses_change_no_answer(drafted: str) -> None:
    expected = alone("llama", asks())
    with engine_for("llama", drafted) as engine:
        found = run(engine, asks())
        assert [tokens_of(deltas) for deltas in found] == expected
        accepted = [deltas[-1].usage.accepted_tokens for deltas in found if deltas[-1].usage is not None]
        assert all(accepted[at] for at in (0, 1, 7)), "penalties are no reason not to guess"


@pytest.mark.parametrize("settings", [{"frequency_penalty": 1.5, "presence_penalty": 0.7}, {"repetition_penalty": 1.5}])
def test_penalties_are_those_of_the_tokens_so_far(settings: dict[str, float]) -> None:
    tokens = prompt(12)
    with small() as engine:
        (deltas,) = run(engine, [GenerateRequest(tokens=tokens, sampling=Sampling(max_tokens=60, logprobs=20, **settings))])
    answer: Counter[int] = Counter()
    changed = 0
    for delta in deltas:
        (found,) = delta.logprobs
        if "repetition_penalty" in settings:  # its logits are not known, but a token that is new beats no likelier new one
            new = [value for token, value in found.top if token not in answer and token not in tokens]
            assert found.token in answer or found.token in tokens or found.logprob >= max(new, default=found.logprob) - 1e-6
        else:
            worth = {token: value - 1.5 * answer[token] - 0.7 * (token in answer) for token, value in found.top}
            mine = found.logprob - 1.5 * answer[found.token] - 0.7 * (found.token in answer)
            assert mine >= max(worth.values()) - 1e-5
        changed += found.rank > 1
        answer[found.token] += 1
    assert changed


def followed_by(engine: Engine, sampling: Sampling) -> int:
    """How many tokens were computed from such that only the device knew."""
    run_pass, followed = engine._runner.run, []

    def noted(chunks: Sequence[Chunk], **more: Any) -> torch.Tensor:
        followed.append(sum(chunk.follows for chunk in chunks))
        return run_pass(chunks, **more)

    engine._runner.run = noted  # type: ignore[method-assign]
    run(engine, [GenerateRequest(tokens=prompt(20, seed=at), sampling=sampling) for at in range(3)])
    return sum(followed)


def test_only_requests_that_need_the_token_before_are_read_at_once() -> None:
    free = Sampling(max_tokens=60, logit_bias=((3, 1.0),), min_p=0.1, temperature=0.9, seed=1, min_tokens=50)
    with ahead() as engine:
        assert followed_by(engine, free) > 3 * 60 * 0.8
    with ahead() as engine:
        assert followed_by(engine, replace(free, presence_penalty=0.1)) == 0


def one(engine: Engine, **settings: Any) -> list[Delta]:
    return run(engine, [GenerateRequest(tokens=prompt(20), sampling=Sampling(**settings))])[0]


def test_stop_tokens_end_an_answer_but_not_before_its_least_length() -> None:
    with small() as engine:
        free = tokens_of(one(engine, max_tokens=40))
        token = free[11]
        ended = one(engine, max_tokens=40, stop_token_ids=(token,))
        assert tokens_of(ended) == free[: free.index(token) + 1]
        assert (ended[-1].finish, ended[-1].stop_reason) == (Finish.STOP, token)
        later = tokens_of(one(engine, max_tokens=40, stop_token_ids=(token,), min_tokens=25))
        assert token not in later[:25] and len(later) > 25 and later[: free.index(token)] == free[: free.index(token)]


def test_stop_strings_within_the_least_length_do_not_end_an_answer() -> None:
    with small() as engine:
        engine._builder._text = Letters()  # type: ignore[assignment]
        text = "".join(delta.text for delta in one(engine, max_tokens=30))
        ended = one(engine, max_tokens=30, stop=(text[10],))
        assert ended[-1].stop_reason == text[10] and "".join(each.text for each in ended) == text[: text.index(text[10])]
        later = "".join(delta.text for delta in one(engine, max_tokens=30, stop=(text[10],), min_tokens=11))
        assert later[:11] == text[:11] and text[10] not in later[11:]


def test_min_p_draws_no_token_that_is_much_less_likely_than_the_likeliest() -> None:
    with small() as engine:
        for delta in one(engine, max_tokens=80, temperature=5.0, seed=3, min_p=0.8, logprobs=1):
            (found,) = delta.logprobs
            assert found.logprob >= found.top[0][1] + 5.0 * log(0.8) - 1e-4


@pytest.mark.parametrize("family", ["llama", "gemma3", "qwen3_next"])
def test_logprobs_of_a_prompt_are_those_of_answers_to_its_beginnings(family: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("stepwell.engine.scheduling.scheduler.MAX_PROMPT_LOGPROBS", 7)
    tokens = prompt(40)
    with small(family) as engine:
        plain = run(engine, [GenerateRequest(tokens=tokens, sampling=Sampling(max_tokens=5))])[0]  # so that its pages are cached
        asked, other = run(engine, [
            GenerateRequest(tokens=tokens, sampling=Sampling(max_tokens=5, prompt_logprobs=4)),
            GenerateRequest(tokens=tokens[::-1], sampling=Sampling(max_tokens=2, prompt_logprobs=0)),
        ])  # fmt: skip
        assert tokens_of(asked) == tokens_of(plain) and not any(delta.prompt_logprobs for delta in asked[1:])
        found = asked[0].prompt_logprobs
        assert [each.token for each in found] == tokens[1:] and {len(each.top) for each in found} == {4}
        assert [each.token for each in other[0].prompt_logprobs] == tokens[-2::-1]
        for at in range(1, 40, 6):
            (first,) = run(engine, [GenerateRequest(tokens=tokens[:at], sampling=Sampling(max_tokens=1, logprobs=4))])[0]
            assert [token for token, _ in found[at - 1].top] == [token for token, _ in first.logprobs[0].top]
            assert found[at - 1].top[0][1] == pytest.approx(first.logprobs[0].top[0][1], abs=1e-4)


def test_logprobs_of_a_prompt_survive_preemption_and_come_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("stepwell.engine.scheduling.scheduler.MAX_PROMPT_LOGPROBS", 9)
    ask = GenerateRequest(tokens=prompt(50), sampling=Sampling(max_tokens=4, prompt_logprobs=0))
    with small() as engine:
        expected = run(engine, [ask])[0][0].prompt_logprobs
        number, steps, deltas = engine.submit(ask), 0, []
        while engine.num_open:
            deltas += engine.step()
            steps += 1
            if steps in (3, 5) and number in engine.scheduler.active:
                _put_back(engine.scheduler, number)
        (asked,) = [delta.prompt_logprobs for delta in deltas if delta.prompt_logprobs]
    assert [each.token for each in asked] == [each.token for each in expected]
    assert [each.logprob for each in asked] == pytest.approx([each.logprob for each in expected], abs=1e-4)


def _put_back(scheduler: Scheduler, number: int) -> None:
    scheduler.put_back(scheduler.active[number])


def test_settings_that_make_no_sense_are_refused() -> None:
    for wrong in (
        {"min_p": -0.1}, {"frequency_penalty": 2.1}, {"presence_penalty": float("nan")}, {"repetition_penalty": 0.0},
        {"logit_bias": ((1, 200.0),)}, {"logit_bias": ((1, 1.0), (1, 2.0))}, {"min_tokens": 9, "max_tokens": 8},
        {"prompt_logprobs": 21}, {"stop_token_ids": tuple(range(129))},
    ):  # fmt: skip
        with pytest.raises(ConfigError):
            Sampling(**wrong)  # type: ignore[arg-type]
    with small() as engine:
        for named in ({"stop_token_ids": (128,)}, {"logit_bias": ((-1, 1.0),)}):
            with pytest.raises(BadTokens, match="from 0 to 127"):
                engine.submit(GenerateRequest(tokens=[1], sampling=Sampling(**named)))  # type: ignore[arg-type]
