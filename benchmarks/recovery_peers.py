"""Peers of benchmarks/recovery.py: jobs of nbelastic, torchrun, torchft."""

from __future__ import annotations

import abc
import contextlib
import os
import random
import signal
import subprocess
import sys
import time
from collections.abc import Collection
from pathlib import Path
from typing import Any

import dask
import psutil
from distributed import Client, LocalCluster

import nbelastic
from benchmarks.meet import free_port
from benchmarks.recovery_ranks import (
    ours,
    ours_accelerate,
    ours_ddp,
    ours_lightning,
    ours_transformers,
)
from benchmarks.side_by_side import ROOT, Failed

DICE = random.Random(1)
RANKS = [sys.executable, "-m", "benchmarks.recovery_ranks"]


class Peer(abc.ABC):
    """Ranks that train; one of them can be killed."""

    def __init__(self, ranks: int, model: str, folder: str) -> None:
        self.ranks, self.model, self.folder = ranks, model, folder
        self.size_after = ranks - 1
        self._stack = contextlib.ExitStack()

    @abc.abstractmethod
    def alive(self) -> None:
        """Raise if the peer has ended, or restart a process that has."""

    @abc.abstractmethod
    def pids(self) -> list[int]:
        """Return the process ids of the ranks."""

    def kill(self) -> tuple[float, list[int]]:
        """Kill one rank; return the time and the remaining processes."""
        pids = self.pids()
        victim = DICE.choice(pids)
        time.sleep(DICE.uniform(0.0, 0.2))  # anywhere in a step
        moment = time.monotonic()
        os.kill(self.target(victim), signal.SIGKILL)
        return moment, [pid for pid in pids if pid != victim]

    def target(self, rank: int) -> int:
        """Return the process that is killed for a rank's."""
        return rank

    def expected(self, _moment: float, others: Collection[int]) -> Collection[int]:
        """Return the processes whose next step ends the outage."""
        return others

    @abc.abstractmethod
    def start(self) -> None:
        """Start the ranks."""

    def __enter__(self) -> Any:
        try:
            self.start()
        except BaseException:
            self._stack.close()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        self._stack.close()

    def _spawn(self, command: list[str], **variables: str) -> subprocess.Popen[bytes]:
        path = os.pathsep.join(filter(None, [str(ROOT), os.environ.get("PYTHONPATH")]))
        environment = os.environ | {"OMP_NUM_THREADS": "1", "PYTHONPATH": path} | variables
        log = self._stack.enter_context((Path(self.folder) / "output.txt").open("ab"))
        process = subprocess.Popen(
            command, env=environment, stdout=log, stderr=log, start_new_session=True
        )
        self._stack.callback(_end, process)
        return process

    def _noted(self) -> list[int]:
        """Return the living processes that have written to their logs."""
        pids = [int(path.stem) for path in Path(self.folder).glob("*.log")]
        return [pid for pid in pids if _lives(pid)]


class Ours(Peer):
    """A job whose ranks are killed; their workers start them anew. One more rank may join."""

    function = staticmethod(ours)
    logs_failures = True

    def start(self) -> None:
        # Otherwise a LocalCluster checks some seconds after a loss, and may close a nanny for good.
        settings = {"distributed.deploy.lost-worker-timeout": "1 hour"}
        self._stack.enter_context(dask.config.set(settings))
        cluster = LocalCluster(
            n_workers=self.ranks, threads_per_worker=1, dashboard_address=":0", silence_logs=50
        )
        self.cluster = self._stack.enter_context(cluster)
        client = self._stack.enter_context(Client(cluster))
        self.job = nbelastic.fit(
            self.function,
            args=[self.folder, self.model],
            cluster=client,
            np=self.ranks,
            min_np=1,
            max_np=self.ranks + 1,
            block=False,
        )
        self._stack.callback(self._stop)

    def pids(self) -> list[int]:
        return self._noted()

    def recoveries(self) -> list[dict[str, float]]:
        """Return, for each recovery so far, the milliseconds after which each phase ended."""
        found = [event.figures for event in self.job.history if event.kind == "phases"]
        counts = ("batches", "samples")
        return [
            {phase: at for phase, at in each.items() if phase not in counts}
            for each in found
            if "restored" in each
        ]

    def alive(self) -> None:
        if self.job.done():
            raise Failed(f"the job has ended: {self.job.exception()}")

    def _stop(self) -> None:
        self.job.cancel()
        self.job.wait(30)


class OursDDP(Ours):
    """The same with torch's DDP, unmodified."""

    function = staticmethod(ours_ddp)


class OursAccelerate(Ours):
    """The same with accelerate."""

    function = staticmethod(ours_accelerate)


class OursLightning(Ours):
    """The same with Lightning, which logs steps only."""

    function = staticmethod(ours_lightning)
    logs_failures = False


class OursTransformers(Ours):
    """The same with Transformers, which logs steps only."""

    function = staticmethod(ours_transformers)
    logs_failures = False


class OursWorker(Ours):
    """The same, but it is a rank's worker that is killed; its nanny restarts it."""

    def target(self, rank: int) -> int:
        return int(psutil.Process(rank).name().removeprefix("rank of "))


class Torchrun(Peer):
    """torchrun: an agent that restarts all ranks when one has died."""

    def start(self) -> None:
        self._agent = self._spawn(
            [
                *(sys.executable, "-m", "torch.distributed.run", "--standalone"),
                *("--nproc-per-node", str(self.ranks), "--max-restarts", "1000"),
                *("--monitor-interval", "0.1", "-m", "benchmarks.recovery_ranks"),
                *("torchrun", self.folder, self.model),
            ]
        )

    def pids(self) -> list[int]:
        return self._noted()

    def expected(self, _moment: float, others: Collection[int]) -> Collection[int]:
        fresh = [pid for pid in self._noted() if pid not in others]
        return fresh if len(fresh) == self.ranks else []

    def alive(self) -> None:
        if self._agent.poll() is not None:
            raise Failed("torchrun has ended:\n" + _end_of(self.folder))


class Torchft(Peer):
    """torchft: a lighthouse, and replicas that are restarted one by one."""

    def start(self) -> None:
        port = free_port()
        self._lighthouse = f"http://127.0.0.1:{port}"
        self._spawn(
            [
                *(str(Path(sys.executable).with_name("torchft_lighthouse")), "--min_replicas", "2"),
                *("--bind", f"127.0.0.1:{port}", "--quorum_tick_ms", "50"),
                *("--join_timeout_ms", "1000", "--heartbeat_timeout_ms", "1000"),
            ]
        )
        self._replicas = [self._replica() for _ in range(self.ranks)]

    def _replica(self) -> subprocess.Popen[bytes]:
        return self._spawn(
            [*RANKS, "torchft", self.folder, self.model],
            TORCHFT_LIGHTHOUSE=self._lighthouse,
        )

    def pids(self) -> list[int]:
        return [each.pid for each in self._replicas]

    def alive(self) -> None:
        for index, replica in enumerate(self._replicas):
            if replica.poll() is not None:
                self._replicas[index] = self._replica()


def _lives(pid: int) -> bool:
    try:
        return psutil.Process(pid).status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


def _end(process: subprocess.Popen[bytes]) -> None:
    children = []
    with contextlib.suppress(psutil.NoSuchProcess):
        children = psutil.Process(process.pid).children(recursive=True)
    for each in [process, *children]:
        with contextlib.suppress(psutil.NoSuchProcess, ProcessLookupError):
            each.kill()
    process.wait()


def _end_of(folder: str) -> str:
    return (Path(folder) / "output.txt").read_text()[-2000:]
