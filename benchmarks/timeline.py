"""Logs of the ranks (benchmarks/recovery_ranks.py), read while they train."""

from __future__ import annotations

import itertools
import statistics
import time
from collections.abc import Callable, Collection
from pathlib import Path
from typing import Any, NamedTuple

from benchmarks.side_by_side import Failed

PATIENCE_S = 120.0
STEPS = 20
"""Steps of all ranks together, from which the length of an ordinary step is computed."""


class Moment(NamedTuple):
    """An event of a rank, with its time and the number of ranks."""

    what: str
    time: float
    size: int


class Timeline:
    """The moments of all processes.

    Parameters
    ----------
    folder : str
        Directory of their logs.
    alive : callable
        Raises :class:`Failed` if no more moments will come.

    Attributes
    ----------
    trained : list of int
        The processes of the latest wait.
    """

    def __init__(self, folder: str, alive: Callable[[], None]) -> None:
        self._folder = Path(folder)
        self._alive = alive
        self.trained: list[int] = []

    def of(self, pid: int) -> list[Moment]:
        """Return the moments of a process."""
        try:
            lines = (self._folder / f"{pid}.log").read_text().splitlines()
        except FileNotFoundError:
            return []
        words = [line.split() for line in lines]
        return [Moment(each[0], float(each[1]), int(each[2])) for each in words if len(each) == 3]

    def until(self, condition: Callable[[], Any], what: str) -> Any:
        """Wait until a condition returns something true, and return that."""
        deadline = time.monotonic() + PATIENCE_S
        while time.monotonic() < deadline:
            found = condition()
            if found:
                return found
            self._alive()
            time.sleep(0.05)
        raise Failed(f"{what}: not in {PATIENCE_S:g} s")

    def training(self, size: int, since: float) -> list[int]:
        """Return the processes that have done enough steps with `size` ranks since a moment."""
        found = []
        for path in self._folder.glob("*.log"):
            last = self.of(int(path.stem))[-4 * STEPS :]
            steps = [m for m in last if m.what == "step" and m.size == size and m.time > since]
            if len(steps) >= STEPS and time.monotonic() - steps[-1].time < 1.0:
                found.append(int(path.stem))
        return found

    def wait_for_steps(self, size: int, mark: str = "step") -> float:
        """Wait until all of `size` ranks train together; return the seconds from mark to mark."""
        since = time.monotonic()
        pids = self.until(
            lambda: len(found := self.training(size, since)) == size and found,
            f"{size} ranks that train",
        )
        self.trained = pids
        times = [[m.time for m in self.of(pid) if m.what == mark][-STEPS:] for pid in pids]
        return statistics.median(
            after - before for each in times for before, after in itertools.pairwise(each)
        )


def until_next_step(timeline: Timeline, crew: Any, moment: float, others: Collection[int]) -> float:
    """Return the seconds from a kill until all survivors or restarted ranks have done a step.

    Survivors may have finished a step in the moment of the kill. What counts is the first step of
    fewer ranks or, if all ranks start again, the first of the new processes.
    """

    def last() -> float | None:
        ends = []
        for pid in crew.expected(moment, others):
            fresh = pid not in others
            size = crew.size_after
            steps = [
                m.time
                for m in timeline.of(pid)
                if m.what == "step" and m.time > moment and (fresh or m.size == size)
            ]
            if not steps:
                return None
            ends.append(steps[0])
        return max(ends) if ends else None

    return float(timeline.until(last, "a step after a kill")) - moment


def until_whole(timeline: Timeline, moment: float, others: Collection[int], size: int) -> float:
    """Return the seconds from a kill until the survivors have stepped with `size` ranks again."""

    def last() -> float | None:
        ends = []
        for pid in others:
            later = [m for m in timeline.of(pid) if m.time > moment]
            short = next((i for i, m in enumerate(later) if m.size < size), len(later))
            steps = [m.time for m in later[short:] if m.what == "step" and m.size == size]
            if not steps:
                return None
            ends.append(steps[0])
        return max(ends)

    return float(timeline.until(last, "a step of all ranks after a kill")) - moment


def outage(timeline: Timeline, moment: float, others: Collection[int]) -> float:
    """Return the seconds after a kill that were not the survivors' own computing.

    They end when the last survivor continues. They begin at the kill, or when the last survivor has
    finished what it was computing.
    """
    computed, entered = moment, moment
    for pid in others:
        moments = timeline.of(pid)
        failed = next(i for i, m in enumerate(moments) if m.what == "fail" and m.time > moment)
        before = moments[failed - 1]
        computed = max(computed, before.time if before.what == "back" else moments[failed].time)
        entered = max(entered, next(m.time for m in moments[failed:] if m.what == "enter"))
    return entered - computed
