"""What is used of Dask beyond its documentation."""

import asyncio
import socket
from types import SimpleNamespace

import pytest
from distributed.batched import BatchedSend

import nbelastic
from nbelastic.cluster import dask_compat


@pytest.mark.parametrize(
    ("interval", "after"), [("10ms", dask_compat.INTERVAL_S), ("0.5ms", 0.0005)]
)
def test_a_stream_waits_no_longer_than_a_millisecond_and_keeps_few_messages(interval, after):
    stream = BatchedSend(interval=interval)
    stream.recent_message_log.extend(range(500))
    dask_compat.shorten_batching(stream)
    assert stream.interval == after
    stream.recent_message_log.append(500)
    assert list(stream.recent_message_log) == list(range(491, 501))


@pytest.mark.parametrize(
    "odd", [None, SimpleNamespace(interval="1s", next_deadline=None, stream=None)]
)
def test_what_is_no_stream_or_connection_is_left_alone(odd):
    dask_compat.shorten_batching(odd)
    dask_compat.resume(odd)
    assert dask_compat.unacknowledged_s(odd) == 0.0


def test_a_jobs_messages_are_not_held_back_anywhere(crew):
    assert crew.fit(nbelastic.size, np=2).results() == [2, 2]
    assert crew.client.scheduler_comm.interval == dask_compat.INTERVAL_S
    of_workers = crew.client.run(lambda dask_worker: dask_worker.batched_stream.interval)
    assert set(of_workers.values()) == {dask_compat.INTERVAL_S}
    to_workers = crew.client.run_on_scheduler(
        lambda dask_scheduler: [each.interval for each in dask_scheduler.stream_comms.values()]
    )
    assert set(to_workers) == {dask_compat.INTERVAL_S}


# -- what a machine knows of a connection whose other end does not answer --------------------------


def test_a_busy_receiver_is_not_cut_off_and_a_closed_connection_is_left_to_dask():
    with (
        socket.create_server(("127.0.0.1", 0)) as server,
        socket.create_connection(server.getsockname()) as connection,
    ):
        connection.sendall(b"beat")  # nobody reads it, but it has arrived
        comm = SimpleNamespace(stream=SimpleNamespace(socket=connection))
        assert dask_compat.unacknowledged_s(comm) == 0.0
    assert dask_compat.unacknowledged_s(comm) == 0.0


# -- what a process has died of, by its nanny's log ------------------------------------------------

MEMORY = "Worker tcp://127.0.0.1:1 (pid={}) exceeded 95% memory budget. Restarting..."
TERMINATED = "Worker process {} was killed by signal 15"
EXITED = "Worker process {} exited with status 3"
OUT_OF_MEMORY = "was ended by its nanny, because it exceeded 95% of its memory limit"


@pytest.mark.parametrize(
    ("lines", "cause"),
    [
        ([EXITED.format(7)], "exited with status 3"),
        ([TERMINATED.format(7), MEMORY.format(7)], OUT_OF_MEMORY),
        ([MEMORY.format(7), EXITED.format(7)], OUT_OF_MEMORY),
        ([MEMORY.format(8), TERMINATED.format(7)], "was killed by signal 15 (SIGTERM)"),
        ([MEMORY.format(7)], ""),
        ([TERMINATED.format(8)], ""),
    ],
)
def test_the_cause_is_that_of_this_process(monkeypatch, lines, cause):
    async def get_logs(n):
        return [("INFO", line) for line in lines]

    monkeypatch.setattr(dask_compat, "LOG_INTERVAL_S", 0.0)
    scheduler = SimpleNamespace(rpc=lambda address: SimpleNamespace(get_logs=get_logs))
    assert asyncio.run(dask_compat.cause_of_death(scheduler, "tcp://nanny", 7)) == cause
