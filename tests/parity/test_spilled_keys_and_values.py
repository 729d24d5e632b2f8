"""Keys and values on the host alone change no bit of answers with Quest or ClusterKV, whose summaries stay on the device.

Engines whose rows spill are compared with engines with the same selector whose rows are all on the device, where passes are the
same; and where everything is picked with the models of transformers, which know neither pages nor selectors.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from engine.families import SMALL, checkpoint, reference
from engine.side_by_side import draw
from parity.recorded import PAGE, Played, Recorded, distance, store_at
from parity.spilling import CONTEXT, prompts, recorded, report, spilled, watch
from parity.test_exact_resumption import WAIT
from parity.test_spilled_rows import check_same
from stepwell.base.ids import Kind, Tier
from stepwell.engine.approximate.clusterkv import ClusterKV
from stepwell.engine.approximate.quest import Quest
from stepwell.engine.loading.checkpoint import Checkpoint
from stepwell.engine.loading.weights import HeldTensors
from stepwell.engine.passes.spilling import SHORT_RUN

hf = pytest.importorskip("transformers")

TOLERANCE = 1e-4
SELECTORS = ("quest", "clusterkv")
BUDGET = 112
LENGTHS = (150, 97, 30, 17, 200, 64)  # some below what is picked, some at the end of a page


def picking(selector: str, **more: Any) -> dict[str, Any]:
    return {"sparse": selector, "sparse_budget": BUDGET, **more}


@cache
def qwen3() -> Checkpoint:
    """Norms of queries and keys before the summaries."""
    model = hf.Qwen3ForCausalLM(hf.Qwen3Config(**SMALL)).eval()
    draw(model, 5)
    return replace(
        checkpoint("llama"), config=model.config.to_dict(), source=HeldTensors(model.state_dict()), digest="test-qwen3"
    )


@pytest.fixture(scope="module", params=SELECTORS)
def selector(request: pytest.FixtureRequest) -> str:
    return str(request.param)


def two_turns(made: Recorded) -> list[Played]:
    """Prompts side by side, and each once more with an answer and more text behind it: some of that is one token, some few."""
    first = made.play_all(prompts(LENGTHS), answer=20)
    again = [[*each.prompt, *each.tokens, *more] for each, more in zip(first, prompts((5, 8, 9, 40, 70, 3), seed=2), strict=True)]
    return first + made.play_all(again, answer=12)


@pytest.fixture(scope="module")
def resident(selector: str) -> list[Played]:
    made = recorded("llama", **picking(selector))
    played = two_turns(made)
    made.close()
    return played


def test_rows_that_may_spill_and_do_not_change_nothing(selector: str, resident: list[Played]) -> None:
    made = recorded("llama", hot_rows=8 * PAGE, **picking(selector))
    check_same(two_turns(made), resident)
    assert report(made).host_pages == report(made).misses == 0
    made.close()


@pytest.mark.parametrize("hot_rows", [0, PAGE, BUDGET, 8 * PAGE, 12 * PAGE])
def test_rows_on_the_host_change_no_bit(selector: str, resident: list[Played], hot_rows: int) -> None:
    """With no hot rows, fewer than are picked, as many, and some more. Freed pages hold no numbers."""
    made = spilled("llama", hot_rows=hot_rows, **picking(selector))
    most = [0]
    watch(made.engine, lambda found: most.append(found.host_pages))
    check_same(two_turns(made), resident)
    found = report(made)
    assert max(most) > 10 and found.misses and found.hot_pages == 0
    assert (found.hits > 0) == (found.fetched_bytes > 0) == (hot_rows > 0)
    assert (found.read_through > 0) == (hot_rows < BUDGET)
    assert (found.read_through == found.misses) == (hot_rows == 0)
    made.close()


def test_norms_before_the_summaries(selector: str) -> None:
    one, other = recorded(qwen3(), **picking(selector)), spilled(qwen3(), hot_rows=8 * PAGE, **picking(selector))
    check_same(two_turns(other), two_turns(one))
    assert report(other).misses
    one.close()
    other.close()


def test_with_a_budget_for_everything_answers_are_those_of_a_model_without_pages(selector: str) -> None:
    """The oracle is not the engine: the same weights in transformers, over the whole text at once."""
    model = reference("llama")
    made = spilled("llama", hot_rows=PAGE, sparse=selector, sparse_budget=CONTEXT)
    for played in two_turns(made):
        text = torch.tensor([[*played.prompt, *played.tokens]])
        with torch.no_grad():
            expected = model(text, use_cache=False).logits[0, len(played.prompt) - 1 : -1]
        assert expected.std() > 0.3, "a dead model proves nothing"
        assert (torch.stack(played.logits) - expected).abs().max() <= TOLERANCE
    assert report(made).misses
    made.close()


def test_prompts_look_at_everything_wherever_their_rows_are(selector: str) -> None:
    """Tokens behind a prompt on the host: one, a short run, a longer one, each in a pass of its own. They see what a model
    without pages sees.
    """
    model, made = reference("llama"), spilled("llama", hot_rows=8 * PAGE, **picking(selector))
    (known,) = prompts((20 * PAGE,))
    made.play(known)
    for behind in (1, 2, SHORT_RUN, SHORT_RUN + 1, 3 * PAGE):
        text, before = [*known, *prompts((behind,), seed=behind)[0]], report(made).misses
        played = made.play(text, answer=1)
        assert played.resumed == len(known) and played.chunks == (len(text),)
        assert report(made).misses > before, "what its last token would pick gets slots"
        with torch.no_grad():
            expected = model(torch.tensor([text]), use_cache=False).logits[0, -1]
        assert (played.logits[0] - expected).abs().max() <= TOLERANCE
    made.close()


def test_a_prompts_last_token_leaves_rows_hot_that_it_would_pick(selector: str) -> None:
    """It looks at everything itself, from a scratch: the first token of the answer finds some of what it picks already there."""
    made = spilled("llama", hot_rows=12 * PAGE, **picking(selector))
    passes: dict[int, tuple[int, int]] = {}
    watch(made.engine, lambda found: passes.setdefault(made.engine.passes, (found.misses, found.hits)) and None)
    made.play(prompts((30 * PAGE,))[0], answer=3)
    assert made.engine.passes == 10, "eight chunks of the prompt, and two tokens behind the first"
    assert passes[7] == (0, 0) and passes[8][0] > 0 == passes[8][1], "the last chunk fetches"
    assert passes[9][1] > 100, "and the first step finds: sinks at least, in every layer"
    made.close()


@pytest.mark.parametrize("behind", [1, 3])
def test_so_does_the_last_token_of_a_few_behind_a_cached_prompt(selector: str, behind: int) -> None:
    """These are read where they lie, and no scratch is filled."""
    made = spilled("llama", hot_rows=12 * PAGE, **picking(selector))
    known = prompts((30 * PAGE,))[0]
    made.play(known, answer=1)
    passes, before, hits = made.engine.passes, report(made), dict[int, int]()
    watch(made.engine, lambda now: hits.setdefault(made.engine.passes, now.hits) and None)
    made.play([*known, *prompts((behind,), seed=9)[0]], answer=3)
    assert report(made).staged_bytes == before.staged_bytes, "otherwise the test shows nothing"
    assert hits[passes + 1] == before.hits and hits[passes + 2] - before.hits > 100, "sinks at least, in every layer"
    made.close()


def test_summaries_survive_the_host_and_the_store_bit_for_bit(
    selector: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Loaded without their rows, they are what was made of the keys: nothing is made again."""
    settings = picking(selector, **store_at(tmp_path / "log"), store_config=WAIT, hot_rows=8 * PAGE, memory="840KiB")
    (prompt,) = prompts((30 * PAGE,))
    first = recorded("llama", **settings)
    first.play(prompt)
    first.settle()
    expected = summaries_of(first, prompt)
    assert len(expected) == 30 and expected.std() > 0.1
    first.evict_to_host()
    for summary in (Quest, ClusterKV):
        monkeypatch.setattr(summary, "make", lambda *_: pytest.fail("it was made again"))
    assert first.play([*prompt, 1], answer=2).host == len(prompt)
    assert torch.equal(summaries_of(first, prompt), expected)
    first.close()
    second = recorded("llama", **settings)
    assert second.play([*prompt, 1], answer=2).stored == len(prompt)
    assert torch.equal(summaries_of(second, prompt), expected)
    for made in (first, second):
        assert made.engine.cache.stats().counters["loaded_index_only_pages"] > 20
    second.close()


