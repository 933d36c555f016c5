"""What the other tests here lean on: a cell of a notebook in JupyterLab is run and interrupted."""

from __future__ import annotations

import re

from tests.browser.lab import Lab


def test_an_interrupt_from_the_menu_stops_run_all(lab: Lab) -> None:
    wait = "import threading\nprint('waiting', flush=True)\nthreading.Event().wait()"
    lab.write("interrupt.ipynb", ["1 + 1", wait, "print('never')"])
    lab.menu("Run", "Run All Cells")
    lab.wait_for_text(1, "waiting")
    lab.interrupt()
    lab.wait_for_text(1, "KeyboardInterrupt")
    lab.wait_until_idle()
    lab.wait_for_prompt(0, re.compile(r"\[\d+\]"))
    lab.wait_for_prompt(2, "[ ]:")
    assert lab.output(2).inner_text() == ""
