"""Attention rows on the host alone change no bit: selections are the same, and so is what is read.

Engines whose rows spill are compared with engines whose rows are all on the device, where passes are the same; and with the
models of transformers, which know neither pages nor hosts.
"""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from engine.families import INDEX, reference
from parity.recorded import PAGE, Played, Recorded, distance, same_bits, store_at
from parity.spilling import SPARSE, prompts, recorded, report, spilled, watch
from parity.test_exact_resumption import WAIT
from stepwell.base.ids import Kind, Tier
from stepwell.tiers.eviction import make_room

pytest.importorskip("transformers")

TOLERANCE = 1e-4
LENGTHS = (150, 97, 30, 17, 200, 64)  # some below what is selected, some at the end of a page
SELECTED = INDEX["index_topk"]


@pytest.fixture(scope="module", params=SPARSE)
def family(request: pytest.FixtureRequest) -> str:
    return str(request.param)


def two_turns(made: Recorded) -> list[Played]:
    """Prompts side by side, and each once more with an answer and more text behind it."""
    first = made.play_all(prompts(LENGTHS), answer=20)
    again = [[*each.prompt, *each.tokens, *more] for each, more in zip(first, prompts((5, 8, 9, 40, 70, 3), seed=2), strict=True)]
    return first + made.play_all(again, answer=12)


@pytest.fixture(scope="module")
def resident(family: str) -> list[Played]:
    made = recorded(family)
    played = two_turns(made)
    made.close()
    return played


def check_same(now: list[Played], then: list[Played]) -> None:
    for one, other in zip(now, then, strict=True):
        assert (one.resumed, one.chunks) == (other.resumed, other.chunks)
        assert same_bits(one, other), f"differs by {distance(one, other)}"


def test_rows_that_may_spill_and_do_not_change_nothing(family: str, resident: list[Played]) -> None:
    made = recorded(family, hot_rows=2 * PAGE)
    check_same(two_turns(made), resident)
    assert report(made).host_pages == report(made).misses == 0
    made.close()


@pytest.mark.parametrize("hot_rows", [0, PAGE, 2 * PAGE, 4 * PAGE, 8 * PAGE])
def test_rows_on_the_host_change_no_bit(family: str, resident: list[Played], hot_rows: int) -> None:
    """With no hot rows, fewer than are selected, a few more, and enough for all. Freed pages hold no numbers."""
    made = spilled(family, hot_rows=hot_rows)
    most = [0]
    watch(made.engine, lambda found: most.append(found.host_pages))
    check_same(two_turns(made), resident)
    found = report(made)
    assert max(most) > 10 and found.misses and found.staged_bytes and found.hot_pages == 0
    assert (found.hits > 0) == (found.fetched_bytes > 0) == (hot_rows > 0)
    assert found.read_through > 0 or hot_rows > SELECTED
    assert (found.read_through == found.misses) == (hot_rows == 0)
    made.close()


def test_steps_with_a_slot_for_each_row_read_nothing_through(family: str) -> None:
    """The first steps fetch, and later ones find most of it."""
    made = spilled(family, hot_rows=2 * PAGE)
    made.play(prompts((256,))[0], answer=40)
    found = report(made)
    assert found.misses and found.read_through == 0 and found.hits > 0
    spill, row_bytes = made.engine.cache.spec.spill, made.engine.cache.spec.state("kv").row_bytes
    assert spill is not None
    shares = {spill.group_of["kv"].count(group) for group in range(spill.num_groups)}  # layers for which a row is fetched
    assert min(shares) <= found.fetched_bytes / (found.misses * row_bytes) <= max(shares)
    made.close()


def test_a_prompts_last_token_leaves_its_rows_hot(family: str) -> None:
    """Computed over rows on the host, its last token fetches what it selects: the first token of the answer finds most of it."""
    made = spilled(family, hot_rows=4 * PAGE)
    passes: list[tuple[int, int]] = []
    watch(made.engine, lambda found: passes.append((found.misses, found.hits)))
    made.play(prompts((256,))[0], answer=3)
    groups = len({*(made.engine.cache.spec.spill.group_of["kv"])})  # type: ignore[union-attr]
    prompt, first = passes[-3], passes[-2]
    assert prompt[0] >= SELECTED * groups / 2, "of those on the host"
    assert first[0] - prompt[0] < prompt[0] / 2, f"{first[0] - prompt[0]} were missing, {prompt[0]} before"
    made.close()


