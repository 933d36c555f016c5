"""Keep records of workers, and say why a job does not use one."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from distributed.comm.addressing import get_address_host
from distributed.core import Status

from nbelastic import messages as m
from nbelastic.cluster.wire import MUST_MATCH

if TYPE_CHECKING:
    from distributed.scheduler import WorkerState

    from .job import ScheduledJob

RANK_KEY = "nbelastic-rank-"  # how the keys of ranks' tasks begin


@dataclass(eq=False)
class WorkerRecord:
    """A worker with an agent."""

    slot: m.Slot
    versions: dict[str, str]  # what it runs
    pid: int
    nanny: str | None = None
    holder: tuple[str, int] | None = None  # job and start that its slot is given to
    has_beaten: bool = False  # since its slot was given to that
    silence: float = 0.0  # seconds without a heartbeat, in which it had a rank and we listened
    last_beats: dict[tuple[str, int], m.Beat] = field(default_factory=dict)  # by job and start
    retiring: bool = False  # about to be retired, or to close: nothing revokes that
    # In force, by source and softness; their `seconds` are moments of the event loop's clock.
    notices: dict[tuple[m.NoticeSource, bool], m.Notice] = field(default_factory=dict)
    retire_at: float = 0.0  # with a notice it is retired then, whatever its rank does
    frozen: bool = False  # the job of its rank was told that it is silent
    watch: m.WatchOrder = field(default_factory=m.WatchOrder)  # as last sent to it

    @property
    def leaving(self) -> bool:
        """Whether it was asked to leave."""
        return self.retiring or self.ends

    @property
    def notice(self) -> m.Notice | None:
        """The worker's most urgent notice; a notice of mere risk counts last."""
        values = self.notices.values()
        return min(values, key=lambda each: (each.soft, each.seconds), default=None)

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


def fits(job: ScheduledJob, worker: WorkerState) -> bool:
    """Return whether a job may use a worker."""
    return misfit(job, worker) is None


def misfit(job: ScheduledJob, worker: WorkerState) -> m.UnusedWorker | None:
    """Return why a job may not use a worker; names and resources mean what they mean in Dask."""
    if worker.status not in (Status.init, Status.running):
        return m.UnusedWorker(worker.address, _STATUS.get(worker.status, m.UnusedReason.CLOSING))
    if job.workers is not None:
        names = {worker.address, str(worker.name), get_address_host(worker.address)}
        if not names & job.workers:
            return m.UnusedWorker(worker.address, m.UnusedReason.NOT_IN_WORKERS)
    needs = job.terms.resources.items()
    has = {key: worker.resources.get(key, 0) for key, _ in needs}
    lacking = ", ".join(f"{k} {has[k]:g} of {need:g}" for k, need in needs if has[k] < need)
    reason = m.UnusedReason.LACKS_RESOURCES
    return m.UnusedWorker(worker.address, reason, lacking) if lacking else None


_STATUS = {Status.paused: m.UnusedReason.PAUSED, Status.closing_gracefully: m.UnusedReason.LEAVING}


def obstacle(job: ScheduledJob, worker: WorkerState, record: WorkerRecord) -> m.UnusedWorker | None:
    """Return why a worker with an agent and without a rank of a job is not offered to it."""
    if problem := misfit(job, worker):
        return problem
    if record.holder is not None:
        return m.UnusedWorker(worker.address, m.UnusedReason.TAKEN, record.holder[0])
    if record.leaving:
        return m.UnusedWorker(worker.address, m.UnusedReason.LEAVING)
    if versions := differing(job, record):
        return m.UnusedWorker(worker.address, m.UnusedReason.OTHER_VERSIONS, versions)
    return None


def is_busy(job: ScheduledJob, worker: WorkerState) -> bool:
    """Return whether other tasks have the threads or resources that a rank's task waits for."""
    others = [task for task in worker.processing if not str(task.key).startswith(RANK_KEY)]
    in_pool = [task for task in others if task not in worker.long_running]
    return len(in_pool) >= worker.nthreads or any(
        worker.resources.get(name, 0) - need
        < sum((task.resource_restrictions or {}).get(name, 0) for task in others)
        for name, need in job.terms.resources.items()
    )


def differing(job: ScheduledJob, record: WorkerRecord) -> str:
    """Return the versions of a worker that differ from the kernel's."""
    return ", ".join(
        f"{name} {record.versions.get(name)} (kernel: {job.terms.versions.get(name)})"
        for name in MUST_MATCH
        if record.versions.get(name) != job.terms.versions.get(name)
    )
