"""Tokens drawn from logits: as often as they are likely, by the seed and the position alone, independent of the batch."""

from __future__ import annotations

from dataclasses import replace
from random import Random
from typing import Any

import pytest
import torch

from engine.small import alone, greedy, prompt, run, small, tokens_of
from stepwell.engine import GenerateRequest, Limits, Sampling
from stepwell.engine.ops import drawing
from stepwell.engine.ops.drawing import NAN_LOGITS, Draw, pick
from stepwell.engine.sampling.choices import number_for

COUNT = 4000  # numbers that distributions are tried with
PLAIN = Draw(temperature=1.0, top_k=None, top_p=1.0, number=0.0)


def spread(count: int = COUNT) -> list[float]:
    """Numbers as a request's tokens get them."""
    return [number_for(7, position) for position in range(count)]


def drawn(logits_V: torch.Tensor, numbers: list[float], **settings: Any) -> list[int]:
    draws = [PLAIN._replace(number=number, **settings) for number in numbers]
    tokens: list[int] = pick(logits_V.expand(len(draws), -1), draws).tolist()
    return tokens


def likeliest_first(logits_V: torch.Tensor) -> torch.Tensor:
    return torch.tensor(sorted(range(len(logits_V)), key=lambda token: (-float(logits_V[token]), token)))


def shares(logits_V: torch.Tensor, *, temperature: float = 1.0, top_k: int | None = None, top_p: float = 1.0) -> torch.Tensor:
    """How likely each token is, the slow way: sorted, cut, and put back in its place."""
    scaled_V = (logits_V.double() - logits_V.max()) / temperature
    kept_K = likeliest_first(logits_V)[: top_k or len(logits_V)]
    share_K = scaled_V[kept_K].softmax(-1)
    share_K = share_K.where(share_K.cumsum(-1) - share_K < top_p * (1 - 1e-12), 0)
    return torch.zeros_like(scaled_V).index_copy(0, kept_K, share_K / share_K.sum())


def test_numbers_are_spread_evenly_and_seeds_and_positions_have_nothing_in_common() -> None:
    for numbers in ([number_for(3, at) for at in range(COUNT)], [number_for(seed, 50) for seed in range(COUNT)]):
        counts = torch.tensor(numbers).mul(20).long().bincount(minlength=20)
        assert _chi_square(counts, torch.full((20,), 1 / 20)) < 45  # 1 of 1,000 has more than 43.8
        pairs = torch.tensor([numbers[:-1], numbers[1:]], dtype=torch.float64)
        assert abs(float(torch.corrcoef(pairs)[0, 1])) < 0.05
    assert number_for(2**64 - 1, 0) != number_for(0, 0) and all(0 <= number < 1 for number in spread())


@pytest.mark.parametrize(
    "settings",
    [
        {}, {"temperature": 0.5}, {"temperature": 3.0}, {"top_k": 5}, {"top_p": 0.7}, {"top_k": 12, "top_p": 0.8},
        {"temperature": 1.7, "top_k": 9, "top_p": 0.9}, {"top_k": 1000},
    ],
    ids=str,
)  # fmt: skip
def test_tokens_come_as_often_as_they_are_likely(settings: dict[str, Any]) -> None:
    logits_V = torch.randn(30, generator=torch.Generator().manual_seed(2)) * 1.5
    share_V = shares(logits_V, **settings)
    counts_V = torch.tensor(drawn(logits_V, spread(), **settings)).bincount(minlength=30)
    assert not counts_V[share_V == 0].any(), "a token was drawn that is cut away"
    likely = share_V * COUNT >= 5
    degrees = int(likely.sum())
    assert _chi_square(counts_V[likely], share_V[likely]) < degrees + 5 * (2 * degrees) ** 0.5 + 5


def _chi_square(counts: torch.Tensor, share: torch.Tensor) -> float:
    expected = share.double() * COUNT
    return float(((counts - expected) ** 2 / expected).sum())


