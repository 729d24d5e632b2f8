"""Sleep, resets and changes of weights: what is found afterwards, below the toy engine, whose bytes follow from its weights."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from toy_runs import Make, computed_by, counters, text
from toy_vllm import MODELS, ToyModel

from stepwell.connectors.vllm.weights import CHUNK_WORDS, CurrentWeights, Held, WeightCheck, Weights, sum_of, sum_of_words
from stepwell.store_tier import prefetch

PROMPT = text(1, 45)


@pytest.fixture(autouse=True)
def every_fetch_pays(monkeypatch: pytest.MonkeyPatch) -> None:
    """The toy computes sooner than any store delivers."""
    monkeypatch.setattr(prefetch, "is_worth_it", lambda *_: True)


def store_in(path: Path, *, used: bool = True) -> dict[str, Any]:
    return {"store": f"log:{path}", "store_budget": "64MiB", "prefetch": "wait_complete"} if used else {}


@pytest.mark.parametrize("ranks", [1, 2])
@pytest.mark.parametrize("model", MODELS)
def test_sleep_with_the_same_weights_keeps_what_is_cached(make: Make, model: str, ranks: int) -> None:
    engine = make(model, ranks=ranks)
    for salt in (None, "a"):
        computed_by(engine, PROMPT, cache_salt=salt)
    for _ in range(3):
        engine.pause()
        for salt in (None, "a"):
            assert computed_by(engine, PROMPT, cache_salt=salt) <= 9


def test_a_reset_empties_host_memory_and_leaves_the_store(make: Make, tmp_path: Path) -> None:
    engine = make(**store_in(tmp_path))
    computed_by(engine, PROMPT)
    assert engine.connector.reset_cache() is True
    engine.run()  # until the store has what only the host had
    assert computed_by(engine, PROMPT) == 5
    assert counters(engine)["tokens_store"] == 44
    alone = make()
    computed_by(alone, PROMPT)
    alone.connector.reset_cache()
    assert computed_by(alone, PROMPT) == 49


@pytest.mark.parametrize("with_store", [False, True])
@pytest.mark.parametrize("rank", [0, 1])
def test_other_weights_find_their_own_alone(make: Make, tmp_path: Path, rank: int, with_store: bool) -> None:
    """There and back, on one rank of two: bytes of other weights would fail in the engine."""
    engine = make("all", ranks=2, **store_in(tmp_path, used=with_store))
    took = []
    for weights in (0, 1, 2, 1, 0):
        engine.pause()
        engine.load_weights(weights, rank=rank)
        took.append(computed_by(engine, PROMPT))
    assert took == [49, 49, 49, 5, 5]
    engine.close()
    if with_store:
        second = make("all", ranks=2, **store_in(tmp_path))
        took = [computed_by(second, PROMPT)]
        second.pause()
        second.load_weights(2, rank=rank)
        took.append(computed_by(second, PROMPT))
        assert took == [5, 5], "weights that were loaded have the same name in every process"


def test_requests_from_before_a_change_of_weights_publish_nothing_and_find_nothing(make: Make) -> None:
    """One has computed a part and is preempted, as vLLM does; one waits, and was looked up; one loads later."""
    engine = make()
    computed_by(engine, PROMPT)
    running = engine.submit(text(2, 45))
    while running.status != "running":
        engine.step()
    waiting, before = engine.submit(PROMPT), engine.computed
    engine._preempt(running, {})
    engine.pause()
    engine.load_weights(1)
    engine.run()
    assert waiting.loaded == 0 and engine.computed - before == 49 + 49
    assert computed_by(engine, text(2, 45)) == 5 == computed_by(engine, PROMPT)


def test_a_request_that_runs_on_over_a_reset_publishes_nothing_more(make: Make, tmp_path: Path) -> None:
    """Which weights computed which of its tokens is not known."""
    engine = make(**store_in(tmp_path))
    running = engine.submit(text(2, 45))
    while running.num_computed_tokens < 16:
        engine.step()
    engine.connector.reset_cache()
    engine.run()
    assert running in engine.done
    assert computed_by(engine, text(2, 45)) >= 49 - 16


def test_weights_that_cannot_be_read_find_nothing_from_before(make: Make, tmp_path: Path) -> None:
    engine = make(**store_in(tmp_path))
    computed_by(engine, PROMPT)
    for worker in engine.workers:
        worker._weights = CurrentWeights([])
    for _ in range(2):
        engine.pause()
        assert computed_by(engine, PROMPT) == 49
        assert computed_by(engine, PROMPT) == 5


def test_a_reset_before_workers_have_said_which_weights_they_hold_asks_again(make: Make) -> None:
    engine = make()
    computed_by(engine, PROMPT)
    engine.pause()
    asked = engine.submit(PROMPT)
    assert engine.connector.get_num_new_matched_tokens(asked, 0) == (None, False)
    engine.pause()
    engine.load_weights(1)
    engine.run()
    assert asked.loaded == 0


def test_listeners_forget_what_other_weights_have_computed(make: Make) -> None:
    engine = make(events=True)
    computed_by(engine, PROMPT)
    engine.events = []
    engine.pause()
    engine.load_weights(1)
    computed_by(engine, PROMPT)
    last = max(at for at, event in enumerate(engine.events) if type(event).__name__ == "AllBlocksCleared")
    assert {type(event).__name__ for event in engine.events[last + 1 :]} == {"BlockStored"}


# ---- asking ---------------------------------------------------------------------------------------------


def test_the_answer_is_that_of_all_ranks_to_the_last_question() -> None:
    doubts = WeightCheck()
    assert doubts.answered({0: (1, "")}, 1) is None, "the check has not begun"
    doubts.begin()
    assert doubts.question() == 0, "no request waits for it"
    doubts.wanted = True
    assert [doubts.question(), doubts.question()] == [1, 0]
    doubts.begin()
    doubts.wanted = True
    assert doubts.answered({0: (1, ""), 1: (1, "")}, 2) is None, "an answer to what was asked before"
    assert doubts.question() == 2
    assert doubts.answered({0: (2, "")}, 2) is None
    assert doubts.answered({1: (2, "")}, 2) == Weights(held=Held.FIRST) and not doubts.pending


@pytest.mark.parametrize(("said", "held"), [(("", None), Held.UNKNOWN), (("", "x"), Held.OTHER), (("", ""), Held.FIRST)])
def test_one_rank_with_other_weights_is_enough(said: tuple[str | None, ...], held: Held) -> None:
    doubts = WeightCheck()
    doubts.begin()
    weights = doubts.answered({rank: (1, name) for rank, name in enumerate(said)}, len(said))
    assert weights is not None and weights.held is held


# ---- digests --------------------------------------------------------------------------------------------


def test_the_digest_covers_the_whole_model_around_the_layers() -> None:
    model = ToyModel(["one", "two"])
    weights = CurrentWeights(model.named.values())
    assert weights.name() == ""
    for tensor, value in ((model.head.data, 2.0), (model.scale, 3.0)):
        kept = tensor.clone()
        tensor.fill_(value)
        assert weights.name() not in ("", None)
        tensor.copy_(kept)
        assert weights.name() == ""
    model.head = torch.nn.Parameter(torch.zeros(6))
    assert weights.name() not in ("", None), "a parameter that was replaced"
    assert CurrentWeights([torch.nn.Linear(2, 2)]).name() is None, "a layer without a model"


@pytest.mark.parametrize("of", [sum_of, sum_of_words])
@pytest.mark.parametrize("count", [1, 7, 8, 9, 4099])
def test_any_bit_and_its_place_count(of: Any, count: int) -> None:
    raw = torch.randint(0, 256, (count,), dtype=torch.uint8, generator=torch.Generator().manual_seed(count))
    first, seen = of(raw.clone()), set()
    for at in {0, count // 2, count - 1}:
        for bit in (0, 7):
            other = raw.clone()
            other[at] ^= 1 << bit
            seen.add(of(other))
    assert first not in seen and of(raw.clone()) == first
    assert of(torch.cat([raw, raw.new_zeros(1)])) != first
    if count > 16:
        assert of(raw.roll(8)) != first, "the same words in other places"


def test_words_count_in_every_chunk() -> None:
    raw = torch.zeros((CHUNK_WORDS + 2) * 8, dtype=torch.uint8)
    sums = set()
    for at in (0, CHUNK_WORDS * 8 - 1, CHUNK_WORDS * 8, len(raw) - 1):
        raw[at] = 1
        sums.add(sum_of_words(raw))
        raw[at] = 0
    assert len({*sums, sum_of_words(raw)}) == 5
    odd = torch.zeros(33, dtype=torch.uint8)[1:]
    assert sum_of_words(odd) == sum_of_words(odd.clone()), "memory that does not begin at a word"


def test_weights_of_any_type_and_order_in_memory_have_a_sum() -> None:
    for dtype in (torch.bfloat16, torch.float8_e4m3fn, torch.int8, torch.bool):
        assert sum_of(torch.zeros(3, 2).to(dtype).T) != 0
    assert isinstance(sum_of(torch.zeros(())), int) and isinstance(sum_of(torch.zeros(0, 3)), int)
