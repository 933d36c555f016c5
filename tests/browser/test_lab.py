"""What the other tests here lean on: a notebook in JupyterLab can be run, read and operated."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest
from playwright.sync_api import expect

if TYPE_CHECKING:
    from tests.browser.lab import Lab

pytestmark = pytest.mark.timeout(400)  # the first test may have to install Chromium

WIDGETS = """
import ipywidgets as w
button = w.Button(description="Press me")
slider = w.IntSlider(value=3, min=0, max=10, description="How many")
page = w.HTML("<table><caption>Things</caption><tr><td>none</td></tr></table>")
def told(what):
    page.value = f"<table><caption>Things</caption><tr><td>{slider.value} {what}</td></tr></table>"
slider.observe(lambda _: told("things"), "value")
button.on_click(lambda _: told("pressed"))
w.VBox([button, slider, page])
"""


def test_widgets_are_found_by_role_and_answer_to_mouse_and_keyboard(lab: Lab) -> None:
    lab.write("widgets.ipynb", [WIDGETS, "slider.value"])
    lab.run_all()
    lab.wait_for_text(0, "none")
    output = lab.output(0)
    slider = output.get_by_role("slider")
    slider.focus()
    for _ in range(2):
        lab.page.keyboard.press("ArrowRight")
    things = output.get_by_role("table", name="Things")
    expect(things).to_contain_text("5 things")
    output.get_by_role("button", name="Press me").click()
    expect(things).to_contain_text("5 pressed")
    lab.run_cell(1)
    lab.wait_for_text(1, "5")


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
