"""Status and history of a job, as frozen dataclasses for the user.

The same objects travel between processes.
"""

from __future__ import annotations

import datetime
import functools
from collections.abc import Sequence
from dataclasses import dataclass, field, fields
from typing import Any


def same_fields(kind: type, *sources: Any) -> dict[str, Any]:
    """Return the values that sources have under the names of a dataclass's fields, by name."""
    return {n: getattr(each, n) for each in sources for n in _shared(kind, each.__class__)}


@functools.cache  # a panel asks it for each rank, four times a second
def _shared(kind: type, source: Any) -> list[str]:
    return [each.name for each in fields(kind) if each.name in source.__match_args__]


@dataclass(frozen=True)
class RankStatus:
    """One rank of a job.

    Attributes
    ----------
    rank : int or None
        The rank's number; None while it belongs to no generation.
    worker : str
        Address of its worker.
    name : str
        Dask's name of its worker.
    host : str
        Digest of what the workers of its host share; the same for ranks that can share memory.
    state : str
        ``starting``, ``ready``, ``forming``, ``running``, ``leaving``, ``done``, ``returned``,
        ``ending``, or ``ended`` once the job is over.
    commits : int
        The rank's last commit.
    step : int
        Batches that it has processed; without a sampler, commits and checks.
    samples_per_s : float or None
        Its pace; None while that is not known.
    device : str
        Its device, as torch names it; empty while that is not known.
    state_bytes : int
        Size of the tensors in its state; 0 while that is not known.
    copied_bytes : int
        Memory for copies of these tensors, to which a reset goes back. There are none if each step
        ends with a commit.
    micro_batches : tuple of (int, int) or None
        The first of a step's micro-batches that it computes, and the one after its last; None
        without a loader.
    steps_per_s : float or None
        Its pace in steps; None while that is not known.
    resident_bytes : int
        Memory of its process, as the system counts it; 0 while that is not known.
    gpu_bytes, gpu_total : int
        Memory that torch has allocated on its GPU, and all of that GPU; both 0 without one.
    start : int
        Number of its start of the function, counted over the job.
    """

    rank: int | None
    worker: str
    host: str
    state: str
    commits: int
    step: int = 0
    samples_per_s: float | None = None
    device: str = ""
    state_bytes: int = 0
    copied_bytes: int = 0
    name: str = ""
    micro_batches: tuple[int, int] | None = None
    steps_per_s: float | None = None
    resident_bytes: int = 0
    gpu_bytes: int = 0
    gpu_total: int = 0
    start: int = 0

    @property
    def quota(self) -> int | None:
        """Number of a step's micro-batches for this rank; None without a loader."""
        return None if self.micro_batches is None else self.micro_batches[1] - self.micro_batches[0]


@dataclass(frozen=True)
class Progress:
    """Progress of a job with a declared total.

    Attributes
    ----------
    epoch, epochs : int
        Epochs done, and the total.
    batch, batches : int
        Batches done of this epoch, and the total of an epoch; both 0 if that was not declared.
    remaining_s : float or None
        Seconds that the rest will take at the pace so far; None while the pace is not known.
    step, steps : int
        Steps done, and the total of a loop without epochs; else both 0.
    """

    epoch: int
    epochs: int
    batch: int = 0
    batches: int = 0
    remaining_s: float | None = None
    step: int = 0
    steps: int = 0

    @property
    def fraction(self) -> float:
        """Part that is done, from 0 to 1."""
        if not self.epochs:
            return self.step / self.steps if self.steps else 0.0
        within = min(self.batch / self.batches, 1.0) if self.batches else 0.0
        return min((self.epoch + within) / self.epochs, 1.0)


