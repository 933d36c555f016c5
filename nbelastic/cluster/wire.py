"""Define every message between kernel, scheduler, agents and ranks.

All messages use connections that Dask has anyway: the client's to the scheduler, and the
scheduler's to its workers. Nothing ever connects to the kernel. A message travels as plain values
(:mod:`nbelastic.membership.serial`) with the number of this protocol; another number is refused.
"""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, cast

from nbelastic.elastic.ranks.telemetry import AnyFloat, CodeLine, MetricsReport, TelemetrySnapshot
from nbelastic.errors import VersionMismatch
from nbelastic.membership import (
    Beat,
    Event,
    Machine,
    NoticeSource,
    Place,
    Plan,
    Reason,
    Slot,
    from_dict,
    to_dict,
)
from nbelastic.membership.serial import plain, tag, typed

from .process_state import ProcessId
from .rank_error import PackedError

if TYPE_CHECKING:
    from collections.abc import Callable

PROTOCOL = 7
"""Number of this protocol. To be raised with each change of a message."""

PLUGIN = "nbelastic"
"""Name of the scheduler plugin and of the agents; the scheduler's messages to agents have it."""

FROM_AGENTS = "nbelastic-agent"
"""Name of the agents' messages to the scheduler."""

FROM_KERNELS = "nbelastic-kernel"
"""Name of the kernels' messages to the scheduler."""

HEARTBEAT_INTERVAL_S = 0.5
"""Seconds between heartbeats."""


@dataclass(frozen=True)
class Message:
    """Base of all messages."""


# -- agent to scheduler ----------------------------------------------------------------------------


@dataclass(frozen=True)
class Hello(Message):
    """A worker has its agent, and can host a rank."""

    slot: Slot
    versions: dict[str, str]
    process: ProcessId


@dataclass(frozen=True)
class RankBeat:
    """Heartbeat of a rank of a job."""

    job: str
    beat: Beat


@dataclass(frozen=True)
class Heartbeats(Message):
    """Heartbeats of all ranks of a worker."""

    beats: tuple[RankBeat, ...]


@dataclass(frozen=True)
class RankEvent(Message):
    """An event of a rank, with the pickled result or the error that belongs to it."""

    job: str
    event: Event
    result: bytes | None = None
    error: PackedError | None = None


@dataclass(frozen=True)
class RankOutput(Message):
    """Text that a rank has printed; after a gap, output is missing until the next message."""

    job: str
    start: int
    text: str
    gap: bool = False


@dataclass(frozen=True)
class RankTelemetry(Message):
    """Telemetry of a rank, and its reports of metrics since the last time."""

    job: str
    start: int
    snapshot: TelemetrySnapshot
    reports: tuple[MetricsReport, ...] = ()


@dataclass(frozen=True)
class RankLeaving(Message):
    """The worker of a rank closes in some seconds."""

    job: str
    start: int


@dataclass(frozen=True)
class RankEnded(Message):
    """The process of a rank has ended, or is never started; its slot is free."""

    job: str
    start: int
    never: bool = False  # its task still waits for another one on its worker


@dataclass(frozen=True)
class FaultReport(Message):
    """A fault was injected, or could not be; or steps were repeated after one."""

    job: str
    start: int
    what: str  # ``done``, ``refused`` or ``redone``
    number: int = 0  # of the fault, unless it is ``redone``
    rank: int | None = None
    detail: str = ""  # reason of a refusal
    generation: int = 0  # for ``redone``: in which so many steps and samples were repeated
    steps: int = 0
    samples: int = 0
    worker: str = ""  # its address; the scheduler fills it in


@dataclass(frozen=True)
class NoticeReport(Message):
    """A worker's machine or batch job will end, or will not after all."""

    source: NoticeSource
    action: str  # what will happen, in the source's own word
    seconds: float  # until then
    host: bool  # for all workers of the host, or this one alone
    revoked: bool = False  # an earlier notice of this source does not hold any more
    soft: bool = False  # the machine is at risk only: left once there is another


# -- scheduler to agent ----------------------------------------------------------------------------


@dataclass(frozen=True)
class ForgetOrder(Message):
    """Forget a job: it is over."""

    job: str


@dataclass(frozen=True)
class WatchOrder(Message):
    """Watch for signals and the end of the own batch job, and for notices of the `host`.

    Not `on`: stop all that.
    """

    on: bool = False
    host: bool = False


@dataclass(frozen=True)
class RankOrder(Message):
    """Base of orders to a rank."""

    job: str
    start: int


@dataclass(frozen=True)
class PlanOrder(RankOrder):
    """Form a generation."""

    plan: Plan


@dataclass(frozen=True)
class AbortOrder(RankOrder):
    """Leave a generation at once: it is over."""

    generation: int
    reason: str


@dataclass(frozen=True)
class ChangeOrder(RankOrder):
    """Agree on a step at which to leave a generation."""

    generation: int


