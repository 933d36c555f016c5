"""What a person sees of a job's panel, found by role and text, and what they can do with it."""

from __future__ import annotations

import itertools
import re
import time
from typing import TYPE_CHECKING

from playwright.sync_api import expect

if TYPE_CHECKING:
    from pathlib import Path

    from playwright.sync_api import Locator

    from tests.browser.lab import Lab

ENOUGH_S = 90.0
"""How long a cluster may take to start what a job asks for."""

WATCH = """() => {
    window.worlds = [];
    const look = () => {
        for (const term of document.querySelectorAll(".nbe dt")) {
            if (term.textContent !== "ranks") continue;
            const size = parseInt(term.nextElementSibling.textContent);
            if (window.worlds.at(-1)?.[1] !== size) window.worlds.push([Date.now() / 1000, size]);
        }
    };
    new MutationObserver(look).observe(
        document.body, {subtree: true, childList: true, characterData: true}
    );
    look();
}"""
"""Notes each size of the world that the page shows, with the moment at which it does."""


class PanelView:
    """A job in the output of a cell: a panel of widgets while it runs, then a card of HTML.

    Parameters
    ----------
    lab : Lab
        Where it is.
    index : int
        The cell.
    """

    def __init__(self, lab: Lab, index: int) -> None:
        self.lab = lab
        self.area: Locator = lab.output(index).locator(".nbe-panel, .nbe-card:has(.nbe-head)")
        self.table = self.area.get_by_role("table", name=re.compile("^Ranks"))
        self.rows = self.table.get_by_role("rowheader").filter(has_text=re.compile(r"^\d+$"))

    # -- looking -------------------------------------------------------------------------------

    def wait_for_state(self, state: str, timeout_s: float = ENOUGH_S) -> None:
        """Wait until the panel says this word."""
        badge = self.area.locator(".nbe-badge").get_by_text(state, exact=False)
        expect(badge).to_be_visible(timeout=timeout_s * 1000)

    def wait_for_world(self, size: int, timeout_s: float = ENOUGH_S) -> None:
        """Wait until the panel shows a world of this size, in figures and by rows."""
        figures = self.area.locator("dl div").filter(has=self.lab.page.get_by_text("ranks"))
        value = figures.get_by_role("definition")
        expect(value).to_have_text(re.compile(rf"^{size}\b"), timeout=timeout_s * 1000)
        expect(self.rows).to_have_count(size, timeout=timeout_s * 1000)

    def watch_worlds(self) -> None:
        """Note from now on which sizes the page shows, and when."""
        self.lab.page.evaluate(WATCH)

    def wait_for_worlds(self, sizes: list[int], timeout_s: float = ENOUGH_S) -> None:
        """Wait until what was noted begins with these sizes, however short each was shown."""
        deadline = time.monotonic() + timeout_s
        while self.sizes()[: len(sizes)] != sizes:
            assert time.monotonic() < deadline, (
                f"{self.sizes()} was shown, not {sizes}: {' '.join(self.area.all_inner_texts())}"
            )
            self.lab.page.wait_for_timeout(100)

    def sizes(self) -> list[int]:
        """Return the sizes that the page has shown; it is 0 while a generation forms."""
        formed = [size for _, size in self.worlds() if size]
        return [size for size, _ in itertools.groupby(formed)]

    def worlds(self) -> list[tuple[float, int]]:
        """Return what was noted: seconds since the epoch, and the size shown from then on."""
        return [(when, size) for when, size in self.lab.page.evaluate("window.worlds")]

    def pictures(self, name: str) -> list[Path]:
        """Take a picture in the light and one in the dark theme; the theme is light again."""
        paths = [self.lab.screenshot(f"{name}-light", self.area)]
        self.lab.theme("dark")
        paths.append(self.lab.screenshot(f"{name}-dark", self.area))
        self.lab.theme("light")
        return paths

    # -- doing ---------------------------------------------------------------------------------

    def press_stop(self) -> None:
        """Press the Stop button."""
        self.area.get_by_role("button", name="Stop").click()

    def lower_the_most(self) -> None:
        """Lower the greatest number of ranks by one, by keyboard."""
        most = self.area.get_by_label("Max ranks")
        least = int(most.input_value()) - 1
        most.press("ArrowDown")  # to the field, though a menu that closes may move the focus
        expect(most).to_have_value(str(least))
        most.press("Tab")
