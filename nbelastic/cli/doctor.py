"""Check a cluster for elastic training: the command asks, workers answer."""

from __future__ import annotations

import importlib.util
import json
import os
import platform
import shutil
import socket
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

from nbelastic import driver
from nbelastic.cluster import own_versions
from nbelastic.collectives import RendezvousServer, missing_native_part

SHM_ENOUGH = 256 * 2**20  # bytes of /dev/shm; with less, data loaders' processes may fail
CLOCK_TOLERANCE_S = 1.0  # seconds by which clocks may differ, besides what asking takes
CONNECT_WITHIN_S = 2.0
METADATA_WITHIN_S = 0.3
METADATA = ("169.254.169.254", 80)  # where clouds announce that a machine is about to be taken away
_SYMBOLS = {"ok": "✓", "note": "·", "bad": "✗"}
_listeners: list[RendezvousServer] = []


@dataclass(frozen=True)
class Side:
    """Facts on a process: this process, the scheduler, or a worker."""

    name: str
    versions: Mapping[str, str] = field(default_factory=dict)  # that all sides must share
    native: str = ""  # why it has no shared memory between ranks
    shm_bytes: int | None = None  # free in /dev/shm; None where there is none
    gpus: tuple[str, ...] = ()
    clock_s: float = 0.0  # by which it is ahead of this process's clock
    clock_error_s: float = 0.0  # by how much that may be wrong
    metadata: bool = False  # whether a cloud's metadata service answers
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
        off = (
            f"{side.name} is {side.clock_s:+.1f} s off"
            for side in workers
            if abs(side.clock_s) > CLOCK_TOLERANCE_S + side.clock_error_s
        )
        ntp = "times in histories are off; synchronize with NTP"
        judge("clocks", off, f"within {CLOCK_TOLERANCE_S:g} s", ntp)
    gpu = next((name for side in sides for name in side.gpus), "")
    usable = f"{len(sides)} processes see {gpu}; ranks sum there, by NCCL or CUDA IPC, if a trial "
    usable += "shows that all can"
    judge("GPUs", [] if gpu else ["none that torch can use"], usable, "ranks train on CPUs")
    silent = [] if any(side.metadata for side in sides) else ["none answers"]
    judge("metadata service", silent, "a cloud's service answers", "expected outside a cloud")
    return found


# -- asking --------------------------------------------------------------------------------------


def examine(address: str | None) -> tuple[Side, Side | None, list[Side]]:
    """Return facts on this process, and on a scheduler, if it is given, and its workers."""
    from nbelastic.cluster.wire import versions_reader

    here = Side(**probe("this process"))
    if address is None:
        return here, None, []
    reader = versions_reader()  # needs nothing of nbelastic where it runs
    with driver.connected(address) as client:
        scheduler = Side("the scheduler", client.run_on_scheduler(reader))
        versions: dict[str, dict[str, str]] = client.run(reader, on_error="ignore")
        began = time.time()
        clocks: dict[str, float] = client.run(time.time, on_error="ignore")
        error = (time.time() - began) / 2
        middle = began + error
        able = [worker for worker, found in versions.items() if found["nbelastic"] != "missing"]
        probes: dict[str, Any] = {}
        cut: dict[str, tuple[str, ...]] = {}
        if able:
            probes = client.run(probe, "", workers=able, on_error="ignore")
            ports = client.run(listen, workers=able, on_error="ignore")
            try:
                cut = client.run(unreachable, ports, workers=able, on_error="ignore")
            finally:
                client.run(stop_listening, workers=able, on_error="ignore")
    sides = []
    for worker, found in versions.items():
        known = probes.get(worker, {}) | {"name": worker, "versions": found}
        known |= {"clock_s": clocks.get(worker, middle) - middle, "clock_error_s": error}
        sides.append(Side(**known, unreachable=tuple(cut.get(worker, ()))))
    return here, scheduler, sides


def probe(name: str) -> dict[str, Any]:
    """Return what a process knows of itself; runs in workers, too."""
    return {
        "name": name,
        "versions": own_versions(),
        "native": missing_native_part(),
        "shm_bytes": shutil.disk_usage("/dev/shm").free if os.path.isdir("/dev/shm") else None,
        "gpus": _own_gpus(),
        "metadata": _connects(METADATA, METADATA_WITHIN_S),
    }


def _own_gpus() -> tuple[str, ...]:
    if importlib.util.find_spec("torch") is None:
        return ()
    import torch

    return tuple(torch.cuda.get_device_name(i) for i in range(torch.cuda.device_count()))


def listen() -> tuple[str, int]:
    """Listen on any port of this worker, as a rank does; return its address."""
    from distributed import get_worker
    from distributed.comm.addressing import get_address_host

    _listeners.append(RendezvousServer(get_address_host(get_worker().address)))
    return _listeners[-1].address


def unreachable(addresses: Mapping[str, tuple[str, int]]) -> tuple[str, ...]:
    """Return the workers to whose ports this one cannot connect."""
    return tuple(
        worker
        for worker, (host, port) in addresses.items()
        if not _connects((host, port), CONNECT_WITHIN_S)
    )


def stop_listening() -> None:
    """Close the port of :func:`listen`."""
    while _listeners:
        _listeners.pop().close()


def _connects(address: tuple[str, int], within_s: float) -> bool:
    try:
        socket.create_connection(address, timeout=within_s).close()
    except OSError:
        return False
    return True


# -- reporting -----------------------------------------------------------------------------------


def report(found: Sequence[Finding], *, as_json: bool, write: Callable[[str], object]) -> int:
    """Write findings as a table, or as JSON lines; return the exit code."""
    if as_json:
        for each in found:
            write(json.dumps(asdict(each)))
    else:
        write(f"nbelastic doctor on {platform.node()}")
        width = max(len(each.what) for each in found)
        for each in found:
            advice = f" → {each.advice}" if each.advice else ""
            write(f"{_SYMBOLS[each.state]} {each.what:<{width}}  {each.detail}{advice}")
    return int(any(each.state == "bad" for each in found))
