"""Interfaces of a rank to the driver, other ranks, threads and clocks.

In a job a worker's agent implements them. A test can implement them itself, without Dask, or with
simulated threads, stores and communicators.
"""

from __future__ import annotations

import contextlib
import os
import sys
import threading
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Protocol

from nbelastic.collectives import Rendezvous, RendezvousServer, connect
from nbelastic.collectives.rendezvous.client import unreachable
from nbelastic.elastic.ranks.warmup import form_alone

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence
    from contextlib import AbstractContextManager

    from nbelastic.collectives import Communicator
    from nbelastic.elastic.checkpoint.manager import CheckpointSpec
    from nbelastic.messages import Event, Place, Plan


class Interrupt(Protocol):
    """The way to raise an exception in a rank's thread while it runs the user's code."""

    def reachable(self) -> AbstractContextManager[None]:
        """Let the thread be interrupted within a ``with`` block, and not after it."""

    def request(self, kind: type[BaseException]) -> None:
        """Raise an exception of this type in the thread, as soon as that is safe."""

    def drop(self) -> None:
        """Withdraw the request, because the thread has obeyed by itself."""

    def nudge(self) -> None:
        """Try again to do what is requested, if anything is."""


class NoInterrupt:
    """An interrupt that never raises: the rank obeys at its next call."""

    def reachable(self) -> AbstractContextManager[None]:
        """Change nothing."""
        return contextlib.nullcontext()

    def request(self, kind: type[BaseException]) -> None:
        """Do nothing."""

    def drop(self) -> None:
        """Do nothing."""

    def nudge(self) -> None:
        """Do nothing."""


@dataclass(frozen=True)
class RankRuntime:
    """Functions and types through which a rank waits, and forms generations with other ranks."""

    connect: Callable[[Rendezvous], Communicator] = connect
    # Starts a rendezvous server on an address, for clients that know a secret.
    open_store: Callable[[str, bytes], RendezvousServer] = RendezvousServer
    condition: Callable[[], Any] = threading.Condition
    interrupt: Callable[[], Interrupt] = NoInterrupt  # made in the rank's thread, for it
    # Returns the positions of addresses of stores that do not answer.
    probe: Callable[[Sequence[tuple[str, int]]], list[int]] = lambda _addresses: []
    # Forms a generation of this rank alone, to be faster with others.
    form_alone: Callable[[Rendezvous], None] = lambda _rendezvous: None
    # Called once the user's code has set up, with the bytes that the first step takes, if other
    # ranks wait for it. Then the rank takes the memory of each step.
    on_set_up: Callable[[int], None] = lambda _nbytes: None


DEFAULT_RUNTIME = RankRuntime(probe=unreachable, form_alone=form_alone)
"""Real threads and sockets."""


class DriverPort(Protocol):
    """The way from a rank to the driver of its job."""

    def report(self, event: Event) -> None:
        """Send `event` to the driver, without waiting. Any thread may call it.

        Events of one rank arrive in the order of the calls, or not at all.
        """


OWN_VARIABLES = (
    *("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE"),
    *("OMP_NUM_THREADS", "MKL_NUM_THREADS", "OPENBLAS_NUM_THREADS"),
    "KERAS_BACKEND",
)
"""Environment variables of a rank that nbelastic sets itself."""


DASK_CUDA = "NBELASTIC_DASK_CUDA"
"""Variable of a rank whose worker has loaded dask-cuda: its own process has not."""


def own_gpu_first() -> bool:
    """Return whether visible GPUs are listed as by dask-cuda: all of the host's, its own first.

    Its lists are ascending ones that are rotated. The first worker's list, and lists of UUIDs, look
    like any other. There it counts whether dask-cuda is loaded.
    """
    visible = os.environ.get("CUDA_VISIBLE_DEVICES", "")
    names = [name.strip() for name in visible.split(",") if name.strip()]
    if not names:
        return False
    if DASK_CUDA in os.environ or "dask_cuda" in sys.modules:
        return True
    if not all(name.isdecimal() for name in names):
        return False
    numbers = [int(name) for name in names]
    first = numbers.index(min(numbers))
    return first > 0 and numbers[first:] + numbers[:first] == sorted(numbers)


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
    heeded: tuple[str, ...] = ()  # Horovod's environment variables in the job's options
    pull: tuple[str, ...] = ()  # variables of rank 0 that go back to the kernel
    # Variables that the job adds to those of the rank's worker.
    env: Mapping[str, str] = field(default_factory=dict, repr=False)  # may hold secrets

    def alone(self, store: tuple[str, int], secret: bytes) -> Rendezvous:
        """Return a rendezvous of this rank alone, at its own store."""
        return Rendezvous(
            job=f"{self.job}-{self.start}",
            generation=0,
            rank=0,
            size=1,
            store=store,
            bind=self.bind,
            backend=self.backend,
            secret=secret,
        )

    def rendezvous(self, plan: Plan, secret: bytes) -> Rendezvous:
        """Return the rendezvous of this rank with the other members of a plan."""
        rank = plan.rank_of(self.start)
        assert rank is not None
        return Rendezvous(
            job=self.job,
            generation=plan.generation,
            rank=rank,
            size=len(plan.members),
            store=plan.members[0].store,
            bind=self.bind,
            timeout_s=self.operation_timeout_s,
            backend=self.backend,
            secret=secret,
        )
