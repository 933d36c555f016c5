"""Check a cluster for elastic training: the command asks, workers answer."""

from __future__ import annotations

import importlib.util
import os
import platform
import shutil
import socket
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace

from distributed.comm.addressing import get_address_host_port

from nbelastic import driver
from nbelastic.cluster import own_versions
from nbelastic.collectives import missing_native_part

SHM_ENOUGH = 256 * 2**20  # bytes of /dev/shm; with less, data loaders' processes may fail
CONNECT_WITHIN_S = 2.0
_SYMBOLS = {"ok": "✓", "note": "·", "bad": "✗"}


@dataclass(frozen=True)
class Side:
    """Facts on a process: this process, the scheduler, or a worker."""

    name: str = ""
    versions: Mapping[str, str] = field(default_factory=dict)  # that all sides must share
    native: str = ""  # why it has no shared memory between ranks
    shm_bytes: int | None = None  # free in /dev/shm; None where there is none
    gpus: tuple[str, ...] = ()
    unreachable: tuple[str, ...] = ()  # workers that it cannot connect to


@dataclass(frozen=True)
class Finding:
    """A row of the report: the subject, ``ok``, ``note`` or ``bad``, the detail and the advice."""

    what: str
    state: str
    detail: str
    advice: str = ""


# -- judging -------------------------------------------------------------------------------------


def findings(here: Side, scheduler: Side | None, workers: Sequence[Side]) -> list[Finding]:
    """Return what is to be said of a cluster, or of this machine."""
    found: list[Finding] = []
    sides = workers or [here]
    others = [side for side in (scheduler, *workers) if side is not None]

    def judge(
        what: str, problems: Iterable[str], good: str, advice: str, state: str = "note"
    ) -> None:
        """Report the first problem, and how many more there are."""
        first, *rest = [*problems] or [""]
        more = f" (and {len(rest)} more)" * bool(rest)
        made = Finding(what, state, first + more, advice) if first else Finding(what, "ok", good)
        found.append(made)

    other_versions = (
        f"{side.name} has {name} {theirs}, this process {version}"
        for side in others
        for name, version in here.versions.items()
        if (theirs := side.versions.get(name, "missing")) != version
        and (side is not scheduler or (name, theirs) != ("torch", "missing"))
    )
    shown = ", ".join(f"{name} {version}" for name, version in here.versions.items())
    same = f"{shown} {'on all sides' if others else 'here'}"
    judge("versions", other_versions, same, "install the same on all machines", "bad")
    no_native = (f"{side.name}: {side.native}" for side in sides if side.native)
    gcc = "ranks there use Gloo; install with a C++20 compiler on Linux"
    judge("native part", no_native, "ranks of a host share memory", gcc)
    small = (
        f"{side.name} has {side.shm_bytes / 2**20:,.0f} MiB free"
        for side in sides
        if side.shm_bytes is not None and side.shm_bytes < SHM_ENOUGH
    )
    shm = "a DataLoader with workers may run out of it; docker: --shm-size=2g"
    judge("/dev/shm", small, "enough for data loaders", shm)
    if scheduler is not None:
        none = [] if workers else ["none present"]
        present = f"{len(workers)} present"
        judge("workers", none, present, "start workers for this scheduler", "bad")
        cut = (f"{s.name} cannot connect to {s.unreachable[0]}" for s in workers if s.unreachable)
        reach = "workers reach each other" if len(workers) > 1 else "fewer than two workers"
        allow = "allow connections between workers on all ports above 1024"
        judge("ports", cut, reach, allow, "bad")
    gpu = next((name for side in sides for name in side.gpus), "")
    usable = f"{len(sides)} processes see {gpu}; ranks sum there, by NCCL or CUDA IPC, if a trial "
    usable += "shows that all can"
    judge("GPUs", [] if gpu else ["none that torch can use"], usable, "ranks train on CPUs")
    return found


# -- asking --------------------------------------------------------------------------------------


def examine(address: str | None) -> tuple[Side, Side | None, list[Side]]:
    """Return facts on this process, and on a scheduler, if it is given, and its workers."""
    from nbelastic.cluster.wire import versions_reader

    here = probe()
    if address is None:
        return here, None, []
    reader = versions_reader()  # needs nothing of nbelastic where it runs
    with driver.connected(address) as client:
        scheduler = Side("the scheduler", client.run_on_scheduler(reader))
        versions: dict[str, dict[str, str]] = client.run(reader, on_error="ignore")
        able = [worker for worker, found in versions.items() if found["nbelastic"] != "missing"]
        known: dict[str, Side] = {}
        if able:
            known = client.run(probe, list(versions), workers=able, on_error="ignore")
    sides = [
        replace(known.get(worker, Side()), name=worker, versions=found)
        for worker, found in versions.items()
    ]
    return here, scheduler, sides


def probe(workers: Sequence[str] = ()) -> Side:
    """Return what a process knows of itself; runs in workers, too."""
    return Side(
        "this process",
        own_versions(),
        missing_native_part(),
        shutil.disk_usage("/dev/shm").free if os.path.isdir("/dev/shm") else None,
        _own_gpus(),
        tuple(worker for worker in workers if not _connects(worker)),
    )


def _own_gpus() -> tuple[str, ...]:
    if importlib.util.find_spec("torch") is None:
        return ()
    import torch

    return tuple(torch.cuda.get_device_name(i) for i in range(torch.cuda.device_count()))


def _connects(worker: str) -> bool:
    try:
        place = get_address_host_port(worker)
        socket.create_connection(place, timeout=CONNECT_WITHIN_S).close()
    except OSError:
        return False
    return True


# -- reporting -----------------------------------------------------------------------------------


def report(found: Sequence[Finding], write: Callable[[str], object]) -> int:
    """Write findings as a table; return the exit code."""
    write(f"nbelastic doctor on {platform.node()}")
    width = max(len(each.what) for each in found)
    for each in found:
        advice = f" → {each.advice}" if each.advice else ""
        write(f"{_SYMBOLS[each.state]} {each.what:<{width}}  {each.detail}{advice}")
    return int(any(each.state == "bad" for each in found))
