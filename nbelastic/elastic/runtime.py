"""Interfaces of a rank to the driver, other ranks, threads and clocks.

In a job a worker's agent implements them. A test can implement them itself, without Dask, or with
simulated threads, stores and communicators.
"""

from __future__ import annotations

import contextlib
import threading
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Protocol

from nbelastic.collectives import Rendezvous, RendezvousServer, connect
from nbelastic.collectives.rendezvous.client import unreachable
from nbelastic.elastic.warmup import form_alone

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence
    from contextlib import AbstractContextManager

    from nbelastic.collectives import Communicator
    from nbelastic.elastic.checkpoint.manager import CheckpointSpec
    from nbelastic.membership import Event, Place, Plan


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
    """Functions and types through which a rank waits, and forms generations with other ranks.

    Attributes
    ----------
    connect : callable
        Makes a communicator from a :class:`~nbelastic.collectives.Rendezvous`.
    open_store : callable
        Starts a rendezvous server on an address, for clients that know a secret.
    condition : callable
        Makes a :class:`threading.Condition` or its like.
    interrupt : callable
        Makes, in the rank's thread, an :class:`Interrupt` of it. By default one that never raises.
    probe : callable
        Returns the positions of those addresses of stores that do not answer. By default none.
    form_alone : callable
        Forms a generation of this rank alone, to be faster with others. By default does nothing.
    on_set_up : callable
        Called once, when the user's code has set up. From then on the rank takes memory that it
        needs in each step. By default does nothing.
    """

    connect: Callable[[Rendezvous], Communicator] = connect
    open_store: Callable[[str, bytes], RendezvousServer] = RendezvousServer
    condition: Callable[[], Any] = threading.Condition
    interrupt: Callable[[], Interrupt] = NoInterrupt
    probe: Callable[[Sequence[tuple[str, int]]], list[int]] = lambda _addresses: []
    form_alone: Callable[[Rendezvous], None] = lambda _rendezvous: None
    on_set_up: Callable[[], None] = lambda: None


DEFAULT_RUNTIME = RankRuntime(probe=unreachable, form_alone=form_alone)
"""Real threads and sockets."""


class DriverPort(Protocol):
    """The way from a rank to the driver of its job."""

    def report(self, event: Event) -> None:
        """Send `event` to the driver. Any thread may call it; it returns at once.

        Events of one rank arrive in the order of the calls, or not at all.
        """


OWN_VARIABLES = (
    *("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE"),
    *("OMP_NUM_THREADS", "MKL_NUM_THREADS", "OPENBLAS_NUM_THREADS"),
    "KERAS_BACKEND",
)
"""Environment variables of a rank that nbelastic sets itself."""


@dataclass(frozen=True, kw_only=True)
class RankSpec:
    """Properties of a rank that are known when it starts.

    Attributes
    ----------
    job : str
        Name of the job, unique on its cluster.
    start : int
        Number of this start of the function.
    place : Place
        The rank and sizes that the driver foresees.
    bind : str
        Address of the interface to listen on: the one that Dask uses. The worker fills it in.
    operation_timeout_s : float
        How long one operation between ranks may take.
    heartbeat_timeout_s : float
        Seconds of silence after which the rank counts as frozen.
    backend : str
        Transport of tensors between ranks, as in ``fit(backend=...)``.
    checkpoint : CheckpointSpec or None
        The commits to write to disk, and where; None for none.
    state_bytes : int or None
        Size of the state that this rank will receive, 0 if it is not known; None where no rank
        trains yet.
    max_np : int or None
        Largest number of ranks that the job was started with; None if there is no limit.
    timeline : str or None
        File for this rank's part of the job's timeline; None for none.
    heeded : tuple of str
        Horovod's environment variables that the job's options come from.
    env : mapping of str to str
        Variables that the job adds to those of the rank's worker.
    """

    job: str
    start: int
    place: Place
    bind: str = ""
    operation_timeout_s: float = 120.0
    heartbeat_timeout_s: float = 10.0
    backend: str = "auto"
    checkpoint: CheckpointSpec | None = None
    state_bytes: int | None = None
    max_np: int | None = None
    timeline: str | None = None
    heeded: tuple[str, ...] = ()
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
