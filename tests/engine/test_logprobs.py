"""Logprobs of all rows of a pass at once: those of one row alone, in one copy to the host."""

from __future__ import annotations

import math
from collections.abc import Sequence

import pytest
import torch

from stepwell.engine.ops.kernels import Kernels
from stepwell.engine.ops.to_host import HostCopy, to_host
from stepwell.engine.requests.request import TokenLogprob
from stepwell.engine.sampling import choices
from stepwell.engine.sampling.choices import Choices, Choosing

VOCAB = 500


def reference(logits_V: torch.Tensor, token: int, count: int) -> TokenLogprob:
    """The logprob of one row alone, computed the slow way."""
    shares = logits_V.float().log_softmax(-1)
    order = sorted(range(len(shares)), key=lambda each: (-float(shares[each]), each))
    top = tuple((each, float(shares[each])) for each in order[:count])
    return TokenLogprob(token=token, logprob=float(shares[token]), rank=int((shares > shares[token]).sum()) + 1, top=top)


def chosen(logits_BV: torch.Tensor, choosing: Sequence[Choosing]) -> tuple[list[choices.Chosen | None], int]:
    """What was chosen, and how many copies to the host it took."""
    copies: list[int] = []

    def counted(numbers_N: torch.Tensor) -> HostCopy:
        copies.append(numbers_N.numel())
        return to_host(numbers_N)

    made = Choices(logits_BV, choosing, Kernels(to_host=counted))
    return [made.of(row) for row in range(len(choosing))], len(copies)


@pytest.mark.parametrize("rows_together", [1, VOCAB * 3, 2**22])
def test_they_are_those_of_each_row_alone(rows_together: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("stepwell.engine.ops.logprobs.ROWS_TOGETHER", rows_together)
    torch.manual_seed(1)
    counts = [0, 5, None, 20, 1, 700, None, 3, 0, 2, 5]
    logits_BV = torch.randn(len(counts), VOCAB) * 4
    logits_BV[5:] = logits_BV[5:].bfloat16().float()  # many are equally likely
    choosing = [Choosing(logprobs=count, given=at if at % 3 == 0 else None) for at, count in enumerate(counts)]
    found, copies = chosen(logits_BV, choosing)
    assert copies == 1
    for row, (each, way) in enumerate(zip(found, choosing, strict=True)):
        assert each is not None and each.token == (int(logits_BV[row].argmax()) if way.given is None else way.given)
        assert each.logprob == (None if way.logprobs is None else reference(logits_BV[row], each.token, way.logprobs))


def test_they_do_not_depend_on_the_rows_they_are_computed_with() -> None:
    logits_BV = (torch.randn(6, VOCAB) * 2).bfloat16().float()
    choosing = [Choosing(logprobs=count) for count in (2, 20, 0, 7, 1, 400)]
    together, _ = chosen(logits_BV, choosing)
    for row, way in enumerate(choosing):
        assert chosen(logits_BV[row : row + 1], [way])[0][0] == together[row]


def test_a_row_that_is_no_number_leaves_the_others_as_they_are() -> None:
    logits_BV = torch.randn(3, VOCAB)
    logits_BV[1, 7] = math.nan
    found, _ = chosen(logits_BV, [Choosing(logprobs=2), Choosing(logprobs=2), Choosing(logprobs=2)])
    assert found[1] is None
    for row in (0, 2):
        each = found[row]
        assert each is not None and each.logprob == reference(logits_BV[row], each.token, 2)


def test_a_pass_without_logprobs_brings_its_tokens_alone() -> None:
    logits_BV = torch.randn(4, VOCAB)
    made = Choices(logits_BV, [Choosing()] * 4, Kernels())
    assert made.tokens == logits_BV.argmax(-1).tolist() and made.tokens_alone
