"""The demo's page: a bar a turn in each life, and names that cannot break it."""

from __future__ import annotations

from typing import Any

from stepwell.cli.demo.picture import draw


def turn(person: str = "Asha", *, seconds: float = 0.5) -> dict[str, Any]:
    reply = {"device": 10, "host": 0, "store": 1200, "computed": 24, "prompt_tokens": 1234, "first_token_s": seconds}
    return {"person": person, "turn": 1, "identical": True, "cold": reply, "first": reply, "second": reply}


def test_each_life_has_a_bar_a_turn_with_its_count() -> None:
    html = draw("m", [turn(), turn("Bo")])
    assert html.count("store: 1,200 tokens") == html.count(">1,234</text>") == 6
    assert "host: 0 tokens" not in html
    assert "identical: <strong>yes</strong>" in html


def test_one_different_answer_is_told() -> None:
    assert "identical: <strong>NO</strong>" in draw("m", [turn(), turn() | {"identical": False}])


def test_names_are_escaped_and_an_instant_answer_is_drawn() -> None:
    html = draw("<b>model", [turn("<i>", seconds=0.0)])
    assert "<b>" not in html and "<i>" not in html and "&lt;b&gt;model" in html
    assert "http" not in html and "<script" not in html
