"""Messages between kernel, scheduler, agents and ranks, and the job's history.

All of it is frozen, and travels as msgpack (:func:`encode`, :func:`decode`). The same object goes
from a rank to the job's status. Nothing here reads a clock, starts a thread or opens a connection.

`start` is the number of a start of the function, counted over the job and never reused.
"""

from __future__ import annotations

import enum
import functools
import numbers
import operator
import re
import sys
from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Annotated, Any, TypeAlias

import msgspec
from msgspec import Struct

from nbelastic.status import DataStatus, Output

_MOST = sys.float_info.max
Number: TypeAlias = Annotated[float, msgspec.Meta(ge=-_MOST, le=_MOST)] | int
"""A finite number; a plain float of a message may be NaN or infinite."""

FRESH = -1  # version of a rank that has never synchronised with the job's state


class Data(Struct, frozen=True, forbid_unknown_fields=True):
    """Base of all that is here."""


# -- membership ------------------------------------------------------------------------------------


class Slot(Data, frozen=True):
    """Capacity for one rank."""

    id: str  # of the worker *process*; a restarted worker has a new one
    worker: str  # address
    name: str  # of the worker; it outlives a restart by its nanny
    host: str  # identified by what its workers share

    @property
    def lasting(self) -> str:
        """Identity that outlives a restart of the process: the worker's name on its host."""
        return f"{self.host}/{self.name}"


class UnusedReason(str, enum.Enum):
    """Why a job does not use a worker, in words with the detail of the worker."""

    CLOSING = "closing"
    LEAVING = "asked to leave"
    PAUSED = "paused by Dask because its memory is used up"
    NOT_IN_WORKERS = "not among workers="
    LACKS_RESOURCES = "without the resources ({detail})"
    TAKEN = "taken by job {detail!r}"
    RESERVED = "reserved for job {detail!r}"
    BEYOND_SHARE = "beyond the share of this job"
    BUSY = "busy with other tasks of Dask, which its rank waits for"
    OTHER_VERSIONS = "with {detail}"
    BEING_PREPARED = "being prepared"
    REFUSED = "refused, because {detail}"
    HOST_FULL = "on a host that has slots_per_host={detail} ranks already"
    TOO_LATE = "too late: the ranks are past the point where others can join"


class UnusedWorker(Data, frozen=True):
    """A worker of the cluster that is not offered to the job."""

    worker: str  # address
    reason: UnusedReason
    # The other job for TAKEN, what is lacking for LACKS_RESOURCES, the versions for OTHER_VERSIONS,
    # the error for REFUSED.
    detail: str = ""

    @property
    def why(self) -> str:
        """The reason in words."""
        return self.reason.value.format(detail=self.detail)


class Limits(Data, frozen=True):
    """Limits set by a job's owner, with times in seconds."""

    np: int = 1  # slots to wait for before anything is started
    min_np: int = 1  # fewest ranks that may train
    max_np: int | None = None  # most ranks that may train; None: all that the cluster offers
    # Longest wait for enough slots, and for a started rank to be ready.
    elastic_timeout: float = 600.0
    stall_timeout: float = 60.0  # longest time that a rank may hold up others that wait for it
    forming_timeout: float = 10.0  # longest time for the ranks of a plan to connect
    exit_timeout: float = 60.0  # longest time for a process to end after its function
    ending_timeout: float = 10.0  # longest time for ranks to end; then their workers are restarted
    reset_limit: int | None = None  # most changes of membership; None: no limit
    check_every: int = 1  # fewest commits of a generation until newcomers join; ranks leave at any
    # Shortest and longest exclusion of a worker that failed; None excludes its process for good.
    # Hosts are never excluded for good: without a range, for 10 to 600 s.
    cooldown: tuple[float, float] | None = None
    slots_per_host: int | None = None  # most ranks on one host; None: no limit
    priority: int = 0  # among jobs of a cluster, higher ones are served first
    weight: float = 1.0  # part of what jobs of one priority share, relative to theirs
    preemptible: bool = False  # a job of a higher priority may take its floor, down to one rank
    checkpoint: bool = False  # ranks can write the state to files

    def changed(self, event: LimitsChanged) -> Limits:
        """Return the limits after a change, in which the new one of min_np and max_np wins."""
        given = msgspec.structs.asdict(event).items()
        new = msgspec.structs.asdict(self) | {k: v for k, v in given if v is not None}
        low, high = new["min_np"], new["max_np"]
        if high is not None and low > high:
            new["min_np"] = new["max_np"] = low if event.max_np is None else high
        if event.min_np is not None:
            new["np"] = new["min_np"]
        return Limits(**new)


class Place(Data, frozen=True):
    """Position of a rank in the job, on its host, and over the hosts."""

    rank: int
    size: int
    local_rank: int
    local_size: int
    cross_rank: int
    cross_size: int


class Member(Data, frozen=True):
    """A rank of a plan."""

    start: int
    slot: Slot
    store: tuple[str, int]  # address of the store that it keeps open
    version: Number  # as in RankReady; FRESH if it has never synchronised


