"""Check a cluster for elastic training: the command asks, workers answer."""

from __future__ import annotations

import socket
from collections.abc import Iterator, Mapping, Sequence

from distributed.comm.addressing import get_address_host_port

from nbelastic import driver
from nbelastic.cluster import check_versions, own_versions
from nbelastic.collectives import missing_native_part

CONNECT_WITHIN_S = 2.0
BAD = "✗"  # begins a line on what keeps jobs from running

Answers = Mapping[str, tuple[str, Sequence[str]]]  # what :func:`probe` has returned, by process


def examine(address: str | None) -> Iterator[str]:
    """Yield lines on a cluster, or without an address on this machine."""
    answers: Answers = {"this process": probe()}
    if address is not None:
        with driver.connected(address) as client:
            check_versions(client)  # VersionMismatch names each side that differs
            workers = client.run_on_scheduler(lambda dask_scheduler: list(dask_scheduler.workers))
            answers = client.run(probe, workers, on_error="ignore")
    versions = ", ".join(f"{name} {version}" for name, version in own_versions().items())
    yield f"✓ versions     {versions}"
    yield from judge(answers, of_cluster=address is not None)


def judge(answers: Answers, *, of_cluster: bool) -> Iterator[str]:
    """Yield lines on processes by their answers."""
    gloo = (f"{name}: {missing}" for name, (missing, _) in answers.items() if missing)
    if first := next(gloo, ""):
        yield f"· native part  {first} → ranks there use Gloo; install with a C++20 compiler"
    else:
        yield "✓ native part  ranks of a host share memory"
    if not of_cluster:
        return
    yield f"{'✓' if answers else BAD} workers      {len(answers)} present"
    cut = (
        f"{name} cannot connect to {others[0]}" for name, (_, others) in answers.items() if others
    )
    if first := next(cut, ""):
        yield f"{BAD} ports        {first} → allow connections on all ports above 1024"
    else:
        yield "✓ ports        workers reach each other"


def probe(workers: Sequence[str] = ()) -> tuple[str, Sequence[str]]:
    """Return the reason for no shared memory, and the workers that this process cannot reach."""
    return missing_native_part(), [worker for worker in workers if not _connects(worker)]


def _connects(worker: str) -> bool:
    try:
        place = get_address_host_port(worker)
        socket.create_connection(place, timeout=CONNECT_WITHIN_S).close()
    except OSError:
        return False
    return True
