"""What the scheduler plugin remembers: workers that can host a rank, and open jobs."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from distributed.comm.addressing import get_address_host
from distributed.core import Status

from .archive import Archive

if TYPE_CHECKING:
    from distributed.scheduler import WorkerState

    from nbelastic.membership import Machine

    from .conductor import Conductor
    from .look import Process, Suspicion

__all__ = ["RANK_KEY", "Host", "JobRecord", "fits"]

RANK_KEY = "nbelastic-rank-"
"""How the keys of ranks' tasks begin."""


@dataclass
class Host:
    """A worker with an agent.

    Attributes
    ----------
    slot : dict
        Its slot, as the machine knows it: id, worker, name, host.
    versions : dict of str to str
        What it runs.
    process : Process
        How others on its host recognize its process.
    holder : tuple of (str, int) or None
        The job and start that its slot is given to.
    beats : bool
        Whether it has sent heartbeats since its slot was given to that.
    silence : float
        Seconds since it last gave a sign of life while a rank has its slot, in time in which the
        scheduler listened.
    suspicion : Suspicion or None
        What has been seen of its process since it fell silent.
    asked : set of tuple
        Who has been asked what they see, and has not answered.
    last_beats : dict of (str, int) to list
        Its last heartbeat, by job and start.
    leaving : bool
        Whether it was asked to leave.
    """

    slot: dict[str, str]
    versions: dict[str, str]
    process: Process
    holder: tuple[str, int] | None = None
    beats: bool = False
    silence: float = 0.0
    suspicion: Suspicion | None = None
    asked: set[tuple[str, bool]] = field(default_factory=set)
    last_beats: dict[tuple[str, int], list[Any]] = field(default_factory=dict)
    leaving: bool = False


@dataclass
class JobRecord:
    """An open job.

    Attributes
    ----------
    client : str or None
        Id of the Dask client that drives it; None while its kernel is gone.
    topic : str
        The event topic on which its driver listens.
    payload : bytes
        The pickled function and its arguments.
    workers : set of str or None
        Addresses, names or hosts of workers that it may use; None for all.
    resources : dict of str to float
        What a worker must offer.
    versions : dict of str to str
        What the kernel runs, and its workers must.
    heartbeat_timeout : float
        Seconds of silence after which a worker counts as frozen.
    ranks : dict of int to str
        Slot of every start that is claimed or runs.
    places : dict of int to dict
        The place foreseen for each of them.
    vitals : dict of int to tuple
        Figures and reports of ranks that have not been passed on.
    lease : float
        Seconds that it goes on without a kernel.
    options : dict
        What it was started with, for a kernel that attaches to it.
    machine : Machine
        The copy of its membership machine.
    uid : str
        Part of its tasks' keys, so that another job of this name has others.
    started : float
        When, in seconds since the epoch.
    epoch : int
        Which driver it has, counted from 1.
    steps : int
        Number of the newest step of that driver's journal.
    seq : int
        Number of the newest event.
    backlog : dict of int to tuple
        Events and their attachments that have not been stepped.
    archive : Archive
        What is kept for a kernel that comes later.
    opening : bool
        Whether workers are still being prepared; its driver hears of all of them together.
    closing : bool
        Whether its driver has closed it: nobody can take it over any more.
    """

    client: str | None
    topic: str
    payload: bytes
    workers: set[str] | None
    resources: dict[str, float]
    versions: dict[str, str]
    heartbeat_timeout: float
    lease: float
    options: Mapping[str, Any]
    machine: Machine
    uid: str
    started: float
    epoch: int = 1
    steps: int = 0
    seq: int = 0
    backlog: dict[int, tuple[dict[str, Any], Any]] = field(default_factory=dict)
    archive: Archive = field(default_factory=Archive)
    conductor: Conductor | None = None
    ranks: dict[int, str] = field(default_factory=dict)
    places: dict[int, dict[str, int]] = field(default_factory=dict)
    beats: dict[int, list[Any]] = field(default_factory=dict)
    silent: set[str] = field(default_factory=set)
    vitals: dict[int, tuple[list[Any], list[Any]]] = field(default_factory=dict)
    opening: bool = True
    closing: bool = False

    def key(self, start: int) -> str:
        """Return the key of a rank's task."""
        return f"{RANK_KEY}{self.uid}-{start}"

    @property
    def conduct(self) -> Conductor:
        """Who carries the job on."""
        assert self.conductor is not None
        return self.conductor

    @property
    def demand(self) -> int:
        """How many ranks it would like to have."""
        limits = self.machine.roster.limits
        wanted = limits.max_np if limits.max_np is not None else max(limits.np, limits.min_np)
        return 0 if self.machine.roster.ended else max(wanted, len(self.ranks))


def fits(job: JobRecord, worker: WorkerState) -> bool:
    """Return whether a job may use a worker; names and resources mean what they mean in Dask."""
    if worker.status not in (Status.init, Status.running):
        return False  # paused, retiring or closing
    if job.workers is not None:
        names = {worker.address, str(worker.name), get_address_host(worker.address)}
        if not names & job.workers:
            return False
    return all(worker.resources.get(key, 0) >= need for key, need in job.resources.items())
