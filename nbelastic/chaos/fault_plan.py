"""Inject the faults of a plan into a job while it trains.

One thread in the kernel, ``nbelastic-chaos-NAME``, looks at the job twenty times a second, and ends
with it. Faults that a rank has to time itself (``step=``, ``generation=``, ``forming=``) are armed
on every start of the function, also on later ones. The one that has the rank then injects the fault
and reports that, and the others are disarmed. All others are sent when their time has come.
"""

from __future__ import annotations

import itertools
import math
import threading
import time
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from nbelastic.driver import driver_of
from nbelastic.errors import OptionError

from .faults import Fault, RandomPlan
from .report import FaultOutcome, Report, with_recovery

if TYPE_CHECKING:
    from collections.abc import Iterable

    from nbelastic.driver import Job
    from nbelastic.membership import RankView
    from nbelastic.messages import FaultOrder, FaultReport


TICK = 0.05
"""Seconds between two looks at the job."""

LEAST_WELL = 2
"""Ranks that must be well, and hold the state, before one of them is hit at random."""

MUTE = frozenset({"kill", "close", "leave", "restart"})
"""Kinds after which no process may be left to report that it was done."""

LASTING = MUTE | {"crash", "crash_server", "stop", "fail", "memory", "hang"}
"""Kinds after which a rank is not well any more; unless ``stop`` is for a while only."""

LATE = 2.0
"""Seconds that word of a commit may take."""

LEAST_SPAN = 2.0
"""Shortest span in seconds over which a pace is measured."""

_numbers = itertools.count(1)


@dataclass
class ScheduledFault:
    """A fault of a plan, with its rank and its outcome."""

    fault: Fault
    rank: int | None = None
    worker: str = ""
    start: int | None = None
    sent: float | None = None
    done: float | None = None
    problem: str = ""
    sent_to: set[int] = field(default_factory=set)

    @property
    def open(self) -> bool:
        """Whether it has still to be done."""
        return self.done is None and not self.problem

    def outcome(self) -> FaultOutcome | None:
        """Return the outcome for the report; None while the fault is open."""
        kind, problem, when = self.fault.kind, self.problem, self.done
        if when is None and kind in MUTE and self.sent is not None:
            when, problem = self.sent, ""
        if when is None and not problem:
            return None
        rank = self.fault.rank if self.rank is None else self.rank
        return FaultOutcome(kind, rank, self.worker, when or self.sent or 0.0, problem)


class RandomSchedule:
    """The faults of a random plan, begun at `now`: the next fault and its due time."""

    def __init__(self, plan: RandomPlan, now: float) -> None:
        self._draws = plan.draws()
        self.advance(now)

    def advance(self, now: float) -> None:
        """Go on to the next."""
        self.next = next(self._draws)
        self.due = now + self.next.wait


class CommitRate:
    """Counts commits before the first fault, and since.

    Word of commits comes late, and in steps. So time is measured from one change to another.
    """

    def __init__(self) -> None:
        self._first: tuple[float, int] | None = None
        self._fault: tuple[float, int] | None = None
        self._last: tuple[float, int] | None = None

    def note(self, now: float, commits: int) -> None:
        """Take note of how many commits there are."""
        if commits > 0 and (self._last is None or commits != self._last[1]):
            self._last = now, commits
            self._first = self._first or self._last

    def mark(self) -> None:
        """Take note of a fault."""
        self._fault = self._fault or self._last

    def before(self) -> float | None:
        """Return commits per second before the first fault; None if that was too soon."""
        return _rate(self._first, self._fault)

    def since(self, now: float | None) -> float | None:
        """Return commits per second since then; `now` is None after the end."""
        last = self._last
        if last is not None and now is not None and now > last[0] + LATE:
            last = now, last[1]  # there have been none since
        return _rate(self._fault, last)

    def seconds(self, now: float | None) -> float:
        """Return seconds since the first fault."""
        if self._fault is None or self._last is None:
            return 0.0
        return (self._last[0] if now is None else now) - self._fault[0]


