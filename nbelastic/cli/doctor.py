"""Check a cluster for elastic training: the command asks, workers answer."""

from __future__ import annotations

import importlib.util
import json
import os
import platform
import shutil
import socket
import time
from collections.abc import Callable, Mapping, Sequence
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
class Facts:
    """Facts on a cluster: on this process, the scheduler if any, and the workers."""

    here: Side
    scheduler: Side | None = None
    workers: tuple[Side, ...] = ()


@dataclass(frozen=True)
class Finding:
    """A row of the report: the subject, ``ok``, ``note`` or ``bad``, the detail and the advice."""

    what: str
    state: str
    detail: str
    advice: str = ""


# -- judging -------------------------------------------------------------------------------------


def findings(facts: Facts) -> list[Finding]:
    """Return what is to be said of a cluster, or of this machine."""
    workers, mebibyte = facts.workers, 2**20
    sides = workers or (facts.here,)
    others = [side for side in (facts.scheduler, *workers) if side is not None]
    here = facts.here.versions
    other_versions = [
        f"{side.name} has {name} {theirs}, this process {version}"
        for side in others
        for name, version in here.items()
        if (theirs := side.versions.get(name, "missing")) != version
        and (side is not facts.scheduler or (name, theirs) != ("torch", "missing"))
    ]
    shown = ", ".join(f"{name} {version}" for name, version in here.items())
    same = f"{shown} {'on all sides' if others else 'here'}"
    no_native = [f"{side.name}: {side.native}" for side in sides if side.native]
    small = [
        f"{side.name} has {side.shm_bytes / mebibyte:,.0f} MiB free"
        for side in sides
        if side.shm_bytes is not None and side.shm_bytes < SHM_ENOUGH
    ]
    gcc = "ranks there use Gloo; install with a C++20 compiler on Linux"
    shm = "a DataLoader with workers may run out of it; docker: --shm-size=2g"
    found = [
        _finding("versions", other_versions, same, "install the same on all machines", "bad"),
        _finding("native part", no_native, "ranks of a host share memory", gcc),
        _finding("/dev/shm", small, "enough for data loaders", shm),
    ]
    if facts.scheduler is not None:
        none = [] if workers else ["none present"]
        cut = [
            f"{side.name} cannot connect to {side.unreachable[0]}"
            for side in workers
            if side.unreachable
        ]
        off = [
            f"{side.name} is {side.clock_s:+.1f} s off"
            for side in workers
            if abs(side.clock_s) > CLOCK_TOLERANCE_S + side.clock_error_s
        ]
        start, present = "start workers for this scheduler", f"{len(workers)} present"
        reach = "workers reach each other" if len(workers) > 1 else "fewer than two workers"
        allow = "allow connections between workers on all ports above 1024"
        ntp = "times in histories are off; synchronize with NTP"
        found += [
            _finding("workers", none, present, start, "bad"),
            _finding("ports", cut, reach, allow, "bad"),
            _finding("clocks", off, f"within {CLOCK_TOLERANCE_S:g} s", ntp),
        ]
    if names := [name for side in sides for name in side.gpus]:
        advice = "ranks sum there, by NCCL or CUDA IPC, if a trial shows that all can"
        found.append(Finding("GPUs", "ok", f"{len(sides)} processes see {names[0]}", advice))
    else:
        found.append(Finding("GPUs", "note", "none that torch can use", "ranks train on CPUs"))
    silent = [] if any(side.metadata for side in sides) else ["none answers"]
    cloud = "a cloud's service answers"
    return [*found, _finding("metadata service", silent, cloud, "expected outside a cloud")]


def _finding(
    what: str, problems: Sequence[str], good: str, advice: str, state: str = "note"
) -> Finding:
    """Report the first problem, and how many more there are."""
    if not problems:
        return Finding(what, "ok", good)
    more = f" (and {len(problems) - 1} more)" if len(problems) > 1 else ""
    return Finding(what, state, problems[0] + more, advice)


# -- asking --------------------------------------------------------------------------------------


def examine(address: str | None) -> Facts:
    """Return what is known of the cluster of a scheduler, or, for None, of this machine."""
    here = Side(**probe("this process"))
    if address is None:
        return Facts(here)
    with driver.connected(address) as client:
        return _ask(client, here)


def _ask(client: Any, here: Side) -> Facts:
    from nbelastic.cluster.wire import versions_reader

    reader = versions_reader()  # needs nothing of nbelastic where it runs
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
    return Facts(here, scheduler, tuple(sides))


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


def report(facts: Facts, *, as_json: bool, write: Callable[[str], object]) -> int:
    """Write the findings as a table, or as JSON lines; return the exit code."""
    found = findings(facts)
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
