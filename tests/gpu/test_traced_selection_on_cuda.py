"""Selections of a trace in a recorded step: they move on with the positions that the step is played for."""

from __future__ import annotations

import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

torch = pytest.importorskip("torch")
sys.path.append(str(Path(__file__).parents[2] / "benchmarks"))

from not_run import NO_CUDA  # noqa: E402
from sparse.traced import TRACES, TracedSelect, Traces  # noqa: E402
from stepwell.engine.ops.selection import Picked  # noqa: E402
from stepwell.engine.passes.paging import Singles  # noqa: E402

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason=NO_CUDA)]


def test_a_recorded_selection_is_that_of_the_positions_it_is_played_for() -> None:
    made = torch.arange(TRACES * 6 * 3, dtype=torch.int32).view(TRACES, 6, 3)
    picked = Picked(position_XK=torch.zeros(2, 3, dtype=torch.int32, device="cuda"))
    select = TracedSelect(lambda *_, count, scored: (picked,), steps=6, count=3, longest=8, device="cuda")
    scores = torch.arange(TRACES * 6 * 8).view(TRACES, 6, 8).half()
    fields: dict[str, Any] = {"table_BP": torch.zeros(2, 2), "first_B": None, "sight": SimpleNamespace(page_tokens=4)}
    singles = Singles(start=0, stop=2, position_B=torch.tensor([100, 100], device="cuda"), **fields)
    paging: Any = SimpleNamespace(parts=(singles,))
    query: Any = None

    def chosen() -> Any:
        (found,) = select(query, query, query, paging, count=3, scored=8)
        return found.position_XK, found.score_YT

    select.follow(Traces(made, scores), 100)
    chosen()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out, score_BT = chosen()
    for step in range(6):
        singles.position_B.fill_(100 + step)
        graph.replay()
        assert out.cpu().tolist() == made[:2, step].tolist()
        assert score_BT.cpu().tolist() == scores[:2, step].tolist()
    select.follow(Traces(made + 1, scores), 101)  # another context: the recording reads the same memory
    graph.replay()
    assert out.cpu().tolist() == (made[:2, 4] + 1).tolist()
