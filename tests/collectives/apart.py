"""Ranks in processes of their own, which do what a test sends them.

A world has the shape of :class:`tests.collectives.worlds.World`, so tests that only exchange
functions and tensors with their ranks run in both.
"""

from __future__ import annotations

import itertools
import multiprocessing
import os
import signal
from concurrent.futures import ProcessPoolExecutor
from types import SimpleNamespace

import cloudpickle
import torch

from nbelastic.collectives import Rendezvous, RendezvousServer, connect
from tests.collectives.worlds import BIND, PATIENCE_S

START_S = 120.0  # importing torch in several processes on few and busy cores
_generations = itertools.count(1)
_here = SimpleNamespace()


def _call(pickled):
    return cloudpickle.dumps(cloudpickle.loads(pickled)(_here.communicator))


def _open_store():
    _here.store = RendezvousServer(BIND, b"secret")
    return _here.store.address


def _close_store():
    _here.store.close()


def _make(rendezvous):
    torch.set_num_threads(1)
    _here.communicator = connect(rendezvous)
    return os.getpid()


class _Result:
    """A future of what a rank returns."""

    def __init__(self, future):
        self._future = future
        self.done = future.done
        self.exception = future.exception

    def result(self, timeout=PATIENCE_S):
        return cloudpickle.loads(self._future.result(timeout))


class Crew:
    """Processes, each of which is a rank of one world after the other."""

    def __init__(self, size):
        context = multiprocessing.get_context("spawn")
        self.processes = [ProcessPoolExecutor(1, mp_context=context) for _ in range(size)]

    def __enter__(self):
        return self

    def __exit__(self, *_):
        for process in self.processes:
            process.shutdown()


class World:
    """A generation of the first `size` processes of a crew. As in a job, rank 0 keeps its store."""

    def __init__(self, crew, size, *, backend, connected=True, timeout_s=PATIENCE_S):
        self.size = size
        self._processes = crew.processes[:size]
        store = self._processes[0].submit(_open_store).result(START_S)
        generation = next(_generations)
        made = [
            process.submit(
                _make,
                Rendezvous(
                    job="apart",
                    generation=generation,
                    rank=rank,
                    size=size,
                    store=store,
                    bind=BIND,
                    timeout_s=timeout_s,
                    backend=backend,
                    secret=b"secret",
                ),
            )
            for rank, process in enumerate(self._processes)
        ]
        self._pids = [future.result(START_S) for future in made]
        if connected:
            self.run(lambda c: c.connect() and None)

    def __reduce__(self):
        return SimpleNamespace, (), {"size": self.size}  # what a function on a rank sees of it

    def __enter__(self):
        return self

    def __exit__(self, *_):
        for rank in range(self.size):
            if self._pids[rank] is not None:
                self.do(rank, lambda c: c.close())
        self._processes[0].submit(_close_store).result(PATIENCE_S)

    def start(self, rank, function):
        """Begin `function(communicator)` in the process of `rank`."""
        return _Result(self._processes[rank].submit(_call, cloudpickle.dumps(function)))

    def do(self, rank, function):
        """Do `function(communicator)` in the process of `rank` and return its result."""
        return self.start(rank, function).result()

    def run(self, function):
        """Do `function(communicator)` on all ranks and return their results."""
        results = [self.start(rank, function) for rank in range(self.size)]
        return [result.result() for result in results]

    def stop(self, rank):
        """Stop a process; it is killed in the end."""
        os.kill(self._pids[rank], signal.SIGSTOP)

    def kill(self, rank):
        """Kill a process, stopped or not. The crew is one short from here on."""
        os.kill(self._pids[rank], signal.SIGKILL)
        self._pids[rank] = None
