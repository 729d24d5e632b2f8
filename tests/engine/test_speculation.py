"""Speculation changes how fast an answer comes, and nothing else: not the answer, not what is cached of it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from random import Random
from typing import Any

import pytest
import torch

from engine.drafted import OWN, Letters, draft, engine_for, prompts
from engine.families import checkpoint
from engine.small import DEFAULTS, PAGE, greedy, prompt, run, tokens_of
from parity.recorded import store_at
from stepwell.base.config import PrefetchPolicy, StoreConfig
from stepwell.base.errors import ConfigError
from stepwell.base.ids import Tier
from stepwell.engine import Delta, Engine, EngineConfig, Finish, GenerateRequest, Limits, Sampling, Usage, build_engine
from stepwell.tree.match import ids_of
from waiting import empty_device, settle

pytest.importorskip("transformers")

PAIRS = [
    ("llama", "llama"), ("llama", "near"), ("mistral", "unwindowed"), ("gpt_oss", "far"), ("deepseek_v3", OWN),
    ("deepseek_v32", OWN),
]  # fmt: skip
WAIT = StoreConfig(prefetch=PrefetchPolicy.WAIT_COMPLETE, recompute_tokens_per_s=1.0, checkpoint_delay_s=0)
LENGTHS = (1, 37, 65)


def both_ways(lengths: Sequence[int], count: int = 12, **more: Any) -> list[GenerateRequest]:
    """Each prompt greedily and drawn, with logprobs."""
    made = []
    for at, tokens in enumerate(prompts(tuple(lengths))):
        made.append(GenerateRequest(tokens=tokens, sampling=Sampling(max_tokens=count, logprobs=1), **more))
        sampling = Sampling(max_tokens=count, logprobs=1, temperature=0.3, top_p=0.9, seed=at)
        made.append(GenerateRequest(tokens=tokens, sampling=sampling, **more))
    return made


def usage_of(deltas: list[Delta]) -> Usage:
    assert deltas[-1].usage is not None
    return deltas[-1].usage


def guesses(played: list[list[Delta]]) -> list[tuple[int, int]]:
    return [(usage_of(deltas).proposed_tokens, usage_of(deltas).accepted_tokens) for deltas in played]


def logprobs_of(played: list[list[Delta]]) -> torch.Tensor:
    return torch.tensor([each.logprob for deltas in played for delta in deltas for each in delta.logprobs])


def check_same(played: list[list[Delta]], expected: list[list[Delta]]) -> None:
    assert [tokens_of(deltas) for deltas in played] == [tokens_of(deltas) for deltas in expected]
    assert [deltas[-1].finish for deltas in played] == [deltas[-1].finish for deltas in expected]
    assert torch.allclose(logprobs_of(played), logprobs_of(expected), atol=1e-4, rtol=0)


# ---- the answer -------------------------------------------------------------------------------------


@pytest.mark.parametrize(("family", "drafted"), PAIRS)
def test_answers_are_the_same_with_a_draft(family: str, drafted: str) -> None:
    asks = both_ways(LENGTHS)
    with engine_for(family) as engine:
        expected = run(engine, asks)
        passes = engine.passes
    with engine_for(family, drafted) as engine:
        played = run(engine, asks)
        again = run(engine, asks)  # from the device
        assert drafted == "far" or engine.passes < 2 * passes
    check_same(played, expected)
    check_same(again, expected)
    assert guesses(again) == guesses(played)
    proposed, accepted = (sum(each) for each in zip(*guesses(played), strict=True))
    assert proposed > 0 and (0 if drafted == "far" else 3) <= accepted <= proposed
    if drafted == family:
        assert all(made == right for made, right in guesses(played)[::2]), "a model agrees with itself"


@pytest.mark.parametrize("drafted", ["llama", OWN])
@pytest.mark.parametrize("count", [1, 3, 6])
def test_an_answer_ends_in_the_middle_of_a_guess(drafted: str, count: int) -> None:
    family = "deepseek_v3" if drafted == OWN else "llama"
    asks = both_ways((30,), count)
    with engine_for(family) as engine:
        expected = run(engine, asks)
    with engine_for(family, drafted) as engine:
        check_same(run(engine, asks), expected)
        after = engine.cache.lookup([*asks[0].tokens, *tokens_of(expected[0]), 1])
        assert after.known_tokens == (30 + count - 1) // PAGE * PAGE, "the last token of an answer is not cached"


def test_ends_of_all_kinds_are_where_they_are_without_a_draft() -> None:
    made = checkpoint("llama")
    with engine_for("llama") as engine:
        whole = tokens_of(run(engine, [greedy(prompt(30), 12)])[0])
    eos = next(token for at, token in enumerate(whole) if at >= 5 and token not in whole[:at])
    stop = Letters().decode(whole[6:8])
    asks = [GenerateRequest(tokens=prompt(30), sampling=Sampling(max_tokens=12, stop=(stop,), logprobs=0)),
            GenerateRequest(tokens=prompt(30), sampling=Sampling(max_tokens=12, logprobs=0))]  # fmt: skip
    with_text = replace(made, text=Letters())  # type: ignore[arg-type]
    with_end = replace(made, eos_ids=frozenset([eos]))
    for each, ask, finish in ((with_text, asks[0], Finish.STOP), (with_end, asks[1], Finish.STOP), (with_end, asks[1], None)):
        ask = replace(ask, sampling=replace(ask.sampling, ignore_eos=True)) if finish is None else ask
        with engine_for("llama", made=each) as engine:
            expected = run(engine, [ask])
        with engine_for("llama", "llama", made=each) as engine:
            played = run(engine, [ask])
        check_same(played, expected)
        assert [delta.text for delta in played[0]] == [delta.text for delta in expected[0]]
        assert played[0][-1].finish is (finish or Finish.LENGTH)
        assert sum(delta.finish is not None for delta in played[0]) == 1 and usage_of(played[0]).accepted_tokens > 2


# ---- what is cached ---------------------------------------------------------------------------------


def pages_of(engine: Engine, tokens: list[int], names: Sequence[str]) -> list[torch.Tensor]:
    """The bytes of every page and window page that the cache has of a path, as numbers."""
    match = engine.cache.lookup([*tokens, 1])
    pages = engine._runner._pages if engine._speculation is None else engine._speculation._pages
    spec = engine.cache.spec
    ids = torch.from_numpy(ids_of(match.path, Tier.DEVICE, match.known_tokens // spec.page_tokens)).long()
    made = [pages.state_PLRE(name)[ids].clone() for name in names if name != "swa"]
    for node in match.path if "swa" in names else ():
        for left in (node.checkpoints or {}).values():
            held = left.residencies[Tier.DEVICE]
            assert held is not None
            made.append(pages.state_PLRE("swa")[torch.from_numpy(held.windows).long()].clone())
    return made


@pytest.mark.parametrize(("family", "drafted"), [("mistral", "unwindowed"), ("gpt_oss", "far"), ("deepseek_v3", OWN)])
def test_pages_hold_what_they_hold_without_a_draft(family: str, drafted: str) -> None:
    found = []
    for kind in (None, drafted):
        with engine_for(family, kind) as engine:
            tokens = prompt(50)
            answer = tokens_of(run(engine, [greedy(tokens, 40)])[0])
            found.append(pages_of(engine, [*tokens, *answer], [s.name for s in engine.cache.spec.states if s.required]))
    assert len(found[0]) == len(found[1]) and sum(each.numel() for each in found[0]) > 0
    assert all(len(one) for one in found[0])
    for one, other in zip(*found, strict=True):
        assert one.shape == other.shape and torch.allclose(one, other, atol=1e-5, rtol=0)


@pytest.mark.parametrize(("family", "drafted"), [("llama", "near"), ("deepseek_v32", OWN)])
def test_rows_of_a_draft_are_the_same_for_an_answer_and_for_a_prompt(family: str, drafted: str) -> None:
    """Whatever was guessed wrongly before them: they depend on the tokens up to theirs alone."""
    tokens, found = prompt(30), []
    for count in (30, 2):
        with engine_for(family, drafted) as engine:
            tokens += tokens_of(run(engine, [greedy(tokens, count)])[0])
            names = [state.name for state in engine.cache.spec.states if not state.required]
            found.append(pages_of(engine, tokens[:59], names))
    for one, other in zip(*found, strict=True):
        assert one.shape == other.shape and len(one) == 3 and torch.allclose(one, other, atol=1e-5, rtol=0)
        assert one.isfinite().all() and (one[1:] != 0).any(dim=-1).all(), "a row was not written"


@pytest.mark.parametrize(("family", "drafted"), [("llama", "near"), ("mistral", "unwindowed"), ("deepseek_v32", OWN)])
def test_as_many_guesses_are_right_whatever_tier_a_prompt_comes_from(family: str, drafted: str, tmp_path: Path) -> None:
    settings = {**store_at(tmp_path / "log", "64MiB"), "store_config": WAIT}
    asks = [greedy([*prompt(70), *prompt(at, seed=at)], 12) for at in (3, 20)]

    with engine_for(family, drafted, **settings) as engine:
        cold = run(engine, [replace(ask, use_cache=False) for ask in asks])
        assert sum(accepted for _, accepted in guesses(cold)) > 0
        run(engine, asks)
        device = run(engine, asks)
        empty_device(engine.cache)
        host = run(engine, asks)
        settle(engine.cache)
        engine.cache.flush()
        store = run(engine, asks)
    with engine_for(family, drafted, **settings) as engine:
        restarted = run(engine, asks)
        assert engine.cache.counters["draft_missing"] == 0
    for played, tier in ((device, "device"), (host, "host"), (store, "store"), (restarted, "store")):
        check_same(played, cold)
        assert guesses(played) == guesses(cold), tier
        assert sum(getattr(usage_of(deltas).sources, tier) for deltas in played) >= 64, tier


@pytest.mark.parametrize(("family", "drafted", "memory"), [("mistral", "unwindowed", "512KiB"), ("deepseek_v3", OWN, "192KiB")])
def test_under_pressure_in_every_tier(family: str, drafted: str, memory: str, tmp_path: Path) -> None:
    """Requests that come and go, share beginnings and are preempted; some want no draft. All tiers are too small."""
    random = Random(3)
    known, asks = [prompt(80, seed=seed) for seed in range(3)], []
    for number in range(16):
        before = random.choice(known)
        known.append([*before[: random.randrange(1, len(before))], *prompt(random.randrange(1, 30), seed=random.randrange(5))])
        drawn = {"temperature": 0.3, "seed": number} if random.random() < 0.3 else {}
        sampling = Sampling(max_tokens=random.randrange(1, 30), **drawn)  # type: ignore[arg-type]
        asks.append(GenerateRequest(tokens=known[-1], sampling=sampling, speculate=number % 8 != 7))
    with engine_for(family) as engine:
        expected = run(engine, asks)
    settings = {**store_at(tmp_path / "log", "4MiB"), "store_config": WAIT, "host_memory": "512KiB", "draft_tokens": 3}
    limits = Limits(chunk_tokens=48, max_running=6)
    with engine_for(family, drafted, device_memory=memory, limits=limits, **settings) as engine:
        played = run(engine, asks)
    check_same(played, expected)
    assert sum(usage_of(deltas).preemptions for deltas in played) > 0 < sum(right for _, right in guesses(played))


def test_guesses_hang_on_the_rows_of_the_draft() -> None:
    """So that the tests above would notice rows that did not travel."""
    tokens = prompt(90)
    with engine_for("llama", "llama") as engine:
        run(engine, [greedy(tokens, 4)])
        assert engine._speculation is not None
        engine._speculation._pages.bytes_PLRB("draft").zero_()
        ((proposed, accepted),) = guesses(run(engine, [greedy(tokens, 20)]))
    assert accepted < proposed / 2


# ---- missing drafts ---------------------------------------------------------------------------------


@pytest.mark.parametrize(("family", "drafted"), [("llama", "llama"), ("deepseek_v3", OWN)])
def test_pages_without_a_draft_are_slower_and_say_so(family: str, drafted: str, tmp_path: Path) -> None:
    settings = {**store_at(tmp_path / "log", "64MiB"), "store_config": WAIT}
    tokens = prompt(40)
    with engine_for(family, drafted, **settings) as engine:
        first = run(engine, [greedy(tokens, 30)])
        known = [*tokens, *tokens_of(first[0])]  # drafted up to here, and not from here on
        undrafted = run(engine, [replace(greedy([*known, *prompt(30, seed=2)], 10), speculate=False)])
        assert usage_of(undrafted[0]).proposed_tokens == 0
        known += [*prompt(30, seed=2), *tokens_of(undrafted[0])]
        assert engine.cache.explain([*known[:64], 1]).missing_states == {}
        explained = engine.cache.explain([*known, 1])
        assert explained.missing_states == {"draft": 64} and "without draft from token 64 on" in str(explained)
        ask = greedy([*known, 5], 12)
        slow = run(engine, [ask])
        assert guesses(slow) == [(0, 0)] and engine.cache.counters["draft_missing"] == 1
        cold = run(engine, [replace(ask, use_cache=False)])
        assert guesses(cold)[0][1] > 0
        check_same(slow, cold)
        branch = run(engine, [greedy([*known[:64], 7], 12)])  # from where all of it is there
        assert guesses(branch)[0][0] > 0 and engine.cache.counters["draft_missing"] == 1
    with engine_for(family, drafted, **settings) as engine:  # the mark is in the pages
        assert engine.cache.explain([*known, 1]).missing_states == {}, "the draft's rows were not checked yet"
        check_same(run(engine, [ask]), cold)
        assert engine.cache.counters["draft_missing"] == 1
        assert engine.cache.explain([*known, 1]).missing_states == {"draft": 64}


@pytest.mark.parametrize(("family", "drafted"), [("llama", "llama"), ("deepseek_v3", OWN)])
def test_with_many_requests_drafting_pauses_and_does_not_go_on_over_the_gap(family: str, drafted: str) -> None:
    asks = [greedy(prompt(30 + 16 * at, seed=at), 40 if at == 0 else 12) for at in range(3)]
    with engine_for(family) as engine:
        expected = run(engine, asks)
    with engine_for(family, drafted, draft_max_running=1) as engine:
        played = run(engine, asks)
        check_same(played, expected)
        assert engine.cache.counters["draft_paused"] >= 2
        alone = [*asks[0].tokens, *tokens_of(played[0])]
        explained = engine.cache.explain([*alone, 1])
        assert list(explained.missing_states) == ["draft"] and 30 <= explained.missing_states["draft"] < 48
        assert usage_of(played[0]).proposed_tokens < 4 * 4, "it went on alone, over a gap"
        resumed = run(engine, [greedy([*alone, 3], 8)])
        assert guesses(resumed) == [(0, 0)] and engine.cache.counters["draft_missing"] == 1
    with engine_for(family, drafted, draft_max_running=3) as engine:
        check_same(run(engine, asks), expected)
        assert engine.cache.counters["draft_paused"] == 0


def test_a_prompt_is_not_drafted_again_where_others_computed_it() -> None:
    """Two requests, one of them without a draft, share a prompt: the one that comes first is cached."""
    tokens = prompt(60)
    with engine_for("llama", "llama") as engine:
        played = run(engine, [replace(greedy(tokens, 4), speculate=False), greedy([*tokens, 9], 12)])
        assert guesses(played) == [(0, 0), (0, 0)] and engine.cache.explain([*tokens, 1]).missing_states == {"draft": 0}
        engine.cache.flush()
        assert engine.cache.explain([*tokens, 1]).missing_states == {}
        played = run(engine, [greedy(tokens, 4), replace(greedy([*tokens, 9], 12), speculate=False)])
        assert guesses(played)[0][0] > 0 and engine.cache.explain([*tokens, 1]).missing_states == {}


# ---- what cannot be -------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("family", "drafted", "settings", "message"),
    [
        ("falcon_h1", "llama", {}, "undo tokens"),
        ("llama", "mistral", {}, "full attention in all layers"),
        ("llama", "small vocabulary", {}, "vocabulary of 64 and the model one of 128"),
        ("llama", OWN, {}, "draft state is not known for llama"),
        ("llama", "llama", {"draft_tokens": 0}, "draft_tokens must be at least 1"),
        ("llama", "llama", {"draft_tokens": 8, "limits": Limits(chunk_tokens=8)}, "less than the 8 of a pass"),
        ("llama", "llama", {"draft_max_running": 0}, "draft_max_running"),
    ],
)
def test_what_cannot_draft_is_refused_at_the_start(family: str, drafted: str, settings: dict[str, Any], message: str) -> None:
    made = checkpoint("mistral") if drafted == "mistral" else None if drafted == OWN else draft("llama")
    if drafted == "small vocabulary":
        made = _cut(64)
    config: dict[str, Any] = DEFAULTS | settings | ({"draft": "mtp"} if drafted == OWN else {})
    with pytest.raises(ConfigError, match=message):
        build_engine(checkpoint(family), EngineConfig(**config), draft=made)


def test_a_model_without_draft_layers_has_none_to_draft_with() -> None:
    bare = replace(checkpoint("deepseek_v3"), config={**checkpoint("deepseek_v3").config, "num_nextn_predict_layers": 0})
    with pytest.raises(ConfigError, match="no draft layers"):
        engine_for("deepseek_v3", OWN, made=bare)


def test_a_checkpoint_keeps_no_second_copy_of_embedding_and_head() -> None:
    with engine_for("deepseek_v3", OWN) as engine:
        assert engine._speculation is not None
        layer, model = engine._speculation._draft._layer, engine._runner.model  # type: ignore[attr-defined]
        assert layer.embed is model.embed and layer.head is model.head


def _cut(vocab: int) -> Any:
    from stepwell.engine.loading.weights import HeldTensors

    made = checkpoint("llama")
    tensors = {name: made.source.read(name) for name in made.source.names()}
    cut = {name: tensor[:vocab] if name in ("model.embed_tokens.weight", "lm_head.weight") else tensor
           for name, tensor in tensors.items()}  # fmt: skip
    return replace(made, config={**made.config, "vocab_size": vocab}, source=HeldTensors(cut))
