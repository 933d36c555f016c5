"""A person at JupyterLab: opens a notebook, runs it, reads it, presses buttons."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, Any

import nbformat
from playwright.sync_api import expect

if TYPE_CHECKING:
    from collections.abc import Iterable
    from pathlib import Path

    from playwright.sync_api import FloatRect, Locator, Page

    from tests.browser.server import LabServer

KERNEL = "Python 3"
"""What the kernel is called."""

PATIENCE_S = 30.0
"""How long a person waits for anything, unless the test says otherwise."""


class Lab:
    """One page of JupyterLab with one notebook.

    Parameters
    ----------
    page : Page
        A fresh page.
    server : LabServer
        The server that it opens.
    pictures : Path
        Where screenshots go.
    """

    def __init__(self, page: Page, server: LabServer, pictures: Path) -> None:
        self.page = page
        self.server = server
        self.path: Path | None = None
        self._pictures = pictures
        page.set_default_timeout(PATIENCE_S * 1000)

    # -- notebooks -----------------------------------------------------------------------------

    def write(self, name: str, cells: Iterable[str]) -> None:
        """Write a notebook of code cells and open it."""
        book = nbformat.v4.new_notebook(cells=[nbformat.v4.new_code_cell(text) for text in cells])
        book.metadata["kernelspec"] = {
            "name": "python3",
            "display_name": KERNEL,
            "language": "python",
        }
        nbformat.write(book, self.server.notebooks / name)
        self.open(name)

    def open(self, name: str) -> None:
        """Open a notebook of the server's directory, and wait for its kernel."""
        self.path = self.server.notebooks / name
        self.page.goto(f"{self.server.url}/lab/tree/{name}?reset&token={self.server.token}")
        self.wait_until_idle()

    def read(self) -> nbformat.NotebookNode:
        """Return the notebook as it is on disk."""
        assert self.path is not None
        return nbformat.read(self.path, as_version=4)

    def save(self) -> nbformat.NotebookNode:
        """Save by keyboard; return the notebook as it is on disk."""
        assert self.path is not None
        before = self.path.stat().st_mtime_ns
        self._command_mode()
        with self.page.expect_response(
            lambda r: r.request.method == "PUT" and "/api/contents/" in r.url
        ) as saved:
            self.page.keyboard.press("Control+s")
        assert saved.value.ok
        assert self.path.stat().st_mtime_ns > before
        return self.read()

    # -- running -------------------------------------------------------------------------------

    def run_all(self) -> None:
        """Run all cells, from the menu."""
        self.menu("Run", "Run All Cells")

    def run_cell(self, index: int) -> None:
        """Run one cell, from the menu."""
        cell = self.cell(index)
        cell.locator(".jp-InputPrompt").click()
        expect(cell).to_have_class(re.compile(r"\bjp-mod-active\b"))
        self.menu("Run", "Run Selected Cell and Do not Advance")

    def interrupt(self) -> None:
        """Interrupt the kernel, from the menu."""
        self.menu("Kernel", "Interrupt Kernel")

    def restart(self) -> None:
        """Restart the kernel, from the menu."""
        self.menu("Kernel", "Restart Kernel…")
        self.page.locator(".jp-Dialog .jp-mod-accept").click()
        self.wait_until_idle()

    def menu(self, *path: str) -> None:
        """Choose an item of a menu, or of a menu within a menu, by its words."""
        first, *rest = path
        bar = self.page.get_by_role("menubar").first
        bar.get_by_role("menuitem", name=first, exact=True).click()
        for depth, words in enumerate(rest):
            items = self.page.locator(".lm-Menu").nth(depth).locator(".lm-Menu-item")
            items.filter(has=self.page.get_by_text(words, exact=True)).click()

    def theme(self, name: str) -> None:
        """Switch to ``light`` or ``dark``, from the menu, and wait for it."""
        self.menu("Settings", "Theme", f"JupyterLab {name.capitalize()}")
        light = "true" if name == "light" else "false"
        body = self.page.locator(f'body[data-jp-theme-light="{light}"]')
        expect(body).to_be_attached()

    def wait_until_idle(self, timeout_s: float = PATIENCE_S) -> None:
        """Wait until the kernel is there and has nothing to do.

        The status bar tells; the indicator beside the notebook says idle before there is a kernel.
        """
        status = self.page.get_by_role("button", name=f"{KERNEL} | Idle", exact=True)
        expect(status).to_be_visible(timeout=timeout_s * 1000)

    def wait_until_run(self, index: int, timeout_s: float = PATIENCE_S) -> None:
        """Wait until a cell has its execution number."""
        prompt = self.cell(index).locator(".jp-InputPrompt")
        expect(prompt).to_have_text(re.compile(r"\[\d+\]"), timeout=timeout_s * 1000)

    def wait_until_skipped(self, index: int) -> None:
        """Wait until a cell that was to run is known not to run."""
        expect(self.cell(index).locator(".jp-InputPrompt")).to_have_text("[ ]:")

    # -- reading -------------------------------------------------------------------------------

    def cell(self, index: int) -> Locator:
        """Return a cell by its place in the notebook."""
        return self.page.locator(".jp-Notebook .jp-Cell").nth(index)

    def output(self, index: int) -> Locator:
        """Return the output area of a cell."""
        return self.cell(index).locator(".jp-Cell-outputArea")

    def wait_for_text(self, index: int, text: Any, timeout_s: float = PATIENCE_S) -> None:
        """Wait until a cell's output contains a text, or matches a pattern."""
        expect(self.output(index)).to_contain_text(text, timeout=timeout_s * 1000)

    def screenshot(self, name: str, where: Locator) -> Path:
        """Take a picture of a part of the page; return its file."""
        self._pictures.mkdir(parents=True, exist_ok=True)
        path = self._pictures / f"{name}.png"
        expect(where).to_be_visible()
        where.evaluate("element => element.scrollIntoView({block: 'nearest'})")
        # Of the page, cut out: JupyterLab takes cells out of the page and back while it lays it
        # out anew, as after a change of theme, and a picture of an element needs it to stay.
        box = where.bounding_box()
        assert box is not None
        clip: FloatRect = {key: box[key] for key in ("x", "y", "width", "height")}
        self.page.screenshot(path=path, animations="disabled", clip=clip, full_page=True)
        return path

    def _command_mode(self) -> None:
        self.page.locator(".jp-Notebook .jp-InputPrompt").first.click()
        self.page.keyboard.press("Escape")
