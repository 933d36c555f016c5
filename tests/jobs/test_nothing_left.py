"""After any end nothing is left: no thread, task, descriptor, process or memory segment."""

import gc
import os
import threading
import time

import psutil

from tests.support.clusters import until
from tests.support.training import Fault, Workload, check


def footprint(ports):
    """Return what a process holds, without what only waits for a search for garbage.

    Of its descriptors, those that are none of Dask's own connections. Dask keeps a pool of them,
    which grows with what happens to go on at the same time.
    """
    gc.collect()
    ends = {
        each.fd: {end.port for end in (each.laddr, each.raddr) if end}
        for each in psutil.Process().net_connections("tcp")
    }
    found = [
        name
        for name in os.listdir("/proc/self/fd")
        if os.path.lexists(f"/proc/self/fd/{name}") and not ends.get(int(name), set()) & {*ports}
    ]
    return {"threads": threading.active_count(), "descriptors": len(found)}


def scheduler_state(dask_scheduler):
    plugin = dask_scheduler.plugins["nbelastic"]
    return {
        "tasks": len(dask_scheduler.tasks),
        "topics": sum(name.startswith("nbelastic") for name in dask_scheduler._broker._topics),
        "jobs": len(plugin.jobs),
        "taken": sum(1 for host in plugin.workers.values() if host.holder),
        "handlers": len(dask_scheduler.stream_handlers) + len(dask_scheduler.handlers),
    }


def everything(crew):
    """Return all that could be left, as a flat mapping of names to numbers."""
    addresses = [crew.cluster.scheduler_address, *crew.workers()]
    addresses += [nanny.address for nanny in crew.cluster.workers.values()]
    ports = [int(address.rpartition(":")[2]) for address in addresses]
    kernel = {
        "ours": sum(t.name.startswith("nbelastic") for t in threading.enumerate()),
        "futures": len(crew.client.futures),
        "event handlers": len(crew.client._event_handlers),
        # Killed processes of other tests leave Python's semaphores.
        "shared memory": sum(not name.startswith("sem.") for name in os.listdir("/dev/shm")),
    }
    scheduler = crew.client.run_on_scheduler(scheduler_state)
    places = {"": kernel, "kernel": footprint(ports), "scheduler": scheduler}
    places |= crew.client.run(footprint, ports)
    return {f"{place}: {k}": v for place, found in places.items() for k, v in found.items()}


ENDS = {"finish": "finished", "fail": "failed", "stop": "stopped", "cancel": "stopped"}


def end(crew, marks, how):
    """Run a job to its end of a kind."""
    faults = (Fault(rank=1, epoch=0, batch=0, kind="raise"),) if how == "fail" else ()
    epochs = 1 if how in ("finish", "fail") else 1000
    work = Workload(marks, epochs=epochs, faults=faults, commit_every=10**9 if faults else 1)
    job = crew.fit(work, np=4, block=False)
    if epochs > 1:
        until(lambda: job.status.commits or job.done(), "commits")
        getattr(job, how)()
    job.exception(60)
    assert job.status.state == ENDS[how]


def test_jobs_of_every_kind_leave_no_more_than_the_first(crew, tmp_path):
    before = {}
    for times in ("first", "again"):  # the first of each kind: libraries load, pools fill
        for how in ENDS:
            marks = tmp_path / f"{times}-{how}"
            marks.mkdir()
            end(crew, marks, how)
        before = before or everything(crew)

    def more():
        time.sleep(0.3)  # to look takes much of a processor
        return {k: (before.get(k), v) for k, v in everything(crew).items() if v > before.get(k, 0)}

    until(lambda: not more(), "nothing is left", 20)


def test_a_data_loaders_processes_do_not_hide_the_death_of_their_rank(crew, tmp_path):
    faults = (Fault(rank=1, epoch=1, batch=1),)
    work = Workload(tmp_path, epochs=4, loader_workers=2, faults=faults)
    job = crew.fit(work, np=4, min_np=2, heartbeat_timeout=60, stall_timeout=60)
    check(job.results(), work)
    lost = next(event for event in job.history if event.kind == "lost")
    formed = [event for event in job.history if event.kind == "formed"][1]
    assert formed.time - lost.time < 10
    assert lost.detail in ("its process has ended", "its worker left the cluster")
