"""The benchmark of sparse decode on small shapes and no GPU: it runs, and what it writes can be read."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest

pytest.importorskip("torch")
sys.path.append(str(Path(__file__).parents[2] / "benchmarks"))

import torch

import bench_sparse
from gpu.device_time import Span, longest
from report import KernelTime, Row, kernels_of
from sparse.served import Shares, shares_of
from sparse.traced import TRACES, TracedSelect, Traces
from stepwell.engine.ops.selection import Picked
from stepwell.engine.passes.paging import Singles


def test_of_requests_with_rows_on_the_host_more_fit(tmp_path: Path) -> None:
    pytest.importorskip("transformers")
    file = tmp_path / "found.json"
    assert bench_sparse.main(["--tiny", "--json", str(file)]) == 0
    found = json.loads(file.read_text())
    rows = found["parts"]["serving"]
    assert found["tiny"] and [row["note"] for row in rows] == [""] * 8
    assert all(row["figures"]["tokens/s"] > 0 for row in rows)
    full, hierarchical = (row["figures"] for row in rows if row["what"].startswith("512") and row["what"].endswith("largest"))
    assert hierarchical["batch"] > full["batch"] > 2
    assert full["fetched, MB"] == 0 < hierarchical["missing, %"] < 50 and hierarchical["fetched, MB"] > 0


def test_a_traced_selection_is_that_of_each_token_s_position_and_goes_back_at_the_end() -> None:
    made = torch.arange(TRACES * 4 * 3, dtype=torch.int32).view(TRACES, 4, 3)
    scores = torch.arange(TRACES * 4 * 6).view(TRACES, 4, 6).half()

    def behind(*_: object, count: int, scored: int) -> Any:
        return (Picked(position_XK=torch.zeros(4, count)),)

    select = TracedSelect(behind, steps=4, count=3, longest=8, device="cpu")
    select.follow(Traces(made, scores), 100)
    singles = cast(Any, Singles)(
        start=0, stop=4, table_BP=torch.zeros(4, 1), position_B=torch.tensor([100, 101, 103, 104]), first_B=None,
        sight=SimpleNamespace(page_tokens=7),
    )  # fmt: skip
    given = [torch.empty(0), torch.empty(0), cast(Any, None), cast(Any, SimpleNamespace(parts=(singles,)))]
    (picked,), (scored,) = select(*given, count=3), select(*given, count=3, scored=8)
    assert picked is not None and picked.score_YT is None and scored is not None and scored.score_YT is not None
    assert scored.score_YT[1].tolist() == [*scores[1, 1].tolist(), -torch.inf], "of no more positions than its pages have"
    assert picked.position_XK.tolist() == [made[0, 0].tolist(), made[1, 1].tolist(), made[0, 3].tolist(), made[1, 2].tolist()]


def test_kernels_of_a_step_are_summed_by_what_they_do() -> None:
    ran = [("_claim_kernel", 0, 1), ("_fetch_kernel", 2, 6), ("a", 6, 8), ("_assign_kernel", 8, 10), ("_fetch_kernel", 10, 12)]
    found = shares_of([Span(name=name, start=start, stop=stop) for name, start, stop in ran], steps=2)
    assert found == Shares(kernels=11 / 2, resolve=1.5, fetch=3)


def test_the_kernels_that_took_longest_are_told_for_one_step_and_written_with_their_case() -> None:
    ran = [("short", 0, 1), ("often", 1, 3), ("often", 3, 6), ("long", 6, 16), ("short", 16, 17)]
    spans = [Span(name=name, start=start, stop=stop) for name, start, stop in ran]
    found = longest(spans, steps=2, most=2)
    assert found == (KernelTime(name="long", calls=0.5, us=5), KernelTime(name="often", calls=1, us=2.5))
    row = Row(what="64K, largest", kernels=found)
    assert row.as_json()["kernels"][1] == {"name": "often", "calls": 1, "us": 2.5}
    assert "kernels" not in Row(what="another").as_json()
    table = kernels_of([Row(what="another"), row])
    assert table is not None and table.row_count == 2 and kernels_of([Row(what="another")]) is None
