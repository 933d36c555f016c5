"""JupyterLab and Chromium for the tests of this directory: one server, one browser, fresh pages.

Playwright's synchronous interface keeps an event loop running in the main thread, so it lives as
long as this package's tests and no longer.
"""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest
from playwright.sync_api import Browser, ViewportSize, expect, sync_playwright

from tests.browser.lab import PATIENCE_S, Lab
from tests.browser.server import LabServer
from tests.support.clusters import until

ROOT = Path(__file__).parents[2]
VIEW: ViewportSize = {"width": 1280, "height": 1600}
NAMES = ("chromium", "chromium-browser", "google-chrome", "google-chrome-stable")


@pytest.fixture(scope="package")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[LabServer]:
    """JupyterLab, in a directory of its own."""
    server = LabServer(tmp_path_factory.mktemp("jupyter"))
    try:
        until(server.answers, "JupyterLab answers")
        shutil.copy(ROOT / "notebooks/01_quickstart.ipynb", server.notebooks)
        yield server
    finally:
        server.stop()


@pytest.fixture(scope="package")
def browser() -> Iterator[Browser]:
    """Chromium, without a window."""
    chromium = next((path for path in map(shutil.which, NAMES) if path), None)
    if chromium is None:
        pytest.skip("there is no Chromium: apt-get install chromium")
    expect.set_options(timeout=PATIENCE_S * 1000)
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(
            executable_path=chromium, headless=True, args=["--no-sandbox"]
        )
        yield browser
        browser.close()


@pytest.fixture
def lab(server: LabServer, browser: Browser) -> Iterator[Lab]:
    """A fresh page of JupyterLab; the kernels that were started in it end with it."""
    context = browser.new_context(viewport=VIEW, device_scale_factor=2, reduced_motion="reduce")
    try:
        yield Lab(context.new_page(), server)
    finally:
        context.close()
        server.end_kernels()
