"""Define every message between kernel, scheduler, agents and ranks.

Runs in all processes, in the event loops of the connections. All messages use connections that Dask
has anyway: the client's to the scheduler, and the scheduler's to its workers. Nothing ever connects
to the kernel. A message travels as plain values (:mod:`nbelastic.membership.serial`) with the
number of this protocol; another number is refused.
"""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, cast

from nbelastic.elastic.telemetry import AnyFloat, CodeLine, MetricsReport, TelemetrySnapshot
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

PROTOCOL = 6
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
    """The process of a rank has ended; its slot is free."""

    job: str
    start: int


@dataclass(frozen=True)
class FaultReport(Message):
    """A fault was injected, or could not be; or steps were repeated after one.

    Attributes
    ----------
    job, start : str, int
        The rank.
    what : str
        ``done``, ``refused`` or ``redone``.
    number : int
        Number of the fault, for the first two.
    rank : int or None
        The rank's number.
    detail : str
        Reason of a refusal.
    generation, steps, samples : int
        For ``redone``: the steps and samples that were repeated in a generation.
    worker : str
        Address of the worker; the scheduler fills it in.
    """

    job: str
    start: int
    what: str
    number: int = 0
    rank: int | None = None
    detail: str = ""
    generation: int = 0
    steps: int = 0
    samples: int = 0
    worker: str = ""


