"""A person with a notebook and four workers: the panel, its controls, interrupts, what is saved."""

from __future__ import annotations

import re

import nbformat
import pytest
from playwright.sync_api import expect

from tests.browser.lab import ENOUGH_S, WATCH, Lab, PanelView
from tests.support.clusters import until

pytestmark = [pytest.mark.nightly, pytest.mark.timeout(400)]

SETUP = """
from dask.distributed import Client

import nbelastic

%load_ext nbelastic
client = Client({address!r})
"""


def test_the_quickstart_survives_a_kill_and_obeys_slider_and_stop(lab: Lab) -> None:
    quickstart = nbformat.read(lab.server.notebooks / "01_quickstart.ipynb", as_version=4)
    code = [cell.source for cell in quickstart.cells if cell.cell_type == "code"]
    lab.write("quickstart.ipynb", code)  # without its outputs, which show a world of four as well
    training = next(i for i, source in enumerate(code) if source.startswith("%%elastic_train"))
    killing = next(i for i, source in enumerate(code) if "SIGKILL" in source)
    panel = PanelView(lab, training)
    lab.page.evaluate(WATCH)
    for index in range(killing + 1):
        lab.run_cell(index)
    shown = [4, 3, 4]  # ranks started, a kill after thirty commits, a worker and a rank started
    until(lambda: panel.worlds()[:3] == shown, "the panel shows a killed worker", 3 * ENOUGH_S)
    panel.wait_for_world(4)
    panel.lower_the_most()
    panel.wait_for_world(3)
    panel.press_stop()
    panel.wait_for_state("stopped")
    lab.run_cell(len(code) - 1)
    prompt = lab.cell(len(code) - 1).locator(".jp-InputPrompt")
    expect(prompt).to_have_text(re.compile(r"\[\d+\]"))
