"""Constrained decoding on a GPU: the answers of the CPU, many in one pass, with a draft, and next to unconstrained requests."""

from __future__ import annotations

import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("llguidance")

from engine.test_guided import GRAMMARS, asks, check, guided_engine, run, text_of  # noqa: E402
from not_run import NO_CUDA  # noqa: E402
from stepwell.engine import Finish  # noqa: E402

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason=NO_CUDA)]
NUM_GREEDY = 4  # of the requests, the first ones: the others draw, and may part where two numbers are rounded otherwise


@pytest.mark.parametrize("draft", [False, True])
def test_answers_on_a_gpu_follow_their_grammars(draft: bool) -> None:
    with guided_engine(dtype="fp32") as engine:
        expected = [text_of(run(engine, [ask])[0]) for ask in asks(engine)[:NUM_GREEDY]]
    with guided_engine(draft=draft, device="cuda", dtype="fp32") as engine:
        found = run(engine, asks(engine))
        again = run(engine, asks(engine))  # from what the first left, by recorded passes
    assert [text_of(deltas) for deltas in found[:NUM_GREEDY]] == expected
    assert [text_of(deltas) for deltas in again] == [text_of(deltas) for deltas in found]
    ended = [
        (text_of(deltas), grammar)
        for deltas, grammar in zip(found, (GRAMMARS * 2)[:7], strict=False)
        if deltas[-1].finish is Finish.STOP
    ]
    for text, grammar in ended:
        check(text, grammar)
    assert len(ended) >= 5
    if draft:
        accepted = [deltas[-1].usage.accepted_tokens for deltas in found[:7] if deltas[-1].usage is not None]
        assert sum(accepted) > 0, "guesses that the grammar allows are taken"
