"""A small elastic training that keeps a ledger, and does harm where it is told to.

Everything that a test wants to know comes back with the result: the loss is real, parameters are
compared by hash, and ``counts[epoch][sample]`` says how often each sample went into the model.
"""

from __future__ import annotations

import contextlib
import hashlib
import os
import signal
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any


def once(mark: Path) -> bool:
    """Return True for the first process that asks."""
    try:
        mark.touch(exist_ok=False)
    except FileExistsError:
        return False
    return True


@dataclass(frozen=True)
class Fault:
    """What one rank does to itself, once, after the optimizer's step and before the commit.

    Kinds: ``kill`` (SIGKILL to its worker), ``stop`` and ``stop_rank`` (SIGSTOP), ``raise`` (a
    ``ValueError``), ``hang`` (sleeps for ever in Python code), ``hold`` (computes for some seconds
    and keeps the GIL). Ranks that do the same in the same batch do it together.
    """

    rank: int
    epoch: int
    batch: int
    kind: str = "kill"
    seconds: float = 0.0


@dataclass(frozen=True)
class Workload:
    """A training run."""

    marks: Path  # an empty directory that all workers see; its files say what has been done once
    samples: int = 240  # divisible, so that shards of up to four ranks are even
    batch_size: int = 12
    epochs: int = 3
    seconds: float = 0.02  # least length of a step
    commit_every: int = 1
    slow_start: float = 0.0  # seconds that ranks take to start after the first generation
    rate: float = 0.05  # of SGD; the loss of a single rank is not steady
    adamw: bool = False  # in place of SGD
    # Train until so many ranks were not there in the first generation, and end with that epoch: no
    # test depends on how fast a newcomer starts. Or until there is a file "enough" among the marks.
    until_newcomers: int = 0
    until_told: bool = False
    loader_workers: int = 0
    seed: int = 0  # if not 0, of the weights of all ranks, so that two jobs can be compared
    faults: tuple[Fault, ...] = field(default=())

    def __call__(self) -> dict[str, Any]:
        """Train, on every rank."""
        return _train(self)


def _train(work: Workload) -> dict[str, Any]:
    import torch
    from torch.utils.data import DataLoader, TensorDataset

    import nbelastic.torch as hvd

    hvd.init()
    newcomer = (work.marks / "training").exists()
    if newcomer:
        time.sleep(work.slow_start)
    torch.manual_seed(1)
    inputs = torch.randn(work.samples, 8)
    targets = inputs.sum(1, keepdim=True)
    data = TensorDataset(torch.arange(work.samples), inputs, targets)
    torch.manual_seed(work.seed or os.getpid())  # weights differ: the first sync matters
    model = torch.nn.Sequential(torch.nn.Linear(8, 16), torch.nn.Tanh(), torch.nn.Linear(16, 1))
    inner: torch.optim.Optimizer = torch.optim.SGD(model.parameters(), lr=work.rate, momentum=0.9)
    if work.adamw:
        inner = torch.optim.AdamW(model.parameters(), lr=0.01, weight_decay=0.1)
    optimizer = hvd.DistributedOptimizer(inner, named_parameters=model.named_parameters())
    sampler = hvd.elastic.ElasticSampler(data, shuffle=True)
    loader = DataLoader(
        data, batch_size=work.batch_size, sampler=sampler, num_workers=work.loader_workers
    )
    state = hvd.elastic.TorchState(
        model,
        optimizer,
        sampler=sampler,
        epoch=0,
        batch=0,
        steps=0,
        losses=[],
        counts=torch.zeros(work.epochs, work.samples, dtype=torch.int32),
    )
    times: list[tuple[float, int]] = []
    begun: list[int] = []
    resets: list[int] = []
    state.register_reset_callbacks([lambda: resets.append(hvd.size())])

    @hvd.elastic.run
    def loop(state: Any) -> None:
        for state.epoch in range(state.epoch, work.epochs):
            for index, (ids, x, y) in enumerate(loader):
                began = time.monotonic()
                begun.append(state.steps)
                optimizer.zero_grad()
                loss = torch.nn.functional.mse_loss(model(x), y)
                loss.backward()
                optimizer.step()
                state.sampler.record_batch(index, work.batch_size)
                state.counts[state.epoch][hvd.allgather(ids)] += 1
                state.losses.append(float(hvd.allreduce(loss.detach())))
                state.steps += 1
                state.batch = index
                (work.marks / "training").touch()
                _do_harm(work, state, hvd.rank())
                if state.steps % work.commit_every == 0:
                    state.commit()
                else:
                    state.check_host_updates()
                times.append((time.monotonic(), hvd.size()))
                time.sleep(max(0.0, work.seconds - (time.monotonic() - began)))
            state.sampler.set_epoch(state.epoch + 1)
            newcomers = int(hvd.allreduce(torch.tensor(int(newcomer)), op=hvd.Sum))
            told = work.until_told and (work.marks / "enough").exists()
            told = bool(hvd.allreduce(torch.tensor(int(told)), op=hvd.Sum))
            if told or 0 < work.until_newcomers <= newcomers:
                state.counts[state.epoch + 1 :] = 1
                break

    try:
        loop(state)
    finally:
        (work.marks / f"cleaned-{os.getpid()}").touch()
    weights = torch.cat([p.detach().flatten() for p in model.parameters()])
    moments = [v for s in inner.state.values() for v in s.values() if torch.is_tensor(v)]
    moments_flat = torch.cat([m.flatten().float() for m in moments])
    return {
        "pid": os.getpid(),
        "rank": hvd.rank(),
        "size": hvd.size(),
        "newcomer": newcomer,
        "steps": state.steps,
        "losses": state.losses,
        "counts": state.counts,
        "begun": begun,
        "resets": resets,
        "times": times,
        "weights": hashlib.sha256(weights.numpy().tobytes()).hexdigest(),
        "moments": hashlib.sha256(moments_flat.numpy().tobytes()).hexdigest(),
    }