class Plan(Data, frozen=True, dict=True):
    """An agreed membership, as the members of a generation receive it."""

    generation: int  # its number, which only grows
    members: tuple[Member, ...]  # by rank
    loop: int  # number of the members' elastic loop, from 1; 0 for a function without one

    @property
    def version(self) -> float:
        """Newest committed version among the members; ``FRESH`` if none has any."""
        return max(member.version for member in self.members)

    @property
    def source(self) -> int:
        """Source of the state: the lowest rank that holds the newest version."""
        newest = self.version
        return next(r for r, member in enumerate(self.members) if member.version == newest)

    @property
    def behind(self) -> tuple[int, ...]:
        """Ranks that have to receive the state."""
        newest, source = self.version, self.source
        return tuple(
            rank
            for rank, member in enumerate(self.members)
            if member.version != newest or (newest == FRESH and rank != source)
        )

    def rank_of(self, start: int) -> int | None:
        """Return the rank of a start of the function, or None if it is no member."""
        return self._ranks.get(start)

    @functools.cached_property
    def _ranks(self) -> dict[int, int]:
        return {member.start: rank for rank, member in enumerate(self.members)}


class FailureKind(str, enum.Enum):
    """Kind of a job's failure."""

    RANK_FAILED = "rank_failed"
    RANK_LOST = "rank_lost"
    RETURNED_EARLY = "returned_early"
    NOT_ENOUGH_WORKERS = "not_enough_workers"
    RESET_LIMIT = "reset_limit"
    NO_PROGRESS = "no_progress"
    CLUSTER_LOST = "cluster_lost"


class Outcome(Data, frozen=True):
    """The end of a job."""

    kind: str  # finished, failed or stopped
    error: FailureKind | None = None  # None: no failure
    reason: AnyReason | None = None  # for a failure or a stop
    starts: tuple[int, ...] = ()  # with the results, or the errors, that the job ends with; by rank


# -- reasons ---------------------------------------------------------------------------------------


class RankId(Data, frozen=True):
    """Identity of a rank at one moment; `rank` is None outside a generation."""

    start: int
    rank: int | None
    worker: str

    def __str__(self) -> str:
        return f"{self.short} on {self.worker}"

    @property
    def short(self) -> str:
        """The identity without the worker."""
        return f"start {self.start}" if self.rank is None else f"rank {self.rank}"


class Reason(Data, frozen=True, tag=True, tag_field="code"):
    """Why something happens to a job, as a sentence for people.

    History, outcomes, orders to ranks and the status carry it. ``str(reason)`` is the sentence,
    without a full stop: `says`, filled in with the attributes. Where nothing reads these, a
    :class:`Text` is enough.
    """

    says = ""

    def __str__(self) -> str:
        return self.says.format_map(self)

    def __getitem__(self, name: str) -> Any:
        return getattr(self, name)


def listed(reasons: Iterable[Reason], none: str = "a planned change") -> str:
    """Return the different reasons in words, or `none`."""
    return "; ".join(dict.fromkeys(map(str, reasons))) or none


def so_many_ranks(number: int) -> str:
    """Return a number of ranks in words."""
    return f"{number} rank{'s' * (number != 1)}"


def and_more(names: Sequence[str], number: int) -> str:
    """Return some names of so many."""
    more = number - len(names)
    return ", ".join(names) + (f" and {more} more" if more > 0 else "")


_TRANSPORTS = {
    "gloo": "Gloo",
    "shm": "shared memory",
    "hierarchical": "shared memory and Gloo",
    "cuda_ipc": "CUDA IPC",
    "nccl": "NCCL",
}


def over(backend: str) -> str:
    """Return how tensors travel: ``over Gloo``, …; empty for one rank, or unknown."""
    return "" if backend in ("", "solo") else f"over {_TRANSPORTS.get(backend, backend)}"


class Text(Reason, frozen=True):
    says = "{text}"
    text: str


class LossReason(str, enum.Enum):
    """Why a rank is lost, in words with the fields of :class:`Lost`."""

    RAISED = "{detail}"
    PROCESS_ENDED = "its process has ended"
    PROCESS_STOPPED = "its process is stopped"
    WORKER_GONE = "its worker left the cluster"
    WORKER_SILENT = "its worker has sent no heartbeat for {seconds:.0f} s (heartbeat_timeout)"
    UNREADABLE = "its worker has sent a message that cannot be read: {detail}"
    NOT_READY = "not ready {seconds:g} s after its start (elastic_timeout)"
    NOT_CONNECTED = "not connected to the other ranks after {seconds:g} s"
    NOT_LEFT = "did not leave its generation within {seconds:g} s (stall_timeout)"
    STALLED = "held up the others for {seconds:g} s (stall_timeout)"
    UNREACHABLE = "the other ranks cannot connect to it"
    LEFT = "as planned: {detail}"
    ENDED = "ended without an order"


