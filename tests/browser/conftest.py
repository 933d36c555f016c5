"""JupyterLab and Chromium for the tests of this directory: one server, one browser, fresh pages.

Playwright's synchronous interface keeps an event loop running in the main thread, so it lives as
long as this package's tests and no longer.
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
from playwright.sync_api import expect, sync_playwright

from tests.browser.chromium import find_chromium, install_chromium
from tests.browser.lab import PATIENCE_S, Lab
from tests.browser.server import LabServer

if TYPE_CHECKING:
    from collections.abc import Iterator

    from playwright.sync_api import Browser, ViewportSize

ROOT = Path(__file__).parents[2]
VIEW: ViewportSize = {"width": 1280, "height": 1600}


@pytest.fixture(scope="session")
def chromium() -> str:
    """Where Chromium is; installed if it has to be and can be."""
    reason = "" if find_chromium() else install_chromium()
    path = find_chromium()
    if path is None:
        pytest.skip(reason or "there is no Chromium, although apt-get has installed it")
    return path


@pytest.fixture(scope="package")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[LabServer]:
    """JupyterLab, in a directory of its own."""
    server = LabServer(tmp_path_factory.mktemp("jupyter"))
    try:
        server.start()
        for notebook in sorted((ROOT / "notebooks").glob("*.ipynb")):
            (server.notebooks / notebook.name).write_bytes(notebook.read_bytes())
        yield server
    finally:
        killed = server.stop()
    assert not killed, f"these outlived JupyterLab: {killed}"


@pytest.fixture(scope="package")
def browser(chromium: str) -> Iterator[Browser]:
    """Chromium, without a window."""
    expect.set_options(timeout=PATIENCE_S * 1000)
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(
            executable_path=chromium, headless=True, args=["--no-sandbox"]
        )
        yield browser
        browser.close()


@pytest.fixture
def lab(server: LabServer, browser: Browser, tmp_path: Path) -> Iterator[Lab]:
    """A fresh page of JupyterLab; the kernels that were started in it end with it."""
    pictures = Path(os.environ.get("NBELASTIC_SCREENSHOTS") or tmp_path / "screenshots")
    context = browser.new_context(viewport=VIEW, device_scale_factor=2, reduced_motion="reduce")
    try:
        yield Lab(context.new_page(), server, pictures)
    finally:
        context.close()
        server.end_kernels()
        server.forget_settings()
