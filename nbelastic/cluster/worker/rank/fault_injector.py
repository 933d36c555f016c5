"""Inject faults into a rank, on orders of ``nbelastic.chaos``.

Orders come in the thread that reads. Faults that belong to a step are injected by the rank's
thread, after each batch (:meth:`FaultInjector.step`). Faults of the process or of its worker are
the worker's to inject (:mod:`nbelastic.cluster.worker.hosted_rank`); the rank says when one is
due. The kernel is told of each first, so that it knows even of a process that ends a moment later.
"""

from __future__ import annotations

import math
import threading
import time
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

from nbelastic.messages import FaultDue, FaultOrder, FaultReport, Message

if TYPE_CHECKING:
    from nbelastic.elastic.ranks.session import Session

IN_STEP = frozenset({"fail", "hang", "slow"})
"""Kinds that happen in user code: the rank's thread does them, after its next batch."""

SETTLING = 0.5
"""Seconds after a change of membership for which nothing is due: word of what was done travels."""

LONGEST_HOLD = 5.0
"""Seconds that a rank's thread stands still, at most, for the worker to do what it has to."""


class InjectedFault(RuntimeError):
    """What ``chaos.fail`` raises on a rank."""


class FaultInjector:
    """Injects the faults of one rank; `send` sends a message to its worker."""

    def __init__(self, job: str, session: Session, send: Callable[[Message], None]) -> None:
        self._job = job
        self._session = session
        self._send = send
        self._lock = threading.Lock()
        self._armed: list[FaultOrder] = []
        self._done: dict[int, threading.Event] = {}
        self._slow: tuple[int, float] = (0, 0.0)
        self._moved = -math.inf

    def _tell(self, fault: FaultOrder, problem: str = "") -> None:
        session = self._session
        self._send(FaultReport(self._job, session.spec.start, fault.number, session.rank, problem))

    # -- by the thread that reads orders -----------------------------------------------------------

    def take(self, faults: Sequence[FaultOrder], drop: Sequence[int]) -> None:
        """Arm `faults`, or inject immediate faults now; disarm the faults numbered `drop`."""
        later = [fault for fault in faults if fault.timed or fault.kind in IN_STEP]
        with self._lock:
            self._armed = [each for each in self._armed if each.number not in {*drop}] + later
        for number in drop:
            self.done(number)
        for fault in faults:
            if fault not in later:
                self._inflict(fault)

    def plan(self) -> None:
        """Do what waits for a generation to form: a plan has come for the rank."""
        if self._session.generation > 0:
            self._moved = time.monotonic()
        for fault in self._due(forming=True):
            self._inflict(fault)

    def done(self, number: int) -> None:
        """Note that the worker has injected a fault, or could not."""
        if number in self._done:
            self._done[number].set()

    # -- by the rank's thread ----------------------------------------------------------------------

    def step(self) -> None:
        """Do what is due after a batch."""
        for fault in self._due(forming=False):
            if fault.kind in IN_STEP:
                self._tell(fault)
                self._in_step(fault)
            else:
                done = self._done[fault.number] = threading.Event()
                self._inflict(fault)
                done.wait(LONGEST_HOLD)  # in this very step, until the worker has done it
        left, seconds = self._slow
        if left > 0:
            self._slow = (left - 1, seconds)
            time.sleep(seconds)  # the fault itself

    def _due(self, *, forming: bool) -> list[FaultOrder]:
        session = self._session
        if not forming and time.monotonic() < self._moved + SETTLING:
            return []  # it may have been the fault of another rank, that had this number
        with self._lock:
            due = [
                fault
                for fault in self._armed
                if fault.forming == forming
                and fault.rank in (None, session.rank)
                and session.telemetry.steps >= (fault.step or 0)
                and session.generation >= (fault.generation or 0)
            ]
            self._armed = [fault for fault in self._armed if fault not in due]
        return due

    def _in_step(self, fault: FaultOrder) -> None:
        kind, rank = fault.kind, self._session.rank
        # In letters, because errors that differ only in digits count as equal.
        name = "".join(chr(ord("a") + int(digit)) for digit in str(fault.number))
        if kind == "fail":
            raise InjectedFault(f"rank {rank} was told to fail (fault {name})")
        if kind == "slow":
            self._slow = (fault.steps, fault.seconds)
        while kind == "hang":
            time.sleep(0.1)  # the fault itself; short, so that an order to end can interrupt it

    # -- by either ---------------------------------------------------------------------------------

    def _inflict(self, fault: FaultOrder) -> None:
        session = self._session
        if fault.kind != "partition":
            self._send(FaultDue(self._job, session.spec.start, fault, session.rank))
            return
        communicator = session._communicator  # its own thread may replace it at any time
        cut = communicator is not None and communicator.cut_connections()
        self._tell(fault, "" if cut else "it has no connections that could be cut")
        self.done(fault.number)
