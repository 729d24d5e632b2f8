"""The policy report: its arithmetic, what it skips, and what it says of goals. Replays only a tiny trace."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import pytest

from stepwell.sim.files import write_trace
from stepwell.sim.generate import Shape, generate

sys.path.append(str(Path(__file__).parents[2] / "benchmarks"))

import policy_report
from policies.gaps import Row, rows_of, summary_of
from policies.grid import ONE_TIER, Cell, WorkingSets, cells_of
from policies.page import STYLES, cells_of_row, draw, said
from policies.results import Results


def row(budget: float = 10.0, **hit_rates: float) -> Row:
    named = {name.replace("_", "-"): rate for name, rate in hit_rates.items()}
    return Row(trace="t", spec="s", budget=budget, budget_bytes=int(budget * 2**30), hit_rates=named)


def cell(policy: str = "end", budget: float = 10.0, **changes: Any) -> Cell:
    settings = {"trace": Path("/somewhere/t.jsonl"), "spec": "kimi-k3", "tiers": ONE_TIER, "requests": None, **changes}
    return Cell(policy=policy, budget=budget, budget_bytes=1000, **settings)


def result(each: Cell, hit_rate: float | None) -> dict[str, Any]:
    asked = {"trace": each.trace.name, "spec": each.spec, "budget": each.budget, "budget_bytes": each.budget_bytes}
    return asked | {"policy": each.policy, "key": each.key, "hit_rate": hit_rate}


# ---- gaps -----------------------------------------------------------------------------------------


def test_gap_is_measured_from_the_best_fixed_rule_to_the_better_reference():
    found = row(value=0.56, lru=0.9, end=0.4, every_512=0.5, clairvoyant=0.6, clairvoyant_wanted=0.62)
    assert (found.best_fixed, found.best_other, found.reference) == ("every-512", "lru", "clairvoyant-wanted")
    assert found.won == pytest.approx(0.06)
    assert found.gap == pytest.approx(0.12)
    assert found.closed == pytest.approx(0.5)


def test_no_gap_is_nothing_to_close():
    found = row(value=0.56, end=0.6, clairvoyant=0.58)
    assert found.gap == pytest.approx(-0.02)
    assert found.closed is None


def test_what_was_not_replayed_gives_no_figures():
    assert row(value=0.5).won is None
    assert row(value=0.5, end=0.5).gap is None
    assert row(end=0.5, clairvoyant=0.6).closed is None
    assert cells_of_row(row(end=0.5), ["value", "end"])[2:] == ("-", "50.0", "end 50.0", "-", "-", "-", "-")


def test_rows_gather_cells_and_pass_over_those_without_figures():
    cells = [result(cell("end"), 0.5), result(cell("value"), None), result(cell("end", 20.0), 0.7)]
    assert [(each.budget, dict(each.hit_rates)) for each in rows_of(cells)] == [(10.0, {"end": 0.5}), (20.0, {"end": 0.7})]


# ---- goals ----------------------------------------------------------------------------------------


def test_summary_lists_each_miss_under_its_goal():
    rows = [
        row(1, value=0.496, end=0.5, clairvoyant=0.52),  # just within (a); the gap is too small for (b)
        row(2, value=0.49, end=0.5, clairvoyant=0.52),  # misses (a)
        row(5, value=0.52, end=0.5, clairvoyant=0.6),  # closes a fifth
        row(10, value=0.54, end=0.5, clairvoyant=0.6),  # closes two fifths
        row(20, value=0.48, end=0.5, clairvoyant=0.6),  # misses both
        row(50, value=0.5),  # cannot be judged
    ]
    summary = summary_of(rows)
    assert (summary.judged_a, [each.budget for each in summary.misses_a]) == (5, [2, 20])
    assert (summary.judged_b, [each.budget for each in summary.misses_b]) == (3, [5, 20])
    lines = list(said(summary))
    assert "3 of 5 meet it" in lines[0]
    assert lines[1] == "  misses (a): s, t, 20%: -2.0 against end"
    assert "1 of 3 meet it" in lines[3]
    assert lines[4] == "  misses (b): s, t, 20%: -20% of +10.0 closed"
    json.dumps(summary.as_json())


def test_page_stands_alone_and_tells_the_misses():
    text = draw([row(1, value=0.4, end=0.5, clairvoyant=0.6), row(2, value=0.6, end=0.5)], ["value", "end"], {("t", "s"): 0.8})
    assert text.count("<svg") == 1
    assert "misses (a): s, t, 1%" in text
    assert "endless memory: 80.0%" in text
    assert "http" not in text and "<script" not in text
    assert '<th>budget</th><th class="n">1%</th><th class="n">2%</th>' in text, "sizes go across, and many policies down"
    assert '<td>value</td><td class="n">40.0</td><td class="n">60.0</td>' in text


def test_lines_of_the_page_differ_without_colours():
    assert len({style.dash for style in STYLES.values()}) == len({style.mark for style in STYLES.values()}) == len(STYLES)


def test_a_difference_that_rounds_to_nothing_is_not_below_it():
    assert cells_of_row(row(value=0.4999, end=0.5), ["value"])[4] == "+0.0"


# ---- going on -------------------------------------------------------------------------------------


def test_results_skip_what_the_file_has(tmp_path: Path):
    path = tmp_path / "r.json"
    Results(path).add(result(cell("end"), 0.5))
    again = Results(path)
    wanted = [cell("end"), cell("value"), cell("end", 20.0), cell("end", requests=5), cell("end", tiers=(10.0, 90.0))]
    assert again.missing(wanted) == wanted[1:]
    assert again.missing([cell("end", trace=Path("/elsewhere/t.jsonl"))]) == []
    again.forget(["end"])
    assert again.missing(wanted) == wanted
    assert not list(tmp_path.glob("*.part"))


def test_file_that_is_no_report_is_refused_and_kept(tmp_path: Path):
    path = tmp_path / "r.json"
    path.write_text('{"other": 1}')
    with pytest.raises(ValueError, match="not a policy report"):
        Results(path)
    assert path.read_text() == '{"other": 1}'


def test_rules_for_checkpoints_are_replayed_once_where_there_are_none(tmp_path: Path):
    path = _trace(tmp_path)
    policies = ["value", "end", "every-512", "clairvoyant", "clairvoyant-wanted"]
    cells = list(
        cells_of(
            [path],
            ["qwen3-8b", "kimi-k3"],
            WorkingSets(None),
            budgets=[5.0, 10.0],
            tiers=ONE_TIER,
            policies=policies,
            requests=None,
        )
    )
    assert [each.policy for each in cells if each.spec == "qwen3-8b"] == ["value", "end", "clairvoyant"] * 2
    assert [each.policy for each in cells if each.spec == "kimi-k3"] == policies * 2
    assert len({each.key for each in cells}) == len(cells)


def test_second_run_replays_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]):
    asked = ["policy_report.py", "--traces", str(_trace(tmp_path)), "--specs", "qwen3-8b", "--budgets", "20", "50"]
    asked += [
        "--jobs",
        "1",
        "--policies",
        "value",
        "end",
        "clairvoyant",
        "--json",
        str(tmp_path / "r.json"),
        "--html",
        str(tmp_path / "r.html"),
    ]
    monkeypatch.setattr(sys, "argv", asked)
    assert policy_report.main() == 0
    first = json.loads((tmp_path / "r.json").read_text())
    assert {each["policy"] for each in first["cells"]} == {"value", "end", "clairvoyant"}
    assert all(0 < each["hit_rate"] < 1 for each in first["cells"])
    assert "0 of them done before" in capsys.readouterr().out
    assert policy_report.main() == 0
    assert "6 cells, 6 of them done before" in capsys.readouterr().out
    assert json.loads((tmp_path / "r.json").read_text()) == first
    assert "<svg" in (tmp_path / "r.html").read_text()


def _trace(directory: Path) -> Path:
    shape = Shape(sessions=12)
    path = directory / "small.jsonl.gz"
    write_trace(path, generate("chat", shape), block_tokens=shape.block_tokens, source="test")
    return path
