"""The frame of pages: they stand alone, in light and dark, on paper and on small screens."""

from __future__ import annotations

import re

import pytest

from stepwell.sim.page import SOURCES, WORDS, bullets, cut_bar, drawing, glossary, key, page, prose, table

LIGHT, DARK = (re.escape(each) for each in (":root { color-scheme", "@media screen and (prefers-color-scheme: dark)"))


def colours(html: str, opening: str) -> dict[str, str]:
    found = re.search(opening + r"[^}]*", html)
    assert found is not None
    return dict(re.findall(r"(--[a-z]+): (#[0-9a-f]+)", found.group()))


def luminance(colour: str) -> float:
    """As contrast is reckoned: of #rgb or #rrggbb, 0 for black and 1 for white."""
    digits = colour[1:] if len(colour) == 7 else "".join(each * 2 for each in colour[1:])
    parts = [int(digits[at : at + 2], 16) / 255 for at in (0, 2, 4)]
    linear = [part / 12.92 if part <= 0.04045 else ((part + 0.055) / 1.055) ** 2.4 for part in parts]
    return 0.2126 * linear[0] + 0.7152 * linear[1] + 0.0722 * linear[2]


def contrast(one: str, other: str) -> float:
    darker, lighter = sorted((luminance(one), luminance(other)))
    return (lighter + 0.05) / (darker + 0.05)


def test_a_page_stands_alone_and_suits_screens_of_any_width() -> None:
    html = page("a <title>", "what it is", "<p>body</p>")
    assert "<title>a &lt;title&gt;</title>" in html and "what it is" in html and "<p>body</p>" in html
    assert 'name="viewport"' in html
    assert "http" not in html and "<script" not in html and "@import" not in html and "url(" not in html


@pytest.mark.parametrize("scheme", [LIGHT, DARK], ids=["light", "dark"])
def test_words_and_lines_stand_out_from_the_paper(scheme: str) -> None:
    found = colours(page("t", "a", ""), scheme)
    for name in ("--ink", "--soft", "--green", "--blue", "--red", "--bar"):
        assert contrast(found[name], found["--paper"]) > 4.5, name


@pytest.mark.parametrize("scheme", [LIGHT, DARK], ids=["light", "dark"])
def test_device_and_host_differ_on_grey_paper(scheme: str) -> None:
    found = colours(page("t", "a", ""), scheme)
    assert contrast(found["--device"], found["--host"]) > 1.8


def test_options_are_not_broken_over_lines_and_names_are_escaped() -> None:
    assert prose("see --kv-dtype; <b> and a--b") == "see <code>--kv-dtype</code>; &lt;b&gt; and a--b"
    assert bullets(["a < b"]) == "<ul><li>a &lt; b</li></ul>"
    assert "&quot;&lt;x&gt;" in drawing(1, 1, "", label='"<x>')


def test_wide_things_scroll_in_their_own_box_and_heads_come_again_on_the_next_sheet() -> None:
    html = table(("name", "size"), [("<i>", "1 GiB")])
    assert html.startswith('<div class="wide"><table><thead><tr><th>name</th><th class="n">size</th></tr></thead>')
    assert '<td>&lt;i&gt;</td><td class="n">1 GiB</td>' in html
    assert drawing(9, 9, "", label="").startswith('<div class="wide"><svg')


def test_words_are_explained() -> None:
    html = glossary(*WORDS)
    assert html.count("<dt>") == html.count("<dd>") == len(WORDS)


# ---- bars by source -------------------------------------------------------------------------------


def test_a_bar_is_as_wide_as_its_tokens_and_leaves_out_sources_of_none() -> None:
    parts = list(cut_bar({"device": 10, "host": 0, "store": 5, "computed": 1234}, x=100, y=0, height=9, token_width=0.5))
    places = [tuple(map(float, re.findall(r' (?:x|width)="([0-9.]+)"', part))) for part in parts]
    assert places == [(100.0, 5.0), (105.0, 2.5), (107.5, 617.0)]
    assert "computed: 1,234 tokens" in parts[-1]


def test_sources_are_filled_differently_and_the_key_defines_what_they_need() -> None:
    parts = cut_bar(dict.fromkeys(SOURCES, 1), x=0, y=0, height=9, token_width=1)
    fills = [found for part in parts for found in re.findall(r'fill="([^"]+)"', part)]
    assert len(set(fills)) == len(SOURCES)
    for name in re.findall(r"url\(#([a-z]+)\)", " ".join(fills)):
        assert key().count(f'id="{name}"') == 1
