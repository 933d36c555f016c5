"""What ``elastic.fit`` of Keras costs: a step, and a killed worker. Torch back end.

In a job of 2 ranks (each a worker of its own) a model of 1 M parameters is trained in turns: by
Keras' ``fit`` and by a loop of PyTorch, each rank for itself, and by ``elastic.fit`` and a
distributed loop with commits, over shared memory. Prints milliseconds from batch to batch, and what
Keras adds beyond what the loop does. Then workers of a job of 3 ranks are killed one by one; prints
the time from the kill to the next batch that the others finish, less a batch. For comparison a
process with Keras' ``BackupAndRestore`` (each epoch) is killed and started again: the time until it
is where it was. Exits with 1 if a target is missed.
"""

from __future__ import annotations

import argparse
import contextlib
import functools
import importlib.util
import itertools
import os
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from benchmarks.command import options_of, run
from benchmarks.figures import Target, quartiles, table

os.environ.setdefault("KERAS_BACKEND", "torch")

OUTAGE_MS, SHARE = 100.0, 0.03
WIDTHS, CLASSES, BATCH = (256, 512, 768, 512), 100, 64
WAYS = ["fit", "elastic.fit", "loop", "distributed loop"]
ROOT = Path(__file__).parents[1]


def main() -> int:
    parser = options_of("keras", __doc__, rounds=8, budget=60.0)
    parser.set_defaults(ranks=[2])
    parser.add_argument("--batches", type=int, default=120, help="of a sample (120)")
    parser.add_argument("--kills", type=int, default=4, help="of workers, one by one (4)")
    options = parser.parse_args()
    if importlib.util.find_spec("keras") is None:
        print("this benchmark needs Keras: pip install 'nbelastic[keras]'", file=sys.stderr)
        return 2
    if options.quick:
        options.rounds, options.batches, options.kills = 2, 12, 1
    return run(options.ranks, options.json, functools.partial(measure, options), show, aims)


def measure(options: argparse.Namespace, ranks: int) -> dict[str, Any]:
    """Return milliseconds by way and round, and those of each outage."""
    import nbelastic

    with cluster(ranks) as client:
        call = functools.partial(train_by_turns, options.rounds, options.batches)
        rounds = nbelastic.fit(call, cluster=client, np=ranks).results()[0]
    print("steps are measured", flush=True)
    with cluster(3) as client, tempfile.TemporaryDirectory() as folder:
        outages = kill_workers(client, folder, options.kills)
    print(f"{options.kills} workers were killed", flush=True)
    restarts = [restart() for _ in range(1 if options.quick else 2)]
    return {"rounds": rounds, "outages": outages, "restarts": restarts}


@contextlib.contextmanager
def cluster(workers: int) -> Iterator[Any]:
    from distributed import Client, LocalCluster

    options: dict[str, Any] = {"n_workers": workers, "threads_per_worker": 1}
    with LocalCluster(**options, dashboard_address=":0") as made, Client(made) as client:
        yield client


# -- steps ---------------------------------------------------------------------------------------


def data(batches: int) -> tuple[Any, Any]:
    import numpy as np

    dice = np.random.default_rng(0)
    count = batches * BATCH
    x = dice.normal(size=(count, WIDTHS[0])).astype("float32")
    return x, dice.integers(0, CLASSES, count)


def keras_model(optimizer: Any) -> Any:
    import keras

    hidden = [keras.layers.Dense(width, activation="relu") for width in WIDTHS[1:]]
    layers = [keras.layers.Input((WIDTHS[0],)), *hidden, keras.layers.Dense(CLASSES)]
    model = keras.Sequential(layers)
    loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    model.compile(optimizer, loss=loss, metrics=["accuracy"])
    return model


