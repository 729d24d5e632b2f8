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
from sparse.overlap import Shares, shares_of
from sparse.rig import Rig, Shape, trace_of
from sparse.served import Measured
from sparse.split import WAYS, PlainAttention, SplitLayer, merge
from sparse.traced import TRACES, TracedSelect, Traces
from stepwell.engine.ops.selection import Picked
from stepwell.engine.passes.paging import Singles
from stepwell.sparse.trace import count_misses

Rows = list[dict[str, Any]]


def measured(part: str, directory: Path, *more: str) -> Rows:
    file = directory / "found.json"
    assert bench_sparse.main(["--tiny", "--only", part, "--json", str(file), *more]) == 0
    found = json.loads(file.read_text())
    assert found["tiny"] and [*found["parts"]] == [part]
    rows: Rows = found["parts"][part]
    return rows


def test_misses_of_a_tiny_trace_are_counted(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    rows = measured("misses", tmp_path)
    assert len(rows) == 12 and all(row["figures"]["belady, %"] > 0 for row in rows)
    assert "written to found.json" in capsys.readouterr().out


def test_times_of_a_tiny_shape_are_measured(tmp_path: Path) -> None:
    rows = measured("times", tmp_path)
    assert len(rows) == 9 and all(row["figures"]["rows"] > 0 for row in rows[1:6])
    assert all("hidden, %" in row["figures"] for row in rows[6:])  # times of a busy machine may say anything
    assert rows[-1]["what"].startswith("a prompt behind 512 tokens")


def test_near_rows_of_a_tiny_shape_leave_fewer_to_wait_for(tmp_path: Path) -> None:
    rows = measured("near", tmp_path)
    assert [row["what"] for row in rows] == [f"batch {b}, {n} near rows" for b in (1, 3) for n in (0, 4)]
    for without, with_near in zip(rows[::2], rows[1::2], strict=True):
        one, other = without["figures"], with_near["figures"]
        assert one["near rows"] == one["used"] == 0 < other["used"] < other["near rows"]
        assert 0 < other["rows waited for"] < one["rows waited for"]


def test_attention_in_two_parts_of_a_tiny_shape_is_measured(tmp_path: Path) -> None:
    rows = measured("split", tmp_path)
    assert [row["what"] for row in rows] == ["batch 1, one layer", "batch 3, one layer"]
    assert all(row["figures"][f"{way}, us"] > 0 for row in rows for way in WAYS)


def test_two_parts_of_attention_merge_to_what_is_seen_in_all_rows() -> None:
    query, rows = torch.randn(3, 2, 24), torch.randn(3, 16, 24)
    over = PlainAttention(3, 16, 2, torch.device("cpu"))
    whole, _ = over(query, rows)
    for cut in (1, 9, 15):
        merged = merge(*over(query, rows[:, :cut]), *over(query, rows[:, cut:]))
        assert torch.allclose(merged, whole, atol=1e-6) and not torch.allclose(whole, over(query, rows[:, :cut])[0], atol=1e-3)


def test_the_kernel_merges_the_same() -> None:
    pytest.importorskip("triton", reason="Triton is not installed")
    if torch.cuda.is_available():
        pytest.skip("kernels are not interpreted beside CUDA")
    from sparse.merging import merge as by_triton

    given = torch.randn(3, 2, 12), 30 * torch.randn(3, 2), torch.randn(3, 2, 12), 30 * torch.randn(3, 2)
    assert torch.allclose(by_triton(*given), merge(*given), atol=1e-6)


def test_every_way_of_a_split_layer_sees_the_same_rows() -> None:
    rig = Rig(bench_sparse.TINY, 2)
    rig.places.rows_PLRE[:, 0].copy_(torch.randint(0, 255, rig.places.rows_PLRE[:, 0].shape))
    layer = SplitLayer(rig, 5)
    seen = {way: layer.step(way, 1) for way in ("before", "beside", "split")}
    assert torch.equal(seen["before"], seen["beside"]) and torch.allclose(seen["before"], seen["split"], rtol=1e-4, atol=1e-4)


def test_a_rig_misses_what_a_request_does_that_goes_on_along_the_trace() -> None:
    """Played again and again, its steps do not jump back. By score less is missing than by age."""
    shape = Shape(layers=1, page_rows=64, row_bytes=16, count=240, hot_rows=512, context=4096, host_bytes=1 << 22)
    rows = {}
    for policy in ("score", "lru"):
        rig = Rig(shape, 1, by_age=policy == "lru")
        rows[policy] = rig.seconds(fetch=True)[1]
        exact = count_misses(trace_of(shape), hot_rows=shape.hot_rows, policy=policy)[64:].mean()
        assert rows[policy] == pytest.approx(exact, rel=0.1)
    assert rows["score"] < 0.9 * rows["lru"]


# ---- whole engines ------------------------------------------------------------------------------------


def test_of_requests_with_rows_on_the_host_more_fit(tmp_path: Path) -> None:
    pytest.importorskip("transformers")
    rows = measured("serving", tmp_path)
    assert [row["note"] for row in rows] == [""] * 8
    assert all(row["figures"]["tokens/s"] > 0 for row in rows)
    full, hierarchical = (row["figures"] for row in rows if row["what"].startswith("512") and row["what"].endswith("largest"))
    assert hierarchical["batch"] > full["batch"] > 2
    assert full["fetched, MB"] == 0 < hierarchical["missing, %"] < 50 and hierarchical["fetched, MB"] > 0


def test_near_rows_are_fetched_by_the_engine_whose_rows_are_on_the_host(tmp_path: Path) -> None:
    pytest.importorskip("transformers")
    rows = measured("serving", tmp_path, "--prefetch-near", "4")
    assert [row["note"] for row in rows] == [""] * 8
    spilling = [row["figures"] for row in rows if "near rows a layer" in row["figures"]]
    assert spilling and all(min(each["of them used"], each["near rows a layer"]) > 0 for each in spilling)


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


def test_fetching_counts_as_hidden_while_another_kernel_runs() -> None:
    ran = [("_claim_kernel", 0, 1), ("_fetch_kernel", 2, 6), ("a", 3, 4), ("b", 3.5, 5), ("a", 8, 10), ("_fetch_kernel", 10, 12)]
    spans = [Span(name=name, start=start, stop=stop) for name, start, stop in ran]
    found = shares_of(spans, steps=2)
    assert found == Shares(kernels=(1 + 4 + 4) / 2, resolve=0.5, fetch=3, hidden=1)
    assert shares_of(spans[-1:], steps=1) == Shares(kernels=2, resolve=0, fetch=2, hidden=0)


def test_how_much_of_fetching_is_hidden_is_not_told_of_steps_that_also_fetch_near_rows() -> None:
    """Those run beside the pass whatever a step waits for, by kernels of the same name: the share would be theirs."""
    kernels = Shares(kernels=9, resolve=1, fetch=4, hidden=2)
    one, other = (Measured(batch=1, times_s=[1.0], tokens=1, near=near, kernels=kernels) for near in (0.0, 5.0))
    assert one.hidden == 0.5 and one.figures(8)["of it hidden, %"] == 50
    assert other.hidden is None and "of it hidden, %" not in other.figures(8)


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
