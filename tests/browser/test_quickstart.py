"""A person with a notebook and four workers: the panel, its controls, interrupts, what is saved."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING

import nbformat
import pytest
from nbconvert import HTMLExporter
from playwright.sync_api import expect

from tests.browser.panel import PanelView

if TYPE_CHECKING:
    from playwright.sync_api import Browser

    from tests.browser.lab import Lab
    from tests.support.clusters import Crew

pytestmark = pytest.mark.timeout(400)  # the first test may have to install Chromium

ENDLESS = 10**9

SETUP = """
import os
import signal
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
{before}
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

KILL = """
processes = client.run(os.getpid)
victim = job.status.ranks[1].worker
os.kill(processes[victim], signal.SIGKILL)
print("killed at", time.time())
"""

SLOW_START = """
for _ in range(6000):
    time.sleep(0.1)
"""

SLOW_MEETING = """
from dataclasses import replace
from nbelastic.elastic.ranks.context import current

rank = current()
runtime = rank._runtime

def slowly(rendezvous):
    for _ in range(60):
        time.sleep(0.1)
    return runtime.connect(rendezvous)

rank._runtime = replace(runtime, connect=slowly)
"""

IN_KERNEL = f"""
import os
import time

from dask.distributed import Client

%load_ext nbelastic
STEPS = {ENDLESS}
client = Client(n_workers=2, threads_per_worker=1, dashboard_address=":0")
pids = sorted(client.run(os.getpid).values())
"""

SAME_WORKERS = "print(sorted(client.run(os.getpid).values()) == pids)\nclient.close()"

TRAINS_ON = """
seen = job.status.commits
while job.status.commits < seen + 5 and not job.done():
    time.sleep(0.05)
print(f"{job.status.state} {job.status.size}, {job.status.resets} resets")
job.cancel()
job.wait()
"""

BUSY = "print('busy:', sum(len(tasks) > 0 for tasks in client.processing().values()))"
LATER = "print('later')"


def setup(crew: Crew, steps: int = ENDLESS) -> str:
    return SETUP.format(address=crew.cluster.scheduler_address, steps=steps).strip()


def train(options: str, before: str = "") -> str:
    return TRAIN.format(options=options, before=before).strip()


@pytest.mark.nightly
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
    panel.wait_for_worlds([4])  # a cluster and four ranks started,
    panel.wait_for_worlds([4, 3])  # thirty commits and a kill,
    panel.wait_for_worlds([4, 3, 4])  # a worker and a rank started: each may take its time
    panel.wait_for_world(4)
    panel.pictures("quickstart")
    panel.lower_the_most()
    panel.wait_for_world(3)
    panel.press_stop()
    panel.wait_for_state("stopped")
    lab.run_cell(len(code) - 1)
    lab.wait_until_run(len(code) - 1)


@pytest.mark.nightly
def test_the_panel_shows_a_killed_worker_and_never_stays_stale(lab: Lab, crew: Crew) -> None:
    training = train("--np 4 --min-np 2 --noblock -o job")
    lab.write("faults.ipynb", [setup(crew), training, KILL, "print(job.status)", BUSY])
    lab.run_cell(0)
    lab.run_cell(1)
    panel = PanelView(lab, 1)
    panel.wait_for_world(4)
    expect(panel.area.get_by_role("progressbar")).to_be_visible()
    panel.watch_worlds()
    lab.run_cell(2)
    panel.wait_for_worlds([4, 3])  # soon four again
    worlds = panel.worlds()
    killed = float(lab.output(2).inner_text().split()[-1])
    delay = worlds[1][0] - killed  # well under a second, but machines are noisy
    print(f"shown {delay:.2f} s after the kill")
    assert 0.0 < delay < 5.0, "the panel stayed stale"
    panel.press_stop()
    panel.wait_for_state("stopped")
    lab.run_cell(3)
    lab.wait_for_text(3, "state='stopped'")
    lab.run_cell(4)
    lab.wait_for_text(4, "busy: 0")


@pytest.mark.nightly
@pytest.mark.parametrize(
    ("state", "options", "before"),
    [
        ("waiting", "--np 9", ""),
        ("waiting", "--np 2", SLOW_START),
        ("forming", "--np 2", SLOW_MEETING),
        ("running", "--np 2", ""),
    ],
    ids=["too-few-workers", "ranks-still-starting", "forming", "running"],
)
def test_an_interrupt_frees_the_workers_and_stops_run_all(
    lab: Lab, crew: Crew, state: str, options: str, before: str
) -> None:
    lab.write("interrupt.ipynb", [setup(crew), train(options, before), LATER, BUSY])
    lab.run_all()
    PanelView(lab, 1).wait_for_state(state)
    lab.interrupt()
    lab.wait_for_text(1, "JobInterrupted")
    lab.wait_until_idle()
    PanelView(lab, 1).wait_for_state("stopped")
    lab.wait_until_skipped(2)
    assert lab.output(2).inner_text() == ""
    lab.run_cell(3)
    lab.wait_for_text(3, "busy: 0")


@pytest.mark.nightly
def test_an_interrupt_spares_workers_of_clusters_in_the_kernel(lab: Lab) -> None:
    waiting = "print('waiting', flush=True)\ntime.sleep(600)"
    embedded = train("--np 2 --noblock -o job")
    cells = [IN_KERNEL.strip(), train("--np 2"), SAME_WORKERS, embedded, waiting, TRAINS_ON.strip()]
    lab.write("kernel.ipynb", cells)
    lab.run_cell(0)
    lab.run_cell(1)
    PanelView(lab, 1).wait_for_state("running")
    lab.interrupt()
    lab.wait_for_text(1, "its 2 workers are free")
    lab.run_cell(2)
    lab.wait_for_text(2, "True")
    lab.run_cell(3)
    PanelView(lab, 3).wait_for_world(2)
    lab.run_cell(4)
    lab.wait_for_text(4, "waiting")
    lab.interrupt()
    lab.wait_for_text(4, "KeyboardInterrupt")
    lab.run_cell(5)
    lab.wait_for_text(5, "running 2, 0 resets")


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
    lab.screenshot("gone", lab.output(1))
    lab.run_cell(0)
    lab.run_cell(2)
    panel = PanelView(lab, 2)
    panel.wait_for_world(2)
    panel.press_stop()
    panel.wait_for_state("stopped")
    expect(lab.output(2).locator(".nbe-card")).to_have_count(1)


def test_a_saved_notebook_shows_the_final_state_without_javascript(
    lab: Lab, crew: Crew, browser: Browser
) -> None:
    lab.write("saved.ipynb", [setup(crew, steps=100), train("--np 3 -o job"), "print('end')"])
    lab.run_all()
    lab.wait_for_text(2, "end", timeout_s=60)
    panel = PanelView(lab, 1)
    panel.wait_for_state("finished")
    assert panel.rows.count() == 3
    lab.wait_for_text(1, re.compile(r"\b100\b"))
    light, dark = panel.pictures("finished")
    assert light.read_bytes() != dark.read_bytes()
    page, _ = HTMLExporter().from_notebook_node(lab.save())
    assert lab.path is not None
    static = lab.path.with_suffix(".html")
    static.write_text(page)
    context = browser.new_context(java_script_enabled=False)
    try:
        reader = context.new_page()
        reader.goto(static.as_uri())
        expect(reader.locator(".nbe-badge")).to_have_text(re.compile("finished"))
        table = reader.get_by_role("table", name=re.compile("^Ranks"))
        assert table.get_by_role("rowheader").all_inner_texts() == ["0", "1", "2"]
        lab.screenshot("static", reader.locator(".nbe-card"))
    finally:
        context.close()