@pytest.mark.parametrize("seed", range(40))
def test_numbers_across_the_range_draw_what_running_sums_of_exact_shares_say(seed: int) -> None:
    """Ragged vocabularies, logits with many ties, and every way to cut, against sorting."""
    random, made = Random(seed), torch.Generator().manual_seed(seed)
    vocab = random.choice([1, 2, 3, 40, 127, 128, 129, 300, 1000])
    logits_V = torch.randn(vocab, generator=made) * random.choice([0.01, 1, 8])
    if seed % 2:
        logits_V = logits_V.mul(2).round().div(2)  # ties, and zeros of both signs
    settings = {
        "temperature": random.choice([0.3, 1.0, 2.0]),
        "top_k": random.choice([None, 1, 2, 7, 100, 5000]),
        "top_p": random.choice([1.0, 1.0, 0.5, 0.13, 0.93]),
    }
    upto_V = shares(logits_V, **settings).cumsum(-1)
    numbers = [number for number in spread(400) if float((upto_V - number).abs().min()) > 1e-5]
    assert len(numbers) > 300
    expected = torch.searchsorted(upto_V, torch.tensor(numbers, dtype=torch.float64), right=True).tolist()
    assert drawn(logits_V, numbers, **settings) == expected


def test_the_edges_of_the_settings() -> None:
    logits_V = torch.tensor([0.5, 2.0, 2.0, -1.0, 2.0, 1.0])
    ends = [0.0, 0.25, 0.5, 1 - 2.0**-53]
    assert drawn(logits_V, ends, top_k=1) == [1] * 4, "the first of equally likely ones, as the likeliest token is"
    assert drawn(logits_V, ends, top_p=1e-300) == [1] * 4
    assert drawn(logits_V, ends, top_k=2) == [1, 1, 2, 2]
    assert set(drawn(logits_V, spread(200), temperature=1e-6)) == {1, 2, 4}
    assert set(drawn(logits_V, spread(200), temperature=100.0)) == set(range(6))
    assert set(drawn(torch.tensor([3.0e38, -3.0e38]), ends, temperature=1e-6)) == {0}
    assert drawn(torch.zeros(8), [0.0, 0.125, 0.13, 0.99], top_p=1.0) == [0, 1, 1, 7]
    assert drawn(torch.zeros(8), [0.0, 0.49, 0.5, 0.99], top_p=0.25) == [0, 0, 1, 1]


def test_likely_ones_are_kept_by_their_logits_even_where_the_temperature_makes_them_alike() -> None:
    logits_V = torch.tensor([1.0, 1.0 + 2.0**-20, 1.0 - 2.0**-20])
    assert drawn(logits_V, [0.0, 0.99], temperature=100.0, top_k=1) == [1, 1]


def rows(count: int, vocab: int, seed: int = 0) -> tuple[torch.Tensor, list[Draw | None]]:
    random, made = Random(seed), torch.Generator().manual_seed(seed)
    logits_BV = (torch.randn(count, vocab, generator=made) * 3).bfloat16().float()
    draws = [
        None if random.random() < 0.3 else Draw(
            temperature=random.choice([0.2, 1.0, 5.0]), top_k=random.choice([None, None, 3, 50]),
            top_p=random.choice([1.0, 0.9, 0.3]), number=number_for(seed, row),
        )
        for row in range(count)
    ]  # fmt: skip
    return logits_BV, draws


@pytest.mark.parametrize("vocab", [50, 1024, 5003])
def test_a_row_gives_the_same_token_in_every_batch(vocab: int, monkeypatch: pytest.MonkeyPatch) -> None:
    logits_BV, draws = rows(40, vocab)
    together = pick(logits_BV, draws).tolist()
    assert [pick(logits_BV[row : row + 1], draws[row : row + 1]).item() for row in range(40)] == together
    order = Random(1).sample(range(40), 40)
    assert pick(logits_BV[order], [draws[row] for row in order]).tolist() == [together[row] for row in order]
    monkeypatch.setattr(drawing, "DRAWN_TOGETHER", 3 * vocab)
    assert pick(logits_BV, draws).tolist() == together
    likeliest = logits_BV.argmax(dim=-1).tolist()
    assert all(together[row] == likeliest[row] for row in range(40) if draws[row] is None)


