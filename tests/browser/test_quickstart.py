"""A person with a notebook and four workers: the panel, its controls, interrupts, what is saved."""

from __future__ import annotations

import re

import nbformat
import pytest
from playwright.sync_api import expect

from tests.browser.lab import ENOUGH_S, Lab, PanelView
from tests.support.clusters import Crew, until

pytestmark = [pytest.mark.nightly, pytest.mark.timeout(400)]

ENDLESS = 10**9

SETUP = """
import time

from dask.distributed import Client

import nbelastic

%load_ext nbelastic
client = Client({address!r})
STEPS = {steps}
"""

TRAIN = """
%%elastic_train {options}
import time

import torch

import nbelastic
import nbelastic.torch as hvd

hvd.init()
torch.manual_seed(1)
model = torch.nn.Linear(8, 1)
optimizer = hvd.DistributedOptimizer(
    torch.optim.SGD(model.parameters(), lr=0.02), named_parameters=model.named_parameters()
)
state = hvd.elastic.TorchState(model, optimizer, step=0, epoch=0)
state.set_total(epoch=1)

@hvd.elastic.run
def loop(state):
    while state.step < STEPS:
        inputs = torch.randn(16, 8)
        optimizer.zero_grad()
        loss = torch.nn.functional.mse_loss(model(inputs), inputs.sum(1, keepdim=True))
        loss.backward()
        optimizer.step()
        state.step += 1
        nbelastic.report(loss=loss.item())
        state.commit()
        time.sleep(0.02)

loop(state)
state.step
"""


def setup(crew: Crew, steps: int = ENDLESS) -> str:
    return SETUP.format(address=crew.cluster.scheduler_address, steps=steps).strip()


def train(options: str) -> str:
    return TRAIN.format(options=options).strip()


def test_the_quickstart_survives_a_kill_and_obeys_slider_and_stop(lab: Lab) -> None:
    quickstart = nbformat.read(lab.server.notebooks / "01_quickstart.ipynb", as_version=4)
    code = [cell.source for cell in quickstart.cells if cell.cell_type == "code"]
    lab.write("quickstart.ipynb", code)  # without its outputs, which show a world of four as well
    training = next(i for i, source in enumerate(code) if source.startswith("%%elastic_train"))
    killing = next(i for i, source in enumerate(code) if "SIGKILL" in source)
    panel = PanelView(lab, training)
    panel.watch_worlds()
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
    lab.wait_for_prompt(len(code) - 1, re.compile(r"\[\d+\]"))


def test_the_panel_of_a_kernel_that_is_gone_says_how_to_attach(lab: Lab, crew: Crew) -> None:
    attach = 'nbelastic.attach("night-run", cluster=client)'
    training = train("--np 2 --noblock --name night-run")
    lab.write("night.ipynb", [setup(crew), training, f"job = {attach}\njob"])
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
