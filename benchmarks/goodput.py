"""Goodput of a job whose workers are killed at regular intervals.

Four ranks train with steps of 80 ms and a commit per step. Measured are commits per second over
some minutes, with one rank killed every 15 seconds and every 60, each relative to an undisturbed
run before. Prints both shares. Exits with 1 below 80 % or 95 %. If the machine is busy with other
work in one run more than in the other, the shares show it.
"""

from __future__ import annotations

import argparse
import math
import sys
import tempfile
import threading
import time
from pathlib import Path

import dask

from nbelastic import Job, chaos
from tests.support.clusters import Crew, a_crew, until
from tests.support.training import Workload

RANKS = 4
LIMITS = {15.0: 0.80, 60.0: 0.95}
"""Least share of the pace, by seconds between two kills."""


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.goodput", description=__doc__)
    parser.add_argument("--seconds", type=float, default=150.0, help="of each measurement")
    parser.add_argument("--quick", action="store_true", help="20 seconds, a kill every 15 only")
    options = parser.parse_args()
    seconds = 20.0 if options.quick else options.seconds
    limits = dict(list(LIMITS.items())[: 1 if options.quick else None])
    dask.config.set({"distributed.deploy.lost-worker-timeout": "1 hour"})
    good = True
    with a_crew(n_workers=RANKS, silence_logs=50) as crew:
        for every, limit in limits.items():
            undisturbed, _ = measure(crew, seconds, every=0.0)
            print(f"undisturbed: {undisturbed:.2f} steps/s", flush=True)
            pace, report = measure(crew, seconds, every)
            share = pace / undisturbed
            good = good and share >= limit
            print(f"a kill every {every:g} s: {pace:.2f} steps/s, {share:.1%} (limit {limit:.0%})")
            print(report, flush=True)
    return 0 if good else 1


def measure(crew: Crew, seconds: float, every: float) -> tuple[float, chaos.Report]:
    """Return steps per second, with a kill every `every` seconds (0 for none)."""
    crew.wait_until_whole(RANKS)
    with tempfile.TemporaryDirectory() as marks:
        work = Workload(Path(marks), epochs=4000, seconds=0.08)
        job = crew.fit(work, np=RANKS, min_np=1, block=False)
        until(lambda: job.status.commits > 20, "it trains")
        count = math.ceil(seconds / every) - 1 if every else 0
        kills = [chaos.kill(rank=n % 2 + 1, after=every * n) for n in range(1, count + 1)]
        plan = chaos.inject(job, *kills)
        begin = next_commit(job)
        threading.Event().wait(seconds)
        end = next_commit(job)
        plan.stop()
        report = plan.report()
        job.cancel()
        job.wait(60)
    if len(report.injections) - len(report.skipped) < count:
        raise RuntimeError(f"not all of {count} kills were done:\n{report}")
    return (end[1] - begin[1]) / (end[0] - begin[0]), report


def next_commit(job: Job) -> tuple[float, int]:
    """Wait for another commit; return its time and the number of commits."""
    before = job.status.commits
    until(lambda: job.status.commits != before, "another commit")
    return time.monotonic(), job.status.commits


if __name__ == "__main__":
    sys.exit(main())