class Lost(Reason, frozen=True):
    says = "{rank}: {cause}"
    rank: RankId
    reason: LossReason
    detail: str = ""  # the exception in one line, the cause of death, or the problem
    seconds: Number = 0.0  # the time limit that it exceeded, or how long its worker was silent

    @property
    def cause(self) -> str:
        """The cause, without the rank."""
        if self.reason == LossReason.PROCESS_ENDED and self.detail:
            return self.detail
        return self.reason.value.format(detail=self.detail, seconds=self.seconds)


class CutOff(Reason, frozen=True):
    says = (
        "{rank.short} was cut off after its function had returned: {how}\n"
        "Threads, exit handlers and child processes of a rank may go on for exit_timeout after its "
        "function. What they were writing may be incomplete. Wait for them in the function, or "
        "pass a larger exit_timeout."
    )
    rank: RankId
    how: str


class RankError(Reason, frozen=True):
    error: str

    def __str__(self) -> str:
        return self.at("")

    def at(self, place: str) -> str:
        """Return the warning with the line of the error."""
        where = f", at {place}" if place else ""
        return (
            f"a rank raised {self.error}{where}\n"
            "The other ranks went on from their last commit. A worker whose rank raises is left "
            "out, unless others raise the same. Fix the error, or handle it in the function."
        )


class Exclusion(Reason, frozen=True):
    kind: str  # worker or host
    name: str
    seconds: Number | None  # None: for good
    times: int = 1  # how often it was excluded, in a row; each time for longer

    def __str__(self) -> str:
        length = "for good" if self.seconds is None else f"for {self.seconds:.1f} s"
        again = f", {self.times} times in a row" if self.times > 1 else ""
        return f"{self.kind} {self.name} is excluded {length}{again}"


class GenerationLeft(Reason, frozen=True):
    rank: RankId
    failed: bool
    detail: str = ""

    def __str__(self) -> str:
        unasked = "an operation failed" if self.failed else "left its generation unasked"
        return f"{self.rank}: {self.detail or unasked}"


class Counted(str, enum.Enum):
    """What is counted until a job ends, in words."""

    SAME_ERROR = "ranks ended their generation with the same error"
    ERRORS = "ranks ended their generation with an error"
    SAME_WORKER = "the same worker was lost"
    STATE = "the job's state was lost"
    WAITS = "all ranks waited for each other"
    UNFORMED = "the ranks could not connect"
    ANY = "ranks failed without a commit"


class Tally(Reason, frozen=True):
    counted: Counted
    times: int
    limit: int
    commit: int  # below 0: before the first generation

    @property
    def reached(self) -> bool:
        """Whether the job ends."""
        return self.times >= self.limit

    def __str__(self) -> str:
        place = "before the first generation" if self.commit < 0 else f"at commit {self.commit}"
        times = f"{self.times} times in a row {place}"
        return f"{self.counted.value} {times}; the limit is {self.limit}"


class NoNewCommit(Reason, frozen=True):
    causes: tuple[AnyReason, ...]
    count: Tally
    last_death: str = ""  # what the last process died of, if it is not among the causes

    def __str__(self) -> str:
        death = "" if self.last_death in str(self.causes) else f"; before that, {self.last_death}"
        return f"{listed(self.causes)} ({self.count}, without progress{death})"


class PastFirstLoop(Reason, frozen=True):
    loop: int
    ranks: int | None = None  # that are left; None while they are enough
    low: int = 0  # fewest ranks of the job

    def __str__(self) -> str:
        left = f"{self.ranks} of at least {self.low} ranks are left, and none can join"
        return (
            f"{'no rank can join any more' if self.ranks is None else left}: the others are in "
            f"elastic loop {self.loop} of the function, and a rank that joins starts at its top, "
            "with the first loop. To let ranks join in all phases, put the phases into one elastic "
            "loop, with the phase among the values of the state"
        )


class RanksAt(Reason, frozen=True):
    text: str  # with ``{ranks}`` in the place of the ranks
    ranks: tuple[RankId, ...]
    lines: tuple[CodeLine | None, ...] = ()  # at which they wait; else by their telemetry

    def __str__(self) -> str:
        return self.at({})

    def at(self, places: Mapping[int, str]) -> str:
        """Return the sentence with the line of code of each start, where known."""
        known = [(rank, places.get(rank.start, "")) for rank in self.ranks]
        words = [f"{rank}, at {place}" if place else str(rank) for rank, place in known]
        more = f"; and {len(words) - 4} more" if len(words) > 4 else ""
        return self.text.replace("{ranks}", "; ".join(words[:4]) + more)


WEIGHTS_DIFFER = Text(
    "ranks train different parameters\n"
    "An optimizer is not wrapped, so that each rank steps with its own gradients. Or parameters "
    "were never made equal, or something changes them on each rank by itself.\n"
    "Wrap each optimizer before the state is made: optimizer = hvd.DistributedOptimizer(optimizer)."
    " Give the model and its optimizers to the state, which makes them equal: "
    "hvd.elastic.TorchState(model, optimizer). Without an elastic loop, call "
    "hvd.broadcast_parameters(model.state_dict(), root_rank=0) first. A Keras model is compiled "
    "with hvd.DistributedOptimizer(optimizer), and trained by "
    "hvd.elastic.fit(hvd.elastic.KerasState(model), ...)."
)


