"""Fetches beside a pass: whoever reads rows waits for them first, and answers are those of engines that fetch nothing.

What is fetched here comes as late as it may: when somebody waits for it. Until then its slots hold no numbers.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

from engine.small import PAGE, greedy, prompt, run, tokens_of
from engine.test_recorded_spilling import played
from engine.test_spilled_selectors import alone as alone_picking
from engine.test_spilled_selectors import engine_for as engine_picking
from engine.test_spilling import alone, engine_for
from parity.spilling import POISON, press, report
from stepwell.engine import Engine
from stepwell.engine.passes.beside import Beside
from stepwell.engine.passes.spilling import Spilling
from stepwell.engine.running.graphs import Recording
from stepwell.sparse.resolve import Plan

pytest.importorskip("transformers")

ASKS = [greedy(prompt(length, seed=length), 12) for length in (150, 97, 200)]


class Late(Beside):
    """A fetch is done when it is waited for, and not before."""

    def __init__(self, spilling: Spilling) -> None:
        rows = spilling.places.rows_PLRE
        super().__init__(spilling._plan, layers=rows.shape[1], device=rows.device)
        self._rows, self._fetches = rows, dict[int, Callable[[], None]]()
        self.waited: list[tuple[int, frozenset[int]]] = []  # for which layer, and which were on their way then

    def start(self, layer: int, fetch: Callable[[], None]) -> None:
        size, target_M = self._rows.shape[2], self.plan.target_M[: int(self.plan.count_1)].long()
        self._rows.view(torch.uint8)[target_M // size, layer, target_M % size] = POISON
        self._fetches[layer] = fetch
        super().start(layer, lambda: None)

    def wait(self, layer: int) -> None:
        if self.coming(layer):
            self.waited.append((layer, frozenset(self._fetches)))
            self._fetches.pop(layer)()
        super().wait(layer)


def late(engine: Engine) -> Late:
    spilling = engine._runner._pages.spilling
    assert spilling is not None and spilling.beside is not None
    spilling.beside = made = Late(spilling)
    return made


@pytest.mark.parametrize("family", ["deepseek_v32", "glm_moe_dsa"])
@pytest.mark.parametrize("hot_rows", [0, PAGE, 4 * PAGE])
def test_rows_that_come_late_change_no_answer(family: str, hot_rows: int) -> None:
    with engine_for(family, hot_rows=hot_rows, fetch_beside=True) as engine:
        beside = late(engine)
        press(engine)
        assert [tokens_of(deltas) for deltas in run(engine, ASKS)] == alone(family, ASKS)
        assert beside.waited and not beside.any_coming and report(engine).misses
        most = max(len(coming) for _, coming in beside.waited)
        assert most == (1 if family == "deepseek_v32" else 2), "layers with one selection come one behind the other"


@pytest.mark.parametrize("selector", ["quest", "clusterkv"])
def test_so_do_keys_and_values_that_a_selector_picked(selector: str) -> None:
    with engine_picking(selector, fetch_beside=True) as engine:
        beside = late(engine)
        press(engine)
        assert [tokens_of(deltas) for deltas in run(engine, ASKS)] == alone_picking(selector, ASKS)
        assert beside.waited and not beside.any_coming and report(engine).misses


def test_a_recorded_step_waits_for_its_rows_too(monkeypatch: pytest.MonkeyPatch) -> None:
    engine, _ = played(monkeypatch, "glm_moe_dsa", hot_rows=4 * PAGE, fetch_beside=True)
    plays, play = [0], Recording.play
    monkeypatch.setattr(Recording, "play", lambda self, batch: (plays.append(1), play(self, batch))[1])
    with engine:
        beside = late(engine)
        press(engine)
        assert [tokens_of(deltas) for deltas in run(engine, ASKS)] == alone("glm_moe_dsa", ASKS)
        assert sum(plays) >= 3 and beside.waited and not beside.any_coming


def test_what_a_failed_pass_left_on_its_way_is_waited_for_before_others_get_its_pages(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    with engine_for("deepseek_v32", fetch_beside=True) as engine:
        press(engine)
        spilling = engine._runner._pages.spilling
        assert spilling is not None and spilling.beside is not None
        engine.submit(ASKS[0])
        for _ in range(8):
            engine.step()
        layer = engine._runner.model.layers[1].attention.latent  # type: ignore[attr-defined]
        queries, calls = type(layer).queries, list[int]()

        def failing(self: Any, *given: Any) -> torch.Tensor:
            if self is layer and not calls:
                calls.append(1)
                assert spilling.beside is not None and spilling.beside.any_coming, "nothing is to be seen otherwise"
                raise MemoryError("none left")
            return queries(self, *given)

        monkeypatch.setattr(type(layer), "queries", failing)
        with pytest.raises(MemoryError):
            engine.step()
        assert not spilling.beside.any_coming, "loads into pages that it gave back are queued behind its fetches"
        engine.step()
        assert [tokens_of(deltas) for deltas in run(engine, ASKS)] == alone("deepseek_v32", ASKS)
        assert not spilling.beside.any_coming


def test_a_plan_is_not_made_while_the_one_before_is_carried_out() -> None:
    with engine_for("deepseek_v32", fetch_beside=True) as engine:
        spilling = engine._runner._pages.spilling
        assert spilling is not None and spilling.beside is not None
        spilling.beside.start(0, lambda: None)
        with pytest.raises(AssertionError, match="still carried out"):
            spilling.resolve(0, None)  # type: ignore[arg-type]
        spilling.beside.wait(0)


def test_without_streams_a_fetch_is_done_at_once() -> None:
    done: list[int] = []
    beside = Beside(Plan(4, torch.device("cpu")), layers=2, device=torch.device("cpu"))
    beside.start(1, lambda: done.append(1))
    assert done == [1] and beside.coming(1) and not beside.coming(0)
    beside.wait(0)
    beside.wait(1)
    assert not beside.any_coming
