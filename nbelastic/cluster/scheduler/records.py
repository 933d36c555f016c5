"""Keep records of open jobs, and of workers that can host a rank."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from distributed.comm.addressing import get_address_host
from distributed.core import Status
from msgspec.structs import replace

from nbelastic.cluster.job_log import JobLog
from nbelastic.cluster.worker.environment import MUST_MATCH
from nbelastic.messages import (
    JobPayload,
    Notice,
    NoticeSource,
    UnusedReason,
    UnusedWorker,
    WatchOrder,
)

if TYPE_CHECKING:
    from distributed.scheduler import WorkerState

    from nbelastic.membership import Machine
    from nbelastic.messages import (
        Beat,
        JobEvent,
        JobTerms,
        Place,
        ProcessId,
        RankOutput,
        RankTelemetry,
        Slot,
    )

    from .controller import JobController

RANK_KEY = "nbelastic-rank-"
"""How the keys of ranks' tasks begin."""

MOST_WAITING = 64_000_000
"""Bytes that may wait for a kernel, about as many as it keeps."""

FEW_WAITING = MOST_WAITING // 4
"""Bytes at which output is sent again."""


@dataclass
class WorkerRecord:
    """A worker with an agent."""

    slot: Slot
    versions: dict[str, str]  # what it runs
    process: ProcessId
    nanny: str | None = None
    holder: tuple[str, int] | None = None  # job and start that its slot is given to
    has_beaten: bool = False  # since its slot was given to that
    silence: float = 0.0  # seconds without a heartbeat, in which it had a rank and we listened
    last_beats: dict[tuple[str, int], Beat] = field(default_factory=dict)  # by job and start
    retiring: bool = False  # about to be retired, or to close: nothing revokes that
    # In force, by source and softness; their `seconds` are moments of the event loop's clock.
    notices: dict[tuple[NoticeSource, bool], Notice] = field(default_factory=dict)
    retire_at: float = 0.0  # with a notice it is retired then, whatever its rank does
    watch: WatchOrder = field(default_factory=WatchOrder)  # as last sent to it

    @property
    def leaving(self) -> bool:
        """Whether it was asked to leave."""
        return self.retiring or self.ends

    @property
    def notice(self) -> Notice | None:
        """The worker's most urgent notice; a notice of mere risk counts last."""
        order = sorted(self.notices.values(), key=lambda each: (each.soft, each.seconds))
        return order[0] if order else None

    @property
    def ends(self) -> bool:
        """Whether its machine or its batch job will end."""
        return self.notice is not None and not self.notice.soft

    @property
    def at_risk(self) -> bool:
        """Whether ranks should leave the worker for a replacement."""
        return self.notice is not None and self.notice.soft and not self.retiring

    @property
    def address(self) -> str:
        """The worker's address, as the scheduler has it."""
        return self.slot.worker

    @property
    def host(self) -> tuple[str, str]:
        """The worker's host, and the PID namespace of its process."""
        return self.slot.host, self.process.namespace


class OutputValve:
    """Lets the output of a job's ranks pass as long as its kernel reads.

    A kernel that is stopped, or whose cell holds its lock for minutes, reads nothing. Dask keeps
    all messages for it meanwhile, and ranks may print gigabytes. So no more output is sent to it
    from a certain size on, until it has read most of that.
    """

    def __init__(self) -> None:
        self._closed = False

    def take(self, message: RankOutput, waiting: int) -> RankOutput | None:
        """Return what to send to the kernel: the message, the mark of a gap, or nothing.

        So many bytes are `waiting` for the kernel.
        """
        was_closed = self._closed
        self._closed = waiting > (FEW_WAITING if was_closed else MOST_WAITING)
        if not self._closed:
            return message
        return None if was_closed else replace(message, text="", gap=True)


@dataclass
class JobRecord:
    """An open job, with the `terms` of its opening."""

    uid: str  # part of its tasks' keys, so that another job of this name has others
    terms: JobTerms
    workers: frozenset[str] | None  # those of its terms, with the scheduler's addresses for them
    machine: Machine
    client: str | None  # id of the Dask client that drives it; None while its kernel is gone
    topic: str  # on which its driver listens
    started: float  # seconds since the epoch
    epoch: int = 1  # number of its driver
    steps: int = 0  # number of the newest step of that driver's journal
    seq: int = 0  # number of the newest event
    backlog: dict[int, JobEvent] = field(default_factory=dict)  # events that were not stepped
    log: JobLog = field(default_factory=JobLog)
    output: OutputValve = field(default_factory=OutputValve)
    controller: JobController = field(init=False)
    ranks: dict[int, str] = field(default_factory=dict)  # slot of each claimed start
    places: dict[int, Place] = field(default_factory=dict)  # place foreseen for each of them
    told: set[int] = field(default_factory=set)  # those of them that were told to end
    never: set[int] = field(default_factory=set)  # starts whose task has nothing to do any more
    beats: dict[int, Beat] = field(default_factory=dict)  # not passed on so far, as telemetry
    telemetry: dict[int, RankTelemetry] = field(default_factory=dict)
    silent: set[str] = field(default_factory=set)  # slots of workers that are frozen
    unused: list[UnusedWorker] = field(default_factory=list)  # as last sent to its driver
    opening: bool = True  # workers are being prepared; its driver is told of all together
    closing: bool = False  # its driver has closed it: it cannot be taken over any more

    def release(self) -> None:
        """Drop all that may be large: the record itself is part of a cycle, and lives on."""
        self.terms = replace(self.terms, payload=JobPayload(b"", b"", b""), options=b"")
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
        """Number of ranks that the job has or wants; only the present ranks without a kernel."""
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
        for key, need in job.terms.resources.items()
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
        for name, need in job.terms.resources.items()
    )


def differing(job: JobRecord, record: WorkerRecord) -> str:
    """Return the versions of a worker that differ from the kernel's."""
    return ", ".join(
        f"{name} {record.versions.get(name)} (kernel: {job.terms.versions.get(name)})"
        for name in MUST_MATCH
        if record.versions.get(name) != job.terms.versions.get(name)
    )