def _rate(since: tuple[float, int] | None, to: tuple[float, int] | None) -> float | None:
    if since is None or to is None or to[0] < since[0] + LEAST_SPAN:
        return None
    return max(to[1] - since[1], 0) / (to[0] - since[0])


class FaultPlan:
    """Faults that are being injected into a job. Made by :func:`inject`."""

    def __init__(
        self, job: Job, faults: tuple[Fault | RandomPlan, ...], pace: float | None
    ) -> None:
        self._job = job
        self._driver = driver_of(job)
        self._pace = pace
        self._began = time.time()
        self._commit_rate = CommitRate()
        self._lock = threading.Lock()
        self._scheduled = {
            next(_numbers): ScheduledFault(f) for f in faults if isinstance(f, Fault)
        }
        self._schedules = [
            RandomSchedule(plan, self._began) for plan in faults if isinstance(plan, RandomPlan)
        ]
        self._known: set[int] = set()
        self._unwell: dict[int, float] = {}
        self._redone: dict[int, tuple[int, int]] = {}
        self._over = threading.Event()
        self._thread = threading.Thread(
            target=self._run, name=f"nbelastic-chaos-{job.name}", daemon=True
        )

    def __repr__(self) -> str:
        done = sum(each.done is not None for each in list(self._scheduled.values()))
        return f"<FaultPlan of {self._job.name}: {done} faults so far>"

    def start(self) -> None:
        """Begin."""
        if self._driver.chaos is not None:
            raise OptionError(
                f"job {self._job.name!r} has a plan of faults already; stop() that one first"
            )
        self._driver.chaos = self._take
        self._thread.start()

    def stop(self) -> None:
        """Inject no more faults; earlier faults stay in the report. The job goes on."""
        self._over.set()
        self._thread.join()

    def wait(self, timeout: float | None = None) -> bool:
        """Wait for the end of the plan, at the end of the job; return False on a timeout."""
        self._thread.join(timeout)
        return not self._thread.is_alive()

    def report(self) -> Report:
        """Return the cost of the plan's faults so far."""
        if self._job.done():
            self._thread.join(LATE)  # which says what did not come to pass
        with self._lock:
            found = [each.outcome() for each in self._scheduled.values()]
            redone = list(self._redone.values())
        history = self._job.history
        injections = sorted((i for i in found if i is not None), key=lambda i: i.time)
        now = time.time() if self._thread.is_alive() else None
        return Report(
            injections=with_recovery(injections, history),
            seconds=self._commit_rate.seconds(now),
            steps_redone=sum(steps for steps, _ in redone),
            samples_redone=sum(samples for _, samples in redone),
            restarts=sum(event.kind == "restarted" for event in history),
            pace=self._commit_rate.since(now),
            undisturbed=self._commit_rate.before() if self._pace is None else self._pace,
        )

    # -- in the client's event loop ----------------------------------------------------------------

    def _take(self, report: FaultReport) -> None:
        """Take the report of a rank."""
        with self._lock:
            if report.what == "redone":
                steps, samples = self._redone.get(report.generation, (0, 0))
                self._redone[report.generation] = (
                    max(steps, report.steps),
                    samples + report.samples,
                )
                return
            scheduled = self._scheduled.get(report.number)
            if scheduled is None or not scheduled.open:
                return
            scheduled.start, scheduled.rank = report.start, report.rank
            scheduled.worker = report.worker
            if report.what == "refused":
                scheduled.problem = report.detail
            else:
                scheduled.done = time.time()
                self._commit_rate.mark()
                self._note_unwell(report.start, scheduled.fault)

    def _note_unwell(self, start: int, fault: Fault) -> None:
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
                for number, scheduled in self._scheduled.items():
                    if scheduled.sent_to:  # one may have done it, and the others not know yet
                        self._order(scheduled.sent_to, drop=[number])
                    if scheduled.open:
                        never = scheduled.sent is None
                        scheduled.problem = "its time has not come" if never else "too late"
            self._driver.chaos = None

    def _look(self) -> None:
        view = self._driver.view()
        members = [rank for rank in view.ranks if rank.rank is not None]
        with self._lock:
            self._commit_rate.note(time.time(), view.commits)
            self._arm({rank.start for rank in view.ranks})
            if view.state != "running":
                return
            passed = time.time() - self._began
            for number, scheduled in self._scheduled.items():
                fault = scheduled.fault
                waits = scheduled.open and scheduled.sent is None and not fault.by_the_rank
                if waits and passed >= (fault.after or 0.0):
                    self._send(number, scheduled, members)
            for schedule in self._schedules:
                self._send_random(schedule, members)

    def _arm(self, starts: set[int]) -> None:
        """Arm the open timed faults on the ranks of `starts`, and disarm the closed faults."""
        timed = {n: each for n, each in self._scheduled.items() if each.fault.by_the_rank}
        for start in starts:
            fresh = {n: c for n, c in timed.items() if c.open and start not in c.sent_to}
            if fresh or start not in self._known:
                self._order([start], faults=[c.fault.order(n) for n, c in fresh.items()])
            for scheduled in fresh.values():
                scheduled.sent_to.add(start)
        self._known |= starts
        for number, scheduled in timed.items():
            if scheduled.sent_to and not scheduled.open:
                self._order(scheduled.sent_to & starts, drop=[number])
                scheduled.sent_to.clear()

    def _send_random(self, schedule: RandomSchedule, members: list[RankView]) -> None:
        """Send what is due of a random plan, if enough ranks are well."""
        now, chosen = time.time(), schedule.next
        if now < schedule.due:
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
        target = well[int(chosen.where * len(well))]
        assert target.rank is not None
        number, scheduled = next(_numbers), ScheduledFault(chosen.fault(target.rank))
        self._scheduled[number] = scheduled
        if not scheduled.fault.by_the_rank:
            self._send(number, scheduled, members)
        if scheduled.fault.kind != "pause":
            self._note_unwell(target.start, scheduled.fault)
        schedule.advance(now)

    def _send(self, number: int, scheduled: ScheduledFault, members: list[RankView]) -> None:
        """Send a fault whose time has come."""
        now, fault = time.time(), scheduled.fault
        if fault.kind == "pause":
            self._driver.pause(self._over, fault.seconds)
            scheduled.sent = scheduled.done = now
        else:
            target = next((rank for rank in members if rank.rank == fault.rank), None)
            if target is None:
                scheduled.problem = f"there are {len(members)} ranks"
                return
            scheduled.sent, scheduled.start, scheduled.worker = now, target.start, target.worker
            scheduled.sent_to.add(target.start)
            self._order([target.start], faults=[fault.order(number)])
        self._commit_rate.mark()

    def _order(
        self, starts: Iterable[int], *, faults: Iterable[FaultOrder] = (), drop: Iterable[int] = ()
    ) -> None:
        self._driver.inject(sorted(starts), tuple(faults), tuple(drop))


def inject(job: Job, *faults: Fault | RandomPlan, pace: float | None = None) -> FaultPlan:
    """Inject faults into a job that runs, or is about to.

    Parameters
    ----------
    job : Job
        The job; made with ``fit(..., block=False)``. It may have one plan at a time.
    *faults : Fault or RandomPlan
        What is to happen.
    pace : float, optional
        Commits per second of an undisturbed run with as many ranks, to compare with; without it
        the job's own before the first fault.

    Returns
    -------
    FaultPlan
        Which is under way, until the job ends or it is stopped.

    Examples
    --------
    >>> plan = inject(job, chaos.kill(rank=2, step=100))  # doctest: +SKIP
    >>> print(plan.report())  # doctest: +SKIP
    """
    for fault in faults:
        if not isinstance(fault, (Fault, RandomPlan)):
            raise OptionError(f"{fault!r}: must be a fault, as chaos.kill(rank=1) makes one")
    plan = FaultPlan(job, faults, pace)
    plan.start()
    return plan
