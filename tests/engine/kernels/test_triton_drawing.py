"""Tokens drawn by Triton's kernels are those of plain torch: on the CPU in Triton's interpreter."""

from __future__ import annotations

from random import Random

import pytest
import torch

from stepwell.engine.ops.drawing import NAN_LOGITS, Draw, pick
from stepwell.engine.sampling.choices import number_for

pytest.importorskip("triton")
from stepwell.engine.ops.on_triton import drawing as fast

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
PLAIN = Draw(temperature=1.0, top_k=None, top_p=1.0, number=0.5)


NAN, INF = torch.nan, torch.inf


@pytest.fixture(autouse=True)
def small_parts(monkeypatch: pytest.MonkeyPatch) -> None:
    """So that a small vocabulary has several splits, and a list several blocks."""
    if DEVICE == "cpu":
        monkeypatch.setattr(fast, "SPLIT", 256)
        monkeypatch.setattr(fast, "LIST_BLOCK", 64)


def same(logits_BV: torch.Tensor, draws: list[Draw | None]) -> list[int]:
    logits_BV = logits_BV.to(DEVICE)
    expected: list[int] = pick(logits_BV, draws).tolist()
    assert fast.pick(logits_BV, draws).tolist() == expected
    return expected


def kinds(vocab: int, seed: int) -> torch.Tensor:
    """A row of each kind: flat, usual, huge, with ties, of bf16, equal, tiny, and zeros of both signs."""
    x = torch.randn(8, vocab, generator=torch.Generator().manual_seed(seed))
    return torch.stack([
        x[0] * 1e-3, x[1] * 3, x[2] * 1e30, x[3].mul(2).round().div(2), (x[4] * 4).bfloat16().float(), x[5] * 0 - 2.5,
        x[6] * 1e-40, x[7].sign() * 0.0,
    ])  # fmt: skip


def any_draw(random: Random, vocab: int) -> Draw:
    return Draw(
        temperature=random.choice([1e-6, 0.3, 0.8, 1.0, 100.0]), top_k=random.choice([None, None, 1, 2, 20, vocab, vocab + 1]),
        top_p=random.choice([1.0, 0.9, 0.5, 0.13, 1e-300, 1 - 1e-9]), number=random.choice([0.0, 1 - 2.0**-53, random.random()]),
    )  # fmt: skip


@pytest.mark.parametrize("vocab", [1, 37, 256, 300])
def test_rows_of_every_kind_with_any_settings_draw_what_plain_torch_draws(vocab: int) -> None:
    random = Random(vocab)
    draws: list[Draw | None] = [any_draw(random, vocab) for _ in range(8)]
    draws[random.randrange(8)] = None
    same(kinds(vocab, vocab), draws)


@pytest.mark.parametrize("kind", [1, 3, 4, 5])
def test_cuts_fall_on_the_same_token_whatever_the_logits(kind: int) -> None:
    """With numbers at the end of the range: the last token that is kept, by its id, is drawn."""
    cuts = [(None, 0.6), (3, 1.0), (50, 0.7)]
    draws: list[Draw | None] = [PLAIN._replace(top_k=top_k, top_p=top_p, number=1 - 2.0**-53) for top_k, top_p in cuts]
    same(kinds(300, 7)[kind].expand(3, -1), draws)


def test_tokens_come_as_often_as_they_are_likely() -> None:
    """By numbers that are spread evenly: how often a token comes is its share, but for a number at either end."""
    logits_V, count = torch.tensor([1.0, -2.0, 3.0, 0.5, 3.0, -9.0, 2.0]), 20
    for cut in (PLAIN._replace(temperature=2.0), PLAIN._replace(temperature=2.0, top_k=6, top_p=0.9)):
        draws = [cut._replace(number=(at + 0.5) / count) for at in range(count)]
        found = torch.tensor(fast.pick(logits_V.expand(count, -1).to(DEVICE), draws).tolist()).bincount(minlength=7)
        share_V = (logits_V.double() / cut.temperature).softmax(-1)
        order = sorted(range(7), key=lambda token: (-float(logits_V[token]), token))
        kept = order[: cut.top_k or 7]
        enough = float(share_V[kept].sum()) * cut.top_p
        while len(kept) > 1 and float(share_V[kept[:-1]].sum()) >= enough:
            kept.pop()
        share_V = torch.zeros_like(share_V).index_copy(0, torch.tensor(kept), share_V[kept] / share_V[kept].sum())
        assert (found - share_V * count).abs().max() <= 1, f"{cut=} {found=}"


def test_rows_that_are_no_numbers_are_marked_and_hurt_no_other() -> None:
    logits_BV = torch.tensor([[0.0, 3.0, 3.0], [1.0, NAN, 0.0], [0.0, 1.0, -INF], [NAN] * 3, [0.0, INF, 0.0], [2.0, 1.0, 0.0]])
    for draw in (None, PLAIN._replace(top_k=1), PLAIN._replace(top_k=2, top_p=0.5), PLAIN._replace(top_p=1e-9)):
        assert same(logits_BV, [draw] * 6) == [1, *[NAN_LOGITS] * 4, 0]


def test_a_row_draws_the_same_in_every_batch_and_wherever_its_logits_lie(monkeypatch: pytest.MonkeyPatch) -> None:
    random, logits_BV = Random(3), kinds(300, 3)[:4]
    draws: list[Draw | None] = [any_draw(random, 300), None, PLAIN._replace(top_p=0.9), PLAIN._replace(number=number_for(1, 2))]
    together = same(logits_BV, draws)
    wide_BV = torch.full((4, 301), 1e9)
    wide_BV[:, :300] = logits_BV
    assert same(wide_BV[:, :300], draws) == together
    monkeypatch.setattr(fast, "LISTED", 600)  # two rows at a time
    order = [2, 0, 3, 1]
    assert same(logits_BV[order], [draws[row] for row in order]) == [together[row] for row in order]
    assert same(logits_BV[1:2].t().contiguous().t(), [None]) == together[1:2]
    assert fast.pick(logits_BV[:0].to(DEVICE), []).tolist() == []
