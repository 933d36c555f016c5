"""Ranks in threads of this process, under the test's control."""

from __future__ import annotations

import contextlib
import dataclasses
import faulthandler
import gc
import itertools
import os
import time
from collections.abc import Callable, Iterable
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

import pytest
import torch

from nbelastic.collectives import Communicator, Rendezvous, RendezvousServer, connect
from nbelastic.collectives.gpu.device import Device
from nbelastic.collectives.nccl.library import NcclLibrary
from nbelastic.collectives.negotiation import NegotiatingCommunicator
from nbelastic.collectives.topology import Topology
from nbelastic.errors import CollectiveError
from nbelastic.native import core, missing
from tests.collectives.fake_device import FakeDevice
from tests.collectives.fake_nccl import COMPILER, NcclDevice, fake_library
from tests.support.own_transport import OwnTransport

Maker = Callable[[Rendezvous], Communicator]

DEVICES: dict[str, Callable[[int], Device | None]] = {
    "cuda_ipc": lambda _rank: FakeDevice(),
    "nccl": lambda _rank: NcclDevice(),
}
"""What returns the device of a rank; tests put other functions in their places."""


def of(backend: str) -> Maker:
    """Return what makes communicators of a backend."""
    return lambda rendezvous: connect(dataclasses.replace(rendezvous, backend=backend))


class Faked(NegotiatingCommunicator):
    """A communicator that negotiates as if ranks had devices, or were on two hosts.

    `device` names that of a rank. Of ranks `apart`, half are elsewhere.
    """

    def __init__(
        self,
        rendezvous: Rendezvous,
        device: str = "",
        library: Callable[[], NcclLibrary] | None = None,
        *,
        apart: bool = False,
    ) -> None:
        super().__init__(rendezvous)
        if apart:
            name = "one" if rendezvous.rank < rendezvous.size // 2 else "other"
            self.host = lambda: name
        if device:
            self.device = lambda: DEVICES[device](rendezvous.rank)
        if library:
            self.library = library
        self._apart = apart

    def _over_gloo(self) -> Any:
        if self._apart:  # two ranks have nothing to gain, but the operations are the same
            return self._over_segments(Topology(((0,), (1,)), ""), None)
        return super()._over_gloo()


def faked(backend: str, *fakes: Any, apart: bool = False) -> Maker:
    """Return what makes such communicators of a backend."""

    def make(rendezvous: Rendezvous) -> Communicator:
        its = dataclasses.replace(rendezvous, backend=backend)
        return connect(its) if its.size == 1 else Faked(its, *fakes, apart=apart)

    return make


# A new kind of communicator is a line here; it must pass these tests as they are.
MAKERS: dict[str, Maker] = {
    "gloo": of("gloo"),
    "shm": of("shm"),
    "auto": of("auto"),
    "hierarchical": faked("auto", apart=True),
    "cuda_ipc": faked("cuda_ipc", "cuda_ipc"),
    "nccl": faked("nccl", "nccl", fake_library),
    "own": OwnTransport,
    "gpu": of("cuda_ipc"),
    "gpu_nccl": of("nccl"),
}

needs_core = pytest.mark.skipif(core is None, reason=f"no part in C++: {missing}")
needs_compiler = pytest.mark.skipif(COMPILER is None, reason="there is no compiler for C")
_NEEDS = {
    "gloo": [],
    "nccl": [needs_core, needs_compiler],
}
# What "auto" is connected to is one of the others, and without a GPU, so are the last two. A
# transport of another package has all operations, and fails as its author likes.
KINDS = [
    pytest.param(kind, marks=_NEEDS.get(kind, [needs_core]))
    for kind in MAKERS
    if kind not in ("auto", "own", "gpu", "gpu_nccl")
]

# Those that differ in what is above them: descriptions on their way or not, coalesced or not.
SOME_KINDS = [kind for kind in KINDS if kind.values[0] in ("gloo", "shm", "cuda_ipc")]

# Longer than anything takes, shorter than TIMEOUT_S: what waits for that long hangs.
PATIENCE_S = 20.0
TIMEOUT_S = 120.0
BIND = "127.0.0.1"

_generations = itertools.count(1)


def terms(rank: int = 0, size: int = 2, store: Any = ("", 0), **changes: Any) -> Rendezvous:
    """Return a rank's rendezvous, of a generation of its own unless the test names one."""
    its = {"job": "test", "generation": next(_generations), "bind": BIND, "timeout_s": TIMEOUT_S}
    return Rendezvous(rank=rank, size=size, store=store, **(its | changes))