def summaries_of(made: Recorded, prompt: Sequence[int]) -> torch.Tensor:
    """The summaries of each page of a prompt; all pages are on the device."""
    engine = made.engine
    match = engine.cache.lookup([*prompt, 0], namespace=engine.cache.namespace_for())
    runs = [node.runs[Tier.DEVICE] for node in match.path]
    assert engine._runner.model.selector is not None and all(run is not None for run in runs)
    ids = np.concatenate([run.ids for run in runs if run is not None])[: len(prompt) // PAGE]
    return engine._runner._pages.state_PLRE(engine._runner.model.selector.state)[torch.from_numpy(ids).long()].clone()


def test_requests_that_share_a_prefix_and_part(selector: str) -> None:
    """What one fetched, the others find; each goes on alone behind what they share."""
    shared, *tails = prompts((200, 20, 33, 7, 50))

    def played(made: Recorded) -> list[Played]:
        first = [made.play(shared)]
        return first + made.play_all([[*shared, *tail] for tail in tails], answer=20)

    one, other = recorded("llama", **picking(selector)), spilled("llama", hot_rows=10 * PAGE, **picking(selector))
    check_same(played(other), played(one))
    found = report(other)
    assert found.hits > found.misses > 0
    one.close()
    other.close()


def test_a_device_too_small_for_one_request(selector: str) -> None:
    """Its rows leave the device while its prompt is computed, and it answers without being put back."""
    (prompt,) = prompts((700,))
    one, other = (
        recorded("llama", **picking(selector)),
        recorded("llama", hot_rows=8 * PAGE, memory="900KiB", **picking(selector)),
    )
    then, now = one.play(prompt, answer=60), other.play(prompt, answer=60)
    check_same([now], [then])
    spec, counters = other.engine.cache.spec, other.engine.cache.stats().counters
    pages, room = -(-760 // PAGE), other.engine.cache.stats().tier(Tier.DEVICE).size_bytes
    assert room < pages * (spec.device_bytes(Kind.ROWS) + spec.device_bytes(Kind.PREFIX)), "all of it would have fitted"
    assert counters["spilled_pages"] > 20 and report(other).staged_bytes and report(other).misses
    one.close()
    other.close()


def test_stores_are_shared_by_engines_with_and_without(selector: str, resident: list[Played], tmp_path: Path) -> None:
    """What is stored of a page is the same. So each goes on from what the other stored, after restarts."""
    settings = picking(selector, **store_at(tmp_path / "log"), store_config=WAIT)
    first = spilled("llama", hot_rows=8 * PAGE, **settings)
    check_same(first.play_all(prompts(LENGTHS), answer=20), resident[: len(LENGTHS)])
    first.close()
    later = resident[len(LENGTHS) :]
    for hot_rows in (None, 8 * PAGE):
        made = recorded("llama", **settings) if hot_rows is None else spilled("llama", hot_rows=hot_rows, **settings)
        again = made.play_all([each.prompt for each in later], answer=12)
        assert [each.tokens for each in again] == [each.tokens for each in later]
        assert max(distance(*pair) for pair in zip(again, later, strict=True)) <= TOLERANCE
        assert sum(each.stored for each in again) > sum(LENGTHS) / 2
        made.close()
