"""The kernel of the host tests: a process on a host that runs the jobs it is told to.

It reads from standard input the names of directories, one a line. In each lies a pickled
:class:`Order`; what happens to the job is written beside it while it happens, and at last how it
ended.
"""

from __future__ import annotations

import json
import os
import pickle
import sys
import time
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from distributed import Client

import nbelastic
from tests.support.clusters import tasks_of_workers

if TYPE_CHECKING:
    from collections.abc import Callable

ORDER, HISTORY, ENDING = "order", "history", "ending"
POLL = 0.1
WHOLE_TIMEOUT = 80.0


@dataclass(frozen=True)
class Order:
    """A job to run, once `workers` workers are there and idle."""

    function: Callable[[], Any]
    workers: int
    options: dict[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class Ending:
    """How a job ended: with results, or with an error of that type and text."""

    results: list[Any]
    error: str = ""
    message: str = ""


def _run(client: Client, folder: Path) -> None:
    order: Order = pickle.loads((folder / ORDER).read_bytes())
    idle = [[]] * order.workers
    deadline = time.monotonic() + WHOLE_TIMEOUT
    while list(client.run_on_scheduler(tasks_of_workers).values()) != idle:
        if time.monotonic() > deadline:
            raise TimeoutError(f"there were no {order.workers} idle workers in {WHOLE_TIMEOUT:g} s")
        time.sleep(POLL)
    job = nbelastic.fit(order.function, cluster=client, block=False, **order.options)
    written = 0
    with (folder / HISTORY).open("w") as file:
        over = False
        while not over:
            over = job.wait(timeout=POLL)
            for event in job.history[written:]:
                file.write(json.dumps(asdict(event)) + "\n")
                written += 1
            file.flush()
    error = job.exception()
    _write(folder, Ending([], type(error).__name__, str(error)) if error else Ending(job.results()))


def _write(folder: Path, ending: Ending) -> None:
    path = folder / f"{ENDING}.part"
    path.write_bytes(pickle.dumps(ending))
    os.replace(path, folder / ENDING)


def main() -> None:
    """Run what standard input says."""
    with Client(sys.argv[1], set_as_default=False, timeout="60s") as client:
        for line in sys.stdin:
            folder = Path(line.strip())
            try:
                _run(client, folder)
            except Exception as error:  # whatever it is, the test must hear of it
                _write(folder, Ending([], type(error).__name__, str(error)))


if __name__ == "__main__":
    # Under the name by which the tests know this module, so that they can read what it pickles.
    from tests.hosts.kernel import main as run

    run()