class Sharing(Reason, frozen=True):
    share: int  # most ranks that it may have now
    # Of the cluster that it could use, without those that keep the states of suspended jobs
    # that come before it.
    slots: int
    others: tuple[str, ...]  # some of the jobs that it shares with, by name
    number: int  # of all these jobs
    suspended: bool = False  # it waits with one rank, which keeps its state, for slots of others

    def __str__(self) -> str:
        slots = f"{self.share} of {self.slots} slots"
        if self.suspended:
            kept = f"{slots} for its state" if self.share else "its state is in its checkpoint"
            others = and_more(self.others, self.number)
            return f"suspended: {kept}, while others go first: {others}"
        return self.among(slots)

    def among(self, part: object) -> str:
        """Return the job's part with the names of other jobs."""
        return f"{part}: shares with {and_more(self.others, self.number)}"


class NoticeSource(str, enum.Enum):
    """Source of a notice about the end of a machine, or of a batch job on it."""

    AWS = "AWS spot"
    GOOGLE = "Google Cloud"
    AZURE = "Azure"
    SLURM = "SLURM's time limit"
    PBS = "PBS's time limit"
    CHAOS = "nbelastic.chaos"


class Notice(Reason, frozen=True):
    """Announcement that a worker's machine, or its batch job, will end, or will not."""

    source: NoticeSource
    action: str = ""  # what will happen, in the source's own word
    seconds: Number = 0.0  # until then; where a notice is kept, the moment
    name: str = ""  # of the worker
    host: bool = False  # for all workers of the host, or this one alone
    revoked: bool = False  # an earlier notice of this source does not hold any more
    soft: bool = False  # at risk only, for an unknown time: left once another rank is ready

    def __str__(self) -> str:
        if self.revoked:
            return f"worker {self.name} stays: {self.source.value} has revoked its notice"
        minutes, seconds = divmod(max(round(self.seconds), 0), 60)
        when = "once another is ready" if self.soft else f"in {minutes}:{seconds:02}"
        action = "" if self.action in ("", "end") else f" ({self.action})"
        return f"worker {self.name} leaves {when}: {self.source.value}{action}"


# Reasons without fields.
STEPS_DIFFER = Text("the ranks left their elastic loop at different steps")
PLACES_DIFFER = Text(
    "ranks wait at different places of the function. All ranks must enter the same elastic "
    "loops in the same order"
)
NONE_STAYS = Text(
    "all workers with the state will go, and the job has no checkpoint: it starts over unless "
    "another worker joins before. Pass checkpoint=, or add workers"
)
WORKER_LEAVING = Text("its worker was asked to leave")
WORKER_EXCLUDED = Text("its worker is excluded for a while")
SCALED_DOWN = Text("the job was scaled down")
SHARED = Text("another job of the cluster is to have its slot")
LEFT_BEHIND = Text("the other ranks are past the point where it could join")
FINISHING = Text("the job is finishing")
STOP_PENDING = Text("stopping at the next commit")
KERNEL_ATTACHED = Text("a kernel has attached to it")


# -- events: to the machine. Each may arrive late, twice, or out of order. -------------------------


class Event(Data, frozen=True, tag=True, tag_field="kind"):
    """Base of all events."""


class SlotsFound(Event, frozen=True):
    """Workers with free slots were found."""

    slots: tuple[Slot, ...]


class WorkersUnused(Event, frozen=True):
    """All workers that are not offered to the job, each with the reason."""

    workers: tuple[UnusedWorker, ...]


class SlotEvent(Event, frozen=True):
    """Base of events of one slot."""

    slot: str  # its id


class RankReport(Event, frozen=True):
    """Base of what a rank, or its agent, reports of it; other events of a rank are refused."""

    start: int


class SlotGone(SlotEvent, frozen=True):
    """A worker's process is gone, or out of the scheduler's reach for good."""

    reason: LossReason = LossReason.WORKER_GONE
    detail: str = ""


class SlotLeaving(SlotEvent, frozen=True):
    """A worker was asked to leave: retired, scaled away, or terminated with notice.

    With a soft notice its host may end at any time: its rank stays until a newcomer is ready.
    """

    soon: bool = False  # it closes in seconds, too soon for another rank to receive the state
    notice: Notice | None = None  # what its host or its batch job has announced


class SlotStays(SlotEvent, frozen=True):
    """A worker with a notice stays, or is at risk no more: the notice is revoked."""


class SlotBusy(SlotEvent, frozen=True):
    """The slot was given to another job before this job could claim it."""


class SlotSilent(SlotEvent, frozen=True):
    """A worker's process is stopped, or has missed the heartbeat timeout."""

    reason: LossReason = LossReason.WORKER_SILENT
    seconds: Number = 0.0  # without a heartbeat


