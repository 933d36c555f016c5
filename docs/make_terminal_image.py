"""Record the live view of a real job as an SVG: ``python docs/make_terminal_image.py``.

Four ranks train on this machine, one of them is killed, and its worker comes back. Needs rich.
"""

from __future__ import annotations

import os
import re
import signal
import time
from pathlib import Path
from typing import Any

from rich._export_format import CONSOLE_SVG_FORMAT
from rich.console import Console

import nbelastic
from nbelastic.cli.hosts.cluster import HostCluster
from nbelastic.cli.live import frame
from nbelastic.driver import set_display
from nbelastic.render import JobSnapshot

PLACE = Path(__file__).parent / "images" / "terminal.svg"
TITLE = "dask elastic run -H alpha:2,beta:2 --min-np 2 python train.py"
WIDTH = 100
FORMAT = re.sub(r"@font-face \{\{.*?\}\}\s*", "", CONSOLE_SVG_FORMAT, flags=re.DOTALL)
"""rich's, without fonts from the network."""


def train() -> None:
    """Train in epochs of 40 steps until the job is stopped."""
    import torch

    import nbelastic.torch as hvd

    hvd.init()
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(20, 64), torch.nn.Tanh(), torch.nn.Linear(64, 1))
    optimizer = hvd.DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=0.05))
    data = torch.utils.data.TensorDataset(torch.randn(4096, 20))
    sampler = hvd.elastic.ElasticSampler(data)
    state = hvd.elastic.TorchState(model, optimizer, sampler=sampler, epoch=0)
    state.set_total(epoch=40)

    @hvd.elastic.run
    def loop(state: Any) -> None:
        loader = torch.utils.data.DataLoader(data, batch_size=32, sampler=sampler)
        for state.epoch in range(state.epoch, 40):
            for index, (x,) in enumerate(loader):
                optimizer.zero_grad()
                loss = torch.nn.functional.mse_loss(model(x), x.sin().sum(1, keepdim=True))
                loss.backward()
                optimizer.step()
                sampler.record_batch(index, 32)
                time.sleep(0.02)
                state.commit()
            nbelastic.report(loss=loss.item())
            if hvd.rank() == 0:
                print(f"epoch {state.epoch:2d}  loss {loss.item():.4f}")
            sampler.set_epoch(state.epoch + 1)

    loop(state)


def wait(condition: Any) -> None:
    """Wait for a condition, at most ten minutes."""
    deadline = time.monotonic() + 600
    while not condition():
        if time.monotonic() > deadline:
            raise TimeoutError
        time.sleep(0.1)


def main() -> None:
    """Run the job, and write the image."""
    set_display(None)
    hosts = {"localhost": 2, "127.0.0.1": 2}
    with HostCluster(lambda: hosts, loopback=True) as cluster:
        job = nbelastic.fit(train, cluster=cluster, min_np=2, max_np=4, name="train", block=False)
        wait(lambda: job.status.size == 4 and job.status.commits >= 400)
        nanny = next(iter(cluster.workers.values()))
        os.kill(nanny.pid, signal.SIGKILL)
        wait(lambda: sum(event.kind == "joined" for event in job.history) == 5)
        time.sleep(3)
        snapshot, printed = JobSnapshot.of(job), job.logs(0).splitlines()[-4:]
        job.cancel()
        job.wait(30)
    console = Console(record=True, width=WIDTH, file=open(os.devnull, "w"), force_terminal=True)  # noqa: SIM115
    for line in printed:
        console.print(line, highlight=False)
    for row in frame(snapshot, WIDTH, 16):
        console.print(row)
    text = console.export_svg(title=TITLE, code_format=FORMAT, unique_id="nbelastic-terminal")
    text = text.replace("localhost:", "alpha:").replace("127.0.0.1:", "beta:")
    PLACE.write_text(text, encoding="utf-8")


if __name__ == "__main__":
    main()