def train_by_turns(rounds: int, batches: int) -> list[dict[str, float]]:
    """Train by all ways in turns; return the milliseconds from batch to batch, on each rank."""
    import keras
    import torch

    import nbelastic.keras as hvd
    import nbelastic.torch as torch_hvd

    hvd.init()
    keras.utils.set_random_seed(0)  # ranks that train alone do the same
    size = hvd.size()
    x, y = data(batches * size)
    inputs, labels = torch.from_numpy(x), torch.from_numpy(y)
    moments: list[float] = []

    class Clock(keras.callbacks.Callback):
        def on_train_batch_begin(self, batch: int, logs: Any = None) -> None:
            moments.append(time.perf_counter())

    alone = keras_model(keras.optimizers.SGD(0.01, momentum=0.9))
    together = keras_model(hvd.DistributedOptimizer(keras.optimizers.SGD(0.01, momentum=0.9)))
    state = hvd.elastic.KerasState(together)

    def network() -> Any:
        layers: list[Any] = []
        for before, after in itertools.pairwise(WIDTHS):
            layers += [torch.nn.Linear(before, after), torch.nn.ReLU()]
        return torch.nn.Sequential(*layers, torch.nn.Linear(WIDTHS[-1], CLASSES))

    def loop(model: Any, optimizer: Any, commit: Callable[[], None]) -> None:
        for batch in range(batches):
            moments.append(time.perf_counter())
            part = slice(batch * BATCH, (batch + 1) * BATCH)
            optimizer.zero_grad()
            loss = torch.nn.functional.cross_entropy(model(inputs[part]), labels[part])
            loss.backward()
            optimizer.step()
            commit()

    nets = [network(), network()]
    steps = [torch.optim.SGD(net.parameters(), 0.01, momentum=0.9) for net in nets]
    steps[1] = torch_hvd.DistributedOptimizer(steps[1])
    torch_state = torch_hvd.elastic.TorchState(nets[1], steps[1])

    @torch_hvd.elastic.run
    def distributed_loop(state: Any) -> None:
        loop(nets[1], steps[1], state.commit)

    def fit() -> None:
        rows = hvd.ElasticDataset(x[: batches * BATCH], y[: batches * BATCH], batch_size=BATCH)
        rows.sampler.install(rows.sampler.progress(), 0, 1)  # all samples to one rank
        alone.fit(rows, callbacks=[Clock()], verbose=0, shuffle=False)

    def elastic_fit() -> None:
        hvd.elastic.fit(state, x, y, batch_size=BATCH, callbacks=[Clock()], verbose=0)

    calls = {
        "fit": fit,
        "elastic.fit": elastic_fit,
        "loop": lambda: loop(nets[0], steps[0], lambda: None),
        "distributed loop": lambda: distributed_loop(torch_state),
    }
    found = []
    for _ in range(rounds + 1):  # the first one warms up
        took = {}
        for way, call in calls.items():
            hvd.barrier()
            moments.clear()
            call()
            gaps = [after - before for before, after in itertools.pairwise(moments)]
            took[way] = 1e3 * statistics.median(gaps)
        found.append(took)
    return found[1:]


# -- killed workers ------------------------------------------------------------------------------


def train_and_log(folder: str) -> None:
    """Train until there is a file that says it is enough; log the end of each batch."""
    import keras

    import nbelastic.keras as hvd

    hvd.init()
    x, y = data(60)
    log = os.open(Path(folder) / f"{os.getpid()}.log", os.O_CREAT | os.O_APPEND | os.O_WRONLY)

    class Log(keras.callbacks.Callback):
        def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
            os.write(log, f"{time.monotonic():.6f} {hvd.size()}\n".encode())
            self.model.stop_training = (Path(folder) / "enough").exists()

    model = keras_model(hvd.DistributedOptimizer(keras.optimizers.SGD(0.01, momentum=0.9)))
    state = hvd.elastic.KerasState(model)
    options = {"epochs": 10**6, "batch_size": BATCH, "callbacks": [Log()], "verbose": 0}
    hvd.elastic.fit(state, x, y, **options)


def kill_workers(client: Any, folder: str, kills: int) -> list[float]:
    """Kill workers one by one; return milliseconds to the next batch, less a batch."""
    import nbelastic

    call = functools.partial(train_and_log, folder)
    job = nbelastic.fit(call, cluster=client, np=3, min_np=1, block=False)
    found = []
    for _ in range(kills):
        until(lambda: len(lines(folder, since=time.monotonic() - 0.5, size=3)) > 20, job)
        times = lines(folder, since=time.monotonic() - 0.5, size=3)
        by_rank = sorted(times)
        ordinary = statistics.median(
            after - before for before, after in zip(by_rank[:-3], by_rank[3:], strict=True)
        )
        pids = {int(path.stem) for path in Path(folder).glob("*.log") if alive(int(path.stem))}
        victim = max(pids)
        moment = time.monotonic()
        os.kill(victim, signal.SIGKILL)
        until(lambda moment=moment: lines(folder, since=moment, size=2), job)
        after = min(lines(folder, since=moment, size=2))
        found.append(1e3 * (after - moment - ordinary))
    (Path(folder) / "enough").touch()
    job.results()
    return found


