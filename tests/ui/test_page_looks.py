"""The page on phones, on wide screens and on paper, in light and in dark."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING

import pytest

from server.serving import ADMIN, Running
from ui.looking import explain, give, is_shown, text_of

if TYPE_CHECKING:
    from ui.looking import OpenPage

CONTRASTS = """() => {
  const linear = (each) => (each / 255 <= 0.04045 ? each / 255 / 12.92 : ((each / 255 + 0.055) / 1.055) ** 2.4);
  const light = (color) => {
    const [r, g, b] = color.match(/[\\d.]+/g).slice(0, 3).map(linear);
    return 0.2126 * r + 0.7152 * g + 0.0722 * b;
  };
  return [...document.querySelectorAll("h1, h2, p, th, td, label, strong, .figure span")].map((each) => {
    const behind = getComputedStyle(each.closest(".card") || document.body).backgroundColor;
    const [low, high] = [light(getComputedStyle(each).color), light(behind)].sort((one, other) => one - other);
    return (high + 0.05) / (low + 0.05);
  });
}"""


@pytest.mark.parametrize("width", [390, 768, 1180])
def test_nothing_is_wider_than_the_screen(busy: Running, open_page: OpenPage, width: int) -> None:
    page = open_page(busy.address, width=width)
    is_shown(page)
    give(page, ADMIN)
    page.wait_for_selector("#token-form[data-state=admin]")
    explain(page, "x" * 500)
    assert page.evaluate("document.documentElement.scrollWidth") <= width
    all_of_it = "[...document.querySelectorAll('main *')].filter(each => !each.closest('.wide'))"
    outside = f"{all_of_it}.filter(each => each.getBoundingClientRect().right > innerWidth + 1)"
    assert page.evaluate(f"{outside}.map(each => each.outerHTML.slice(0, 80))") == []


def test_requests_under_way_fit_into_half_a_laptop_s_screen(busy: Running, open_page: OpenPage) -> None:
    row = {"id": 4321, "tenant": None, "state": "prompt", "prompt_tokens": 31156, "ready_tokens": 31100, "cached_tokens": 30896,
           "answer_tokens": 220, "max_tokens": 1024, "age_s": 6.3}  # fmt: skip
    page = open_page(busy.address, width=1000)
    told = {"active": 1, "waiting": 0, "requests": [row]}
    page.route("**/cache/requests", lambda route: route.fulfill(body=json.dumps(told), content_type="application/json"))
    page.reload()
    page.wait_for_selector("#requests tbody tr")
    cut = page.evaluate(
        "(() => { const box = document.querySelector('#requests .wide'); return box.scrollWidth - box.clientWidth; })()"
    )
    assert "6.3 s" in text_of(page, "#requests") and cut <= 1


@pytest.mark.parametrize("dark", [False, True])
def test_text_stands_out_in_light_and_in_dark(busy: Running, open_page: OpenPage, dark: bool) -> None:
    page = open_page(busy.address, dark=dark)
    is_shown(page)
    ratios = page.evaluate(CONTRASTS)
    assert len(ratios) > 50 and min(ratios) >= 4.5
    background = page.evaluate("getComputedStyle(document.body).backgroundColor")
    assert background == ("rgb(22, 24, 27)" if dark else "rgb(255, 255, 255)")


def test_on_paper_there_are_no_buttons_and_no_table_is_cut(busy: Running, open_page: OpenPage) -> None:
    page = open_page(busy.address, dark=True)
    is_shown(page)
    give(page, ADMIN)
    page.wait_for_selector("#token-form[data-state=admin]")
    page.emulate_media(media="print")
    page.set_viewport_size({"width": 720, "height": 1000})  # of A4 between its margins
    assert page.locator("button:visible, input:visible, textarea:visible").count() == 0
    widths = "[...document.querySelectorAll('.wide')].map(each => each.scrollWidth - document.body.clientWidth)"
    assert max(page.evaluate(widths)) <= 1
    assert page.evaluate("getComputedStyle(document.body).backgroundColor") == "rgb(255, 255, 255)"


def test_every_field_and_drawing_has_a_name_that_can_be_read_out(busy: Running, open_page: OpenPage) -> None:
    page = open_page(busy.address)
    is_shown(page)
    nameless = (
        "[...document.querySelectorAll('input, textarea, select')].filter(each => !each.labels.length).map(each => each.id)"
    )
    assert page.evaluate(nameless) == []
    drawn = page.locator("main svg[role=img]")
    assert drawn.count() > 5 and all(drawn.nth(at).get_attribute("aria-label") for at in range(drawn.count()))
