"""Keep records of open jobs, and of workers that can host a rank.

Runs in the scheduler, in its event loop.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from distributed.comm.addressing import get_address_host
from distributed.core import Status

from nbelastic.cluster.job_log import JobLog
from nbelastic.cluster.wire import JobPayload, WatchOrder
from nbelastic.cluster.worker.environment import MUST_MATCH
from nbelastic.membership import NoticeSource, UnusedReason, UnusedWorker

from .output_valve import OutputValve

if TYPE_CHECKING:
    from distributed.scheduler import WorkerState

    from nbelastic.cluster.process_state import ProbeHistory, ProcessId
    from nbelastic.cluster.wire import JobEvent, RankTelemetry
    from nbelastic.membership import Beat, Machine, Place, Slot

    from .controller import JobController

RANK_KEY = "nbelastic-rank-"
"""How the keys of ranks' tasks begin."""


@dataclass(frozen=True)
class NoticeRecord:
    """A notice in force.

    Attributes
    ----------
    source : NoticeSource
        Who says so.
    action : str
        What will happen, in the source's own word.
    deadline : float
        When, by the event loop's clock.
    retire_at : float
        When workers are retired at the latest, whatever their ranks do.
    """

    source: NoticeSource
    action: str
    deadline: float
    retire_at: float


@dataclass
class WorkerRecord:
    """A worker with an agent.

    Attributes
    ----------
    slot : Slot
        Its slot.
    versions : dict of str to str
        What it runs.
    process : ProcessId
        Identity of its process on its host.
    holder : tuple of (str, int) or None
        The job and start that its slot is given to.
    has_beaten : bool
        Whether it has sent heartbeats since its slot was given to that.
    silence : float
        Seconds since its last heartbeat while a rank has its slot, in time in which the scheduler
        listened.
    probes : ProbeHistory or None
        States of its process since it fell silent.
    being_asked : set of tuple
        Observers of its process that have not answered.
    last_beats : dict of (str, int) to Beat
        The last heartbeats of its ranks, by job and start.
    retiring : bool
        Whether it is about to be retired, or to close: nothing revokes that.
    notices : dict of NoticeSource to NoticeRecord
        Notices that it will go.
    risk : NoticeSource or None
        Who recommends to leave it once there is another.
    watch : WatchOrder
        What it was last told about watching for notices.
    """

    slot: Slot
    versions: dict[str, str]
    process: ProcessId
    nanny: str | None = None
    holder: tuple[str, int] | None = None
    has_beaten: bool = False
    silence: float = 0.0
    probes: ProbeHistory | None = None
    being_asked: set[tuple[str, bool]] = field(default_factory=set)
    last_beats: dict[tuple[str, int], Beat] = field(default_factory=dict)
    retiring: bool = False
    notices: dict[NoticeSource, NoticeRecord] = field(default_factory=dict)
    risk: NoticeSource | None = None
    watch: WatchOrder = field(default_factory=WatchOrder)

    @property
    def leaving(self) -> bool:
        """Whether it was asked to leave."""
        return self.retiring or bool(self.notices)

    @property
    def notice(self) -> NoticeRecord | None:
        """The notice by which it goes first."""
        return min(self.notices.values(), key=lambda each: each.deadline, default=None)

    @property
    def address(self) -> str:
        """The worker's address, as the scheduler has it."""
        return self.slot.worker

    @property
    def host(self) -> tuple[str, str]:
        """Its host and the namespace there in which its process has its number."""
        return self.slot.host, self.process.namespace


