"""Time from ``fit`` on a fresh cluster to the first step of all ranks.

A new process starts a ``LocalCluster``, and calls ``fit`` when its workers are there. Seconds, and
their ratio to one import of torch in a fresh process, in turns with it. The memory (PSS) is that of
the workers and of all that they have started, when the job is over. With ``--against PATH``, the
checkout of another version in that folder is measured, too, in turns. With ``--cold``, which needs
root, the system's file cache is emptied before each sample. Exits with 1 if a target is missed.
"""

from __future__ import annotations

import argparse
import functools
import json
import os
import subprocess
import sys
import time
import uuid
from pathlib import Path
from typing import Any

import psutil

from benchmarks.command import options_of, run
from benchmarks.figures import Target, quartiles, table
from benchmarks.side_by_side import ROOT, Failed

MOST_IMPORTS = 1.5
"""Of torch, for which the ranks of four workers may need time to start."""

IMPORT = "imports torch"
SAMPLE = """
import json, os, sys, time
from distributed import Client, LocalCluster
import nbelastic
from benchmarks.start import memory_of

def train():
    import torch
    import nbelastic.torch as hvd
    hvd.init()
    hvd.allreduce(torch.ones(1))
    return time.monotonic()

def main(workers):
    assert nbelastic.__file__.startswith(os.getcwd()), "an editable install hides the checkout"
    options = {"threads_per_worker": 1, "dashboard_address": ":0", "silence_logs": 50}
    with LocalCluster(n_workers=workers, **options) as cluster, Client(cluster) as client:
        begin = time.monotonic()
        moments = nbelastic.fit(train, cluster=client, np=workers, block=False).results()
        seconds = max(moments) - begin
        time.sleep(1)  # ranks have ended
        print(json.dumps({"seconds": seconds, "mb": memory_of(sys.argv[2])}))

if __name__ == "__main__":
    main(int(sys.argv[1]))
"""


def main() -> int:
    parser = options_of("start", __doc__, rounds=5, budget=60.0)
    parser.set_defaults(ranks=[1, 4, 8])
    parser.add_argument("--against", metavar="PATH", help="checkout of another version")
    parser.add_argument("--cold", action="store_true", help="empty the file cache (root only)")
    options = parser.parse_args()
    if options.quick:
        options.rounds = 1
    return run(options.ranks, options.json, functools.partial(measure, options), show, aims)


def memory_of(mark: str) -> float:
    """Return the megabytes of the processes that have a mark in their environment, but not ours."""
    found = 0
    for process in psutil.process_iter():
        try:
            if process.pid != os.getpid() and process.environ().get("NBELASTIC_START") == mark:
                found += process.memory_full_info().pss
        except psutil.Error:
            continue
    return found / 1e6


def measure(options: argparse.Namespace, ranks: int) -> dict[str, Any]:
    """Return the samples of each candidate, with one rank for each worker."""
    checkouts = {"ours": ROOT}
    if options.against:
        checkouts["before"] = Path(options.against).resolve()
    samples: dict[str, Any] = {name: [] for name in (IMPORT, *checkouts)}
    for _ in range(options.rounds):
        empty_cache(options.cold)
        begin = time.monotonic()
        subprocess.run([sys.executable, "-c", "import torch"], check=True)
        samples[IMPORT].append({"seconds": time.monotonic() - begin})
        for name, checkout in checkouts.items():
            empty_cache(options.cold)
            samples[name].append(one_start(checkout, ranks))
    return samples


def empty_cache(cold: bool) -> None:
    if cold:
        os.sync()
        Path("/proc/sys/vm/drop_caches").write_text("3")


def one_start(checkout: Path, ranks: int) -> dict[str, float]:
    """Start a cluster with the nbelastic of a checkout; return its figures."""
    mark = uuid.uuid4().hex  # what imports torch for one sample is not there for the next
    own = "import sys; sys.path.append(sys.argv[3])\n"  # for this module
    done = subprocess.run(
        [sys.executable, "-c", own + SAMPLE, str(ranks), mark, str(ROOT)],
        cwd=checkout,
        env=os.environ | {"PYTHONPATH": str(checkout), "NBELASTIC_START": mark},
        capture_output=True,
        text=True,
        check=False,
    )
    if done.returncode:
        raise Failed(f"{checkout}: {done.stderr[-2000:]}")
    figures: dict[str, float] = json.loads(done.stdout.splitlines()[-1])
    return figures


def show(ranks: int, samples: dict[str, Any]) -> None:
    print(f"\n{ranks} workers: median (quartiles)")
    unit = quartiles([each["seconds"] for each in samples[IMPORT]]).median
    rows = []
    for name, found in samples.items():
        seconds = [each["seconds"] for each in found]
        ratio = f"{quartiles(seconds).median / unit:.2f}"
        sizes = [each["mb"] for each in found if "mb" in each]
        memory = quartiles(sizes).show(0) if sizes else "-"
        rows.append([name, str(len(found)), quartiles(seconds).show(2), ratio, memory])
    print(table(["", "samples", "seconds", "imports of torch", "MB"], rows), flush=True)


def aims(ranks: int, samples: dict[str, Any]) -> list[Target]:
    """Return the targets of this project."""
    if ranks > 4:
        return []
    ours, unit = (
        quartiles([each["seconds"] for each in samples[name]]).median for name in ("ours", IMPORT)
    )
    return [Target(f"{ranks} workers: imports of torch", ours / unit, MOST_IMPORTS, False)]


if __name__ == "__main__":
    sys.exit(main())
