"""Rows that were nearly selected come beside a pass and after all that reads the tables: nobody sees one before it is there.

What is near here gets its slot when it may, and comes as late as it may: when somebody waits for it. Until then its slots hold no
numbers.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
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
from stepwell.engine.ops.selection import best
from stepwell.engine.passes.near import nearly
from stepwell.engine.passes.spilling import Spilling
from stepwell.engine.running.graphs import Recording
from stepwell.memory.row_pages import ABSENT
from stepwell.sparse.resolve import Plan, Wanted

pytest.importorskip("transformers")

ASKS = [greedy(prompt(length, seed=length), 12) for length in (150, 97, 200)]


class Late:
    """Puts off the copies of rows that are near until the pass waits for them."""

    def __init__(self, spilling: Spilling) -> None:
        assert spilling._near is not None and spilling.beside is not None
        self._fetch, self._wait = spilling._near._fetch, spilling._near.wait
        self._put_off: list[Callable[[], None]] = []
        self.waits: list[int] = []  # copies that were put off, each time that some were waited for
        spilling._near._fetch = self.put_off
        spilling._near.wait = self.wait  # type: ignore[method-assign]

    def put_off(self, places: Any, layer: int, plan: Plan) -> None:
        size, target_M = places.page_rows, plan.target_M[: int(plan.count_1)].long()
        places.rows_PLRE.view(torch.uint8)[target_M // size, layer, target_M % size] = POISON
        self._put_off.append(partial(self._fetch, places, layer, plan))

    def wait(self, beside: Any) -> None:
        if self._put_off:
            self.waits.append(len(self._put_off))
        for copy in self._put_off:
            copy()
        self._put_off.clear()
        self._wait(beside)

    @property
    def nothing_left(self) -> bool:
        return not self._put_off


def late(engine: Engine) -> Late:
    spilling = engine._runner._pages.spilling
    assert spilling is not None
    return Late(spilling)


@pytest.mark.parametrize("family", ["deepseek_v32", "glm_moe_dsa"])
@pytest.mark.parametrize("how", [{}, {"fetch_beside": True}], ids=["in line", "beside"])
def test_near_rows_that_come_late_change_no_answer(family: str, how: dict[str, Any]) -> None:
    with engine_for(family, hot_rows=4 * PAGE, prefetch_near=10, **how) as engine:
        made = late(engine)
        press(engine)
        assert [tokens_of(deltas) for deltas in run(engine, ASKS)] == alone(family, ASKS)
        assert made.waits and made.nothing_left and report(engine).near_used
        assert max(made.waits) == (1 if family == "deepseek_v32" else 2), "all layers of a selection, at once behind the last"


@pytest.mark.parametrize("selector", ["quest", "clusterkv"])
def test_so_do_keys_and_values_that_were_nearly_picked(selector: str) -> None:
    with engine_picking(selector, hot_rows=10 * PAGE, prefetch_near=16) as engine:
        made = late(engine)
        press(engine)
        assert [tokens_of(deltas) for deltas in run(engine, ASKS)] == alone_picking(selector, ASKS)
        assert made.waits and made.nothing_left and report(engine).near


def test_a_recorded_step_ends_with_nothing_under_way(monkeypatch: pytest.MonkeyPatch) -> None:
    engine, _ = played(monkeypatch, "glm_moe_dsa", hot_rows=4 * PAGE, prefetch_near=10)
    plays, play, left = [0], Recording.play, list[bool]()

    def noted(self: Recording, batch: Any) -> torch.Tensor:
        out = play(self, batch)
        plays.append(1)
        left.append(made.nothing_left)
        return out

    monkeypatch.setattr(Recording, "play", noted)
    with engine:
        made = late(engine)
        press(engine)
        assert [tokens_of(deltas) for deltas in run(engine, ASKS)] == alone("glm_moe_dsa", ASKS)
        assert sum(plays) >= 3 and all(left) and report(engine).near_used


def test_a_pass_that_failed_leaves_nothing_that_is_near_under_way(monkeypatch: pytest.MonkeyPatch) -> None:
    with engine_for("deepseek_v32", hot_rows=4 * PAGE, prefetch_near=10) as engine:
        press(engine)
        spilling = engine._runner._pages.spilling
        assert spilling is not None and spilling._near is not None and spilling.beside is not None
        engine.submit(ASKS[0])
        for _ in range(8):
            engine.step()
        layer, calls = engine._runner.model.layers[1].attention.latent, list[int]()  # type: ignore[attr-defined]
        ask = type(layer).ask

        def failing(self: Any, *given: Any) -> Any:
            if self is layer and not calls:
                calls.append(1)
                assert spilling.beside is not None and spilling.beside.any_coming, "nothing is to be seen otherwise"
                raise MemoryError("none left")
            return ask(self, *given)

        monkeypatch.setattr(type(layer), "ask", failing)
        with pytest.raises(MemoryError):
            engine.step()
        assert not spilling.beside.any_coming and spilling._near._under_way is None
        engine.step()
        assert [tokens_of(deltas) for deltas in run(engine, ASKS)] == alone("deepseek_v32", ASKS)


def test_what_is_near_is_the_best_that_a_query_sees_and_none_where_it_sees_fewer() -> None:
    score_XT = torch.tensor([[3.0, 9, 1, 7, 5, 2], [4.0, 8, 6, -torch.inf, -torch.inf, -torch.inf], [-torch.inf] * 6])
    wanted = Wanted.of(
        torch.tensor([[1, 3], [1, 2], [ABSENT, ABSENT]], dtype=torch.int32), last_X=torch.tensor([5, 2, 1]),
        table_BP=torch.zeros(3, 1), hot_BQ=torch.zeros(3, 1, dtype=torch.int32), score_XT=score_XT,
    )  # fmt: skip
    near = nearly(wanted, 4, best)
    assert near.near and not wanted.near and near.position_XK.dtype == torch.int32
    assert near.position_XK.tolist() == [[0, 1, 3, 4], [0, 1, 2, ABSENT], [ABSENT] * 4]
    assert nearly(wanted, 99, best).position_XK.shape == (3, 6), "no more than there are"
