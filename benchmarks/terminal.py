"""Time from a command on the terminal to the first step, and what the package adds to ``dask``.

A cluster runs. `dask elastic run` starts a script on it: the first one on this cluster, and another
one after it. The figure is the time from the start of the command's process to the end of the first
step, less the script's own imports (torch and `nbelastic.torch`), as rank 0 has them. The limit is
3 s. In turns with both, the same script runs as a plain Python process, in a world of one rank.

`dask --help` runs in turns with and without the package's entry point. Every `dask` command loads
it. The limit is 10 ms more of a processor's time. Exits with 1 if a target is missed.
"""

from __future__ import annotations

import argparse
import functools
import json
import os
import resource
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from benchmarks.command import options_of, run
from benchmarks.figures import Target, quartiles, table
from benchmarks.side_by_side import ROOT, Failed

LIMIT_S = 3.0
HELP_MS = 10.0
WAIT_S = 120.0
SCRIPT = Path(__file__).with_name("terminal_script.py")

DASK = """
import sys
from importlib.metadata import EntryPoint
from types import SimpleNamespace

import dask.cli

NAME, TARGET, GROUP = "elastic", "nbelastic.cli.entry:elastic", "dask_cli"
installed = dask.cli.importlib_metadata.entry_points(group=GROUP)
found = [each for each in installed if each.name != NAME]
if sys.argv.pop(1) == "with":
    found.append(EntryPoint(NAME, TARGET, GROUP))
dask.cli.importlib_metadata = SimpleNamespace(entry_points=lambda group: found)
sys.argv[0] = "dask"
dask.cli.run_cli()
"""
"""The ``dask`` command, with the entry point of this package or without it."""

NAMES = {"first": "first command", "again": "second command", "plain": "plain process"}


def main() -> int:
    parser = options_of("terminal", __doc__, rounds=5, budget=60.0)
    parser.set_defaults(ranks=[2])
    parser.add_argument("--helps", type=int, default=30, help="pairs of dask --help (30)")
    options = parser.parse_args()
    if options.quick:
        options.rounds, options.helps = 1, 1
    return run(options.ranks, options.json, functools.partial(measure, options), show, aims)


def measure(options: argparse.Namespace, ranks: int) -> dict[str, Any]:
    """Return the seconds of each command, and the milliseconds of each pair of ``dask --help``."""
    with tempfile.TemporaryDirectory() as folder:
        script = Path(folder) / "train.py"  # alone in its folder, which travels with it
        script.write_bytes(SCRIPT.read_bytes())
        commands = [one_round(script, ranks) for _ in range(options.rounds)]
    return {"commands": commands, "helps": [helps(number) for number in range(options.helps)]}


def one_round(script: Path, ranks: int) -> dict[str, dict[str, float]]:
    """Start a cluster, and run the script on it twice, and once without it."""
    from distributed import LocalCluster

    with LocalCluster(n_workers=ranks, threads_per_worker=1, dashboard_address=":0") as cluster:
        place = ["--scheduler", cluster.scheduler_address, "-np", str(ranks), "--quiet"]
        command = [sys.executable, "-c", DASK, "with", "elastic", "run", *place, "python"]
        first, again = started(command, script), started(command, script)
    return {"first": first, "again": again, "plain": started([sys.executable], script)}


def started(command: list[str], script: Path) -> dict[str, float]:
    """Run the script; return seconds until it begins, of its imports, and until its first step."""
    out = script.with_suffix(".json")
    begin = time.monotonic()
    complete([*command, str(script), str(out)])
    times = json.loads(out.read_text())
    out.unlink()
    imports = times["imported"] - times["begun"]
    return {
        "script": times["begun"] - begin,
        "imports": imports,
        "step": times["stepped"] - begin - imports,
    }


def helps(number: int) -> dict[str, float]:
    """Return the milliseconds of a processor for ``dask --help``, with and without the package."""
    times = {}
    for which in ("with", "without") if number % 2 else ("without", "with"):
        begin = processor_s()
        text = complete([sys.executable, "-c", DASK, which, "--help"])
        times[which] = 1e3 * (processor_s() - begin)
        if ("  elastic  " in text) != (which == "with"):
            raise Failed(f"dask --help {which} the entry point of nbelastic shows:\n{text}")
    return times


def processor_s() -> float:
    """Return the seconds of a processor that ended child processes have used."""
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    return used.ru_utime + used.ru_stime


def complete(command: list[str]) -> str:
    """Run a command to its end; return what it has printed."""
    path = os.pathsep.join(filter(None, [str(ROOT), os.environ.get("PYTHONPATH", "")]))
    ended = subprocess.run(
        command,
        cwd=ROOT,
        env={**os.environ, "PYTHONPATH": path},
        capture_output=True,
        text=True,
        check=False,
        timeout=WAIT_S,
    )
    if ended.returncode:
        raise Failed(f"a command has ended with {ended.returncode}: {ended.stdout}{ended.stderr}")
    return ended.stdout


def slower(world: dict[str, Any]) -> list[float]:
    return [each["with"] - each["without"] for each in world["helps"]]


def show(ranks: int, world: dict[str, Any]) -> None:
    print(f"\n{ranks} ranks, seconds from the command: median (quartiles)")
    rows = []
    for kind, name in NAMES.items():
        found = [each[kind] for each in world["commands"]]
        parts = [[each[part] for each in found] for part in ("script", "imports", "step")]
        rows.append([name, *(quartiles(each).show(2) for each in parts)])
    print(table(["", "the script begins", "its imports", "first step, less imports"], rows))
    imports = quartiles([each["plain"]["imports"] for each in world["commands"]]).median
    shares = (f"{name} {share / imports:.2f}" for name, share in steps(world).items())
    print(f"relative to the imports of the plain process: {', '.join(shares)}")
    for which in ("with", "without"):
        times = quartiles([each[which] for each in world["helps"]])
        print(f"dask --help {which} nbelastic, ms of a processor: {times.show(0)}")
    print(f"the difference, ms: {quartiles(slower(world)).show()}", flush=True)


def steps(world: dict[str, Any]) -> dict[str, float]:
    """Return the seconds from each command to the first step, less imports."""
    return {
        NAMES[kind]: quartiles([each[kind]["step"] for each in world["commands"]]).median
        for kind in ("first", "again")
    }


def aims(ranks: int, world: dict[str, Any]) -> list[Target]:
    """Return the targets of this project."""
    targets = [
        Target(f"{ranks} ranks, {name}: seconds to the first step, less imports", s, LIMIT_S, False)
        for name, s in steps(world).items()
    ]
    added = quartiles(slower(world)).median
    return [*targets, Target("dask --help: milliseconds added", added, HELP_MS, False)]


if __name__ == "__main__":
    sys.exit(main())
