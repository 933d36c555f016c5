"""Messages that are not held back."""

from types import SimpleNamespace

import pytest
from distributed.batched import BatchedSend

import nbelastic
from nbelastic.cluster.haste import INTERVAL_S, hasten


@pytest.mark.parametrize(("interval", "after"), [("10ms", INTERVAL_S), ("0.5ms", 0.0005)])
def test_a_stream_waits_no_longer_than_a_millisecond(interval, after):
    stream = BatchedSend(interval=interval)
    hasten(stream)
    assert stream.interval == after


@pytest.mark.parametrize("stream", [None, SimpleNamespace(), SimpleNamespace(interval="10ms")])
def test_what_has_no_such_interval_is_left_alone(stream):
    hasten(stream)
    assert getattr(stream, "interval", "10ms") == "10ms"


def test_a_jobs_messages_are_not_held_back_anywhere(crew):
    assert crew.fit(nbelastic.size, np=2).results() == [2, 2]
    assert crew.client.scheduler_comm.interval == INTERVAL_S
    of_workers = crew.client.run(lambda dask_worker: dask_worker.batched_stream.interval)
    assert set(of_workers.values()) == {INTERVAL_S}
    to_workers = crew.client.run_on_scheduler(
        lambda dask_scheduler: [each.interval for each in dask_scheduler.stream_comms.values()]
    )
    assert set(to_workers) == {INTERVAL_S}
