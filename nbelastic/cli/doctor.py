"""Check a cluster for elastic training: ``dask elastic doctor``.

The command's process asks, workers answer, and :func:`findings` judges. That function is pure.
"""

from __future__ import annotations

import importlib.util
import json
import os
import platform
import shutil
import socket
import time
from dataclasses import asdict, dataclass, field
from typing import TYPE_CHECKING, Any

from nbelastic.cluster import own_versions
from nbelastic.collectives import missing_native_part

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

SHM_ENOUGH = 256 * 2**20
"""Bytes of ``/dev/shm`` below which data loaders with processes of their own may fail."""

CLOCK_TOLERANCE_S = 1.0
"""Seconds by which clocks may differ, besides what asking takes."""

CONNECT_WITHIN_S = 2.0
METADATA_WITHIN_S = 0.3
METADATA = ("169.254.169.254", 80)
"""The address at which clouds announce that a machine is about to be taken away."""

_SYMBOLS = {"ok": "✓", "note": "·", "bad": "✗"}
_listeners: list[socket.socket] = []


@dataclass(frozen=True)
class Side:
    """What is known of one process: this one, the scheduler, or a worker.

    Attributes
    ----------
    name : str
        Its name for people.
    versions : dict of str to str
        Versions that all sides must share.
    native : str
        Why it has no shared memory between ranks; empty where it has.
    shm_bytes : int or None
        Free bytes of ``/dev/shm``; None where there is none.
    gpus : tuple of str
        Names of its GPUs.
    clock_s : float
        Seconds by which its clock is ahead of this process's.
    clock_error_s : float
        By how much that may be wrong.
    metadata : bool
        Whether a cloud's metadata service answers.
    unreachable : tuple of str
        Workers that it cannot connect to.
    """

    name: str
    versions: Mapping[str, str] = field(default_factory=dict)
    native: str = ""
    shm_bytes: int | None = None
    gpus: tuple[str, ...] = ()
    clock_s: float = 0.0
    clock_error_s: float = 0.0
    metadata: bool = False
    unreachable: tuple[str, ...] = ()


@dataclass(frozen=True)
class Facts:
    """What is known of a cluster: this process, the scheduler if there is one, the workers."""

    here: Side
    scheduler: Side | None = None
    workers: tuple[Side, ...] = ()


@dataclass(frozen=True)
class Finding:
    """One row of the report: what was looked at, ``ok``, ``note`` or ``bad``, and what to do."""

    what: str
    state: str
    detail: str
    advice: str = ""


# -- judging -------------------------------------------------------------------------------------


def findings(facts: Facts) -> list[Finding]:
    """Return what is to be said of a cluster."""
    sides = facts.workers or (facts.here,)
    found = [_versions(facts), _native(sides), _shared_memory(sides)]
    if facts.scheduler is not None:
        found += [_workers(facts), _ports(facts.workers), _clocks(facts)]
    return [*found, _gpus(sides), _metadata(sides)]


def _versions(facts: Facts) -> Finding:
    here = facts.here
    shown = ", ".join(f"{name} {version}" for name, version in here.versions.items())
    others = [side for side in (facts.scheduler, *facts.workers) if side is not None]
    for side in others:
        for name, version in here.versions.items():
            theirs = side.versions.get(name, "missing")
            spared = side is facts.scheduler and name == "torch" and theirs == "missing"
            if theirs != version and not spared:
                detail = f"{side.name} has {name} {theirs}, this process {version}"
                return Finding("versions", "bad", detail, "install the same on all machines")
    where = "on all sides" if others else "here"
    return Finding("versions", "ok", f"{shown} {where}")


def _native(sides: Sequence[Side]) -> Finding:
    missing = [side for side in sides if side.native]
    if not missing:
        return Finding("native part", "ok", "ranks of a host share memory")
    detail = f"{missing[0].name}: {missing[0].native}" + _more(missing)
    return Finding(
        "native part",
        "note",
        detail,
        "ranks there use Gloo; install with a C++20 compiler on Linux",
    )


def _shared_memory(sides: Sequence[Side]) -> Finding:
    small = [s for s in sides if s.shm_bytes is not None and s.shm_bytes < SHM_ENOUGH]
    if not small:
        return Finding("/dev/shm", "ok", "enough for data loaders")
    size = (small[0].shm_bytes or 0) / 2**20
    return Finding(
        "/dev/shm",
        "note",
        f"{small[0].name} has {size:,.0f} MiB free" + _more(small),
        "a DataLoader with workers may run out of it; docker: --shm-size=2g",
    )


def _workers(facts: Facts) -> Finding:
    if facts.workers:
        return Finding("workers", "ok", f"{len(facts.workers)} present")
    return Finding("workers", "bad", "none present", "start workers for this scheduler")


def _ports(workers: Sequence[Side]) -> Finding:
    cut = [side for side in workers if side.unreachable]
    if not cut:
        detail = "workers reach each other" if len(workers) > 1 else "fewer than two workers"
        return Finding("ports", "ok", detail)
    detail = f"{cut[0].name} cannot connect to {cut[0].unreachable[0]}" + _more(cut)
    return Finding(
        "ports", "bad", detail, "allow connections between workers on all ports above 1024"
    )


def _clocks(facts: Facts) -> Finding:
    wrong = [
        side for side in facts.workers if abs(side.clock_s) > CLOCK_TOLERANCE_S + side.clock_error_s
    ]
    if not wrong:
        return Finding("clocks", "ok", f"within {CLOCK_TOLERANCE_S:g} s")
    detail = f"{wrong[0].name} is {wrong[0].clock_s:+.1f} s off" + _more(wrong)
    return Finding("clocks", "note", detail, "times in histories are off; synchronize with NTP")


def _gpus(sides: Sequence[Side]) -> Finding:
    names = [name for side in sides for name in side.gpus]
    if not names:
        return Finding("GPUs", "note", "none that torch can use", "ranks train on CPUs")
    advice = "ranks can sum there: backend='cuda_ipc' on one host, 'nccl' on any (experimental)"
    return Finding("GPUs", "ok", f"{len(sides)} processes see {names[0]}", advice)


def _metadata(sides: Sequence[Side]) -> Finding:
    if any(side.metadata for side in sides):
        return Finding("metadata service", "ok", "a cloud's service answers")
    return Finding("metadata service", "note", "none answers", "expected outside a cloud")


def _more(sides: Sequence[Side]) -> str:
    return f" (and {len(sides) - 1} more)" if len(sides) > 1 else ""


# -- asking --------------------------------------------------------------------------------------


def examine(address: str | None) -> Facts:
    """Return what is known of a cluster, or of this machine.

    Parameters
    ----------
    address : str or None
        The scheduler's address; None for this machine alone.

    Raises
    ------
    ClusterLost
        No scheduler answers there.
    """
    here = Side(**probe("this process"))
    if address is None:
        return Facts(here)
    from distributed import Client

    from nbelastic.cluster import check_scheduler

    check_scheduler(address, None, lambda _: None)
    with Client(address, set_as_default=False) as client:
        return _ask(client, here)


def _ask(client: Any, here: Side) -> Facts:
    """Ask the scheduler and the workers of a cluster."""
    from nbelastic.cluster.worker.environment import versions_reader

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

    host = get_address_host(get_worker().address)
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    listener = socket.socket(family, socket.SOCK_STREAM)
    listener.bind((host, 0))
    listener.listen(128)
    _listeners.append(listener)
    return host, listener.getsockname()[1]


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
