"""Heartbeats on the scheduler: passed on to the drivers, and missed where they cease."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, Any

from .protocol import BEAT_INTERVAL, Message
from .timer import Every

if TYPE_CHECKING:
    from collections.abc import Callable

    from .records import Host, JobRecord

__all__ = ["Pulse"]


class Pulse:
    """The heartbeats of all ranks.

    Parameters
    ----------
    jobs, hosts : dict
        The plugin's books.
    tell : callable
        ``tell(job, do, **fields)`` sends a message to a driver.
    """

    def __init__(
        self,
        jobs: dict[str, JobRecord],
        hosts: dict[str, Host],
        tell: Callable[..., None],
    ) -> None:
        self._jobs = jobs
        self._hosts = hosts
        self._tell = tell
        self._ticked = 0.0
        self._timer = Every(BEAT_INTERVAL, self._tick)

    def start(self) -> None:
        """Watch, if not watching yet."""
        if not self._timer.running:
            self._ticked = asyncio.get_running_loop().time()
            self._timer.start()

    def stop(self) -> None:
        """Stop watching."""
        self._timer.stop()

    def take(self, slot: str | None, beats: list[tuple[str, list[Any]]]) -> None:
        """Take in what an agent has sent."""
        if slot is not None:
            self._hosts[slot].beats, self._hosts[slot].silence = True, 0.0
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

    def _tick(self) -> None:
        """Pass heartbeats on, and look for workers that send none.

        Time counts as silence only as far as the scheduler was listening: after a pause of its
        own it must read what has come in before it blames anyone.
        """
        now = asyncio.get_running_loop().time()
        passed, self._ticked = min(now - self._ticked, 2 * BEAT_INTERVAL), now
        for name, record in self._jobs.items():
            if record.beats:
                beats = [
                    dict(zip(("start", "progress", "waiting", "version"), beat, strict=True))
                    for beat in record.beats.values()
                ]
                record.beats = {}
                self._event(name, {"kind": "Beats", "beats": beats})
            self.send_vitals(name)
        for slot, host in self._hosts.items():
            if host.holder is not None and host.beats:
                host.silence += passed
                self._note_silence(slot, host)

    def _note_silence(self, slot: str, host: Host) -> None:
        assert host.holder is not None
        job = host.holder[0]
        record = self._jobs.get(job)
        if record is None or slot in record.silent or host.silence < record.heartbeat_timeout:
            return
        record.silent.add(slot)
        detail = f"its worker has sent no heartbeat for {host.silence:.0f} s"
        self._event(job, {"kind": "SlotSilent", "slot": slot, "detail": detail})

    def _event(self, job: str, event: Message) -> None:
        self._tell(job, "event", event=event, attachment=None)