def eventually(condition: Callable[[], Any], what: str = "the condition") -> None:
    """Wait until `condition()` holds."""
    deadline = time.monotonic() + PATIENCE_S
    while not condition():
        if time.monotonic() > deadline:
            faulthandler.dump_traceback(all_threads=True)
            raise AssertionError(f"{what} did not come to hold")
        time.sleep(0.001)


def failure(future: Future[Any], within: float = PATIENCE_S) -> str:
    """Return the error of a collective that a rank raised."""
    error = future.exception(within)
    assert isinstance(error, CollectiveError), error
    return str(error)


class World:
    """The communicators of one generation, each with a thread that is its rank's.

    `make` makes one of a rendezvous: what is tested. `store` is the address of an open store.
    """

    def __init__(
        self,
        make: Maker,
        size: int,
        *,
        connected: bool = True,
        store: tuple[str, int] | None = None,
        job: str = "test",
        timeout_s: float = TIMEOUT_S,
    ) -> None:
        self.size = size
        self.generation = next(_generations)
        self._store = RendezvousServer(BIND) if store is None else None
        address = store if self._store is None else self._store.address
        its = {"job": job, "generation": self.generation, "timeout_s": timeout_s}
        self.communicators = [make(terms(rank, size, address, **its)) for rank in range(size)]
        self._threads = [
            ThreadPoolExecutor(1, thread_name_prefix=f"rank-{rank}") for rank in range(size)
        ]
        if connected:
            self.run(lambda communicator: communicator.connect())

    def __enter__(self) -> World:
        return self

    def __exit__(self, *_: object) -> None:
        self.abort("the test is over")
        self.close()
        self.forget()
        if self._store is not None:
            self._store.close()

    def __getitem__(self, rank: int) -> Communicator:
        return self.communicators[rank]

    def start(self, rank: int, function: Callable[[Communicator], Any]) -> Future[Any]:
        """Begin `function(communicator)` in the thread of `rank`.

        A communicator that it returns, as connecting does, takes the place of the former.
        """

        def rank_main() -> Any:
            outcome = function(self.communicators[rank])
            if isinstance(outcome, Communicator):
                self.communicators[rank] = outcome
            return outcome

        return self._threads[rank].submit(rank_main)

    def do(self, rank: int, function: Callable[[Communicator], Any]) -> Any:
        """Do `function(communicator)` in the thread of `rank` and return its result."""
        return self.start(rank, function).result(PATIENCE_S)

    def run(self, function: Callable[[Communicator], Any]) -> list[Any]:
        """Do `function(communicator)` on all ranks and return their results."""
        futures = [self.start(rank, function) for rank in range(self.size)]
        try:
            return [future.result(PATIENCE_S) for future in futures]
        except BaseException:
            self.abort("another rank failed")  # or the others would wait for ever
            raise

    def wait_until_waiting(self, ranks: Iterable[int]) -> None:
        """Wait until each of `ranks` waits for an operation."""
        for rank in ranks:
            eventually(lambda rank=rank: self[rank].waiting, f"rank {rank} waiting")

    def close(self) -> None:
        """Close all communicators, each in its thread."""
        for rank in range(len(self.communicators)):
            self.do(rank, lambda communicator: communicator.close())

    def forget(self) -> None:
        """Drop all communicators without closing them, and end their threads."""
        self.communicators.clear()
        for thread in self._threads:
            thread.shutdown()

    def abort(self, reason: str) -> None:
        """Abort all communicators, from this thread."""
        for communicator in self.communicators:
            communicator.abort(reason)


def noise(rank: int, count: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    """Return numbers whose sum depends on the order in which they are added."""
    generator = torch.Generator().manual_seed(rank)
    return (torch.randn(count, generator=generator) * 10 ** (rank % 3)).to(dtype)


def descriptors() -> int:
    """Count this process's descriptors of segments."""
    gc.collect()  # a segment lives as long as its last user, who may be part of a cycle
    targets = []
    for name in os.listdir("/proc/self/fd"):
        with contextlib.suppress(FileNotFoundError):
            targets.append(os.readlink(f"/proc/self/fd/{name}"))
    return sum(each.startswith("/memfd:nbelastic") for each in targets)
