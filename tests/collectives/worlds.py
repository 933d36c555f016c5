"""Ranks in threads of this process, under the test's control."""

from __future__ import annotations

import contextlib
import dataclasses
import faulthandler
import gc
import itertools
import os
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from nbelastic.collectives import Communicator, Rendezvous, RendezvousServer, connect
from nbelastic.collectives.negotiation import NegotiatingCommunicator
from nbelastic.collectives.topology import Topology
from nbelastic.native import core, missing
from tests.collectives.fake_device import FakeDevice
from tests.collectives.fake_nccl import COMPILER, LateNcclDevice, NcclDevice, fake_library

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable
    from concurrent.futures import Future

    from nbelastic.collectives.gpu.device import Device
    from nbelastic.collectives.nccl.library import NcclLibrary

    Maker = Callable[[Rendezvous], Communicator]


def of(backend: str) -> Maker:
    """Return what makes communicators of a backend."""
    return lambda rendezvous: connect(dataclasses.replace(rendezvous, backend=backend))


class _Apart(NegotiatingCommunicator):
    """A communicator that negotiates as if half of the ranks were on another host."""

    def __init__(self, rendezvous: Rendezvous) -> None:
        first = rendezvous.rank < rendezvous.size // 2
        super().__init__(rendezvous, host="one" if first else "other")

    def _over_gloo(self) -> Communicator:
        two_alone = Topology(((0,), (1,)), "")  # nothing to gain, but the operations are the same
        return self._over_segments(two_alone, None)


def apart(rendezvous: Rendezvous) -> Communicator:
    """Make a communicator of ranks on two hosts: 1 + 1, 1 + 2, 2 + 2 or 2 + 3 of them."""
    return connect(rendezvous) if rendezvous.size == 1 else _Apart(rendezvous)


class _Faked(NegotiatingCommunicator):
    """A communicator that negotiates as if ranks computed on devices that others can read."""

    def _own_device(self) -> Device | None:
        return fake_device(self.rank)


def fake_device(_rank: int) -> Device | None:
    """Return the device of a rank; tests put others in place of this function."""
    return FakeDevice()


def faked(rendezvous: Rendezvous) -> Communicator:
    """Make a communicator over CUDA IPC, with memory of this process for that of devices."""
    its = dataclasses.replace(rendezvous, backend="cuda_ipc")
    return connect(its) if its.size == 1 else _Faked(its)


class _HostsFaked(_Faked):
    """The same, with half of the ranks on another host."""

    def __init__(self, rendezvous: Rendezvous) -> None:
        first = rendezvous.rank < rendezvous.size // 2
        super().__init__(rendezvous, host="one" if first else "other")

    def _with_devices(self, host: Any, topology: Topology, capabilities: Any) -> Communicator:
        if topology.any_host_shared:
            return super()._with_devices(host, topology, capabilities)
        # Nothing to gain, but the operations are the same.
        chosen, _ = self._over_hosts(host, topology, self._device)
        return chosen


def hosts_faked(rendezvous: Rendezvous) -> Communicator:
    """Make a communicator over CUDA IPC on two hosts, as :func:`apart`, and Gloo between them."""
    its = dataclasses.replace(rendezvous, backend="cuda_ipc")
    return connect(its) if its.size == 1 else _HostsFaked(its)


class _HostsOverNccl(_HostsFaked):
    def _own_library(self) -> NcclLibrary:
        return nccl_library(self.rank)

    def _own_device(self) -> Device | None:
        return hosts_device(self.rank)


def hosts_device(_rank: int) -> Device | None:
    """Return the device of a rank; tests put others in place of this function."""
    return LateNcclDevice()


def hosts_over_nccl(rendezvous: Rendezvous) -> Communicator:
    """Make a communicator over CUDA IPC on two hosts, and a fake of NCCL between them."""
    its = dataclasses.replace(rendezvous, backend="cuda_ipc")
    return connect(its) if its.size == 1 else _HostsOverNccl(its)


class _OverNccl(NegotiatingCommunicator):
    """A communicator that negotiates as if each rank had a GPU, with a library that fakes NCCL."""

    def _own_device(self) -> Device | None:
        return nccl_device(self.rank)

    def _own_library(self) -> NcclLibrary:
        return nccl_library(self.rank)