class RankReady(RankReport, frozen=True):
    """A rank is set up and waits for a plan."""

    left: int  # newest generation that it knows; it is ready for later ones only
    # Last commit, or FRESH; half a commit more for the state at the end of a later step.
    version: Number
    loop: int  # number of the elastic loop that it is about to enter; 0 outside one
    store: tuple[str, int]  # address of the store that it keeps open
    failed: bool = False  # it left its generation because an operation failed, not as agreed
    detail: str = ""  # error of that operation
    # Starts that it could not reach, if plans in a row did not form.
    unreached: tuple[int, ...] = ()
    # Starts of members whose processes have ended. The operating system reports that to neighbours
    # at once, and to the scheduler only when the memory of the process is free.
    gone: tuple[int, ...] = ()
    own: bool = False  # the failure was its own, or that of all ranks: its communicator works
    part: bool = False  # its operation is of some ranks, and others need not begin any
    line: CodeLine | None = None  # of user code, at which it waits


class RankFormed(RankReport, frozen=True):
    """A rank has connected to the other members of its generation."""

    generation: int
    backend: str = ""  # kind of communicator, the same on all members: gloo, …; solo for one rank
    remark: str = ""  # why it is not a faster kind, for people


class LoopDone(RankReport, frozen=True):
    """A rank's elastic loop has returned, and the rank waits for the other members."""

    generation: int
    version: int  # last commit
    operations: int = 0  # between ranks, begun by its loop in this generation


class RankReturned(RankReport, frozen=True):
    """A rank's function has returned."""

    isolated: bool = False  # it exchanged nothing with others, and entered no elastic loop
    exits: bool = False  # its process still runs, and a RankExited follows


class RankExited(RankReport, frozen=True):
    """The process of a rank that has returned has ended."""

    cut: str = ""  # how it ended, unless by itself


class RankRaised(RankReport, frozen=True):
    """A rank has ended with an error: its function raised, or could not be run."""

    error: str  # the exception in one line
    collective: bool = False  # a failed operation between ranks: a consequence, not a cause
    version: int = FRESH  # last commit
    on_all_ranks: bool = False  # all ranks raise it at the same point, and would do so again
    state_mismatch: bool = False  # the rank has built another state than the others


class RankDied(RankReport, frozen=True):
    """The process of a rank has ended without an event of its own; its worker lives."""

    detail: str  # cause of death, in words
    version: int = FRESH  # last known commit


class RankLeft(RankReport, frozen=True):
    """A rank has ended as ordered."""


class WeightsSampled(RankReport, frozen=True):
    """A rank has sampled its parameters."""

    generation: int
    # Number of its commits in this generation before the sample; 0 at the end of the elastic loop.
    # Without a loop: minus the number of operations, and 0 at the end.
    moment: int
    values: tuple[Number, ...]  # of parameters at the same places on all ranks


class RankNote(RankReport, frozen=True):
    """Entry for the job's history."""

    about: str  # kind in the history: checkpoint, warning, phases
    detail: str  # for people
    figures: dict[str, Number] = {}


class Beat(Data, frozen=True, array_like=True):
    """Part of a heartbeat about a single rank."""

    start: int
    generation: int  # to which `operations` belongs
    progress: int  # a number that changes when the rank makes progress
    waiting: bool  # for other ranks
    version: int  # last commit
    operations: int = 0  # between ranks, begun by its loop in this generation
    operation: str = ""  # in which it waits, or for which its start does; empty if not known


class Beats(Event, frozen=True):
    """Heartbeats of several ranks."""

    beats: tuple[Beat, ...]


CANCELLED = "cancelled by its user"  # reason of a request to end now


class StopRequested(Event, frozen=True):
    """Request to end the job at the next commit, or now."""

    now: bool = False
    reason: str = "stopped by its user"


class LimitsChanged(Event, frozen=True):
    """Change of a job's limits, priority or weight; None leaves a value as it is."""

    min_np: int | None = None
    max_np: int | None = None
    priority: int | None = None
    weight: Number | None = None


class ShareSet(Event, frozen=True):
    """The scheduler has set the job's share; it announces the free slots after this."""

    sharing: Sharing | None  # None: no bound besides max_np
    reclaimed: tuple[str, ...] = ()  # slots to leave, because another job can use no other


class ClusterGone(Event, frozen=True):
    """The scheduler cannot be reached any more."""

    detail: str = ""


class Tick(Event, frozen=True):
    """Time has passed."""


# -- effects: orders of the machine, which the job's controller carries out ------------------------


class Effect(Data, frozen=True, tag=True):
    """Base of all effects."""


class RankEffect(Effect, frozen=True):
    """Base of effects for ranks: agents and processes get them in a RankOrder."""


class GenerationEffect(RankEffect, frozen=True):
    """Base of effects for members of a generation."""

    generation: int
    starts: tuple[int, ...]


class StartRank(Effect, frozen=True):
    """Start the function on a slot, with the place foreseen for it."""

    start: int
    slot: Slot
    place: Place


class Publish(RankEffect, frozen=True):
    """Send a plan to its members."""

    plan: Plan


