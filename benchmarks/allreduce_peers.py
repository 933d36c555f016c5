"""Ranks of benchmarks/allreduce.py: all ways of summing a vector that it compares."""

from __future__ import annotations

import gc
import os
from collections.abc import Callable
from typing import Any

import numpy as np

from benchmarks.meet import Place, meet, meet_over_gloo
from benchmarks.side_by_side import Failed

WIDTH = 128
FLOAT_BYTES = 4


class Peers:
    """Peers that take turns in one process: nbelastic, Gloo, and the memory's limit.

    Each has one float32 vector: in the communicator's memory, or in ordinary memory.
    """

    def __init__(self, rank: int, size: int, backend: str, place: Place) -> None:
        import torch

        self.rank, self.size = rank, size
        self._torch: Any = torch
        self._dist = meet_over_gloo(rank, size, place)
        self._communicator = meet(rank, size, backend, place)
        self._runs: dict[str, Callable[[], object]] = {}
        self._arrays: dict[str, np.ndarray[Any, Any]] = {}

    def prepare(self, nbytes: int) -> None:
        """Allocate vectors of `nbytes` bytes, and free all others."""
        self.forget()
        count, dtype = nbytes // FLOAT_BYTES, self._torch.float32
        own = self._communicator.empty(count, dtype)
        ordinary = self._torch.empty(count, dtype=dtype)
        communicator, dist = self._communicator, self._dist

        def touch() -> None:
            ordinary.add_(0.0)
            # Without it, each repeats its own vector in its cache while it has a processor.
            communicator.barrier()

        self._runs = {
            "ours": lambda: communicator.allreduce(own),
            "ours, any memory": lambda: communicator.allreduce(ordinary),
            "gloo": lambda: dist.all_reduce(ordinary),
            "limit": touch,
        }
        self._arrays = dict.fromkeys(self._runs, ordinary.numpy()) | {"ours": own.numpy()}

    def check(self, peer: str) -> bool:
        """Sum once; return whether the sum is right. Leaves zeros."""
        if peer == "limit":
            return True
        return summed(self._arrays[peer], self._runs[peer], self.rank, self.size)

    def run(self, peer: str, iterations: int) -> None:
        operation = self._runs[peer]
        for _ in range(iterations):
            operation()

    def forget(self) -> None:
        """Free all vectors."""
        self._runs, self._arrays = {}, {}
        gc.collect()

    def close(self) -> None:
        self.forget()
        self._communicator.close()
        self._dist.destroy_process_group()


class Mpich:
    """A rank of MPICH."""

    def __init__(self, rank: int, size: int) -> None:
        import mpi4py

        # One thread calls MPI, so it needs no locks. But only if several threads could call it does
        # a waiting rank yield its processor, which ranks without one of their own need.
        if size > len(os.sched_getaffinity(0)):
            os.environ |= {"MPIR_CVAR_POLLS_BEFORE_YIELD": "1", "MPIR_CVAR_ENABLE_HEAVY_YIELD": "1"}
        else:
            mpi4py.rc.thread_level = "funneled"
        from mpi4py import MPI

        if (MPI.COMM_WORLD.rank, MPI.COMM_WORLD.size) != (rank, size):
            raise Failed("mpiexec is not that of mpi4py's MPI")
        self.rank, self.size = rank, size
        self._mpi: Any = MPI
        self._array = np.empty(0, np.float32)

    def version(self) -> str:
        return str(self._mpi.Get_library_version().splitlines()[0])

    def prepare(self, nbytes: int) -> None:
        self._array = np.empty(nbytes // FLOAT_BYTES, np.float32)

    def check(self, _peer: str) -> bool:
        return summed(self._array, lambda: self.run("", 1), self.rank, self.size)

    def run(self, _peer: str, iterations: int) -> None:
        world, mpi, array = self._mpi.COMM_WORLD, self._mpi, self._array
        for _ in range(iterations):
            world.Allreduce(mpi.IN_PLACE, array, op=mpi.SUM)

    def forget(self) -> None:
        self._array = np.empty(0, np.float32)

    def close(self) -> None:
        self.forget()
        self._mpi.Finalize()


def summed(
    array: np.ndarray[Any, Any], operation: Callable[[], object], rank: int, size: int
) -> bool:
    """Fill `array`, sum it over the ranks; return whether it is the sum. Leaves zeros if it is."""
    view = array.reshape(-1, WIDTH)
    rows = np.arange(len(view), dtype=np.float32)[:, None] % 1021
    columns = np.arange(WIDTH, dtype=np.float32)
    np.add(rows, columns + rank, out=view)
    operation()
    view -= size * rows
    view -= size * columns + size * (size - 1) / 2
    return not array.any()
