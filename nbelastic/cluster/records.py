"""What the scheduler plugin remembers: workers that can host a rank, and open jobs."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from distributed.comm.addressing import get_address_host
from distributed.core import Status

if TYPE_CHECKING:
    from distributed.scheduler import WorkerState

__all__ = ["Host", "JobRecord", "fits"]


@dataclass
class Host:
    """A worker with an agent.

    Attributes
    ----------
    slot : dict
        Its slot, as the machine knows it: id, worker, name, host.
    versions : dict of str to str
        What it runs.
    holder : tuple of (str, int) or None
        The job and start that its slot is given to.
    silence : float
        Seconds without a heartbeat while a rank runs, in time in which the scheduler listened.
    leaving : bool
        Whether it was asked to leave.
    """

    slot: dict[str, str]
    versions: dict[str, str]
    holder: tuple[str, int] | None = None
    beats: bool = False
    silence: float = 0.0
    leaving: bool = False


@dataclass
class JobRecord:
    """An open job.

    Attributes
    ----------
    client : str
        Id of the Dask client that drives it.
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
    vitals : dict of int to tuple
        Figures and reports of ranks that have not been passed on.
    demand : int
        How many ranks it would like to have.
    orphaned : bool
        Whether the kernel that drove it is gone.
    opening : bool
        Whether workers are still being prepared; its driver hears of all of them together.
    """

    client: str
    topic: str
    payload: bytes
    workers: set[str] | None
    resources: dict[str, float]
    versions: dict[str, str]
    heartbeat_timeout: float
    ranks: dict[int, str] = field(default_factory=dict)
    beats: dict[int, list[Any]] = field(default_factory=dict)
    silent: set[str] = field(default_factory=set)
    vitals: dict[int, tuple[list[Any], list[Any]]] = field(default_factory=dict)
    demand: int = 0
    orphaned: bool = False
    opening: bool = True


def fits(job: JobRecord, worker: WorkerState) -> bool:
    """Return whether a job may use a worker; names and resources mean what they mean in Dask."""
    if worker.status not in (Status.init, Status.running):
        return False  # paused, retiring or closing
    if job.workers is not None:
        names = {worker.address, str(worker.name), get_address_host(worker.address)}
        if not names & job.workers:
            return False
    return all(worker.resources.get(key, 0) >= need for key, need in job.resources.items())
