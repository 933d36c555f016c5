"""Interfaces of a rank to other ranks, threads and clocks.

In a job a worker's agent implements them. A test can implement them itself, without Dask, or with
simulated threads, stores and communicators.
"""

from __future__ import annotations

import contextlib
import os
import sys
import threading
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

from nbelastic.collectives import Communicator, Rendezvous, RendezvousServer, connect
from nbelastic.collectives.rendezvous.client import unreachable
from nbelastic.elastic.state.state_payload import StatePayload
from nbelastic.elastic.state.transfer import spread
from nbelastic.errors import CollectiveError
from nbelastic.messages import Place

if TYPE_CHECKING:
    from nbelastic.elastic.checkpoint.files import CheckpointSpec


class Interrupt:
    """The way to raise an exception in a rank's thread while it runs the user's code.

    This one never raises: the rank obeys at its next call.
    """

    def reachable(self) -> AbstractContextManager[None]:
        """Let the thread be interrupted within a ``with`` block, and not after it."""
        return contextlib.nullcontext()

    def request(self, kind: type[BaseException]) -> None:
        """Raise an exception of this type in the thread, as soon as that is safe."""

    def drop(self) -> None:
        """Withdraw the request, because the thread has obeyed by itself."""

    def nudge(self) -> None:
        """Try again to do what is requested, if anything is."""


@dataclass(frozen=True)
class RankRuntime:
    """Functions and types through which a rank waits, and forms generations with other ranks."""

    connect: Callable[[Rendezvous], Communicator] = connect
    # Starts a rendezvous server on an address, for clients that know a secret.
    open_store: Callable[[str, bytes], RendezvousServer] = RendezvousServer
    condition: Callable[[], Any] = threading.Condition
    interrupt: Callable[[], Interrupt] = Interrupt  # made in the rank's thread, for it
    # Returns the positions of addresses of stores that do not answer.
    probe: Callable[[Sequence[tuple[str, int]]], list[int]] = lambda _addresses: []
    # Forms a generation of this rank alone, at its own store and with the job's secret.
    form_alone: Callable[[RankSpec, tuple[str, int], bytes], None] = lambda *_: None
    # Called once the user's code has set up, with the bytes that the first step takes, if other
    # ranks wait for it. Then the rank takes the memory of each step.
    on_set_up: Callable[[int], None] = lambda _nbytes: None


# The first generation that a process forms takes ten times as long as the second: modules are
# imported, libraries loaded, threads and sockets made. So a newcomer first forms one of two with
# itself, sums and sends something, and closes it again, before it reports that it is ready.
LIMIT_S = 5.0  # seconds that an operation may take in a generation that a rank forms alone


def form_alone(spec: RankSpec, store: tuple[str, int], secret: bytes) -> None:
    """Form a generation of two ranks in this process, and close it."""
    shares_gpu = spec.backend in ("auto", "cuda_ipc", "nccl")  # as ranks of one process do
    terms = Rendezvous(
        job=f"{spec.job}-{spec.start}",
        generation=1,
        rank=0,
        size=2,
        store=store,
        bind=spec.bind,
        backend="host" if shares_gpu else spec.backend,
        secret=secret,
        timeout_s=LIMIT_S,
    )
    other = threading.Thread(
        target=_take_part, args=(replace(terms, rank=1),), name="nbelastic-warmup"
    )
    other.start()
    _take_part(terms)
    other.join()


def _take_part(terms: Rendezvous) -> None:
    import torch

    with contextlib.suppress(CollectiveError):  # the next generation that is formed has it, too
        communicator = connect(terms)
        try:
            communicator = communicator.connect()
            communicator.allreduce(torch.zeros(1))
            payload = StatePayload(b"", [torch.zeros(1)]) if terms.rank == 0 else None
            spread(communicator, [0, 1], payload)
            communicator.barrier()
        finally:
            communicator.close()


DEFAULT_RUNTIME = RankRuntime(probe=unreachable, form_alone=form_alone)  # real threads and sockets


THREAD_VARIABLES = ("OMP_NUM_THREADS", "MKL_NUM_THREADS", "OPENBLAS_NUM_THREADS")

OWN_VARIABLES = (
    *("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE"),
    *THREAD_VARIABLES,
    "KERAS_BACKEND",
)
"""Environment variables of a rank that nbelastic sets itself."""


DASK_CUDA = "NBELASTIC_DASK_CUDA"
"""Variable of a rank whose worker has loaded dask-cuda: its own process has not."""


def own_gpu_first() -> bool:
    """Return whether visible GPUs are listed by dask-cuda: all of the host's, its own first."""
    by_dask_cuda = DASK_CUDA in os.environ or "dask_cuda" in sys.modules
    return by_dask_cuda and bool(os.environ.get("CUDA_VISIBLE_DEVICES"))


@dataclass(frozen=True, kw_only=True)
class RankSpec:
    """Properties of a rank, known at its start."""

    job: str  # unique on its cluster
    start: int  # number of this start of the function
    place: Place  # the rank and sizes that the driver foresees
    bind: str = ""  # address of the interface that Dask uses; the worker fills it in
    operation_timeout_s: float = 120.0
    heartbeat_timeout_s: float = 10.0  # of silence, after which the rank counts as frozen
    exit_timeout_s: float = 60.0  # of its process, after its function
    backend: str = "auto"  # as in ``fit(backend=...)``
    checkpoint: CheckpointSpec | None = None
    # Of the state that this rank will receive, 0 if not known; None where no rank trains yet.
    state_bytes: int | None = None
    max_np: int | None = None  # that the job was started with; None if there is no limit
    timeline: str | None = None  # file for this rank's part of the job's timeline
    pull: tuple[str, ...] = ()  # variables of rank 0 that go back to the kernel
    # Variables that the job adds to those of the rank's worker.
    env: Mapping[str, str] = field(default_factory=dict, repr=False)  # may hold secrets
