"""A campaign: ``python -m tests.chaos --minutes 20 [--seed 1]``, or ``make chaos MINUTES=20``.

One job after another, each under a random plan of its own, until the time is over. Prints what was
injected and how long the jobs took to recover. Exits with 1 if any job hung, came to a wrong result
or left something behind; then with the seed of its plan and its history.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
import time
from pathlib import Path

import dask

from tests.chaos.plans import WORKERS, Run, merged, random_plan
from tests.support.clusters import a_crew

EPOCHS = 120
EVERY = 2.0
"""Seconds between two faults; they wait for the job to be well enough."""


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.chaos", description=__doc__)
    parser.add_argument("--minutes", type=float, default=1.0)
    parser.add_argument("--seed", type=int, default=1, help="of the first plan")
    parser.add_argument("--every", type=float, default=EVERY)
    arguments = parser.parse_args()
    dask.config.set({"distributed.deploy.lost-worker-timeout": "1 hour"})
    end = time.monotonic() + 60 * arguments.minutes
    runs: list[Run] = []
    with (
        a_crew(n_workers=WORKERS, silence_logs=50) as crew,
        tempfile.TemporaryDirectory() as folder,
    ):
        while time.monotonic() < end:
            seed = arguments.seed + len(runs)
            marks = Path(folder) / str(seed)
            marks.mkdir()
            run = random_plan(crew, marks, seed, epochs=EPOCHS, every=arguments.every)
            runs.append(run)
            done = run.report.rows[-1].injected
            print(f"seed {seed}: {done} faults; {run.problem or 'right'}", flush=True)
            if run.problem:
                print(run.report, run.trace, sep="\n", flush=True)
    print(f"\n{len(runs)} jobs in {arguments.minutes:g} minutes")
    print(merged([run.report for run in runs]))
    wrong = [run.seed for run in runs if run.problem]
    print(
        f"went wrong: seeds {wrong}" if wrong else "no hang, no wrong result, nothing left behind"
    )
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