def nccl_device(_rank: int) -> Device | None:
    """Return the device of a rank; tests put others in place of this function."""
    return NcclDevice()


def nccl_library(_rank: int) -> NcclLibrary:
    """Return the library of a rank; tests put others in place of this function."""
    return fake_library()


def over_nccl(rendezvous: Rendezvous) -> Communicator:
    """Make a communicator over a fake of NCCL."""
    its = dataclasses.replace(rendezvous, backend="nccl")
    return connect(its) if its.size == 1 else _OverNccl(its)


# A new kind of communicator is a line here; it must pass these tests as they are.
MAKERS: dict[str, Maker] = {
    "gloo": of("gloo"),
    "shm": of("shm"),
    "auto": of("auto"),
    "hierarchical": apart,
    "cuda_ipc": faked,
    "nccl": over_nccl,
    "cuda_ipc+gloo": hosts_faked,
    "cuda_ipc+nccl": hosts_over_nccl,
    "gpu": of("cuda_ipc"),
    "gpu_nccl": of("nccl"),
}

needs_core = pytest.mark.skipif(core is None, reason=f"no part in C++: {missing}")
needs_compiler = pytest.mark.skipif(COMPILER is None, reason="there is no compiler for C")
_NEEDS = {
    "gloo": [],
    "nccl": [needs_core, needs_compiler],
    "cuda_ipc+nccl": [needs_core, needs_compiler],
}
# What "auto" is connected to is one of the others, and without a GPU, so are the last two.
KINDS = [
    pytest.param(kind, marks=_NEEDS.get(kind, [needs_core]))
    for kind in MAKERS
    if kind not in ("auto", "gpu", "gpu_nccl")
]

# Those that differ in what is above them: descriptions on their way or not, coalesced or not.
SOME_KINDS = [kind for kind in KINDS if kind.values[0] in ("gloo", "shm", "cuda_ipc+nccl")]

# Longer than anything takes, shorter than TIMEOUT_S: what waits for that long hangs.
PATIENCE_S = 20.0
TIMEOUT_S = 120.0
BIND = "127.0.0.1"

_generations = itertools.count(1)


def eventually(condition: Callable[[], Any], what: str = "the condition") -> None:
    """Wait until `condition()` holds."""
    deadline = time.monotonic() + PATIENCE_S
    while not condition():
        assert time.monotonic() < deadline, f"{what} did not come to hold"
        time.sleep(0.001)


def gone(threads: Callable[[], list[str]], what: str) -> None:
    """Wait until no such threads are left; if some are, say which, and where they stand."""
    deadline = time.monotonic() + PATIENCE_S
    while names := threads():
        if time.monotonic() > deadline:
            faulthandler.dump_traceback(all_threads=True)
            raise AssertionError(f"{what} have not ended: {names}")
        time.sleep(0.001)


class World:
    """The communicators of one generation, each with a thread that is its rank's.

    Parameters
    ----------
    make : callable
        Makes a communicator of a rendezvous: what is tested.
    size : int
        How many ranks.
    connected : bool, default True
        Whether to connect them all at once.
    store : tuple of (str, int), optional
        Address of a store that is open already.
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
        self.communicators = [
            make(
                Rendezvous(
                    job=job,
                    generation=self.generation,
                    rank=rank,
                    size=size,
                    store=address,
                    bind=BIND,
                    timeout_s=timeout_s,
                )
            )
            for rank in range(size)
        ]
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


def descriptors() -> int:
    """Count this process's descriptors of segments and of sockets of its host.

    Connections over TCP are left out: clusters of other tests open and close some.
    """
    gc.collect()  # a segment lives as long as its last user, who may be part of a cycle
    lines = Path("/proc/net/unix").read_text().splitlines()[1:]
    local = {f"socket:[{line.split()[6]}]" for line in lines}
    targets = []
    for name in os.listdir("/proc/self/fd"):
        with contextlib.suppress(FileNotFoundError):
            targets.append(os.readlink(f"/proc/self/fd/{name}"))
    return sum(each in local or each.startswith("/memfd:nbelastic") for each in targets)