@dataclass(frozen=True)
class DataStatus:
    """Rows of a source of data, as of the newest commit known to the kernel.

    Attributes
    ----------
    source : str
        ``Parquet``, ``Dask`` and the like, or the class of the dataset.
    epoch : int
        The present epoch, from 0.
    done : int
        Rows of it that are done.
    left : int or None
        Rows of it that are left; None if its length is not known.
    seen : int
        Rows that went into the training, once each, over all epochs.
    redone : int
        Rows that were handed out, rolled back with a fault, and handed out again.
    lost : int
        Rows of steps that are done which no rank has taken. It is 0, unless the function passes
        over steps.
    """

    source: str
    epoch: int
    done: int
    left: int | None
    seen: int
    redone: int
    lost: int


@dataclass(frozen=True)
class JobStatus:
    """A job at one moment.

    Attributes
    ----------
    name : str
        The job's name.
    state : str
        ``waiting``, ``forming``, ``running``, ``stopping``, ``finished``, ``failed``, ``stopped``
        or ``detached`` (another kernel has attached to it).
    generation : int
        Number of the newest generation.
    size : int
        Number of the newest generation's members; 0 before the first generation.
    min_np, max_np : int, int or None
        Limits on the number of ranks; None for as many as the cluster offers.
    resets : int
        Changes of membership so far.
    commits : int
        Newest commit that every member holds.
    elapsed : float
        Seconds since the job was started, to its end if it has ended.
    reason : str
        What the job waits for, or why it ended. It names workers that are not used, and why.
    ranks : tuple of RankStatus
        Members by rank, then ranks that are starting.
    samples_per_s : float or None
        Pace of all members together; None while that is not known.
    progress : Progress or None
        Progress; None if the state has no declared total.
    backend : str
        Communicator of the newest generation: ``shm``, ``gloo``, ``hierarchical`` (both),
        ``cuda_ipc``, ``nccl``, ``pygloo``, or ``solo`` for a single rank; empty while it is not
        known.
    share : int or None
        Ranks that it may have now, besides ``max_np``, while it shares its cluster with other jobs;
        ``reason`` names them. None while it is alone.
    warnings : tuple of str
        Likely mistakes in the training, which goes on. The first line of each names the mistake,
        the others the cause and the remedy.
    micro_batches : int
        Micro-batches of a step, on all ranks together; 0 without a loader.
    why_not_exact : str
        What keeps the training from having the same bits for every number of ranks; empty if
        nothing does, or without a loader.
    data : tuple of DataStatus
        Rows of each loader in the state.
    errors : int
        Errors that the job has survived: functions of ranks that raised while others went on, and
        processes that were cut off after their function. ``warnings`` has each.
    """

    name: str
    state: str
    generation: int
    size: int
    min_np: int
    max_np: int | None
    resets: int
    commits: int
    elapsed: float
    reason: str
    ranks: tuple[RankStatus, ...]
    samples_per_s: float | None = None
    progress: Progress | None = None
    backend: str = ""
    share: int | None = None
    warnings: tuple[str, ...] = ()
    micro_batches: int = 0
    why_not_exact: str = ""
    data: tuple[DataStatus, ...] = ()
    errors: int = 0

    @property
    def steps_per_s(self) -> float | None:
        """Steps per second of the job, whose ranks step together; None while not known."""
        known = (each.steps_per_s for each in self.ranks if each.rank is not None)
        return next((pace for pace in known if pace is not None), None)

    @property
    def state_in_words(self) -> str:
        """The state, with the number of errors that a finished job has survived."""
        if self.state != "finished" or not self.errors:
            return self.state
        return f"finished with {self.errors} error{'s' * (self.errors != 1)}"

    @property
    def headlines(self) -> tuple[str, ...]:
        """The first line of each warning."""
        return tuple(warning.split("\n", 1)[0] for warning in self.warnings)


def aligned(rows: Sequence[Sequence[str]]) -> str:
    """Return the rows of a table as lines with columns."""
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    return "\n".join("  ".join(map(str.ljust, row, widths)).rstrip() for row in rows)