class Abort(GenerationEffect, frozen=True):
    """End the generation of members: free them wherever they wait."""

    reason: AnyReason


class Notify(GenerationEffect, frozen=True):
    """Announce a change to members, which agree on the step to leave at."""


class Release(GenerationEffect, frozen=True):
    """Release members from their elastic loop, because all have left it."""


class EndRank(RankEffect, frozen=True):
    """End a rank's function."""

    start: int
    # ``leave`` (at the agreed step), ``stop`` (where it waits, or at its next commit or operation),
    # ``cancel`` (now, wherever it is), ``evict`` (the job has gone on without it).
    how: str
    reason: AnyReason
    save: Number = 0.0  # seconds to write a checkpoint first, because no other rank has the state


class RestartWorker(Effect, frozen=True):
    """Restart a worker's process if it has a nanny, because its rank cannot be ended."""

    slot: Slot
    reason: AnyReason


class Record(Effect, frozen=True, omit_defaults=True):
    """Entry of the job's history: the machine's decision, and the log's additions."""

    # joined, lost, died, left, formed, reset, cooldown, restarted, backend, checkpoint, warning,
    # phases, waiting, share, notice, finished, failed, or stopped.
    kind: str
    generation: int = 0  # at that time
    worker: str | None = None  # address
    rank: int | None = None
    start: int | None = None  # of the function, by that rank
    reason: AnyReason | None = None
    name: str = ""  # Dask's name of the worker
    figures: dict[str, float | int] = {}
    time: Number = 0.0  # seconds since the epoch, as all that follows from the log
    size: int = 0  # members from then on
    detail: str = ""  # where there is no reason
    line: CodeLine | None = None  # of user code, that the rank was known to execute
    seen: str = ""  # the event that led to it, and the process that reported that


class End(Effect, frozen=True):
    """End of the job: nothing of it runs any more."""

    outcome: Outcome


# -- effects of ``nbelastic.chaos`` ----------------------------------------------------------------


class FaultOrder(Data, frozen=True, kw_only=True):
    """A fault to be injected into a rank; :class:`nbelastic.chaos.Fault` has what it means."""

    number: int = 0  # unique in the kernel, where the fault is in a plan
    kind: str
    rank: int | None = None  # at which it is due, as the next two; None for any
    step: int | None = None
    generation: int | None = None
    forming: bool = False
    after: Number | None = None
    seconds: Number = 0.0
    steps: int = 0

    @property
    def timed(self) -> bool:
        """Whether the rank itself has to wait for the moment."""
        return self.forming or self.step is not None or self.generation is not None


class InjectFaults(RankEffect, frozen=True):
    """Inject faults, and drop faults that this rank's agent, or another rank, has injected."""

    faults: tuple[FaultOrder, ...] = ()
    drop: tuple[int, ...] = ()


# -- what ranks measure and raise ------------------------------------------------------------------


class CodeLine(Data, frozen=True):
    """A line of code, and its function."""

    file: str
    line: int
    function: str
    text: str = ""  # in a traceback


class MetricsReport(Data, frozen=True):
    """A report of metrics."""

    commit: int  # the one before it
    number: int  # since that commit
    generation: int
    step: Number | None  # position on the horizontal axis, if given
    values: dict[str, float]  # by name; NaN for one that is not finite
    time: float = 0.0  # when it came to the scheduler, in seconds since the epoch; 0 before


_INSTALLED = re.compile(r"[\\/](lib[\\/]python3[^\\/]*|(site|dist)-packages)[\\/]", re.IGNORECASE)
"""Files of installed packages and of Python itself, on whatever machine."""


class PackedError(Data, frozen=True):
    """An error as it travels: plain values, and the pickled error, empty if pickling fails."""

    summary: str
    frames: tuple[CodeLine, ...]
    pickled: bytes

    @property
    def place(self) -> CodeLine | None:
        """The innermost line that is not of an installed package; the innermost if all are."""
        own = [frame for frame in self.frames if not _INSTALLED.search(frame.file)]
        return next(reversed(own or self.frames), None)


# -- agent to scheduler ----------------------------------------------------------------------------


class Message(Data, frozen=True, tag=True, tag_field="message"):
    """Base of all messages between processes."""


class JobMessage(Message, frozen=True):
    """Base of messages about a job."""

    job: str


class RankMessage(JobMessage, frozen=True):
    """Base of messages about a rank of a job."""

    start: int


class Hello(Message, frozen=True):
    """A worker has its agent, and can host a rank."""

    slot: Slot
    versions: dict[str, str]
    pid: int  # of its process


class Heartbeats(Message, frozen=True):
    """Heartbeats of all ranks of a worker, each with its job."""

    beats: tuple[tuple[str, Beat], ...]


class RankEvent(JobMessage, frozen=True):
    """An event of a rank, with its pickled result or its error."""

    event: EventOfRank
    result: bytes | None = None
    error: PackedError | None = None


class RankOutput(RankMessage, frozen=True):
    """Text that a rank has printed; after a gap, output is missing until the next message."""

    text: str
    gap: bool = False