def _do_harm(work: Workload, state: Any, rank: int) -> None:
    for fault in work.faults:
        where = (fault.rank, fault.epoch, fault.batch)
        mark = f"fault-{fault.kind}-{fault.rank}"
        if where != (rank, state.epoch, state.batch) or not once(work.marks / mark):
            continue
        if fault.kind == "kill":
            for process in _gather(work, fault):
                with contextlib.suppress(ProcessLookupError):
                    os.kill(process, signal.SIGKILL)
            time.sleep(60)
        elif fault.kind in ("stop", "stop_rank"):
            (work.marks / "stopped").touch()
            if fault.kind == "stop":
                os.kill(worker_process(), signal.SIGSTOP)
            os.kill(os.getpid(), signal.SIGSTOP)
        elif fault.kind == "raise":
            raise ValueError(f"rank {rank} was told to fail")
        elif fault.kind == "hang":
            while True:
                time.sleep(0.1)
        else:
            interval = sys.getswitchinterval()
            sys.setswitchinterval(1e6)  # nobody asks for the GIL before that
            end = time.monotonic() + fault.seconds
            while time.monotonic() < end:
                pass
            sys.setswitchinterval(interval)


def _gather(work: Workload, fault: Fault) -> list[int]:
    """Wait until all are there that are killed at once; return their workers' processes.

    Each would survive hearing of another's end in time. Its own is the last: else it could be gone
    while another is still in a collective.
    """
    own, processes = worker_process(), []
    (work.marks / f"killed-{fault.rank}").write_text(f"{own}\n")
    for other in work.faults:
        if (other.epoch, other.batch, other.kind) == (fault.epoch, fault.batch, fault.kind):
            file = work.marks / f"killed-{other.rank}"
            while not (file.exists() and file.read_text().endswith("\n")):
                time.sleep(0.001)
            processes.append(int(file.read_text()))
    return sorted(processes, key=lambda process: process == own)


def worker_process() -> int:
    """Return the process id of this rank's worker, which the rank's process is named by."""
    import psutil

    return int(psutil.Process().name().removeprefix("rank of "))


def step_by_step(over: Callable[[Any], object], **values: Any) -> Any:
    """Commit after each step until `over` is true of the state; return the state."""
    import nbelastic.torch as hvd

    @hvd.elastic.run
    def loop(state: Any) -> Any:
        while not over(state):
            hvd.barrier()
            state.step += 1
            state.commit()
        return state

    return loop(hvd.elastic.ObjectState(step=0, **values))


def check(results: list[dict[str, Any]], work: Workload) -> None:
    """Assert what must hold at the end of every run, whatever happened on the way."""
    assert len({result["weights"] for result in results}) == 1, "parameters differ between ranks"
    assert len({result["moments"] for result in results}) == 1, "optimizer states differ"
    counts = results[0]["counts"]
    assert (counts == 1).all(), (
        f"samples repeated: {int((counts > 1).sum())}, lost: {int((counts < 1).sum())}"
    )
    losses = results[0]["losses"]
    assert len(losses) == results[0]["steps"]
    assert losses[-1] < losses[0]


def check_nothing_redone(results: list[dict[str, Any]]) -> None:
    """Assert that no rank that is left has begun a step twice."""
    for result in results:
        steps = result["begun"]
        assert steps == sorted(set(steps)), "steps were done again"