@dataclass
class JobRecord:
    """An open job.

    Attributes
    ----------
    client : str or None
        Id of the Dask client that drives it; None while its kernel is gone.
    topic : str
        The event topic on which its driver listens.
    payload : JobPayload
        Its function.
    workers : set of str or None
        Addresses, names or hosts of workers that it may use; None for all.
    unused : list of UnusedWorker
        The workers that are not offered to it, as last sent to its driver.
    resources : dict of str to float
        What a worker must offer.
    versions : dict of str to str
        What the kernel runs, and its workers must.
    heartbeat_timeout : float
        Seconds of silence after which a worker counts as frozen.
    ranks : dict of int to str
        Slot of every start that is claimed or runs.
    told : set of int
        Those of them that were told to end.
    places : dict of int to Place
        The place foreseen for each of them.
    telemetry : dict of int to RankTelemetry
        Telemetry of ranks that has not been passed on.
    lease : float
        Seconds that it goes on without a kernel.
    options : bytes
        What it was started with, pickled, for a kernel that attaches to it.
    machine : Machine
        The copy of its membership machine.
    uid : str
        Part of its tasks' keys, so that another job of this name has others.
    partitions : tuple of str
        Keys of partitions that the scheduler holds for it, as JSON.
    notices : bool
        Whether its workers watch for notices.
    started : float
        When, in seconds since the epoch.
    epoch : int
        Which driver it has, counted from 1.
    steps : int
        Number of the newest step of that driver's journal.
    seq : int
        Number of the newest event.
    backlog : dict of int to JobEvent
        Events that have not been stepped.
    log : JobLog
        History, output and results, for a kernel that attaches later.
    output : OutputValve
        What lets output pass to its kernel.
    opening : bool
        Whether workers are still being prepared; its driver is told of all of them together.
    closing : bool
        Whether its driver has closed it: it cannot be taken over any more.
    """

    client: str | None
    topic: str
    payload: JobPayload
    workers: set[str] | None
    resources: dict[str, float]
    versions: dict[str, str]
    heartbeat_timeout: float
    lease: float
    options: bytes
    machine: Machine
    uid: str
    started: float
    partitions: tuple[str, ...] = ()
    notices: bool = True
    epoch: int = 1
    steps: int = 0
    seq: int = 0
    backlog: dict[int, JobEvent] = field(default_factory=dict)
    log: JobLog = field(default_factory=JobLog)
    output: OutputValve = field(default_factory=OutputValve)
    controller: JobController = field(init=False)
    ranks: dict[int, str] = field(default_factory=dict)
    places: dict[int, Place] = field(default_factory=dict)
    told: set[int] = field(default_factory=set)
    beats: dict[int, Beat] = field(default_factory=dict)
    silent: set[str] = field(default_factory=set)
    telemetry: dict[int, RankTelemetry] = field(default_factory=dict)
    unused: list[UnusedWorker] = field(default_factory=list)
    opening: bool = True
    closing: bool = False

    def release(self) -> None:
        """Let go of all that may be large: the record itself is part of a cycle, and lives on."""
        self.payload = JobPayload(b"", b"", b"")
        self.backlog.clear()
        self.log = JobLog()

    def key(self, start: int) -> str:
        """Return the key of a rank's task."""
        return f"{RANK_KEY}{self.uid}-{start}"

    @property
    def holder(self) -> str:
        """Name of the client, to Dask, that wants its partitions."""
        return f"nbelastic-{self.uid}"

    @property
    def demand(self) -> int:
        """How many ranks it has and would like to have; without a kernel it can start none."""
        limits = self.machine.roster.limits
        wanted = limits.max_np if limits.max_np is not None else max(limits.np, limits.min_np)
        if self.client is None or self.machine.roster.ended:
            wanted = 0
        return 0 if self.machine.roster.ended else max(wanted, len(self.ranks))


def fits(job: JobRecord, worker: WorkerState) -> bool:
    """Return whether a job may use a worker."""
    return misfit(job, worker) is None


def misfit(job: JobRecord, worker: WorkerState) -> UnusedWorker | None:
    """Return why a job may not use a worker; names and resources mean what they mean in Dask."""
    if worker.status not in (Status.init, Status.running):
        return UnusedWorker(worker.address, _STATUS.get(worker.status, UnusedReason.CLOSING))
    if job.workers is not None:
        names = {worker.address, str(worker.name), get_address_host(worker.address)}
        if not names & job.workers:
            return UnusedWorker(worker.address, UnusedReason.NOT_IN_WORKERS)
    lacking = [
        f"{key} {worker.resources.get(key, 0):g} of {need:g}"
        for key, need in job.resources.items()
        if worker.resources.get(key, 0) < need
    ]
    if lacking:
        return UnusedWorker(worker.address, UnusedReason.LACKS_RESOURCES, ", ".join(lacking))
    return None


_STATUS = {
    Status.paused: UnusedReason.PAUSED,
    Status.closing_gracefully: UnusedReason.LEAVING,
}


def obstacle(job: JobRecord, worker: WorkerState, record: WorkerRecord) -> UnusedWorker | None:
    """Return why a worker with an agent and without a rank of a job is not offered to it."""
    problem = misfit(job, worker)
    if problem is None and record.holder is not None:
        problem = UnusedWorker(worker.address, UnusedReason.TAKEN, record.holder[0])
    elif problem is None and record.leaving:
        problem = UnusedWorker(worker.address, UnusedReason.LEAVING)
    elif problem is None and differing(job, record):
        problem = UnusedWorker(worker.address, UnusedReason.OTHER_VERSIONS, differing(job, record))
    return problem


def is_busy(job: JobRecord, worker: WorkerState) -> bool:
    """Return whether other tasks have the threads or resources that a rank's task waits for."""
    others = [task for task in worker.processing if not str(task.key).startswith(RANK_KEY)]
    in_pool = [task for task in others if task not in worker.long_running]
    return len(in_pool) >= worker.nthreads or any(
        worker.resources.get(name, 0) - need
        < sum((task.resource_restrictions or {}).get(name, 0) for task in others)
        for name, need in job.resources.items()
    )


def differing(job: JobRecord, record: WorkerRecord) -> str:
    """Return which versions of a worker are not those of a job's kernel."""
    return ", ".join(
        f"{name} {record.versions.get(name)} (kernel: {job.versions.get(name)})"
        for name in MUST_MATCH
        if record.versions.get(name) != job.versions.get(name)
    )
