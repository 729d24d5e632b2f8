"""Which hot rows are replaced: by the scores that selected the others, handed on by every selector."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from engine.small import PAGE, greedy, prompt, run, tokens_of
from engine.test_spilled_selectors import alone as alone_picking
from engine.test_spilled_selectors import engine_for as engine_picking
from engine.test_spilling import alone, engine_for
from parity.spilling import press, report
from stepwell.engine import Engine
from stepwell.sparse.resolve import Wanted

pytest.importorskip("transformers")

ASKS = [greedy(prompt(length, seed=length), 12) for length in (150, 197, 230)]


def made(selector: str, **settings: Any) -> Engine:
    return engine_for("glm_moe_dsa", **settings) if selector == "dsa" else engine_picking(selector, **settings)


def expected(selector: str) -> list[list[int]]:
    return alone("glm_moe_dsa", ASKS) if selector == "dsa" else alone_picking(selector, ASKS)


def watched(engine: Engine) -> list[Wanted]:
    """What is resolved from now on."""
    spilling = engine._runner._pages.spilling
    assert spilling is not None
    resolve, seen = spilling._resolve, list[Wanted]()

    def noted(places: Any, group: int, wanted: Wanted, plan: Any) -> None:
        seen.append(wanted)
        resolve(places, group, wanted, plan)

    spilling._resolve = noted
    return seen


def check_scores(wanted: Wanted) -> None:
    """They are those by which the rows were selected, of the same query and at the same positions."""
    assert wanted.score_XT is not None and len(wanted.score_XT) == len(wanted.position_XK)
    for position_K, last, score_T in zip(wanted.position_XK, wanted.last_X.tolist(), wanted.score_XT, strict=True):
        chosen = position_K[(position_K >= 0) & (position_K <= last)].long()
        others = torch.ones(last + 1, dtype=torch.bool).index_fill_(0, chosen, value=False)
        if len(chosen) and others.any():
            assert score_T[chosen].min() >= score_T[: last + 1][others].max() > -torch.inf


@pytest.mark.parametrize("selector", ["dsa", "quest", "clusterkv"])
def test_scores_that_selected_the_rows_decide_which_others_are_replaced(selector: str) -> None:
    """For steps, for the last token of a prompt, and for a few tokens behind a cached one."""
    with made(selector) as engine:
        press(engine)
        seen = watched(engine)
        assert [tokens_of(deltas) for deltas in run(engine, ASKS)] == expected(selector)
        run(engine, [greedy([*ask.tokens[: 4 * PAGE], 1, 2, 3], 2) for ask in ASKS])
        scored = [wanted for wanted in seen if wanted.score_XT is not None]
        assert len(scored) > 40 and any(len(wanted.position_XK) > len(wanted.table_BP) for wanted in seen)
        for wanted in scored:
            check_scores(wanted)
        assert all(wanted.score_XT is not None for wanted in seen if (wanted.last_X > 150).any()), "it selects, and by scores"
        assert report(engine).hits and report(engine).misses
