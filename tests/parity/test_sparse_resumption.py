"""With Quest or ClusterKV an answer does not depend on where its prompt's rows and summaries came from, nor on being interrupted.

Bits are compared as in `test_exact_resumption.py`. Rows of an answer that were computed picking are not cached: a later prompt
that contains it looks at everything.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from engine.families import checkpoint
from engine.small import DEFAULTS, greedy, prompt, run, small, tokens_of
from parity.recorded import PAGE, Played, Recorded, distance, script, store_at
from parity.test_exact_resumption import WAIT, check_same, replay
from stepwell.base.errors import ConfigError
from stepwell.engine import EngineConfig, Limits, build_engine
from stepwell.engine.building.settings import check_settings

pytest.importorskip("transformers")

TOLERANCE = 1e-4
CASES = [("llama", "quest"), ("llama", "clusterkv"), ("gemma3", "quest"), ("gemma3", "clusterkv")]
BUDGET = 112  # of prompts that have 100 to 350 tokens


def settings(selector: str, **more: Any) -> dict[str, Any]:
    return {"sparse": selector, "sparse_budget": BUDGET, **more}


@pytest.fixture(scope="module", params=CASES, ids=["-".join(case) for case in CASES])
def case(request: pytest.FixtureRequest) -> tuple[str, str]:
    return request.param  # type: ignore[no-any-return]


@pytest.fixture(scope="module")
def resident(case: tuple[str, str]) -> list[Played]:
    family, selector = case
    recorded = Recorded(family, **settings(selector))
    played = script(recorded, seed=5)
    recorded.close()
    assert any(each.resumed for each in played) and max(len(each.prompt) for each in played) > BUDGET + PAGE
    return played


def test_picking_is_seen_at_all(case: tuple[str, str], resident: list[Played]) -> None:
    """Otherwise nothing here says anything: the same prompts without a selector give other logits, from the second token on."""
    dense = Recorded(case[0])
    first = [each for each in resident if not each.resumed or len(each.prompt) > BUDGET + PAGE]
    played = [dense.play(each.prompt) for each in first]
    dense.close()
    assert any(distance(now, then) > 10 * TOLERANCE for now, then in zip(played, first, strict=True))


def test_from_the_host(case: tuple[str, str], resident: list[Played]) -> None:
    def evict(recorded: Recorded) -> Recorded:
        recorded.evict_to_host()
        return recorded

    again = replay(Recorded(case[0], **settings(case[1])), resident, evict)
    check_same(again, resident)
    assert sum(each.host for each in again) > 0


def test_after_a_restart_from_a_store(case: tuple[str, str], resident: list[Played], tmp_path: Path) -> None:
    family, selector = case
    more = settings(selector, **store_at(tmp_path / "log"), store_config=WAIT)

    def restart(recorded: Recorded) -> Recorded:
        recorded.close()
        return Recorded(family, **more)

    again = replay(Recorded(family, **more), resident, restart)
    check_same(again, resident)
    assert sum(each.stored for each in again) == sum(each.resumed for each in again) > 0


def test_a_store_of_other_settings_is_a_miss(case: tuple[str, str], tmp_path: Path) -> None:
    """Without summaries, with others, or with answers that picked another number of tokens."""
    family, selector = case
    stored = {**store_at(tmp_path / "log"), "store_config": WAIT}
    asked = prompt(200)
    other = "clusterkv" if selector == "quest" else "quest"
    written: list[dict[str, Any]] = [{}, settings(other), settings(selector) | {"sparse_budget": BUDGET + PAGE}]
    for each in written:
        recorded = Recorded(family, **each, **stored)
        recorded.play(asked)
        recorded.close()
    for number, each in enumerate([settings(selector), settings(selector)]):
        recorded = Recorded(family, **each, **stored)
        played = recorded.play(asked)
        recorded.close()
        assert (played.stored > 0) == (number == 1), "what others wrote was read" if not number else "nothing was read"


def test_cold_and_warm_answers_are_the_same(case: tuple[str, str]) -> None:
    family, selector = case
    recorded = Recorded(family, **settings(selector))
    asked = prompt(230)
    cold, warm = recorded.play(asked), recorded.play(asked)
    anew = recorded.play(asked, use_cache=False)
    recorded.close()
    assert warm.resumed > 0 == anew.resumed and cold.tokens == warm.tokens == anew.tokens
    assert max(distance(cold, warm), distance(cold, anew)) <= TOLERANCE


def test_a_second_turn_is_answered_as_if_nothing_were_cached(case: tuple[str, str]) -> None:
    family, selector = case
    recorded = Recorded(family, **settings(selector))
    asked = prompt(230)
    first = recorded.play(asked)
    turn = [*asked, *first.tokens, *prompt(40, seed=9)]
    warm, anew = recorded.play(turn), recorded.play(turn, use_cache=False)
    recorded.close()
    assert warm.resumed > 0 == anew.resumed and warm.tokens == anew.tokens and distance(warm, anew) <= TOLERANCE


def test_chunks_and_neighbours_change_no_answer(case: tuple[str, str]) -> None:
    family, selector = case
    asks = [greedy(prompt(60 + 55 * number, seed=number), 12) for number in range(4)]

    def answers(chunk_tokens: int, together: bool) -> list[list[int]]:
        limits = Limits(chunk_tokens=chunk_tokens, max_running=8)
        with small(family, **settings(selector), limits=limits) as engine:
            if together:
                return [tokens_of(deltas) for deltas in run(engine, asks)]
            return [tokens_of(run(engine, [ask])[0]) for ask in asks]

    expected = answers(64, together=False)
    assert answers(64, together=True) == answers(17, together=True) == answers(512, together=True) == expected


@pytest.mark.parametrize("selector", ["quest", "clusterkv"])
def test_preempted_answers_are_the_same(selector: str) -> None:
    """They are computed again with their prompts: the prompt looks at everything, the answer at what it picks."""
    asks = [greedy(prompt(120 + 10 * number, seed=number), 60) for number in range(4)]
    with small("llama", **settings(selector)) as engine:
        expected = [tokens_of(run(engine, [ask])[0]) for ask in asks]
    for host in ("8MiB", "0"):
        with small("llama", **settings(selector), device_memory="600KiB", host_memory=host) as engine:
            found = run(engine, asks)
            usages = [deltas[-1].usage for deltas in found]
            assert sum(usage.preemptions for usage in usages if usage is not None) > 0, "the device was not small enough"
            assert [tokens_of(deltas) for deltas in found] == expected


def test_speculation_over_a_selector_changes_no_answer() -> None:
    asks = [greedy(prompt(150 + 20 * number, seed=number), 24) for number in range(2)]
    with small("llama", **settings("quest")) as engine:
        expected = [tokens_of(run(engine, [ask])[0]) for ask in asks]
    config = EngineConfig(**(DEFAULTS | settings("quest", draft_tokens=3)))
    with build_engine(checkpoint("llama"), config, draft=checkpoint("llama")) as engine:
        assert [tokens_of(deltas) for deltas in run(engine, asks)] == expected


def test_settings_are_checked_before_weights_are_read() -> None:
    for wrong in ({"sparse": "best"}, {"sparse_budget": 100}, {"sparse": "dsa", "sparse_budget": 100}):
        with pytest.raises(ConfigError, match="sparse"):
            check_settings(EngineConfig(device="cpu", device_memory="4MiB", host_memory="0", **wrong))
