"""The page of a job in a real browser: narrow, without its style, without news."""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Iterator
from typing import Any

import pytest
from playwright.sync_api import Browser, Page

from nbelastic.notebook.panel import STALE
from nbelastic.render import STYLE, page
from tests.notebook.fakes import full

SMALL_TEXT = """() => [...document.querySelectorAll(".nbe *")].filter(
    each => [...each.childNodes].some(n => n.nodeType === 3 && n.textContent.trim())
        && !each.closest("title") && parseFloat(getComputedStyle(each).fontSize) < 12
).map(each => each.outerHTML.slice(0, 120))"""

OVERLAPS = """() => {
    const boxes = [...document.querySelectorAll(".nbe-figure text")].map(
        each => [each.textContent, each.getBoundingClientRect()]);
    return boxes.flatMap(([one, a], i) => boxes.slice(i + 1).filter(([, b]) =>
        a.left < b.right && b.left < a.right && a.top < b.bottom - 2 && b.top < a.bottom - 2
    ).map(([other]) => `${one} and ${other}`));
}"""


@pytest.fixture
def blank(browser: Browser) -> Iterator[Page]:
    context = browser.new_context(viewport={"width": 960, "height": 900})
    yield context.new_page()
    context.close()


CUT_OFF = """() => {
    const card = document.querySelector(".nbe-card").getBoundingClientRect();
    return [...document.querySelectorAll(".nbe *")].filter(each => {
        const box = each.getBoundingClientRect();
        return box.width > 1 && !each.closest("thead") && (box.right > card.right || box.left < 0);
    }).map(each => each.outerHTML.slice(0, 80));
}"""

LAYOUT = """() => [...document.querySelectorAll(".nbe-curves li")].map(each => {
    const [box, svg] = [each, each.querySelector("svg")].map(e => e.getBoundingClientRect());
    const [name, value] = ["span", "b"].map(e => each.querySelector(e).getBoundingClientRect());
    return {left: box.left, height: svg.height, words: name.height < 40 && value.height < 25};
})"""


@pytest.mark.parametrize("scheme", ["light", "dark"])
@pytest.mark.parametrize(("width", "columns"), [(140, 1), (170, 1), (200, 1), (370, 2), (520, 3)])
def test_nothing_is_cut_off_or_stretched(
    blank: Page, width: int, columns: int, scheme: Any
) -> None:
    curves = {name: [(0.0, 1.0), (1.0, 0.5)] for name in ("loss", "accuracy", "learning rate")}
    shown = dataclasses.replace(full(), curves=curves)
    blank.emulate_media(color_scheme=scheme)
    blank.set_content(f'<div style="width:{width}px">{page(shown)}</div>')
    assert blank.evaluate(CUT_OFF) == []
    assert blank.evaluate(OVERLAPS) == []
    assert blank.evaluate(SMALL_TEXT) == []
    curves = blank.evaluate(LAYOUT)
    assert [curve["height"] for curve in curves] == [32, 32, 32]
    assert len({curve["left"] for curve in curves}) == columns
    assert all(curve["words"] for curve in curves)
    rank = blank.get_by_role("row").filter(has_text="10.0.0.2")
    assert rank.get_by_role("cell").first.inner_text() == "running"
    assert blank.get_by_role("rowheader").count() == 5


def test_without_its_style_drawings_are_small_and_words_have_the_pages_color(blank: Page) -> None:
    bare = re.sub("<style>.*?</style>", "", page(full()), flags=re.DOTALL)
    blank.set_content(f'<body style="background:#111;color:rgb(221, 221, 221)">{bare}</body>')
    heights = blank.evaluate("[...document.querySelectorAll('svg')].map(e => e.clientHeight)")
    assert heights and max(heights) < 200
    marks = blank.evaluate("[...document.querySelectorAll('li svg')].map(e => e.clientHeight)")
    assert max(marks) <= 32
    shown = blank.locator(".nbe").inner_text()
    assert "running quickstart" in shown
    assert "epoch 2 of 4, batch 5 of 10 · 1:15 left" in shown
    colors = "[...document.querySelectorAll('svg text')].map(e => getComputedStyle(e).fill)"
    assert set(blank.evaluate(colors)) == {"rgb(221, 221, 221)"}


def test_a_panel_without_news_says_so_by_itself(blank: Page) -> None:
    blank.set_content(f'{STYLE}<div class="nbe">{STALE}</div>')
    words = blank.get_by_text("No news for 15 s")
    for seconds, shown in ((14, False), (16, True), (3600, True)):
        jump = f"document.getAnimations().forEach(each => each.currentTime = {seconds * 1000})"
        blank.evaluate(jump)
        assert words.is_visible() == shown
