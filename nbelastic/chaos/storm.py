"""A storm: the faults of a plan, injected into a job while it trains.

One thread, ``nbelastic-chaos-NAME``, that looks at the job twenty times a second, and ends with it.
Faults that a rank has to time itself (``step=``, ``generation=``, ``forming=``) are armed on every
start of the function, also on those that come later; the one that has the rank then does it, says
so, and the others are disarmed. All others are sent when their time has come.
"""

from __future__ import annotations

import itertools
import math
import threading
import time
from typing import TYPE_CHECKING, Any

from nbelastic.errors import OptionError

from .cases import LASTING, Case, Gusts, Tally
from .faults import Fault
from .report import Report, with_recovery
from .weather import Weather

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping

    from nbelastic.driver import Job
    from nbelastic.membership import RankView

__all__ = ["Storm", "inject"]

TICK = 0.05
"""Seconds between two looks at the job."""

LEAST_WELL = 2
"""Ranks that must be well, and hold the state, before one of them is hit at random."""

_numbers = itertools.count(1)


class Storm:
    """Faults that are being injected into a job. Made by :func:`inject`."""

    def __init__(self, job: Job, faults: tuple[Fault | Weather, ...], pace: float | None) -> None:
        self._job = job
        self._driver = job._driver
        self._pace = pace
        self._began = time.time()
        self._pulse = Tally()
        self._lock = threading.Lock()
        self._cases = {next(_numbers): Case(f) for f in faults if isinstance(f, Fault)}
        self._gusts = [Gusts.of(w, self._began) for w in faults if isinstance(w, Weather)]
        self._known: set[int] = set()
        self._unwell: dict[int, float] = {}
        self._redone: dict[int, tuple[int, int]] = {}
        self._over = threading.Event()
        self._thread = threading.Thread(
            target=self._run, name=f"nbelastic-chaos-{job.name}", daemon=True
        )

    def __repr__(self) -> str:
        done = sum(case.done is not None for case in list(self._cases.values()))
        return f"<Storm over {self._job.name}: {done} faults so far>"

    def start(self) -> None:
        """Begin."""
        if self._driver.chaos is not None:
            raise OptionError(f"job {self._job.name!r} has a storm already; stop() it first")
        self._driver.chaos = self._take
        self._thread.start()

    def stop(self) -> None:
        """Inject nothing more; what has been done is not undone. The job goes on."""
        self._over.set()
        self._thread.join()

    def wait(self, timeout: float | None = None) -> bool:
        """Wait for the storm's end, which is the job's; return whether it has come."""
        self._thread.join(timeout)
        return not self._thread.is_alive()

    def report(self) -> Report:
        """Return what it has cost so far."""
        with self._lock:
            found = [case.injection() for case in self._cases.values()]
            redone = list(self._redone.values())
        history = self._job.history
        injections = sorted((i for i in found if i is not None), key=lambda i: i.time)
        now = time.time() if self._thread.is_alive() else None
        return Report(
            injections=with_recovery(injections, history),
            seconds=self._pulse.seconds(now),
            steps_redone=sum(steps for steps, _ in redone),
            samples_redone=sum(samples for _, samples in redone),
            restarts=sum(event.kind == "restarted" for event in history),
            pace=self._pulse.since(now),
            undisturbed=self._pulse.before() if self._pace is None else self._pace,
        )

    # -- in the client's event loop ----------------------------------------------------------------

    def _take(self, message: Mapping[str, Any]) -> None:
        """Take in word from a rank."""
        with self._lock:
            if message["what"] == "redone":
                steps, samples = self._redone.get(message["generation"], (0, 0))
                self._redone[message["generation"]] = (
                    max(steps, message["steps"]),
                    samples + message["samples"],
                )
                return
            case = self._cases.get(message["number"])
            if case is None or not case.open:
                return
            case.start, case.rank = message["start"], message["rank"]
            case.worker = message["worker"]
            if message["what"] == "refused":
                case.problem = message["detail"]
            else:
                case.done = time.time()
                self._pulse.mark()
                self._note_harm(message["start"], case.fault)

    def _note_harm(self, start: int, fault: Fault) -> None:
        for_a_while = fault.kind not in LASTING or fault.seconds > 0
        until = time.time() + fault.seconds + 2.0 if for_a_while else math.inf
        self._unwell[start] = max(until, self._unwell.get(start, 0.0))

    # -- the thread --------------------------------------------------------------------------------

    def _run(self) -> None:
        try:
            while not self._over.wait(TICK) and not self._job.done():
                self._look()
        finally:
            with self._lock:
                for number, case in self._cases.items():
                    if case.told:  # somebody may have done it, and the others not know of it yet
                        self._order(case.told, drop=[number])
                    if case.open:
                        case.problem = "its time has not come" if case.sent is None else "too late"
            self._driver.chaos = None

    def _look(self) -> None:
        view = self._driver.view()
        members = [rank for rank in view.ranks if rank.rank is not None]
        with self._lock:
            self._pulse.note(time.time(), view.commits)
            self._arm({rank.start for rank in view.ranks})
            if view.state != "running":
                return
            passed = time.time() - self._began
            for number, case in self._cases.items():
                waits = case.open and case.sent is None and not case.fault.by_the_rank
                if waits and passed >= (case.fault.after or 0.0):
                    self._send(number, case, members)
            for gusts in self._gusts:
                self._blow(gusts, members)

    def _arm(self, starts: set[int]) -> None:
        """Let ranks know what they have to look out for, and what not any more."""
        timed = {n: case for n, case in self._cases.items() if case.fault.by_the_rank}
        for start in starts:
            fresh = {n: c for n, c in timed.items() if c.open and start not in c.told}
            if fresh or start not in self._known:
                self._order([start], faults=[c.wire(n) for n, c in fresh.items()])
            for case in fresh.values():
                case.told.add(start)
        self._known |= starts
        for number, case in timed.items():
            if case.told and not case.open:
                self._order(case.told & starts, drop=[number])
                case.told.clear()

    def _blow(self, gusts: Gusts, members: list[RankView]) -> None:
        """Send what is due of a random plan, if enough ranks are well."""
        now, draw = time.time(), gusts.next
        if now < gusts.due:
            return
        well = [
            rank
            for rank in members
            if rank.state == "running"
            and rank.commits > 0
            and self._unwell.get(rank.start, 0) < now
        ]
        if len(well) < LEAST_WELL:
            return
        target = well[int(draw.where * len(well))]
        assert target.rank is not None
        number, case = next(_numbers), Case(draw.fault(target.rank))
        self._cases[number] = case
        if not case.fault.by_the_rank:
            self._send(number, case, members)
        if case.fault.kind != "pause":
            self._note_harm(target.start, case.fault)
        gusts.advance(now)

    def _send(self, number: int, case: Case, members: list[RankView]) -> None:
        """Send a fault whose time has come."""
        now, fault = time.time(), case.fault
        if fault.kind == "pause":
            self._driver.pause(self._over, fault.seconds)
            case.sent = case.done = now
        else:
            target = next((rank for rank in members if rank.rank == fault.rank), None)
            if target is None:
                case.problem = f"there are {len(members)} ranks"
                return
            case.sent, case.start, case.worker = now, target.start, target.worker
            case.told.add(target.start)
            self._order([target.start], faults=[case.wire(number)])
        self._pulse.mark()

    def _order(self, starts: Iterable[int], **fields: Any) -> None:
        self._driver.order("harm", starts=sorted(starts), **fields)


def inject(job: Job, *faults: Fault | Weather, pace: float | None = None) -> Storm:
    """Inject faults into a job that runs, or is about to.

    Parameters
    ----------
    job : Job
        The job; made with ``fit(..., block=False)``. It may have one storm at a time.
    *faults : Fault or Weather
        What is to happen.
    pace : float, optional
        Commits per second of an undisturbed run with as many ranks, to compare with; without it
        the job's own before the first fault.

    Returns
    -------
    Storm
        Which is under way, until the job ends or it is stopped.

    Examples
    --------
    >>> storm = inject(job, chaos.kill(rank=2, step=100))  # doctest: +SKIP
    >>> print(storm.report())  # doctest: +SKIP
    """
    for fault in faults:
        if not isinstance(fault, (Fault, Weather)):
            raise OptionError(f"{fault!r}: must be a fault, as chaos.kill(rank=1) makes one")
    storm = Storm(job, faults, pace)
    storm.start()
    return storm