class RankTelemetry(Message, frozen=True):
    """Telemetry of a rank at one moment, and its reports of metrics since the last time."""

    job: str = ""
    start: int = 0
    step: int = 0  # batches processed
    samples: int = 0
    device: str = ""  # that it computes on
    epoch: int = 0  # of its state
    batch: int = 0
    epochs: int = 0  # in all; 0 if not declared
    batches: int = 0  # in an epoch; without epochs steps in all, and `batch` is the last one
    state_bytes: int = 0  # of tensors
    copied_bytes: int = 0  # for commits
    resident_bytes: int = 0  # of its process
    gpu_bytes: int = 0  # of torch, on the GPU of which it has most
    gpu_total: int = 0  # of that GPU; 0 without one
    line: CodeLine | None = None  # of user code, if there was no step since the last snapshot
    micro_batches: int = 0  # of a step, on all ranks; 0 without a loader
    first: int = 0  # the first micro-batch that it computes
    last: int = 0  # the one after its last
    why_not_exact: str = ""  # what keeps its training from being exact
    data: tuple[DataStatus, ...] = ()  # of each loader of its state, at its last commit
    reports: tuple[MetricsReport, ...] = ()


class RankLeaving(RankMessage, frozen=True):
    """The worker of a rank closes in some seconds."""


class RankEnded(RankMessage, frozen=True):
    """The process of a rank has ended, or is never started; its slot is free."""

    never: bool = False  # its task still waits for another one on its worker


class FaultReport(RankMessage, frozen=True):
    """A fault was injected, or could not be."""

    number: int
    rank: int | None
    problem: str = ""  # why it could not be injected
    worker: str = ""  # its address; the scheduler fills it in


class NoticeReport(Message, frozen=True):
    """A worker has read a notice."""

    notice: Notice


# -- scheduler to agent ----------------------------------------------------------------------------


class ForgetOrder(JobMessage, frozen=True):
    """Forget a job: it is over."""


class WatchOrder(Message, frozen=True):
    """Watch for the end of the own batch job, and for notices of the `host`.

    Not `on`: stop all that.
    """

    on: bool = False
    host: bool = False


class RankOrder(RankMessage, frozen=True):
    """An effect that a rank is to obey."""

    effect: AnyRankEffect


# -- between a rank and its agent, besides what the agent passes on --------------------------------


class FaultDue(RankMessage, frozen=True):
    """A fault of the worker, or of the rank's process, is due."""

    fault: FaultOrder
    rank: int | None


# -- kernel to scheduler ---------------------------------------------------------------------------


class JobPayload(Message, frozen=True):
    """The function of a job with its modules: packed by the kernel, unpacked by its ranks."""

    secret: bytes  # by which ranks prove that they belong to the job
    modules: bytes  # the user's own modules, pickled
    call: bytes  # function and arguments; unpacking needs the modules
    torch: dict[str, str] = {}  # its settings in the kernel, no defaults

    def __repr__(self) -> str:  # without its secret
        return f"JobPayload(torch={self.torch})"


class JobTerms(Data, frozen=True):
    """Terms of a job, as ``fit`` makes them."""

    payload: JobPayload
    workers: tuple[str, ...] | None  # addresses, names or hosts that it may use; None for all
    resources: dict[str, Number]  # what a worker must offer
    versions: dict[str, str]  # the kernel's, which its workers must share
    heartbeat_timeout: Number  # seconds of silence after which a worker counts as frozen
    lease: Number  # seconds that it goes on without a kernel
    options: bytes  # that it was started with, pickled, for a kernel that attaches to it
    machine: bytes  # its membership machine, packed
    partitions: tuple[str, ...] = ()  # keys of Dask's as JSON; the scheduler holds them to the end
    notices: bool = True  # its workers watch for notices


class OpenRequest(JobMessage, frozen=True):
    """Publish a job."""

    uid: str  # its id among jobs of this name, a part of its tasks' keys
    client: str  # id of the Dask client that drives it
    topic: str  # on which its driver listens
    terms: JobTerms


class AttachRequest(JobMessage, frozen=True):
    """Take a job over: for the first time, or `again` after the connection was lost."""

    client: str
    topic: str
    again: bool


class LogContents(Data, frozen=True):
    """Contents of a job's log, oldest first; keys are starts of the function."""

    results: dict[int, bytes]  # pickled
    failures: dict[int, PackedError]
    history: tuple[Record, ...]
    ranks: dict[int, tuple[int, str]]  # the last rank and the worker
    output: tuple[Output, ...]  # the newest
    telemetry: tuple[RankTelemetry, ...]  # the last of each start, with its newest reports


class JobWish(JobMessage, frozen=True):
    """An event of a user without the job's driver: to stop the job, or change its limits."""

    event: StopRequested | LimitsChanged


