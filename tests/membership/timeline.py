"""Simulated time: a number that jumps from one event to the next."""

from __future__ import annotations

import heapq
import itertools
from typing import TYPE_CHECKING

from nbelastic.membership import Phase
from nbelastic.messages import Event, Limits, Outcome, Tick

from .invariants import Checked

if TYPE_CHECKING:
    from collections.abc import Callable

    from typing_extensions import Self


class Timeline:
    """A machine, and things that are to happen; a tick at each of the machine's deadlines."""

    def __init__(self, limits: Limits) -> None:
        self.machine = Checked(limits)
        self.now = 0.0
        self.outcome: Outcome | None = None
        self.milestones: dict[int, list[Callable[[], None]]] = {}
        self._queue: list[tuple[float, int, Callable[[], None]]] = []
        self._numbers = itertools.count()

    def tell(self, event: Event) -> None:
        """Hand an event to the machine and carry out what it says."""
        raise NotImplementedError

    def phase(self) -> Phase:
        return self.machine.roster.phase

    def later(self, delay: float, action: Callable[[], None]) -> None:
        heapq.heappush(self._queue, (self.now + delay, next(self._numbers), action))

    def step(self) -> None:
        """Let the next thing happen: a message, a timer, or a deadline of the machine."""
        self.now, due = self.next_time(), self._queue[0][0]
        if due > self.now:
            self.tell(Tick())
        else:
            heapq.heappop(self._queue)[2]()

    def next_time(self) -> float:
        """Return when the next thing happens."""
        deadline = self.machine.deadline()
        due = self._queue[0][0]
        return max(self.now, due if deadline is None else min(deadline, due))

    def run(self, until: Callable[[], bool] = lambda: False, seconds: float = 7200.0) -> Self:
        """Let things happen until the job ends or `until` says so; it must, within `seconds`."""
        limit = self.now + seconds
        while self.outcome is None and not until():
            assert self.now < limit, f"still {self.machine.roster.phase} after {seconds} s"
            self.step()
        return self

    def run_for(self, seconds: float) -> Self:
        end = self.now + seconds
        while self.next_time() <= end:
            self.step()
        self.now = end
        return self

    def at(self, batch: int, action: Callable[[], object]) -> None:
        """Do something as soon as that many batches have been trained."""
        self.milestones.setdefault(batch, []).append(lambda: action() and None)
