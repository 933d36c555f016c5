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
from collections.abc import Iterator
from dataclasses import dataclass, field

from msgspec import structs

from nbelastic.driver import Job, RankStatus, driver_of
from nbelastic.errors import OptionError
from nbelastic.messages import FaultReport

from .faults import Fault, RandomPlan
from .report import FaultOutcome, Report, with_recovery

# In seconds.
TICK = 0.05  # between two looks at the job
LATE = 2.0  # that the thread may take at the end of the job

LEAST_WELL = 2  # ranks that must be well, and hold the state, before one of them is hit at random

MUTE = frozenset({"kill", "close", "leave", "restart"})
"""Kinds after which no process may be left to report that it was done."""

LASTING = MUTE | {"crash", "stop", "fail", "hang"}
"""Kinds after which a rank is not well any more; unless ``stop`` is for a while only."""

_numbers = itertools.count(1)


@dataclass
class ScheduledFault:
    """A fault of a plan, and its outcome so far."""

    fault: Fault
    start: int | None = None  # of the only process that it is for, if that was drawn
    sent: bool = False  # to the one process that has its rank
    sent_to: set[int] = field(default_factory=set)
    outcome: FaultOutcome | None = None

    def end(self, problem: str = "", rank: int | None = None, worker: str = "") -> None:
        """Set the outcome: injected now, unless there is a problem."""
        rank = self.fault.rank if rank is None else rank
        self.outcome = FaultOutcome(self.fault.kind, rank, worker, time.time(), problem)


class FaultPlan:
    """Faults that are being injected into a job. Made by :func:`inject`."""

    def __init__(self, job: Job, faults: tuple[Fault | RandomPlan, ...]) -> None:
        self._job = job
        self._driver = driver_of(job)
        self._began = time.time()
        self._lock = threading.Lock()
        self._scheduled = {
            next(_numbers): ScheduledFault(f) for f in faults if isinstance(f, Fault)
        }
        self._random = [self._schedule_all(p) for p in faults if isinstance(p, RandomPlan)]
        self._members: list[RankStatus] = []  # at the last look
        self._unwell: dict[int, float] = {}
        self._over = threading.Event()
        self._thread = threading.Thread(
            target=self._run, name=f"nbelastic-chaos-{job.name}", daemon=True
        )

    def __repr__(self) -> str:
        ended = [each.outcome for each in list(self._scheduled.values()) if each.outcome]
        done = sum(not outcome.problem for outcome in ended)
        return f"<FaultPlan of {self._job.name}: {done} faults so far>"

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
            found = [each.outcome for each in self._scheduled.values() if each.outcome is not None]
        history = self._job.history
        return Report(
            injections=with_recovery(sorted(found, key=lambda each: each.time), history),
            steps_redone=round(sum(event.figures.get("batches", 0) for event in history)),
            restarts=sum(event.kind == "restarted" for event in history),
        )

    # -- in the client's event loop ----------------------------------------------------------------

    def _take(self, report: FaultReport) -> None:
        """Take the report of a rank."""
        with self._lock:
            scheduled = self._scheduled.get(report.number)
            if scheduled is None or (scheduled.outcome is not None and not scheduled.sent):
                return
            scheduled.sent_to.discard(report.start)  # it holds its step until its worker lets go
            scheduled.end(report.problem, report.rank, report.worker)
            if not report.problem:
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
                        self._driver.job_client.inject(scheduled.sent_to, drop=[number])
                    if scheduled.outcome is None:
                        scheduled.end("too late" if scheduled.sent else "its time has not come")
            self._driver.chaos = None

    def _look(self) -> None:
        view, inject = self._driver.view(), self._driver.job_client.inject
        self._members = [rank for rank in view.ranks if rank.rank is not None]
        running = view.state == "running"
        with self._lock:
            for plan in self._random if running else ():
                next(plan)
            starts = {rank.start for rank in view.ranks}
            orders: dict[int, list[Fault]] = {}
            for number, each in self._scheduled.items():
                fault, chosen = each.fault, set[int]()
                if fault.timed and each.outcome is None:  # armed on every start, also on later ones
                    able = starts if each.start is None else starts & {each.start}
                    chosen = able - each.sent_to
                elif fault.timed and each.sent_to:
                    inject(each.sent_to & starts, drop=[number])
                    each.sent_to.clear()
                elif running and not (fault.timed or each.sent or each.outcome):
                    chosen = self._send_if_due(each)
                each.sent_to |= chosen
                for start in chosen:
                    rank = fault.rank if fault.timed else None  # else the start has it
                    order = structs.replace(fault, number=number, rank=rank)
                    orders.setdefault(start, []).append(order)
            for start, faults in orders.items():
                inject([start], faults)

    def _schedule_all(self, plan: RandomPlan) -> Iterator[None]:
        """Schedule faults of a random plan, each when it is due; one at most until a ``yield``."""
        for wait, where, fault in plan.draws():
            due = time.time() + wait
            while time.time() < due or not self._schedule(where, fault):
                yield
            yield

    def _schedule(self, where: float, fault: Fault) -> bool:
        """Schedule a random fault; return False if too few ranks are well."""
        well = [
            rank
            for rank in self._members
            if rank.state == "running"
            and rank.commits
            and self._unwell.get(rank.start, 0) < time.time()
        ]
        if len(well) < LEAST_WELL:
            return False
        target = well[int(where * len(well))]
        if fault.kind != "pause":
            fault = structs.replace(fault, rank=target.rank)
            self._note_unwell(target.start, fault)
        self._scheduled[next(_numbers)] = ScheduledFault(fault, start=target.start)
        return True

    def _send_if_due(self, scheduled: ScheduledFault) -> set[int]:
        """Return the start of the rank to order a fault from, if its time has come."""
        fault = scheduled.fault
        if time.time() < self._began + (fault.after or 0.0):
            return set()
        if fault.kind == "pause":
            self._driver.call(lambda: self._over.wait(fault.seconds))
            scheduled.end()
            return set()
        target = next((rank for rank in self._members if rank.rank == fault.rank), None)
        if target is None:
            scheduled.end(f"there are {len(self._members)} ranks")
            return set()
        scheduled.sent = True
        if fault.kind in MUTE:
            scheduled.end(worker=target.worker)
        return {target.start}


def inject(job: Job, *faults: Fault | RandomPlan) -> FaultPlan:
    """Inject faults into a job that runs, or is about to.

    Parameters
    ----------
    job : Job
        The job; made with ``fit(..., block=False)``. It may have one plan at a time.
    *faults : Fault or RandomPlan
        What is to happen.

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
    driver, plan = driver_of(job), FaultPlan(job, faults)
    if driver.chaos is not None:
        raise OptionError(f"job {job.name!r} has a plan of faults already; stop() that one first")
    driver.chaos = plan._take
    plan._thread.start()
    return plan
