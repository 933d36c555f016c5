"""What the other tests here lean on: a cell of a notebook in JupyterLab is run and interrupted."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from tests.browser.lab import Lab

pytestmark = pytest.mark.timeout(400)  # the first test may have to install Chromium


def test_an_interrupt_from_the_menu_stops_run_all(lab: Lab) -> None:
    wait = "import threading\nprint('waiting', flush=True)\nthreading.Event().wait()"
    lab.write("interrupt.ipynb", ["1 + 1", wait, "print('never')"])
    lab.run_all()
    lab.wait_for_text(1, "waiting")
    lab.interrupt()
    lab.wait_for_text(1, "KeyboardInterrupt")
    lab.wait_until_idle()
    lab.wait_until_run(0)
    lab.wait_until_skipped(2)
    assert lab.output(2).inner_text() == ""
