"""The page of a comparison: every replay under the trace it is of, with figures next to its bar."""

from __future__ import annotations

from dataclasses import replace

from small_traces import ListTrace, branching, setup

from stepwell.base.meters import ManualClock
from stepwell.sim.picture import draw
from stepwell.sim.replay import replay_trace
from stepwell.sim.report import Report


def replayed(name: str = "t", policy: str = "value") -> Report:
    trace = ListTrace(requests=branching(40, seed=3), name=name)
    return replay_trace(trace, setup(device_pages=32, host_pages=64), policy=policy, clock=ManualClock())


def test_a_name_is_told_whole_and_escaped() -> None:
    html = draw([replayed("<b>" + "long-" * 20)])
    assert "<b>" not in html and "&lt;b&gt;" + "long-" * 20 in html
    assert "http" not in html and "<script" not in html


def test_replays_of_one_trace_stand_together() -> None:
    html = draw([replayed("a"), replayed("a", "lru"), replayed("b")])
    assert [html.count(each) for each in ("<h2>a</h2>", "<h2>b</h2>", "<thead>")] == [1, 1, 2]


def test_traces_of_one_name_are_not_mixed() -> None:
    assert draw([replayed("a"), replayed("a")]).count("<h2>a</h2>") == 2


def test_shares_are_told_in_figures_too() -> None:
    report = replayed()
    html = draw([report])
    for tokens in (report.device_tokens, report.host_tokens, report.computed_tokens):
        assert f">{tokens / report.prompt_tokens:.1%}<" in html
    assert f">{report.hit_rate:.1%}</text>" in html
    assert "20,000 tokens/s" in html, "times are for a machine, which is named"


def test_a_replay_of_nothing_is_drawn() -> None:
    nothing = dict.fromkeys(("prompt_tokens", "device_tokens", "host_tokens", "store_tokens", "computed_tokens"), 0)
    assert "0.0%" in draw([replace(replayed(), **nothing, reusable_tokens=0)])
