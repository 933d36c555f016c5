"""After any end nothing is left: no thread, task, descriptor, process or memory segment."""

import contextlib
import os
import threading
import time
from collections import Counter

import pytest

from nbelastic.errors import JobError
from tests.support.clusters import until
from tests.support.training import Fault, Workload, check


def descriptors(ports):
    """Return what the descriptors of this process are, without those of Dask's own connections.

    Dask keeps a pool of them, which grows with what happens to go on at the same time.
    """
    import os

    import psutil

    ends = {}
    for each in psutil.Process().net_connections("tcp"):
        ends[each.fd] = [end.port for end in (each.laddr, each.raddr) if end]
    found = []
    for name in os.listdir("/proc/self/fd"):
        place, its = f"/proc/self/fd/{name}", ends.get(int(name), [])
        if os.path.lexists(place) and not {*its} & {*ports}:  # not that of the list
            found.append(f"TCP between ports {its}" if its else os.readlink(place))
    return found


def footprint(ports):
    """Return what a process holds, by kind, without what only waits for a search for garbage."""
    import gc
    import multiprocessing
    import os
    import threading

    gc.collect()
    return {
        "threads": threading.active_count(),
        "descriptors": len(descriptors(ports)),
        "children": len(multiprocessing.active_children()),
        "stdout": type(__import__("sys").stdout).__name__,
        "daemon": multiprocessing.current_process().daemon,
        "threads of torch": os.environ.get("OMP_NUM_THREADS"),
    }


def scheduler_state(dask_scheduler):
    plugin = dask_scheduler.plugins["nbelastic"]
    return {
        "tasks": len(dask_scheduler.tasks),
        "topics": sum(name.startswith("nbelastic") for name in dask_scheduler._broker._topics),
        "jobs": len(plugin.jobs),
        "taken": sum(1 for host in plugin.workers.values() if host.holder),
        "handlers": len(dask_scheduler.stream_handlers) + len(dask_scheduler.handlers),
    }


def dask_ports(crew):
    addresses = [crew.cluster.scheduler_address, *crew.workers()]
    addresses += [nanny.address for nanny in crew.cluster.workers.values()]
    return [int(address.rpartition(":")[2]) for address in addresses]


def everything(crew):
    """Return all that could be left, as a flat mapping of names to numbers."""
    ports = dask_ports(crew)
    counts = {f"kernel: {k}": v for k, v in footprint(ports).items() if isinstance(v, int)}
    del counts["kernel: children"]  # workers come and go
    for worker, found in crew.client.run(footprint, ports).items():
        assert found["stdout"] == "TextIOWrapper"
        assert found["daemon"]
        assert found["threads of torch"] == "1"
        counts |= {f"{worker}: {k}": v for k, v in found.items() if isinstance(v, int)}
    for name, value in crew.client.run_on_scheduler(scheduler_state).items():
        counts[f"scheduler: {name}"] = value
    shared = os.listdir("/dev/shm")  # killed processes of other tests leave Python's semaphores
    counts["shared memory"] = sum(not name.startswith("sem.") for name in shared)
    counts["our threads"] = sum(t.name.startswith("nbelastic") for t in threading.enumerate())
    counts["futures"] = len(crew.client.futures)
    counts["event handlers"] = len(crew.client._event_handlers)
    return counts


def finish(crew, marks):
    crew.fit(Workload(marks, epochs=1), np=4)


def fail(crew, marks):
    faults = (Fault(rank=1, epoch=0, batch=0, kind="raise"),)
    with pytest.raises(ValueError, match="was told to fail"):
        crew.fit(Workload(marks, epochs=1, faults=faults, commit_every=10**9), np=4)


def stop(crew, marks):
    job = crew.fit(Workload(marks, epochs=1000), np=4, block=False)
    until(lambda: job.status.commits > 0 or job.done(), "commits")
    job.stop()
    with pytest.raises(JobError):
        job.result(60)


def cancel(crew, marks):
    job = crew.fit(Workload(marks, epochs=1000), np=4, block=False)
    until(lambda: job.status.state == "running" or job.done(), "it runs")
    job.cancel()
    with pytest.raises(JobError):
        job.result(60)


def test_jobs_of_every_kind_leave_no_more_than_the_first(crew, tmp_path):
    ends = [finish, fail, stop, cancel]
    for number in range(4):  # the first of each kind: libraries load, pools fill
        marks = tmp_path / f"first-{number}"
        marks.mkdir()
        ends[number](crew, marks)
    before = everything(crew)
    open_before = descriptors(dask_ports(crew))
    for number in range(4):
        marks = tmp_path / str(number)
        marks.mkdir()
        ends[number](crew, marks)

    def more():
        time.sleep(0.3)  # to look takes much of a processor
        return {k: (before.get(k), v) for k, v in everything(crew).items() if v > before.get(k, 0)}

    with contextlib.suppress(AssertionError):
        until(lambda: not more(), "nothing is left", 20)
    opened = Counter(descriptors(dask_ports(crew))) - Counter(open_before)
    assert not more(), f"this process has opened: {dict(opened)}"


def test_a_data_loaders_processes_do_not_hide_the_death_of_their_rank(crew, tmp_path):
    faults = (Fault(rank=1, epoch=1, batch=1),)
    work = Workload(tmp_path, epochs=4, loader_workers=2, faults=faults)
    job = crew.fit(work, np=4, min_np=2, heartbeat_timeout=60, stall_timeout=60)
    check(job.results(), work)
    lost = next(event for event in job.history if event.kind == "lost")
    formed = [event for event in job.history if event.kind == "formed"][1]
    assert formed.time - lost.time < 10
    assert lost.detail in ("its process has ended", "its worker left the cluster")


def large():
    return bytes(30_000_000)


def bytes_kept(dask_scheduler):
    """Return how many bytes of results the scheduler keeps, also of jobs that are over."""
    import gc

    from nbelastic.cluster.job_log import JobLog
    from nbelastic.cluster.scheduler.job import ScheduledJob

    kept = gc.get_objects()
    archives = [each for each in kept if type(each) is JobLog]
    records = [each for each in kept if type(each) is ScheduledJob]
    of_results = [len(result) for each in archives for result in each.results.values()]
    return sum(of_results) + sum(len(each.terms.payload.call) for each in records)


def test_large_results_are_kept_once_and_in_the_kernel_alone(crew):
    before = crew.client.run_on_scheduler(bytes_kept)  # jobs of others, to be taken over
    job = crew.fit(large, np=2)
    assert [len(result) for result in job.results()] == [30_000_000, 30_000_000]
    assert crew.client.run_on_scheduler(bytes_kept) <= before
    assert not job._driver.log.results