def test_sums_are_exact_whatever_the_vocabulary() -> None:
    """Or tokens would depend on the order in which a device adds."""
    for vocab in (2, 1000, 262_208):
        assert drawn(torch.zeros(vocab), [0.0, 0.5, 1 - 2.0**-53]) == [0, vocab // 2, vocab - 1]
        assert drawn(torch.zeros(vocab), [0.0, 1 - 2.0**-53], top_p=0.5) == [0, vocab // 2 - 1]


def test_rows_that_are_no_numbers_are_marked_and_hurt_no_other() -> None:
    nan, inf = torch.nan, torch.inf
    logits_BV = torch.tensor([[0.0, 3.0, 3.0], [1.0, nan, 0.0], [0.0, 1.0, -inf], [nan] * 3, [0.0, inf, 0.0], [2.0, 1.0, 0.0]])
    cut = [PLAIN._replace(top_k=1), PLAIN._replace(top_k=1, top_p=0.5), PLAIN._replace(top_p=1e-9)]
    for draw in (None, *cut, PLAIN._replace(temperature=1e-6)):
        assert pick(logits_BV, [draw] * 6).tolist() == [1, *[NAN_LOGITS] * 4, 0]
    for draw in (*cut, PLAIN._replace(top_p=0.999, number=0.999), PLAIN._replace(top_k=3, number=0.999)):
        assert pick(logits_BV, [draw] * 6).tolist()[1:5] == [NAN_LOGITS] * 4
    assert pick(logits_BV[:0], []).tolist() == []


def asks(seed: int) -> list[GenerateRequest]:
    random = Random(seed)
    shared, made = prompt(40, seed=seed), []
    for at in range(8):
        tokens = [*shared[: random.randrange(40)], *prompt(random.randrange(1, 40), seed=100 * seed + at)]
        settings = Sampling(
            max_tokens=random.choice([3, 20, 50]), temperature=random.choice([0, 0.7, 1.5]), seed=at,
            top_k=random.choice([None, 20]), top_p=random.choice([1.0, 0.9]), logprobs=random.choice([None, None, None, 1]),
        )  # fmt: skip
        made.append(GenerateRequest(tokens=tokens, sampling=settings))
    return made


@pytest.mark.parametrize("ahead", [False, True])
def test_answers_do_not_depend_on_the_batch_the_order_the_chunks_or_the_room(ahead: bool) -> None:
    pytest.importorskip("transformers")
    many = asks(3)
    expected = alone("llama", many)
    preemptions = 0
    for settings in ({}, {"limits": Limits(chunk_tokens=24, max_running=3)}, {"device_memory": "192KiB", "host_memory": "1MiB"}):
        with small(**settings) as engine:
            engine.passing.reads_later = ahead
            for turn in range(2):  # the second time from the cache
                order = Random(turn).sample(range(len(many)), len(many))
                found = run(engine, [many[at] for at in order])
                assert [tokens_of(deltas) for deltas in found] == [expected[at] for at in order], f"{settings=} {turn=}"
                preemptions += sum(deltas[-1].usage.preemptions for deltas in found if deltas[-1].usage is not None)
    assert preemptions > 0, "this was to be tight"


def test_an_answer_goes_on_alike_when_what_there_is_of_it_is_asked_again() -> None:
    pytest.importorskip("transformers")
    settings = Sampling(max_tokens=30, temperature=1.2, seed=11, top_p=0.95)
    with small() as engine:
        whole = tokens_of(run(engine, [GenerateRequest(tokens=prompt(30), sampling=settings)])[0])
        again = GenerateRequest(tokens=[*prompt(30), *whole[:13]], sampling=replace(settings, max_tokens=17))
        assert tokens_of(run(engine, [again])[0]) == whole[13:]


def test_requests_without_a_seed_differ() -> None:
    pytest.importorskip("transformers")
    free = GenerateRequest(tokens=prompt(30), sampling=Sampling(max_tokens=20, temperature=2.0))
    with small() as engine:
        one, other, likeliest = (tokens_of(deltas) for deltas in run(engine, [free, free, greedy(prompt(30), 20)]))
    assert one != other and likeliest == alone("llama", [greedy(prompt(30), 20)])[0]
