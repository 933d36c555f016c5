"""Wait for a job in a way that an interrupt ends."""

from __future__ import annotations

from typing import TYPE_CHECKING

from nbelastic.errors import JobInterrupted

from . import display
from .job import driver_of

if TYPE_CHECKING:
    from .job import Job

TICK = 0.1
"""Seconds between two looks of a waiting caller at what it shows."""


def wait_interruptibly(job: Job) -> None:
    """Wait for the end; an interrupt stops the job at its next commit, a second one now.

    After one it raises ``JobInterrupted`` at the end, with the number of workers that the job had
    when it was interrupted and that are free now.
    """
    interrupts = handled = 0
    workers: set[str] = set()
    with display.watching(job) as watch:
        while True:
            try:  # all of it: the next interrupt may come while this one is handled
                if handled < interrupts:
                    handled = interrupts
                    workers = workers or {rank.worker for rank in job.status.ranks}
                    if interrupts == 1:
                        job.stop()
                        watch.say("stopping at the next commit; interrupt again to stop now")
                    else:
                        job.cancel()
                if job.wait(TICK):
                    break
                watch.tick()
            except KeyboardInterrupt:
                interrupts += 1
    if interrupts:
        raise JobInterrupted(f"job {job.name!r} was interrupted; {_what_is_free(job, workers)}")


def _what_is_free(job: Job, workers: set[str]) -> str:
    """Say what has become of the workers that the job had."""
    driver = driver_of(job)
    known = driver.free_workers
    if driver.owns_cluster:
        return "the cluster that was started for it is closed"
    if not workers:
        return "no worker ran it"
    if known is None:
        return "the scheduler has not said what has become of its workers"
    count, free = len(workers), len(workers & known)
    if free < count:
        return f"{free} of its {count} workers are free, the others are gone or still busy"
    return "its worker is free" if count == 1 else f"its {count} workers are free"