@dataclass(frozen=True)
class NoticeReport(Message):
    """A worker's machine or batch job will end, or will not after all.

    Attributes
    ----------
    source : NoticeSource
        Who says so.
    action : str
        What will happen, in the source's own word.
    seconds : float
        Seconds until then.
    host : bool
        Whether this is about all workers of the host, or this one alone.
    revoked : bool
        Whether an earlier notice of this source does not hold any more, if there was any.
    soft : bool
        Whether the machine is at risk only: it should be left once there is another.
    """

    source: NoticeSource
    action: str
    seconds: float
    host: bool
    revoked: bool = False
    soft: bool = False


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
    """A fault to be injected into a rank.

    Attributes
    ----------
    number : int
        Its number, unique in the kernel.
    kind : str
        The name of a function of :mod:`nbelastic.chaos`.
    seconds, steps : float, int
        How long it lasts.
    rank, step, generation : int or None
        The rank, step and generation at which it is due; None for any.
    forming : bool
        Whether it is due while the next generation forms.
    """

    number: int
    kind: str
    seconds: float = 0.0
    steps: int = 0
    rank: int | None = None
    step: int | None = None
    generation: int | None = None
    forming: bool = False

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

    Attributes
    ----------
    secret : bytes
        The job's secret, by which ranks prove to each other that they belong to it.
    modules : bytes
        The user's own modules, pickled.
    call : bytes
        The function and its arguments, pickled; it needs the modules to be unpacked.
    torch : dict of str to str
        Torch's settings in the kernel that are not its defaults.
    """

    secret: bytes = field(repr=False)
    modules: bytes = field(repr=False)
    call: bytes = field(repr=False)
    torch: dict[str, str] = field(default_factory=dict)


@dataclass(frozen=True)
class JobTerms:
    """Terms of a job, as ``fit`` makes them.

    Attributes
    ----------
    payload : JobPayload
        Its function.
    workers : tuple of str or None
        Addresses, names or hosts of workers that it may use; None for all.
    resources : dict of str to float
        Resources that a worker must offer.
    versions : dict of str to str
        The kernel's versions, which its workers must share.
    heartbeat_timeout : float
        Seconds of silence after which a worker counts as frozen.
    lease : float
        Seconds that it goes on without a kernel.
    options : bytes
        The options that it was started with, pickled, for a kernel that attaches to it.
    machine : str
        Its membership machine, as :func:`pack_machine` writes it.
    partitions : tuple of str
        Keys of partitions of Dask collections that it reads, as JSON. The scheduler holds them
        until its end.
    notices : bool
        Whether its workers watch for notices.
    """

    payload: JobPayload
    workers: tuple[str, ...] | None
    resources: dict[str, float]
    versions: dict[str, str]
    heartbeat_timeout: float
    lease: float
    options: bytes
    machine: str
    partitions: tuple[str, ...] = ()
    notices: bool = True


@dataclass(frozen=True)
class OpenRequest(Message):
    """Publish a job.

    Attributes
    ----------
    job, uid : str
        Its name, and its id among jobs of this name, which is a part of its tasks' keys.
    client, topic : str
        Id of the Dask client that drives it, and the topic on which its driver listens.
    terms : JobTerms
        Its terms.
    """

    job: str
    uid: str
    client: str
    topic: str
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
    """Something that happened to a job, with the reason as code and fields.

    Attributes
    ----------
    time : float
        Seconds since the epoch.
    line : CodeLine or None
        The line of user code that the rank was known to execute.
    seen : str
        The event that led to it, and the process that reported that.

    The others are those of :class:`~nbelastic.membership.Record`; `detail` is a text where there is
    no reason, and `size` the number of members from then on.
    """

    time: float
    kind: str
    generation: int = 0
    size: int = 0
    worker: str | None = None
    rank: int | None = None
    start: int | None = None
    name: str = ""
    detail: str = ""
    reason: Reason | None = None
    figures: dict[str, AnyFloat] = field(default_factory=dict)
    line: CodeLine | None = None
    seen: str = ""


@dataclass(frozen=True)
class LogContents:
    """Contents of a job's log.

    Attributes
    ----------
    results, failures : dict
        The pickled result or the error of each start that has one.
    history : tuple of HistoryRecord
        The history, oldest first.
    ranks : dict of int to (int, str)
        The last rank and the worker of each start.
    output : tuple of (int, str)
        The newest output, each piece with its start.
    telemetry : tuple of RankTelemetry
        The last telemetry of each start, with its newest reports.
    """

    results: dict[int, bytes]
    failures: dict[int, PackedError]
    history: tuple[HistoryRecord, ...]
    ranks: dict[int, tuple[int, str]]
    output: tuple[tuple[int, str], ...]
    telemetry: tuple[RankTelemetry, ...]


@dataclass(frozen=True)
class JobWish(Message):
    """An event of a user who does not drive the job: to stop it, or to change its limits."""

    job: str
    event: Event


@dataclass(frozen=True)
class JobHandover(Message):
    """Answer to an attach, or to a look: all that a driver needs to know of a job.

    Attributes
    ----------
    epoch : int
        The number of the new driver.
    uid : str
        Part of the job's keys.
    seq : int
        Number of the last event in the machine.
    machine : str
        The scheduler's copy of the membership machine, as :func:`pack_machine` writes it.
    options : bytes
        The options that the job was started with, pickled.
    started : float
        Time of its start, in seconds since the epoch.
    log : LogContents
        History, output, telemetry and results.
    """

    epoch: int
    uid: str
    seq: int
    machine: str
    options: bytes
    started: float
    log: LogContents


@dataclass(frozen=True)
class AttachRefusal(Message):
    """Answer to an attach: the job is ``unknown`` on this cluster, or ``taken`` by another."""

    problem: str
    jobs: tuple[str, ...] = ()


@dataclass(frozen=True)
class JobSummary:
    """A job, as :func:`nbelastic.jobs` lists it."""

    name: str
    state: str
    size: int
    commits: int
    started: float
    attached: bool
    priority: int
    weight: float
    min_np: int
    max_np: int | None
    slots: int
    share: int | None


@dataclass(frozen=True)
class JobSummaries(Message):
    """All jobs on a cluster."""

    jobs: tuple[JobSummary, ...]


@dataclass(frozen=True)
class JournalStep(Message):
    """A step of a driver's journal: an event and the moment at which the driver handled it.

    Attributes
    ----------
    job, topic, epoch : str, str, int
        The job, and the driver.
    number : int
        Number of the step.
    now, chance : float
        The arguments of the machine, besides the event.
    seq : int
        Number of the event, if it came from the cluster; else 0.
    event : Event or None
        The event, if it did not.
    """

    job: str
    topic: str
    epoch: int
    number: int
    now: float
    chance: float
    seq: int = 0
    event: Event | None = None


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
    """Read :func:`pack`'s dict of a message.

    Raises
    ------
    VersionMismatch
        Its sender has another protocol.
    ValueError
        It is not a message.
    """
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
