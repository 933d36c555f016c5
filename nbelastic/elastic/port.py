"""The seams around a rank: what carries its messages, and what it is made with.

In a job the agent of the rank's worker is on the other side; a test can stand there itself, with
no Dask at all, or with threads, stores and communicators that it has simulated.
"""

from __future__ import annotations

import threading
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol

from nbelastic.collectives import Rendezvous, connect, open_store
from nbelastic.collectives.reach import unreachable
from nbelastic.elastic.interrupt import Interrupt
from nbelastic.elastic.rehearsal import rehearse

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from nbelastic.collectives import Communicator, Store
    from nbelastic.elastic.checkpoint import CheckpointSpec
    from nbelastic.membership import Event, Place, Plan

__all__ = ["REAL", "Means", "Port", "RankSpec"]


@dataclass(frozen=True)
class Means:
    """What a rank waits with, and meets others with.

    Attributes
    ----------
    connect : callable
        Makes a communicator from a :class:`~nbelastic.collectives.Rendezvous`.
    open_store : callable
        Opens a store that listens on an address, for those who know a secret.
    condition : callable
        Makes what :class:`threading.Condition` is.
    interrupt : callable
        Makes, in the rank's thread, an :class:`~nbelastic.elastic.interrupt.Interrupt` of it.
    probe : callable
        Returns the places of those in a sequence of stores' addresses that do not answer; by
        default it does not look.
    rehearse : callable
        Does once, with nobody else, what a rank does with others; by default nothing.
    settled : callable
        Is called once, when the user's code has set up: what the rank takes from then on it needs
        in each step. By default it does nothing.
    filled : callable
        Is called after it, with addresses and sizes of memory that the rank has had and given back,
        and will take again in its first step. By default it does nothing.
    """

    connect: Callable[[Rendezvous], Communicator] = connect
    open_store: Callable[[str, bytes], Store] = open_store
    condition: Callable[[], Any] = threading.Condition
    interrupt: Callable[[], Any] = Interrupt
    probe: Callable[[Sequence[tuple[str, int]]], list[int]] = lambda _addresses: []
    rehearse: Callable[[Rendezvous], None] = lambda _rendezvous: None
    settled: Callable[[], None] = lambda: None
    filled: Callable[[Sequence[tuple[int, int]]], None] = lambda _blocks: None


REAL = Means(probe=unreachable, rehearse=rehearse)
"""Threads, sockets and all."""


class Port(Protocol):
    """How a rank reports to its job."""

    def report(self, event: Event) -> None:
        """Send `event` to the driver. Any thread may call it; it returns at once.

        What one rank reports arrives in the order of the calls, or not at all.
        """


@dataclass(frozen=True, kw_only=True)
class RankSpec:
    """What a rank is told at its start.

    Attributes
    ----------
    job : str
        Name of the job, unique on its cluster.
    start : int
        Which start of the function this is.
    place : Place
        The rank and sizes that the driver foresees.
    bind : str
        Address of the interface to listen on: the one that Dask uses.
    operation_timeout_s : float
        How long one operation between ranks may take, if nobody aborts it before.
    backend : str
        How tensors are to travel between the ranks.
    checkpoint : CheckpointSpec or None
        Which commits are written to disk, and where; None for none.
    state_bytes : int or None
        How large a state will come from those who train, 0 where that is not known; None where
        nobody trains yet.
    """

    job: str
    start: int
    place: Place
    bind: str
    operation_timeout_s: float = 120.0
    backend: str = "auto"
    checkpoint: CheckpointSpec | None = None
    state_bytes: int | None = None

    def alone(self, store: tuple[str, int], secret: bytes) -> Rendezvous:
        """Return how this rank would meet others at its own store, in a job of its own."""
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
        """Return how this rank meets the other members of a plan, who know the same `secret`."""
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
