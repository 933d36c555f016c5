"""Heartbeats on the scheduler: passed on to the drivers, and missed where they cease.

A worker that misses two is looked at, by whoever can see its process. If that is stopped, its
driver hears so at once; if it is busy, it is alive and merely cannot speak (something holds the
GIL), which is as good as a heartbeat that says so; and if nobody can tell, the worker counts as
frozen when it has been silent for its job's ``heartbeat_timeout``.
"""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, Any

from .lookout import Lookout
from .protocol import BEAT_INTERVAL, Message
from .timer import Every

if TYPE_CHECKING:
    from collections.abc import Callable

    from distributed import Scheduler

    from .records import Host, JobRecord

__all__ = ["Pulse"]

LISTEN_INTERVAL = 0.25
"""Seconds between two counts of everybody's silence, and between two looks at a process."""

LONGEST_COUNT = 2 * LISTEN_INTERVAL
"""Most seconds that one count adds: whoever counts late has not been listening."""

SUSPICIOUS = 2 * BEAT_INTERVAL
"""Seconds of silence after which a worker is looked at."""


class Pulse:
    """The heartbeats of all ranks.

    Parameters
    ----------
    scheduler : distributed.Scheduler
        Through which processes are looked at.
    jobs, hosts : dict
        The plugin's books.
    tell : callable
        ``tell(job, do, **fields)`` sends a message to a driver.
    """

    def __init__(
        self,
        scheduler: Scheduler,
        jobs: dict[str, JobRecord],
        hosts: dict[str, Host],
        tell: Callable[..., None],
    ) -> None:
        self._jobs = jobs
        self._hosts = hosts
        self._tell = tell
        self._counted = 0.0
        self._relay = Every(BEAT_INTERVAL, self._pass_on)
        self._listen = Every(LISTEN_INTERVAL, self._count_silence)
        self._lookout = Lookout(scheduler, hosts, self._take_verdict)

    def start(self) -> None:
        """Watch, if not watching yet."""
        if not self._listen.running:
            self._counted = _now()
            self._listen.start()
            self._relay.start()

    def stop(self) -> None:
        """Stop watching."""
        self._listen.stop()
        self._relay.stop()
        self._lookout.stop()

    def acquaint(self, slot: str) -> None:
        """Prepare those who will look at a worker's process if it falls silent."""
        self._lookout.acquaint(slot)

    def take(self, slot: str | None, beats: list[tuple[str, list[Any]]]) -> None:
        """Take in what an agent has sent."""
        if slot is not None:
            host = self._hosts[slot]
            host.beats, host.suspicion = True, None
            host.silence = -min(_now() - self._counted, LONGEST_COUNT)  # the next count adds it
            host.last_beats = {(job, beat[0]): beat for job, beat in beats}
        for job, beat in beats:
            if job in self._jobs:
                self._jobs[job].beats[beat[0]] = beat

    def take_vitals(
        self, worker: str, job: str, start: int, figures: list[Any], rows: list[Any]
    ) -> None:
        """Take in what a rank tells people of itself; it goes on with the next beat."""
        record = self._jobs.get(job)
        if record is not None:
            waiting = record.vitals[start][1] if start in record.vitals else []
            record.vitals[start] = (figures, [*waiting, *rows])

    def send_vitals(self, job: str) -> None:
        """Send what has come in of vitals and has not been passed on."""
        record = self._jobs.get(job)
        if record is not None and record.vitals:
            vitals = [[start, *held] for start, held in record.vitals.items()]
            record.vitals = {}
            self._tell(job, "vitals", vitals=vitals)

    def _pass_on(self) -> None:
        """Pass on what has come in since the last time."""
        for name, record in list(self._jobs.items()):  # telling may end a job
            if record.beats:
                beats = [
                    dict(zip(("start", "progress", "waiting", "version"), beat, strict=True))
                    for beat in record.beats.values()
                ]
                record.beats = {}
                self._event(name, {"kind": "Beats", "beats": beats})
            self.send_vitals(name)

    def _count_silence(self) -> None:
        """Look for workers with a rank that send nothing.

        Time counts as silence only as far as the scheduler was listening: after a pause of its
        own it must read what has come in before it blames anyone.
        """
        now = _now()
        passed, self._counted = min(now - self._counted, LONGEST_COUNT), now
        for slot, host in list(self._hosts.items()):
            if host.holder is not None:
                host.silence += passed
                self._note_silence(slot, host, host.holder[0])

    def _note_silence(self, slot: str, host: Host, job: str) -> None:
        record = self._jobs.get(job)
        if record is None or slot in record.silent:
            return
        limit = record.heartbeat_timeout
        if host.beats and host.silence >= limit:  # before its first, its task may wait for a thread
            self._blame(slot, job, f"its worker has sent no heartbeat for {host.silence:.0f} s")
        elif host.silence >= min(SUSPICIOUS, limit / 2):
            self._lookout.look_at(slot)
        else:
            host.suspicion = None

    def _take_verdict(self, slot: str, verdict: str) -> None:
        """Take in what others have seen of a silent worker's process."""
        host = self._hosts.get(slot)
        if host is None or host.holder is None:
            return
        job, start = host.holder
        if verdict == "stopped":
            self._blame(slot, job, "its process is stopped")
        elif verdict == "busy":
            host.silence = 0.0
            self._vouch(job, start, host)

    def _vouch(self, job: str, start: int, host: Host) -> None:
        """Repeat a rank's last heartbeat for it, but not that it waits: that may have changed."""
        beat = host.last_beats.get((job, start))
        if beat is not None and job in self._jobs:
            _, progress, _, version = beat
            self._jobs[job].beats.setdefault(start, [start, progress, False, version])

    def _blame(self, slot: str, job: str, detail: str) -> None:
        """Tell a driver, once, that a worker is frozen."""
        record = self._jobs.get(job)
        if record is not None and slot not in record.silent:
            record.silent.add(slot)
            self._event(job, {"kind": "SlotSilent", "slot": slot, "detail": detail})

    def _event(self, job: str, event: Message) -> None:
        self._tell(job, "event", event=event, attachment=None)


def _now() -> float:
    return asyncio.get_running_loop().time()