def test_rows_in_eight_bits(family: str) -> None:
    one, other = recorded(family, kv_dtype="fp8"), spilled(family, hot_rows=2 * PAGE, kv_dtype="fp8")
    check_same(two_turns(other), two_turns(one))
    assert report(other).misses
    one.close()
    other.close()


def test_logits_are_those_of_a_model_without_pages(family: str) -> None:
    """The oracle is not the engine: the same weights in transformers, over the whole text at once."""
    model, made = reference(family), spilled(family, hot_rows=2 * PAGE)
    for played in two_turns(made):
        text = torch.tensor([[*played.prompt, *played.tokens]])
        with torch.no_grad():
            expected = model(text, use_cache=False).logits[0, len(played.prompt) - 1 : -1]
        assert expected.std() > 0.3, "a dead model proves nothing"
        assert (torch.stack(played.logits) - expected).abs().max() <= TOLERANCE
    assert report(made).misses and report(made).staged_bytes
    made.close()


def test_requests_that_share_a_prefix_and_part(family: str) -> None:
    """What one fetched, the others find; each goes on alone behind what they share."""
    shared, *tails = prompts((130, 20, 33, 7, 50))

    def played(made: Recorded) -> list[Played]:
        first = [made.play(shared)]
        return first + made.play_all([[*shared, *tail] for tail in tails], answer=20)

    one, other = recorded(family), spilled(family, hot_rows=4 * PAGE)
    check_same(played(other), played(one))
    found = report(other)
    assert found.hits > found.misses > 0
    one.close()
    other.close()


def test_a_device_too_small_for_one_request(family: str) -> None:
    """Its rows leave the device while its prompt is computed, and it answers without being put back."""
    (prompt,) = prompts((700,))
    one, other = recorded(family), recorded(family, hot_rows=2 * PAGE, memory="720KiB")
    then, now = one.play(prompt, answer=60), other.play(prompt, answer=60)
    check_same([now], [then])
    spec, counters = other.engine.cache.spec, other.engine.cache.stats().counters
    pages = -(-760 // PAGE)
    room = other.engine.cache.stats().tier(Tier.DEVICE).size_bytes
    assert room < pages * (spec.device_bytes(Kind.ROWS) + spec.device_bytes(Kind.PREFIX)), "all of it would have fitted"
    assert counters["spilled_pages"] > 20 and report(other).staged_bytes and report(other).misses
    one.close()
    other.close()


def test_a_prompt_that_is_loaded_without_its_rows(family: str) -> None:
    """From the host, where the device has space for the index alone."""
    (prompt,) = prompts((600,))
    longer = [*prompt, *prompts((90,), seed=4)[0]]

    def played(made: Recorded) -> list[Played]:
        first = made.play(prompt)
        made.settle()
        state = made.engine.cache._state
        make_room(state, Tier.DEVICE, {Kind.PREFIX: state.arena(Tier.DEVICE).layout.rows(Kind.PREFIX) + 1})
        return [first, made.play(longer, answer=20)]

    one, other = recorded(family), recorded(family, hot_rows=2 * PAGE, memory="720KiB")
    check_same(played(other), played(one))
    assert other.engine.cache.stats().counters["loaded_index_only_pages"] > 10
    one.close()
    other.close()


def test_stores_are_shared_by_engines_with_and_without(family: str, resident: list[Played], tmp_path: Path) -> None:
    """What is stored of a page is the same. So each goes on from what the other stored, after restarts."""
    settings = {**store_at(tmp_path / "log"), "store_config": WAIT}
    first = spilled(family, hot_rows=2 * PAGE, **settings)
    check_same(first.play_all(prompts(LENGTHS), answer=20), resident[: len(LENGTHS)])
    first.close()
    for hot_rows in (None, 2 * PAGE):
        made = recorded(family, **settings) if hot_rows is None else spilled(family, hot_rows=hot_rows, **settings)
        again = made.play_all([each.prompt for each in resident[len(LENGTHS) :]], answer=12)
        assert [each.tokens for each in again] == [each.tokens for each in resident[len(LENGTHS) :]]
        assert max(distance(*pair) for pair in zip(again, resident[len(LENGTHS) :], strict=True)) <= TOLERANCE
        assert sum(each.stored for each in again) > sum(LENGTHS) / 2
        made.close()