@dataclass(frozen=True)
class ReleaseOrder(RankOrder):
    """Leave the elastic loop: all members have left it."""

    generation: int


@dataclass(frozen=True)
class SaveOrder(RankOrder):
    """Write the last commit to the checkpoint, while the rank waits."""


@dataclass(frozen=True)
class EndRankOrder(RankOrder):
    """End, in the way that :class:`~nbelastic.membership.EndRank` describes."""

    how: str
    reason: str
    save: float = 0.0


@dataclass(frozen=True)
class FaultOrder:
    """A fault to be injected into a rank, for some seconds or steps."""

    number: int  # unique in the kernel
    kind: str  # the name of a function of :mod:`nbelastic.chaos`
    seconds: float = 0.0
    steps: int = 0
    rank: int | None = None  # at which it is due, as the next two; None for any
    step: int | None = None
    generation: int | None = None
    forming: bool = False  # it is due while the next generation forms

    @property
    def timed(self) -> bool:
        """Whether the rank itself has to wait for the moment."""
        return self.forming or self.step is not None or self.generation is not None


@dataclass(frozen=True)
class FaultsOrder(RankOrder):
    """Inject faults, and drop those that another rank has injected."""

    faults: tuple[FaultOrder, ...] = ()
    drop: tuple[int, ...] = ()


# -- between a rank and its agent, besides what the agent passes on --------------------------------


@dataclass(frozen=True)
class FaultDue(Message):
    """A fault of the worker, or of the rank's process, is due."""

    job: str
    start: int
    fault: FaultOrder
    rank: int | None


@dataclass(frozen=True)
class FaultDone(RankOrder):
    """A fault that was due has been injected, or could not be."""

    number: int


# -- kernel to scheduler ---------------------------------------------------------------------------


@dataclass(frozen=True)
class JobPayload(Message):
    """The function of a job, and what belongs to it.

    The kernel packs it, the scheduler keeps it, and the process of each rank unpacks it.
    """

    secret: bytes = field(repr=False)  # by which ranks prove that they belong to the job
    modules: bytes = field(repr=False)  # the user's own modules, pickled
    call: bytes = field(repr=False)  # function and arguments; unpacking needs the modules
    torch: dict[str, str] = field(default_factory=dict)  # its settings in the kernel, no defaults


@dataclass(frozen=True)
class JobTerms:
    """Terms of a job, as ``fit`` makes them."""

    payload: JobPayload
    workers: tuple[str, ...] | None  # addresses, names or hosts that it may use; None for all
    resources: dict[str, float]  # what a worker must offer
    versions: dict[str, str]  # the kernel's, which its workers must share
    heartbeat_timeout: float  # seconds of silence after which a worker counts as frozen
    lease: float  # seconds that it goes on without a kernel
    options: bytes  # that it was started with, pickled, for a kernel that attaches to it
    machine: str  # its membership machine, by :func:`pack_machine`
    partitions: tuple[str, ...] = ()  # keys of Dask's as JSON; the scheduler holds them to the end
    notices: bool = True  # its workers watch for notices


@dataclass(frozen=True)
class OpenRequest(Message):
    """Publish a job."""

    job: str
    uid: str  # its id among jobs of this name, a part of its tasks' keys
    client: str  # id of the Dask client that drives it
    topic: str  # on which its driver listens
    terms: JobTerms


@dataclass(frozen=True)
class AttachRequest(Message):
    """Take a job over: for the first time, or `again` after the connection was lost."""

    job: str
    client: str
    topic: str
    again: bool


@dataclass(frozen=True)
class HistoryRecord:
    """Entry of a job's history, a :class:`~nbelastic.membership.Record` with its time."""

    time: float  # seconds since the epoch
    kind: str
    generation: int = 0
    size: int = 0  # members from then on
    worker: str | None = None
    rank: int | None = None
    start: int | None = None
    name: str = ""
    detail: str = ""  # where there is no reason
    reason: Reason | None = None
    figures: dict[str, AnyFloat] = field(default_factory=dict)
    line: CodeLine | None = None  # of user code, that the rank was known to execute
    seen: str = ""  # the event that led to it, and the process that reported that


@dataclass(frozen=True)
class LogContents:
    """Contents of a job's log, oldest first; keys are starts of the function."""

    results: dict[int, bytes]  # pickled
    failures: dict[int, PackedError]
    history: tuple[HistoryRecord, ...]
    ranks: dict[int, tuple[int, str]]  # the last rank and the worker
    output: tuple[tuple[int, str], ...]  # the newest, each piece with its start
    telemetry: tuple[RankTelemetry, ...]  # the last of each start, with its newest reports


@dataclass(frozen=True)
class JobWish(Message):
    """An event of a user who does not drive the job: to stop it, or to change its limits."""

    job: str
    event: Event