def lines(folder: str, since: float, size: int) -> list[float]:
    """Return the moments after `since` at which a rank of so many has finished a batch."""
    found = []
    for path in Path(folder).glob("*.log"):
        for line in path.read_text().splitlines()[-400:]:
            when, ranks = line.split()
            if float(when) > since and int(ranks) == size:
                found.append(float(when))
    return found


def alive(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    return Path(f"/proc/{pid}/stat").read_text().split(")")[1].split()[0] != "Z"


def until(condition: Callable[[], Any], job: Any = None, timeout: float = 120.0) -> None:
    deadline = time.monotonic() + timeout
    while not condition():
        if (job is not None and job.done()) or time.monotonic() > deadline:
            raise RuntimeError("waited in vain" if job is None else f"waited in vain: {job}")
        time.sleep(0.002)


# -- BackupAndRestore ----------------------------------------------------------------------------

RESTARTED = """
import sys, time
from pathlib import Path
import keras
from benchmarks.keras import BATCH, data, keras_model
folder = Path(sys.argv[1])
x, y = data(60)
class Log(keras.callbacks.Callback):
    def on_epoch_begin(self, epoch, logs=None):
        self.epoch = epoch
    def on_train_batch_end(self, batch, logs=None):
        with open(folder / "log", "a") as out:
            print(time.monotonic(), self.epoch * 60 + batch, file=out)
model = keras_model(keras.optimizers.SGD(0.01, momentum=0.9))
keep = keras.callbacks.BackupAndRestore(folder / "backup")
model.fit(x, y, epochs=10**6, batch_size=BATCH, verbose=0, callbacks=[keep, Log()])
"""


def restart() -> float:
    """Kill a process in the middle of an epoch, and start it again; return milliseconds."""
    with tempfile.TemporaryDirectory() as folder:
        log = Path(folder) / "log"

        def last() -> tuple[float, int]:
            text = log.read_text() if log.exists() else ""
            rows = [line.split() for line in text.splitlines() if line.count(" ") == 1]
            return (float(rows[-1][0]), int(rows[-1][1])) if rows else (0.0, -1)

        def start() -> subprocess.Popen[bytes]:
            command = [sys.executable, "-c", RESTARTED, folder]
            return subprocess.Popen(command, cwd=ROOT, env={**os.environ, "PYTHONPATH": str(ROOT)})

        process = start()
        try:
            until(lambda: last()[1] >= 150)  # the middle of the third epoch
            moment, (_, reached) = time.monotonic(), last()
            process.kill()
            process.wait()
            process = start()
            until(lambda: last()[0] > moment and last()[1] > reached)
            return 1e3 * (last()[0] - moment)
        finally:
            process.kill()
            process.wait()


# -- results -------------------------------------------------------------------------------------


def beyond(rounds: list[dict[str, float]]) -> float:
    """Return what ``elastic.fit`` adds beyond what the loop does, as a share of ``fit``."""
    return statistics.median(
        (each["elastic.fit"] - each["fit"] - each["distributed loop"] + each["loop"]) / each["fit"]
        for each in rounds
    )


def show(ranks: int, world: dict[str, Any]) -> None:
    rounds = world["rounds"]
    print(f"\n{ranks} ranks, milliseconds from batch to batch: median (quartiles) over rounds")
    print(table(WAYS, [[quartiles([each[way] for each in rounds]).show(2) for way in WAYS]]))
    print("\nMilliseconds from a kill to the next batch, less a batch: median (quartiles), worst")
    print(quartiles(world["outages"]).show(1), f"{max(world['outages']):.0f}")
    print("\nMilliseconds from a kill until BackupAndRestore is where it was")
    print(", ".join(f"{each:.0f}" for each in world["restarts"]), flush=True)


def aims(ranks: int, world: dict[str, Any]) -> list[Target]:
    outage = quartiles(world["outages"]).median
    return [
        Target(f"{ranks} ranks: elastic.fit beyond a loop", beyond(world["rounds"]), SHARE, False),
        Target("3 ranks: from a kill to the next batch, ms", outage, OUTAGE_MS, False),
    ]


if __name__ == "__main__":
    sys.exit(main())
