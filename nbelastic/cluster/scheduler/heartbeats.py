"""Pass heartbeats on to the drivers, and detect workers whose heartbeats cease.

A worker that misses two heartbeats is probed: its nanny, or else another worker of its host, reads
the state of its process. If that is stopped, the driver is told at once. If it is busy, it is alive
and merely cannot send (something holds the GIL), which is as good as a heartbeat. If its process
cannot be read, the worker counts as frozen after its job's ``heartbeat_timeout``.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from typing import TYPE_CHECKING, Any

from distributed.protocol.pickle import dumps
from distributed.protocol.serialize import Serialize, Serialized, deserialize
from msgspec.structs import replace

from nbelastic.cluster.dask_compat import PeriodicCall, resume
from nbelastic.cluster.process_state import ProbeHistory, ProcessState, Verdict, read_state
from nbelastic.cluster.wire import HEARTBEAT_INTERVAL_S
from nbelastic.messages import Beats, LossReason, SlotSilent, TelemetryBatch

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from distributed import Scheduler

    from nbelastic.messages import Event, Message, RankBeat, RankTelemetry

    from .records import JobRecord, WorkerRecord

logger = logging.getLogger(__name__)

LISTEN_INTERVAL = 0.25
"""Seconds between two counts of silence, and between two probes of a process."""

LONGEST_COUNT = 2 * LISTEN_INTERVAL
"""Most seconds that one count adds: a late count means that the scheduler did not listen."""

PROBED_AFTER = 2 * HEARTBEAT_INTERVAL_S
"""Seconds of silence after which a worker is probed."""

ANSWER_LIMIT = 1.0
"""Seconds that an observer has to read a process; one that takes longer is not asked again."""


class HeartbeatMonitor:
    """Monitor of the heartbeats of all ranks.

    `workers` are by slot. ``tell(job, event)`` hands an event to a job, ``send(job, message)``
    sends a message to its driver.
    """

    def __init__(
        self,
        scheduler: Scheduler,
        jobs: dict[str, JobRecord],
        workers: dict[str, WorkerRecord],
        tell: Callable[[str, Event], None],
        send: Callable[[str, Message], None],
    ) -> None:
        self._scheduler = scheduler
        self._jobs = jobs
        self._workers = workers
        self._tell = tell
        self._send = send
        self._counted_at = 0.0
        self._relay = PeriodicCall(HEARTBEAT_INTERVAL_S, self._pass_on)
        self._listen = PeriodicCall(LISTEN_INTERVAL, self._count_silence)
        self._probes: dict[str, asyncio.Task[None]] = {}  # under way, by slot

    def start(self) -> None:
        """Start monitoring, unless it has started."""
        if not self._listen.running:
            self._counted_at = _now()
            self._listen.start()
            self._relay.start()

    def stop(self) -> None:
        """Stop monitoring."""
        self._listen.stop()
        self._relay.stop()
        for probe in self._probes.values():
            probe.cancel()

    async def warm_up(self, worker: WorkerRecord) -> None:
        """Probe a worker through its nanny in good time: the first probe imports modules there."""
        if worker.nanny:
            await self._read_state(worker, worker.address, nanny=True)

    def take(self, slot: str | None, beats: tuple[RankBeat, ...]) -> None:
        """Take the heartbeats of an agent."""
        if slot is not None:
            worker = self._workers[slot]
            worker.has_beaten = True
            worker.silence = -min(_now() - self._counted_at, LONGEST_COUNT)  # the next count adds
            worker.last_beats = {(each.job, each.beat.start): each.beat for each in beats}
        for each in beats:
            if each.job in self._jobs:
                self._jobs[each.job].beats[each.beat.start] = each.beat

    def take_telemetry(self, worker: str, telemetry: RankTelemetry) -> None:
        """Take the telemetry of a rank; it goes on with the next heartbeat."""
        record = self._jobs.get(telemetry.job)
        if record is not None:
            waiting = record.telemetry.get(telemetry.start)
            if waiting is not None and waiting.reports:
                reports = waiting.reports + telemetry.reports
                telemetry = replace(telemetry, reports=reports)
            record.telemetry[telemetry.start] = telemetry

    def send_telemetry(self, job: str) -> None:
        """Send the telemetry that has not been passed on."""
        record = self._jobs.get(job)
        if record is not None and record.telemetry:
            ranks, record.telemetry = tuple(record.telemetry.values()), {}
            record.log.note_telemetry(ranks)
            self._send(job, TelemetryBatch(ranks))

    def _pass_on(self) -> None:
        """Pass on what has come in since the last time."""
        # Streams to workers and drivers may have stalled, because the clock was set back.
        for worker in self._workers.values():
            resume(self._scheduler.stream_comms.get(worker.address))
        for record in self._jobs.values():
            if record.client is not None:
                resume(self._scheduler.client_comms.get(record.client))
        for name in list(self._jobs):  # an event may end a job
            self.send_beats(name)
            self.send_telemetry(name)

    def send_beats(self, job: str) -> None:
        """Pass on the heartbeats of a job's ranks that have not been passed on."""
        record = self._jobs.get(job)
        if record is not None and record.beats:
            beats, record.beats = tuple(record.beats.values()), {}
            self._tell(job, Beats(beats))

    def _count_silence(self) -> None:
        """Count the silence of workers with a rank.

        Time counts as silence only as far as the scheduler was listening: after a pause of its
        own, messages wait to be read first.
        """
        now = _now()
        passed, self._counted_at = min(now - self._counted_at, LONGEST_COUNT), now
        for slot, worker in list(self._workers.items()):
            if worker.holder is not None:
                worker.silence += passed
                self._note_silence(slot, worker, worker.holder[0])

    def _note_silence(self, slot: str, worker: WorkerRecord, job: str) -> None:
        record = self._jobs.get(job)
        if record is None or slot in record.silent:
            return
        limit = record.terms.heartbeat_timeout
        # Before its first heartbeat, its task may wait for a thread.
        if worker.has_beaten and worker.silence >= limit:
            self._report_silent(slot, job, LossReason.WORKER_SILENT, worker.silence)
        elif worker.silence >= (least := min(PROBED_AFTER, limit / 2)) and slot not in self._probes:
            probe = asyncio.ensure_future(self._probe(slot, worker, least))
            self._probes[slot] = probe
            probe.add_done_callback(lambda _: self._probes.pop(slot))

    async def _probe(self, slot: str, worker: WorkerRecord, least: float) -> None:
        """Probe a worker until it is silent no more, or for less than `least` seconds."""
        history = ProbeHistory()
        deaf: set[tuple[str, bool]] = set()  # observers, of which one may be stopped, too
        while self._workers.get(slot) is worker and worker.silence >= least:
            observer = next((o for o in self._observers(worker) if o not in deaf), None)
            if observer is None:
                return
            state = None
            with contextlib.suppress(asyncio.TimeoutError, TimeoutError, OSError):
                state = await asyncio.wait_for(self._read_state(worker, *observer), ANSWER_LIMIT)
            if state is None:
                deaf.add(observer)
                continue
            verdict = history.add(state)
            if worker.silence < least or worker.holder is None:  # it has sent a heartbeat since
                return
            job, start = worker.holder
            if verdict is Verdict.STOPPED:
                self._report_silent(slot, job, LossReason.PROCESS_STOPPED, worker.silence)
                return
            if verdict is Verdict.BUSY:
                worker.silence = least
                # Its last heartbeat again, but not that it waits: that may have changed.
                beat = worker.last_beats.get((job, start))
                if beat is not None and job in self._jobs:
                    repeated = replace(beat, waiting=False, operation="")
                    self._jobs[job].beats.setdefault(start, repeated)
            await asyncio.sleep(LISTEN_INTERVAL)

    def _observers(self, worker: WorkerRecord) -> Iterator[tuple[str, bool]]:
        """Yield the addresses of workers that may see a worker's process; True: by their nannies.

        Its nanny comes first, then other workers of its host that are not silent.
        """
        if worker.nanny:
            yield worker.address, True
        for other in self._workers.values():
            alive = other is not worker and other.silence < PROBED_AFTER
            if alive and other.host == worker.host:
                yield other.address, False

    async def _read_state(
        self, worker: WorkerRecord, address: str, nanny: bool
    ) -> ProcessState | None:
        """Have an observer read a process, by Dask's own handler; None if it cannot."""
        message = {"op": "run", "function": dumps(read_state), "args": dumps((worker.process,))}
        if address not in self._scheduler.workers:
            return None
        answers = await self._scheduler.broadcast(
            msg=message, workers=[address], nanny=nanny, on_error="return"
        )
        answer: Any = answers.get(address)
        if not isinstance(answer, dict) or answer.get("status") != "OK":
            return None
        result = answer.get("result")
        if isinstance(result, Serialized):  # as the scheduler leaves what it only passes on
            result = deserialize(result.header, result.frames)
        elif isinstance(result, Serialize):  # came without being written down
            result = result.data
        return result if isinstance(result, ProcessState) else None

    def _report_silent(self, slot: str, job: str, reason: LossReason, seconds: float) -> None:
        """Tell a driver, once, that a worker is frozen."""
        record = self._jobs.get(job)
        if record is not None and slot not in record.silent:
            record.silent.add(slot)
            logger.info(
                "job %r: %s is frozen: %s, %.1f s without a heartbeat (heartbeat_timeout %g s)",
                job,
                self._workers[slot].address,
                reason.value,
                seconds,
                record.terms.heartbeat_timeout,
            )
            self._tell(job, SlotSilent(slot, reason, seconds))


def _now() -> float:
    return asyncio.get_running_loop().time()
