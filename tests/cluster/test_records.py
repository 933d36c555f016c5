"""Why a worker is not offered to a job, and how much of its output waits."""

from __future__ import annotations

import asyncio
from types import SimpleNamespace
from unittest.mock import Mock

import pytest
from distributed.comm import connect, listen
from distributed.core import Status
from msgspec.structs import replace

from nbelastic.cluster.dask_compat import unsent_bytes
from nbelastic.cluster.scheduler.job import FEW, MOST_WAITING
from nbelastic.cluster.scheduler.records import WorkerRecord
from nbelastic.cluster.worker.agent import own_interface
from nbelastic.messages import RankOutput, UnusedWorker
from nbelastic.messages import UnusedReason as Reason
from tests.support.records import a_record

from .shared_cluster import SharedCluster

VERSIONS = {"python": "3.11", "nbelastic": "1", "torch": "2.1"}
NEWER = {**VERSIONS, "torch": "2.2"}
GPU, GPUS = {"GPU": 1}, {"GPU": 2}


def a_job(**changes):
    return a_record(**{"versions": VERSIONS, **changes})


def a_host(**changes):
    return WorkerRecord(**{"slot": {"id": "w"}, "versions": VERSIONS, "pid": 0, **changes})


def a_worker(**changes):
    fields = {"address": "tcp://10.0.0.1:5", "name": "w", "status": Status.running, "resources": {}}
    return SimpleNamespace(**{**fields, **changes})


@pytest.mark.parametrize(
    ("job", "worker", "host", "reason", "detail"),
    [
        ({}, {"status": Status.paused}, {}, Reason.PAUSED, ""),
        ({}, {"status": Status.closing_gracefully}, {}, Reason.LEAVING, ""),
        ({}, {"status": Status.closing}, {}, Reason.CLOSING, ""),
        ({"workers": {"other"}}, {}, {}, Reason.NOT_IN_WORKERS, ""),
        ({"resources": GPUS}, {"resources": GPU}, {}, Reason.LACKS_RESOURCES, "GPU 1 of 2"),
        ({}, {}, {"holder": ("other", 3)}, Reason.TAKEN, "other"),
        ({}, {}, {"retiring": True}, Reason.LEAVING, ""),
        ({}, {}, {"versions": NEWER}, Reason.OTHER_VERSIONS, "torch 2.2 (kernel: 2.1)"),
    ],
)
def test_every_obstacle_has_its_reason(job, worker, host, reason, detail):
    found = a_job(**job).obstacle(a_worker(**worker), a_host(**host))
    assert found == UnusedWorker("tcp://10.0.0.1:5", reason, detail)


def a_task(key, **resources):
    return SimpleNamespace(key=key, resource_restrictions=resources or None)


@pytest.mark.parametrize(
    ("tasks", "long_running", "job", "busy"),
    [
        (["nbelastic-rank-a-0"], [], {}, False),
        (["nbelastic-rank-a-0", "x"], [], {}, False),
        (["nbelastic-rank-a-0", "x", "y"], [], {}, True),
        (["nbelastic-rank-a-0", "x", "y"], ["y"], {}, False),  # it has left the pool
        (["nbelastic-rank-a-0", "GPU"], [], {"resources": GPU}, True),
        (["nbelastic-rank-a-0", "x"], [], {"resources": GPU}, False),
        (["nbelastic-rank-a-0", "GPU"], [], {}, False),
    ],
)
def test_a_rank_waits_for_other_tasks_of_its_worker(tasks, long_running, job, busy):
    made = {key: a_task(key, **(GPU if key == "GPU" else {})) for key in tasks}
    worker = a_worker(
        nthreads=2,
        resources=GPU,
        processing=made.values(),
        long_running=[made[key] for key in long_running],
    )
    assert a_job(**job).is_busy(worker) is busy


@pytest.mark.parametrize("name", ["tcp://10.0.0.1:5", "w", "10.0.0.1"])
def test_a_worker_is_meant_by_address_name_or_host(name):
    assert a_job(workers={name}).misfit(a_worker()) is None


@pytest.mark.parametrize(
    ("hosts", "found"),
    [
        (["127.0.0.1"], "127.0.0.1"),
        (["localhost", "127.0.0.2"], "127.0.0.1"),
        (["198.51.100.1", "127.0.0.2"], "127.0.0.2"),  # a gateway's address: nothing listens there
        (["no-such-host.invalid", "127.0.0.2"], "127.0.0.2"),
        ([], "127.0.0.1"),
    ],
)
def test_a_rank_listens_on_an_address_of_its_own_machine(hosts, found):
    assert own_interface(hosts) == found


# -- output that waits for a kernel that does not read ---------------------------------------------

TEXT = RankOutput("job", 0, "0123456789")
GAP = RankOutput("job", 0, "", gap=True)


def test_a_kernel_that_does_not_read_gets_the_mark_of_a_gap_until_it_has_read_most():
    full, job = MOST_WAITING + 1, a_record()
    waiting = [0, MOST_WAITING, full, full, MOST_WAITING, FEW + 1, FEW, MOST_WAITING, full]
    sent = job.send = Mock()
    passed = []
    for each in waiting:
        job.send_output(TEXT, each)
        passed.append([call.args[0] for call in sent.call_args_list])
        sent.reset_mock()
    assert passed == [[TEXT], [TEXT], [GAP], [], [], [], [TEXT], [TEXT], [GAP]]


async def test_what_waits_for_a_jobs_own_kernel_counts():
    cluster = await SharedCluster().start()
    for name, waiting in (("job", MOST_WAITING + 1), ("other", 0)):
        await cluster.open(name)
        buffer = SimpleNamespace(_write_buffer=range(waiting))
        stream = SimpleNamespace(comm=SimpleNamespace(stream=buffer))
        cluster.client_comms[f"kernel of {name}"] = stream
        job = cluster.plugin.jobs[name]
        job.send = Mock()
        cluster.plugin._output("w", replace(TEXT, job=name))
        assert job.send.call_args.args[0] == replace(GAP if waiting else TEXT, job=name)
    await cluster.plugin.before_close()


def test_bytes_that_wait_for_the_other_end_are_counted():
    """Dask's streams write without waiting, so that their own buffers are empty."""

    async def scene():
        arrived: asyncio.Queue = asyncio.Queue()
        async with listen("tcp://127.0.0.1", arrived.put) as listener:
            writer = await connect(listener.contact_address)
            reader = await arrived.get()
            stream = SimpleNamespace(comm=writer)
            before = unsent_bytes(stream)
            await writer.write(b"x" * 50_000_000)
            await writer.write("done")
            waiting = unsent_bytes(stream)
            await reader.read()
            await reader.read()
            after = unsent_bytes(stream)
            await writer.close()
            await reader.close()
        return before, waiting > 25_000_000, after

    assert asyncio.run(scene()) == (0, True, 0)
    assert unsent_bytes(None) == unsent_bytes(SimpleNamespace(comm=None)) == 0