class JobHandover(Message, frozen=True):
    """Answer to an attach, or to a look: all that a driver needs to know of a job."""

    epoch: int  # the number of the new driver
    uid: str
    seq: int  # number of the last event in the machine
    machine: bytes  # the scheduler's copy, packed
    options: bytes  # that the job was started with, pickled
    started: Number  # seconds since the epoch
    log: LogContents


class AttachRefusal(Message, frozen=True):
    """Answer to an attach: the job is ``unknown``, or is ``taken`` by another.

    Or the asking client is ``gone``: its connection was lost, as the scheduler has just noticed.
    """

    problem: str
    jobs: tuple[str, ...] = ()


class JournalStep(JobMessage, frozen=True):
    """Step of a driver's journal: an event and the moment of its handling."""

    topic: str
    epoch: int  # of the driver
    number: int  # of the step
    now: Number  # the machine's arguments besides the event
    chance: Number
    seq: int = 0  # number of the event, if it came from the cluster
    event: AnyEvent | None = None  # the event, if it did not


class InjectRequest(JobMessage, frozen=True):
    """Pass faults on to ranks."""

    epoch: int
    starts: tuple[int, ...]
    order: InjectFaults


class GiveUp(Message, frozen=True):
    """Do not open, or hand over, the job of a topic; close a job that is `over`."""

    topic: str
    over: bool


# -- scheduler to kernel ---------------------------------------------------------------------------


class ToDriver(Data, frozen=True):
    """A message to the driver of an epoch; later drivers ignore it."""

    epoch: int
    message: AnyMessage


class JobEvent(Message, frozen=True):
    """An event for the driver to decide on, with its result or its error."""

    seq: int
    event: AnyEvent
    result: bytes | None = None
    error: PackedError | None = None


class SlotGranted(Message, frozen=True):
    """A slot is a rank's: start its task."""

    start: int
    slot: Slot
    place: Place


class TelemetryBatch(Message, frozen=True):
    """Telemetry of several ranks."""

    ranks: tuple[RankTelemetry, ...]


class DriverReplaced(Message, frozen=True):
    """The job is not the driver's any more, or has gone on without it."""


class JobClosed(Message, frozen=True):
    """No further message of the job follows."""


# -- encoding --------------------------------------------------------------------------------------


def leaves(base: type) -> list[type]:
    """Return the messages of a base class."""
    below: list[type] = base.__subclasses__()
    return [leaf for each in below for leaf in leaves(each)] if below else [base]


if TYPE_CHECKING:
    AnyReason: TypeAlias = Reason
    AnyEvent: TypeAlias = Event
    AnyMessage: TypeAlias = Message
    AnyRankEffect: TypeAlias = RankEffect
    EventOfRank: TypeAlias = Event
else:  # decoding needs to know all classes
    AnyReason, AnyEvent, AnyMessage, AnyRankEffect, EventOfRank = (
        functools.reduce(operator.or_, leaves(base))
        for base in (Reason, Event, Message, RankEffect, RankReport)
    )

MOST_BYTES = 2**32 - 1  # bytes that travel as one value; msgpack writes no more

LEAST, LARGEST = -(2**63), 2**64 - 1
"""The integers that msgpack writes; a greater or smaller one becomes the nearest of them."""


def encode(value: object) -> bytes:
    """Write anything here as msgpack, without running code of a user's class."""
    # What msgpack cannot carry becomes the next best thing: text that is not UTF-8 is escaped,
    # integers are cut to 64 bits.
    try:
        return _ENCODER.encode(value)
    except (ValueError, OverflowError):
        plain = msgspec.to_builtins(value, builtin_types=(bytes, msgspec.Raw), enc_hook=_plain)
        return _ENCODER.encode(_sendable(plain))


def decode(data: bytes | memoryview, kind: Any) -> Any:
    """Read :func:`encode`'s bytes as a `kind`; raise ValueError for what is none."""
    decoder = _MESSAGES if kind is AnyMessage else _decoder(kind)  # hashing the union takes longer
    return decoder.decode(data)


@functools.cache
def _decoder(kind: Any) -> msgspec.msgpack.Decoder[Any]:
    return msgspec.msgpack.Decoder(kind)


def _sendable(value: Any) -> Any:
    kind = type(value)
    if kind is str:
        return value.encode("utf-8", "backslashreplace").decode("utf-8")
    if kind is int:
        return min(max(value, LEAST), LARGEST)
    if kind is dict:
        return {_sendable(key): _sendable(item) for key, item in value.items()}
    if kind in (list, tuple):
        return kind(map(_sendable, value))
    return value


def _plain(value: Any) -> Any:
    """Return what a value of another type is a kind of, or else its name."""
    kind = type(value)
    if issubclass(kind, int):
        return int.__int__(value)
    if issubclass(kind, float):
        return float.__float__(value)
    if issubclass(kind, str):
        return str.__str__(value)
    if kind.__module__ == "numpy" and issubclass(kind, numbers.Real):
        return int(value) if issubclass(kind, numbers.Integral) else float(value)
    return object.__repr__(value)


_ENCODER = msgspec.msgpack.Encoder(enc_hook=_plain)
_MESSAGES = _decoder(AnyMessage)
