"""Train a small convolutional network on handwritten digits while ranks and workers die and join.

``make demo`` runs this. The data are scikit-learn's 1,797 scanned digits. First the process of a
rank is killed with SIGKILL, later that of a worker. Each time the others go on, and a replacement
joins when it is ready: soon for a rank, because its worker is still there.
"""

from __future__ import annotations

import os
import signal
import sys
import time
from typing import Any

from distributed import Client, LocalCluster
from sklearn.datasets import load_digits

import nbelastic

TRAINING_SAMPLES = 1440  # with BATCH_SIZE, a multiple of 12: shards of 1, 2, 3 or 4 ranks are even
BATCH_SIZE = 24


def train(epochs: int, pixels: Any, digits: Any) -> dict[str, Any]:
    """Train on images for a number of epochs; runs on every rank."""
    import hashlib

    import torch
    from torch import nn
    from torch.utils.data import DataLoader, TensorDataset

    import nbelastic.torch as hvd

    hvd.init()
    print(f"process {os.getpid()}")
    torch.manual_seed(0)
    images = torch.tensor(pixels / 16.0, dtype=torch.float32).unsqueeze(1)
    labels = torch.tensor(digits)
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


def process_of(job: nbelastic.Job, rank: int) -> int:
    """Return the process of a rank, which prints its id at each start."""
    return int(job.logs(rank).rpartition("process ")[2].split()[0])


def outages(job: nbelastic.Job) -> list[float]:
    """Return for how many seconds the world was short, each time."""
    found, whole, since = [], 0, None
    for event in job.history:
        if event.kind == "lost":
            since = since or event.time
        elif event.kind == "formed":
            whole = max(whole, event.size)
            if since is not None and event.size == whole:
                found.append(event.time - since)
                since = None
    return found


def sizes(job: nbelastic.Job) -> list[int]:
    """Return the size of each generation that has formed."""
    return [event.size for event in job.history if event.kind == "formed"]


def main(epochs: int = 100) -> int:
    """Run the job, kill a rank and a worker in the middle, and report."""
    with (
        LocalCluster(n_workers=4, threads_per_worker=1, dashboard_address=":0") as cluster,
        Client(cluster) as client,
    ):
        processes = client.run(os.getpid)
        images, labels = load_digits(return_X_y=True)
        args = (epochs, images.reshape(-1, 8, 8), labels)
        begin = time.time()
        job = nbelastic.fit(train, cluster=client, args=args, np=4, min_np=2, block=False)
        print(f"job {job.name}: 4 workers, {epochs} epochs of {TRAINING_SAMPLES} digits")
        shown, kills = 0, 0
        while not job.wait(0.05):
            shown = follow(job, shown)
            ranks = job.status.ranks
            if kills < 2 and len(ranks) == 4 and job.status.commits >= (60, 600)[kills]:
                victim = ranks[1].worker
                what = ("rank 1, a process of", "worker")[kills]
                print(f"{job.status.elapsed:7.2f} s  kill -9   {what} {victim}", flush=True)
                os.kill((process_of(job, 1), processes[victim])[kills], signal.SIGKILL)
                kills += 1
        follow(job, shown)
        results = job.results()
    result = results[0]
    first = next(event for event in job.history if event.kind == "formed")
    print(f"{first.size} ranks on a fresh cluster: together {first.time - begin:.1f} s after fit")
    for what, seconds in zip(("rank", "worker"), outages(job), strict=False):
        print(f"a {what} was killed: {seconds:.2f} s with 3 ranks instead of 4")
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
