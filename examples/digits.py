"""Train a small convolutional network on handwritten digits while workers die and join.

``make demo`` runs this. The data are scikit-learn's 1,797 scanned digits. One worker's process is
killed with SIGKILL in the middle; its replacement joins the training when it is ready.
"""

from __future__ import annotations

import os
import signal
import sys
import time
from typing import Any

from distributed import Client, LocalCluster

import nbelastic

TRAINING_SAMPLES = 1440  # with BATCH_SIZE, a multiple of 12: shards of 1, 2, 3 or 4 ranks are even
BATCH_SIZE = 24


def train(epochs: int) -> dict[str, Any]:
    """Train for a number of epochs; runs on every rank."""
    import hashlib

    import torch
    from sklearn.datasets import load_digits
    from torch import nn
    from torch.utils.data import DataLoader, TensorDataset

    import nbelastic.torch as hvd

    hvd.init()
    torch.manual_seed(0)
    digits = load_digits()
    images = torch.tensor(digits.images / 16.0, dtype=torch.float32).unsqueeze(1)
    labels = torch.tensor(digits.target)
    order = torch.randperm(len(labels))
    first, rest = order[:TRAINING_SAMPLES], order[TRAINING_SAMPLES:]

    data = TensorDataset(torch.arange(TRAINING_SAMPLES), images[first], labels[first])
    sampler = hvd.elastic.ElasticSampler(data, shuffle=True)
    loader = DataLoader(data, batch_size=BATCH_SIZE, sampler=sampler)

    model = nn.Sequential(
        nn.Conv2d(1, 32, 3, padding=1),
        nn.ReLU(),
        nn.Conv2d(32, 32, 3, padding=1),
        nn.ReLU(),
        nn.MaxPool2d(2),
        nn.Flatten(),
        nn.Linear(512, 64),
        nn.ReLU(),
        nn.Linear(64, 10),
    )
    optimizer = hvd.DistributedOptimizer(
        torch.optim.SGD(model.parameters(), lr=0.02, momentum=0.9),
        named_parameters=model.named_parameters(),
    )
    state = hvd.elastic.TorchState(
        model,
        optimizer,
        sampler=sampler,
        epoch=0,
        counts=torch.zeros(epochs, TRAINING_SAMPLES, dtype=torch.int32),
    )

    @hvd.elastic.run
    def loop(state: Any) -> None:
        for state.epoch in range(state.epoch, epochs):
            for batch, (indices, x, y) in enumerate(loader):
                optimizer.zero_grad()
                nn.functional.cross_entropy(model(x), y).backward()
                optimizer.step()
                state.sampler.record_batch(batch, BATCH_SIZE)
                state.counts[state.epoch][hvd.allgather(indices)] += 1  # counts of all ranks
                state.commit()
            state.sampler.set_epoch(state.epoch + 1)

    loop(state)
    model.eval()
    with torch.no_grad():
        right = (model(images[rest]).argmax(1) == labels[rest]).float().mean().item()
    weights = torch.cat([p.detach().flatten() for p in model.parameters()])
    return {
        "accuracy": right,
        "repeated": int((state.counts - 1).clamp(min=0).sum()),
        "lost": int((1 - state.counts).clamp(min=0).sum()),
        "weights": hashlib.sha256(weights.numpy().tobytes()).hexdigest(),
    }


def follow(job: nbelastic.Job, shown: int) -> int:
    """Print what has happened since the last call."""
    for event in job.history[shown:]:
        seconds = event.time - (time.time() - job.status.elapsed)
        who = "" if event.rank is None else f" rank {event.rank}"
        print(f"{seconds:7.2f} s  {event.kind:9}{who:8} {event.detail}", flush=True)
        shown += 1
    return shown


def sizes(job: nbelastic.Job) -> list[int]:
    """Return the size of each generation that has formed."""
    return [event.size for event in job.history if event.kind == "formed"]


def main(epochs: int = 100) -> int:
    """Run the job, kill a worker in the middle, and report."""
    with (
        LocalCluster(n_workers=4, threads_per_worker=1, dashboard_address=":0") as cluster,
        Client(cluster) as client,
    ):
        processes = client.run(os.getpid)
        job = nbelastic.fit(train, cluster=client, args=(epochs,), np=4, min_np=2, block=False)
        print(f"job {job.name}: 4 workers, {epochs} epochs of {TRAINING_SAMPLES} digits")
        shown, killed = 0, False
        while not job.wait(0.05):
            shown = follow(job, shown)
            if not killed and job.status.commits >= 60:
                victim = job.status.ranks[1].worker
                print(f"{job.status.elapsed:7.2f} s  kill -9   {victim}", flush=True)
                os.kill(processes[victim], signal.SIGKILL)
                killed = True
        follow(job, shown)
        results = job.results()
    result = results[0]
    equal = len({r["weights"] for r in results}) == 1
    print(
        f"accuracy {result['accuracy']:.2f} · {' → '.join(map(str, sizes(job)))} ranks · "
        f"{job.status.resets} resets · {result['repeated'] + result['lost']} samples repeated or "
        f"lost beyond the batch in flight · parameters "
        f"{'equal' if equal else 'DIFFER'} on all ranks"
    )
    return 0 if equal and result["repeated"] + result["lost"] == 0 else 1


if __name__ == "__main__":
    sys.exit(main(*map(int, sys.argv[1:])))
