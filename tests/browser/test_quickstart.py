"""A person with a notebook and four workers: the panel, its controls, interrupts, what is saved."""

from __future__ import annotations

import re

import nbformat
import pytest
from playwright.sync_api import expect

from tests.browser.lab import ENOUGH_S, WATCH, Lab, PanelView
from tests.support.clusters import Crew, until

pytestmark = [pytest.mark.nightly, pytest.mark.timeout(400)]

SETUP = """
from dask.distributed import Client

import nbelastic

%load_ext nbelastic
client = Client({address!r})
"""

TRAIN = """
%%elastic_train --np 2 --noblock --name night-run
import time

import nbelastic.torch as hvd

@hvd.elastic.run
def loop(state):
    while True:
        hvd.barrier()
        state.step += 1
        state.commit()
        time.sleep(0.02)

loop(hvd.elastic.ObjectState(step=0))
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


def test_the_panel_of_a_kernel_that_is_gone_says_how_to_attach(lab: Lab, crew: Crew) -> None:
    attach = 'nbelastic.attach("night-run", cluster=client)'
    setup = SETUP.format(address=crew.cluster.scheduler_address)
    lab.write("night.ipynb", [setup.strip(), TRAIN.strip(), f"job = {attach}\njob"])
    line = lab.output(1).locator(".nbe-card").get_by_text(attach)
    lab.run_cell(0)
    lab.run_cell(1)
    for _ in range(2):  # before and after a reload
        PanelView(lab, 1).wait_for_world(2)
        expect(line).to_be_hidden()
        assert lab.save()
        lab.page.reload()
        lab.wait_until_idle()
    lab.restart()
    lab.save()
    lab.page.reload()
    expect(line).to_be_visible()
    expect(lab.output(1).get_by_text("model not found")).to_be_hidden()
    lab.run_cell(0)
    lab.run_cell(2)
    panel = PanelView(lab, 2)
    panel.wait_for_world(2)
    panel.press_stop()
    panel.wait_for_state("stopped")
    expect(lab.output(2).locator(".nbe-card")).to_have_count(1)
