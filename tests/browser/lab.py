"""A person at JupyterLab: opens a notebook, runs it, reads it, presses the buttons of a job."""

from __future__ import annotations

import itertools
import re
from collections.abc import Iterable
from pathlib import Path

import nbformat
from playwright.sync_api import Locator, Page, expect

from tests.browser.server import LabServer

KERNEL = "Python 3 (ipykernel)"  # what the kernel is called
PATIENCE_S = 30.0  # how long a person waits for anything, unless the test says otherwise
ENOUGH_S = 90.0  # how long a cluster may take to start what a job asks for

WATCH = """() => {
    window.worlds = [];
    const look = () => {
        for (const term of document.querySelectorAll(".nbe dt")) {
            if (term.textContent !== "ranks") continue;
            const size = parseInt(term.nextElementSibling.textContent);
            if (size) window.worlds.push(size);
        }
    };
    new MutationObserver(look).observe(
        document.body, {subtree: true, childList: true, characterData: true}
    );
    look();
}"""
"""Notes each size of the world that the page shows from now on; 0 while a generation forms."""


class Lab:
    """One page of JupyterLab with one notebook."""

    def __init__(self, page: Page, server: LabServer) -> None:
        self.page = page
        self.server = server
        self.path = Path()
        page.set_default_timeout(PATIENCE_S * 1000)

    # -- notebooks -----------------------------------------------------------------------------

    def write(self, name: str, cells: Iterable[str]) -> None:
        """Write a notebook of code cells, open it, and wait for its kernel."""
        book = nbformat.v4.new_notebook(cells=[nbformat.v4.new_code_cell(text) for text in cells])
        book.metadata["kernelspec"] = {"name": "python3", "display_name": KERNEL}
        self.path = self.server.notebooks / name
        nbformat.write(book, self.path)
        self.page.goto(f"{self.server.url}/lab/tree/{name}?reset&token={self.server.token}")
        self.wait_until_idle()

    def save(self) -> nbformat.NotebookNode:
        """Save by keyboard; return the notebook as it is on disk."""
        before = self.path.stat().st_mtime_ns
        self.page.locator(".jp-Notebook .jp-InputPrompt").first.click()
        self.page.keyboard.press("Escape")
        with self.page.expect_response(
            lambda r: r.request.method == "PUT" and "/api/contents/" in r.url
        ) as saved:
            self.page.keyboard.press("Control+s")
        assert saved.value.ok
        assert self.path.stat().st_mtime_ns > before
        return nbformat.read(self.path, as_version=4)

    # -- running -------------------------------------------------------------------------------

    def run_cell(self, index: int) -> None:
        """Run one cell, from the menu."""
        cell = self.cell(index)
        cell.locator(".jp-InputPrompt").click()
        expect(cell).to_have_class(re.compile(r"\bjp-mod-active\b"))
        self.menu("Run", "Run Selected Cell and Do not Advance")

    def restart(self) -> None:
        self.menu("Kernel", "Restart Kernel…")
        self.page.locator(".jp-Dialog .jp-mod-accept").click()
        self.wait_until_idle()

    def menu(self, name: str, item: str) -> None:
        """Choose an item of a menu by its words."""
        bar = self.page.get_by_role("menubar").first
        bar.get_by_role("menuitem", name=name, exact=True).click()
        items = self.page.locator(".lm-Menu .lm-Menu-item")
        items.filter(has=self.page.get_by_text(item, exact=True)).click()

    def wait_until_idle(self) -> None:
        """Wait until the kernel is there and has nothing to do.

        The status bar tells; the indicator beside the notebook says idle before there is a kernel.
        """
        name = f"{KERNEL} | Idle"
        expect(self.page.get_by_role("button", name=name, exact=True)).to_be_visible()

    # -- reading -------------------------------------------------------------------------------

    def cell(self, index: int) -> Locator:
        return self.page.locator(".jp-Notebook .jp-Cell").nth(index)

    def output(self, index: int) -> Locator:
        return self.cell(index).locator(".jp-Cell-outputArea")


class PanelView:
    """A job in the output of a cell: a panel of widgets while it runs, then a card of HTML."""

    def __init__(self, lab: Lab, index: int) -> None:
        self.page = lab.page
        self.area: Locator = lab.output(index).locator(".nbe-panel, .nbe-card:has(.nbe-head)")
        table = self.area.get_by_role("table", name=re.compile("^Ranks"))
        self.rows = table.get_by_role("rowheader").filter(has_text=re.compile(r"^\d+$"))

    def wait_for_state(self, state: str) -> None:
        badge = self.area.locator(".nbe-badge").get_by_text(state, exact=False)
        expect(badge).to_be_visible(timeout=ENOUGH_S * 1000)

    def wait_for_world(self, size: int) -> None:
        """Wait until the panel shows a world of this size, in figures and by rows."""
        figures = self.area.locator("dl div").filter(has=self.page.get_by_text("ranks"))
        value = figures.get_by_role("definition")
        expect(value).to_have_text(re.compile(rf"^{size}\b"), timeout=ENOUGH_S * 1000)
        expect(self.rows).to_have_count(size, timeout=ENOUGH_S * 1000)

    def worlds(self) -> list[int]:
        return [size for size, _ in itertools.groupby(self.page.evaluate("window.worlds"))]

    def press_stop(self) -> None:
        self.area.get_by_role("button", name="Stop").click()

    def lower_the_most(self) -> None:
        """Lower the greatest number of ranks by one, by keyboard."""
        most = self.area.get_by_label("Max ranks")
        least = int(most.input_value()) - 1
        most.press("ArrowDown")  # to the field, though a menu that closes may move the focus
        expect(most).to_have_value(str(least))
        most.press("Tab")
