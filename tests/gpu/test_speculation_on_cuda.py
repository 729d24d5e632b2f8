"""Drafts on a GPU: the answers of the CPU without one, and as many right guesses from the host tier as from the device."""

from __future__ import annotations

import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("transformers")

from engine.drafted import OWN, engine_for  # noqa: E402
from engine.small import greedy, prompt, run, tokens_of  # noqa: E402
from not_run import NO_CUDA  # noqa: E402
from waiting import empty_device  # noqa: E402

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason=NO_CUDA)]


@pytest.mark.parametrize(("family", "drafted"), [("llama", "near"), ("mistral", "unwindowed"), ("deepseek_v3", OWN),
                                                 ("deepseek_v32", OWN)])  # fmt: skip
def test_a_draft_changes_no_answer(family: str, drafted: str) -> None:
    asks = [greedy(prompt(length, seed=length), 16) for length in (3, 40, 100)]
    with engine_for(family) as engine:
        expected = [tokens_of(deltas) for deltas in run(engine, asks)]
    with engine_for(family, drafted, device="cuda", dtype="fp32") as engine:
        played = run(engine, asks)
        empty_device(engine.cache)
        again = run(engine, asks)
        assert engine.cache.counters["draft_missing"] == 0
    for each in (played, again):
        assert [tokens_of(deltas) for deltas in each] == expected
    usages = [[deltas[-1].usage for deltas in each if deltas[-1].usage is not None] for each in (played, again)]
    counts = [[(usage.proposed_tokens, usage.accepted_tokens) for usage in each] for each in usages]
    assert counts[0] == counts[1] and sum(accepted for _, accepted in counts[0]) > 0
    assert sum(usage.sources.host for usage in usages[1]) == 32 + 96


def test_a_missing_draft_is_noticed() -> None:
    with engine_for("llama", "llama", device="cuda", dtype="bf16") as engine:
        tokens = prompt(60)
        run(engine, [greedy(tokens, 4, speculate=False)])
        (deltas,) = run(engine, [greedy([*tokens, 5], 8)])
        assert deltas[-1].usage is not None and deltas[-1].usage.proposed_tokens == 0
        assert engine.cache.counters["draft_missing"] == 1 and engine.cache.explain([*tokens, 5]).missing_states == {"draft": 0}
