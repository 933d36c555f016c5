"""Pass heartbeats on to the drivers, and detect workers whose heartbeats cease.

A worker that misses two heartbeats is probed: its nanny reads the state of its process. Of a
stopped one the driver is told at once; a busy one cannot send (something holds the GIL), which is
as good as a heartbeat; any other counts as frozen after its job's ``heartbeat_timeout``. Who else
asks whether a worker is alive reads its record.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import Mapping
from typing import Any

from distributed import Scheduler
from distributed.protocol.pickle import dumps
from distributed.protocol.serialize import Serialize, Serialized, deserialize
from msgspec.structs import replace

from nbelastic import messages as m
from nbelastic.cluster.dask_compat import PeriodicCall
from nbelastic.cluster.process_state import ProbeHistory, ProcessState, read_state
from nbelastic.cluster.wire import HEARTBEAT_INTERVAL_S

from .job import ScheduledJob
from .records import WorkerRecord

logger = logging.getLogger(__name__)

LISTEN_INTERVAL = 0.25  # seconds between two counts of silence, and between two probes of a process
LONGEST_COUNT = 2 * LISTEN_INTERVAL  # seconds in one count: after a pause, messages wait to be read
PROBED_AFTER = 2 * HEARTBEAT_INTERVAL_S  # seconds of silence after which a worker is probed
ANSWER_LIMIT = 1.0  # seconds for a nanny to read a process


class HeartbeatMonitor:
    """Monitor of the heartbeats of all ranks."""

    def __init__(
        self,
        scheduler: Scheduler,
        jobs: Mapping[str, ScheduledJob],
        workers: Mapping[str, WorkerRecord],
    ) -> None:
        self._scheduler, self._jobs, self._workers = scheduler, jobs, workers
        self._counted_at = 0.0
        self._relay = PeriodicCall(HEARTBEAT_INTERVAL_S, self._pass_on)
        self._listen = PeriodicCall(LISTEN_INTERVAL, self._count_silence)
        self._probes: dict[str, asyncio.Task[None]] = {}  # under way, by address

    def start(self) -> None:
        """Start monitoring, unless it has started."""
        self._counted_at = _now()
        self._listen.start()
        self._relay.start()

    def stop(self) -> None:
        """Stop monitoring."""
        self._listen.stop()
        self._relay.stop()
        for probe in self._probes.values():
            probe.cancel()

    def take(self, worker: WorkerRecord | None, beats: tuple[tuple[str, m.Beat], ...]) -> None:
        """Take the heartbeats of an agent."""
        if worker is not None:
            worker.has_beaten = True
            worker.silence = -min(_now() - self._counted_at, LONGEST_COUNT)  # the next count adds
            worker.last_beats = {(job, beat.start): beat for job, beat in beats}
        for job, beat in beats:
            if job in self._jobs:
                self._jobs[job].beats[beat.start] = beat

    def take_telemetry(self, worker: str, telemetry: m.RankTelemetry) -> None:
        """Take the telemetry of a rank; it goes on with the next heartbeat."""
        job = self._jobs.get(telemetry.job)
        if job is not None:
            waiting = job.telemetry.get(telemetry.start)
            if waiting is not None:
                telemetry = replace(telemetry, reports=waiting.reports + telemetry.reports)
            job.telemetry[telemetry.start] = telemetry

    def send_telemetry(self, job: ScheduledJob) -> None:
        """Send the telemetry that has not been passed on."""
        if job.telemetry:
            ranks, job.telemetry = tuple(job.telemetry.values()), {}
            job.log.note_telemetry(ranks)
            job.send(m.TelemetryBatch(ranks))

    def _pass_on(self) -> None:
        """Pass on what has come in since the last time."""
        for job in self._jobs.values():
            self.send_beats(job)
            self.send_telemetry(job)

    def send_beats(self, job: ScheduledJob) -> None:
        """Pass on the heartbeats of a job's ranks that have not been passed on."""
        if job.beats:
            beats, job.beats = tuple(job.beats.values()), {}
            job.take_in(m.Beats(beats))

    def _count_silence(self) -> None:
        """Count the silence of workers with a rank, as far as the scheduler was listening."""
        now = _now()
        passed, self._counted_at = min(now - self._counted_at, LONGEST_COUNT), now
        for address, worker in list(self._workers.items()):
            if worker.holder is not None:
                worker.silence += passed
                job = self._jobs.get(worker.holder[0])
                if job is not None and not worker.frozen:
                    self._note_silence(address, worker, job.terms.heartbeat_timeout)

    def _note_silence(self, address: str, worker: WorkerRecord, limit: float) -> None:
        least = min(PROBED_AFTER, limit / 2)
        # Before its first heartbeat, its task may wait for a thread.
        if worker.has_beaten and worker.silence >= limit:
            self._report_silent(worker, m.LossReason.WORKER_SILENT)
        elif worker.nanny and worker.silence >= least and address not in self._probes:
            probe = self._probes[address] = asyncio.ensure_future(self._probe(worker, least))
            probe.add_done_callback(lambda _: self._probes.pop(address))

    async def _probe(self, worker: WorkerRecord, least: float) -> None:
        """Probe a worker until it is silent no more, or for less than `least` seconds."""
        history = ProbeHistory()
        while self._workers.get(worker.address) is worker and worker.silence >= least:
            state = await self._read_state(worker)
            verdict = None if state is None else history.add(state)
            if worker.silence < least or worker.holder is None:  # it has sent a heartbeat since
                return
            job, start = worker.holder
            if verdict == "stopped":
                self._report_silent(worker, m.LossReason.PROCESS_STOPPED)
                return
            if verdict == "busy":
                worker.silence = least
                # Its last heartbeat again, but not that it waits: that may have changed.
                beat = worker.last_beats.get((job, start))
                if beat is not None and job in self._jobs:
                    repeated = replace(beat, waiting=False, operation="")
                    self._jobs[job].beats.setdefault(start, repeated)
            await asyncio.sleep(LISTEN_INTERVAL)

    async def _read_state(self, worker: WorkerRecord) -> ProcessState | None:
        """Have a worker's nanny read its process, by Dask's own handler; None if it cannot."""
        message = {"op": "run", "function": dumps(read_state), "args": dumps((worker.pid,))}
        ask = self._scheduler.broadcast(
            msg=message, workers=[worker.address], nanny=True, on_error="return"
        )
        answers: dict[str, Any] = {}
        with contextlib.suppress(asyncio.TimeoutError, TimeoutError, OSError, KeyError):
            answers = await asyncio.wait_for(ask, ANSWER_LIMIT)
        answer = answers.get(worker.address)
        result = answer.get("result") if isinstance(answer, dict) else None
        if isinstance(result, Serialized):  # as the scheduler leaves what it only passes on
            result = deserialize(result.header, result.frames)
        elif isinstance(result, Serialize):  # came without being written down
            result = result.data
        return result if isinstance(result, ProcessState) else None

    def _report_silent(self, worker: WorkerRecord, reason: m.LossReason) -> None:
        """Tell a driver, once, that a worker is frozen."""
        job = None if worker.holder is None else self._jobs.get(worker.holder[0])
        if job is not None and not worker.frozen:
            worker.frozen = True
            where, limit = worker.address, job.terms.heartbeat_timeout
            logger.info(
                "job %r: %s is frozen: %s, %.1f s without a heartbeat (heartbeat_timeout %g s)",
                *(job.name, where, reason.value, worker.silence, limit),
            )
            job.take_in(m.SlotSilent(worker.slot.id, reason, worker.silence))


def _now() -> float:
    return asyncio.get_running_loop().time()