@dataclass(frozen=True)
class JobHandover(Message):
    """Answer to an attach, or to a look: all that a driver needs to know of a job."""

    epoch: int  # the number of the new driver
    uid: str
    seq: int  # number of the last event in the machine
    machine: str  # the scheduler's copy, by :func:`pack_machine`
    options: bytes  # that the job was started with, pickled
    started: float  # seconds since the epoch
    log: LogContents


@dataclass(frozen=True)
class AttachRefusal(Message):
    """Answer to an attach: the job is ``unknown`` on this cluster, or ``taken`` by another."""

    problem: str
    jobs: tuple[str, ...] = ()


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


@dataclass(frozen=True)
class JobSummaries(Message):
    """All jobs on a cluster."""

    jobs: tuple[JobInfo, ...]


@dataclass(frozen=True)
class JournalStep(Message):
    """Step of a driver's journal: an event and the moment at which the driver handled it."""

    job: str
    topic: str
    epoch: int  # of the driver
    number: int  # of the step
    now: float  # the machine's arguments besides the event
    chance: float
    seq: int = 0  # number of the event, if it came from the cluster
    event: Event | None = None  # the event, if it did not


@dataclass(frozen=True)
class InjectRequest(Message):
    """Pass faults on to ranks."""

    job: str
    epoch: int
    starts: tuple[int, ...]
    faults: tuple[FaultOrder, ...] = ()
    drop: tuple[int, ...] = ()


@dataclass(frozen=True)
class GiveUp(Message):
    """Do not open, or hand over, the job of a topic; if it is `over`, close it."""

    topic: str
    over: bool


# -- scheduler to kernel ---------------------------------------------------------------------------


@dataclass(frozen=True)
class ToDriver:
    """A message to the driver of an epoch; a later one ignores it."""

    epoch: int
    message: Message


@dataclass(frozen=True)
class JobEvent(Message):
    """An event for the driver to decide on, with the result or the error that belongs to it."""

    seq: int
    event: Event
    result: bytes | None = None
    error: PackedError | None = None


@dataclass(frozen=True)
class SlotGranted(Message):
    """A slot is a rank's: start its task."""

    start: int
    slot: Slot
    place: Place


@dataclass(frozen=True)
class TelemetryBatch(Message):
    """Telemetry of several ranks."""

    ranks: tuple[RankTelemetry, ...]


@dataclass(frozen=True)
class WorkerRefused(Message):
    """A worker cannot host a rank of the job."""

    worker: str
    reason: str


@dataclass(frozen=True)
class DriverReplaced(Message):
    """The job is not the driver's any more, or has gone on without it."""


@dataclass(frozen=True)
class JobClosed(Message):
    """No further message of the job follows."""


# -- packing ---------------------------------------------------------------------------------------


def _leaves(base: type[Message]) -> list[type[Message]]:
    found = base.__subclasses__()
    return [*found, *(each for kind in found for each in _leaves(kind))]


tag(Message, "message", _leaves(Message))


def pack(message: Message | ToDriver) -> dict[str, Any]:
    """Write a message as plain values."""
    return {"protocol": PROTOCOL, "body": plain(message)}


def pack_machine(machine: Machine) -> str:
    """Write a membership machine as JSON."""
    return json.dumps(to_dict(machine))


def unpack_machine(text: str) -> Machine:
    """Read :func:`pack_machine`'s text."""
    return from_dict(json.loads(text))


def pack_for_ranks(order: RankOrder) -> Callable[[int], dict[str, Any]]:
    """Return a function that writes an order to a rank; what is common is written once.

    A plan of a thousand ranks goes to each of them.
    """
    packed = pack(order)
    return lambda start: {**packed, "body": {**packed["body"], "start": start}}


def unpack(data: Any) -> Message:
    """Read :func:`pack`'s dict; raise VersionMismatch or ValueError for what it did not write."""
    return cast(Message, _read(Message, data))


def unpack_for_driver(data: Any) -> ToDriver:
    """Read :func:`pack`'s dict of a message to a driver; raise as :func:`unpack` does."""
    return cast(ToDriver, _read(ToDriver, data))


def _read(kind: type, data: Any) -> Any:
    if not isinstance(data, dict) or "body" not in data:
        raise ValueError(f"not a message: {data!r:.200}")
    if data.get("protocol") != PROTOCOL:
        raise VersionMismatch(
            f"another version of nbelastic sent a message: its protocol has the number "
            f"{data.get('protocol')!r}, this one {PROTOCOL}; install the same version of nbelastic "
            "in the kernel, on the scheduler and on all workers"
        )
    try:
        return typed(kind, data["body"], strict=True)
    except (TypeError, ValueError, LookupError, AttributeError) as error:
        raise ValueError(f"not a message: {data['body']!r:.200} ({error!r:.200})") from error