@dataclass(frozen=True)
class JobInfo:
    """A job on a cluster, from :func:`nbelastic.jobs`.

    Attributes
    ----------
    name : str
        The job's name, for :func:`nbelastic.attach`.
    state : str
        As in :class:`nbelastic.JobStatus`.
    size : int
        Number of ranks in training.
    commits : int
        Newest commit that all of these ranks hold.
    started : float
        Time of its start, in seconds since the epoch.
    attached : bool
        Whether a kernel is attached to it.
    priority, weight : int, float
        Its place among the jobs of the cluster.
    min_np, max_np : int, int or None
        Limits on the number of ranks.
    slots : int
        Slots that it has, also for ranks that are starting or leaving.
    share : int or None
        As in :class:`nbelastic.JobStatus`.
    """

    name: str
    state: str
    size: int
    commits: int
    started: float
    attached: bool
    priority: int = 0
    weight: float = 1.0
    min_np: int = 1
    max_np: int | None = None
    slots: int = 0
    share: int | None = None


class JobTable(tuple[JobInfo, ...]):
    """The jobs on a cluster: a tuple, shown as a table."""

    COLUMNS = ("name", "state", "priority", "weight", "np", "slots", "share", "commits", "kernel")

    def __repr__(self) -> str:
        if not self:
            return "no jobs"
        rows = [
            (
                job.name,
                job.state,
                str(job.priority),
                f"{job.weight:g}",
                f"{job.min_np} to {'all' if job.max_np is None else job.max_np}",
                str(job.slots),
                "" if job.share is None else str(job.share),
                f"{job.commits:,}",
                "yes" if job.attached else "no",
            )
            for job in self
        ]
        return aligned([self.COLUMNS, *rows])


@dataclass(frozen=True)
class HistoryEvent:
    """Event in the history of a job.

    Attributes
    ----------
    time : float
        Seconds since the epoch.
    kind : str
        ``joined``, ``lost``, ``left``, ``formed``, ``reset``, ``phases`` (duration of each phase
        of a reset, on the rank that became 0), ``cooldown``, ``restarted``, ``backend``,
        ``checkpoint``, ``died`` (the cause of death of a rank that is lost already), ``warning``,
        ``refused``, ``waiting``, ``share``, ``notice``, ``abandoned``,
        ``attached``, ``alias`` (``import horovod`` found nbelastic), ``finished``, ``failed`` or
        ``stopped``.
    worker : str or None
        Address of the worker concerned.
    rank : int or None
        The rank concerned, in the generation of that time.
    generation : int
        The generation of that time.
    detail : str
        More about it, as a text.
    size : int
        Number of members after it.
    name : str
        Dask's name of that worker.
    figures : dict of str to float
        Numbers that belong to it. For ``phases`` these are the milliseconds after which each phase
        ended, and the ``batches`` and ``samples`` that rank 0 did again because they followed the
        last commit. For a rank that held up the others these are ``seconds_since_heartbeat`` and
        ``seconds_since_progress``.
    seen : str
        What led to it, and which process reported that; empty where nothing had to be seen.
    """

    time: float
    kind: str
    worker: str | None
    rank: int | None
    generation: int
    detail: str
    size: int = 0
    name: str = ""
    figures: dict[str, float] = field(default_factory=dict, hash=False)
    seen: str = ""

    def __str__(self) -> str:
        at = datetime.datetime.fromtimestamp(self.time).strftime("%H:%M:%S")
        who = "" if self.rank is None else f" rank {self.rank}"
        place = self.name or self.worker
        where = f" on {place}" if place else ""
        return f"{at} {self.kind}{who}{where}{self.detail and f': {self.detail}'}"


@dataclass(frozen=True)
class Output:
    """Output of a rank.

    Attributes
    ----------
    start : int
        Start of the function.
    rank : int or None
        The rank's number at that time.
    text : str
        The printed text, which may end in the middle of a line.
    """

    start: int
    rank: int | None
    text: str
