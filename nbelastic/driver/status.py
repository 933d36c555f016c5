"""What a user sees of a job: frozen snapshots and the history of what happened."""

from __future__ import annotations

from dataclasses import dataclass

__all__ = ["HistoryEvent", "JobInfo", "JobStatus", "Output", "Progress", "RankStatus"]


@dataclass(frozen=True)
class RankStatus:
    """One rank of a job.

    Attributes
    ----------
    rank : int or None
        Its rank; None while it belongs to no generation.
    worker : str
        Address of its worker.
    host : str
        Its host, as workers prove it to each other.
    state : str
        ``starting``, ``ready``, ``forming``, ``running``, ``leaving``, ``done``, ``returned`` or
        ``ending``.
    commits : int
        Its last commit.
    step : int
        Batches that it has processed (commits and checks where it has no sampler).
    samples_per_s : float or None
        How fast it goes; None while that is not known.
    device : str
        What it computes on, as torch names it; empty while that is not known.
    state_bytes : int
        Size of the tensors in its state; 0 while that is not known.
    copied_bytes : int
        Memory that copies of them take, for going back to a commit: none where a commit follows
        each step.
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


@dataclass(frozen=True)
class Progress:
    """How far a job has come, where its state has a declared total.

    Attributes
    ----------
    epoch, epochs : int
        Epochs done, and in all.
    batch, batches : int
        Batches done of this epoch, and in an epoch; both 0 where that was not declared.
    remaining_s : float or None
        Seconds that the rest will take at the pace so far; None while there is none.
    """

    epoch: int
    epochs: int
    batch: int = 0
    batches: int = 0
    remaining_s: float | None = None

    @property
    def fraction(self) -> float:
        """How much is done, from 0 to 1."""
        if not self.epochs:
            return 0.0
        within = min(self.batch / self.batches, 1.0) if self.batches else 0.0
        return min((self.epoch + within) / self.epochs, 1.0)


@dataclass(frozen=True)
class JobStatus:
    """A job at one moment.

    Attributes
    ----------
    name : str
        The job's name.
    state : str
        ``waiting``, ``forming``, ``running``, ``finished``, ``failed``, ``stopped`` or
        ``detached`` (another kernel drives it now).
    generation : int
        Number of the newest generation.
    size : int
        Number of its members; 0 while none has been agreed.
    min_np, max_np : int, int or None
        The limits; None for as many as the cluster offers.
    resets : int
        Changes of membership so far.
    commits : int
        Newest commit that every member holds.
    elapsed : float
        Seconds since the job was started, to its end if it has ended.
    reason : str
        What the job waits for, or why it ended.
    ranks : tuple of RankStatus
        Members by rank, then those that start.
    samples_per_s : float or None
        How fast all members go together; None while that is not known.
    progress : Progress or None
        How far it has come; None where the state has no declared total.
    backend : str
        How tensors travel between the members of the newest generation: ``shm``, ``gloo``,
        ``hierarchical`` (both), ``pygloo``, or ``solo`` for a rank alone; empty while that is not
        known.
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


@dataclass(frozen=True)
class JobInfo:
    """A job on a cluster, as :func:`nbelastic.jobs` tells of it.

    Attributes
    ----------
    name : str
        Its name, for :func:`nbelastic.attach`.
    state : str
        As in :class:`JobStatus`.
    size : int
        Number of ranks that train.
    commits : int
        Newest commit that all of them hold.
    started : float
        When it was started, in seconds since the epoch.
    attached : bool
        Whether a kernel drives it.
    """

    name: str
    state: str
    size: int
    commits: int
    started: float
    attached: bool


@dataclass(frozen=True)
class HistoryEvent:
    """Something that happened to a job.

    Attributes
    ----------
    time : float
        Seconds since the epoch.
    kind : str
        ``joined``, ``lost``, ``left``, ``formed``, ``reset``, ``phases`` (where the time of a
        reset went, on the rank that became 0), ``cooldown``, ``restarted``, ``backend``,
        ``checkpoint``, ``refused``, ``waiting``, ``abandoned``, ``attached``, ``finished``,
        ``failed`` or ``stopped``.
    worker : str or None
        Address of the worker that it happened to.
    rank : int or None
        The rank that it happened to, in the generation of that time.
    generation : int
        The generation of that time.
    detail : str
        More, for people.
    size : int
        Number of members from then on.
    """

    time: float
    kind: str
    worker: str | None
    rank: int | None
    generation: int
    detail: str
    size: int = 0


@dataclass(frozen=True)
class Output:
    """Something that a rank printed.

    Attributes
    ----------
    start : int
        Which start of the function.
    rank : int or None
        Its rank then.
    text : str
        What it printed; may end in the middle of a line.
    """

    start: int
    rank: int | None
    text: str
