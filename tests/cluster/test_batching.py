"""Messages that are not held back."""

import asyncio
import threading
import time
from types import SimpleNamespace

import pytest
from distributed.batched import BatchedSend

import nbelastic
from nbelastic.cluster.dask_compat import INTERVAL_S, is_stalled, resume, shorten_batching


@pytest.mark.parametrize(("interval", "after"), [("10ms", INTERVAL_S), ("0.5ms", 0.0005)])
def test_a_stream_waits_no_longer_than_a_millisecond(interval, after):
    stream = BatchedSend(interval=interval)
    shorten_batching(stream)
    assert stream.interval == after


@pytest.mark.parametrize("stream", [None, SimpleNamespace(), SimpleNamespace(interval="10ms")])
def test_what_has_no_such_interval_is_left_alone(stream):
    shorten_batching(stream)
    assert getattr(stream, "interval", "10ms") == "10ms"


def test_a_stream_keeps_few_of_the_messages_that_it_has_sent():
    stream = BatchedSend(interval="10ms")
    stream.recent_message_log.extend(range(500))
    shorten_batching(stream)
    stream.recent_message_log.append(500)
    assert list(stream.recent_message_log) == list(range(491, 501))


def test_a_jobs_messages_are_not_held_back_anywhere(crew):
    assert crew.fit(nbelastic.size, np=2).results() == [2, 2]
    assert crew.client.scheduler_comm.interval == INTERVAL_S
    of_workers = crew.client.run(lambda dask_worker: dask_worker.batched_stream.interval)
    assert set(of_workers.values()) == {INTERVAL_S}
    to_workers = crew.client.run_on_scheduler(
        lambda dask_scheduler: [each.interval for each in dask_scheduler.stream_comms.values()]
    )
    assert set(to_workers) == {INTERVAL_S}


class Clock:
    """A wall clock that can be set back, for this thread alone: others have event loops, too."""

    def __init__(self, monkeypatch):
        self.back = 0.0
        thread = threading.get_ident()

        def now(_loop=None):
            return time.time() - (self.back if threading.get_ident() == thread else 0.0)

        for place in ("distributed.batched.time", "distributed.metrics.time"):
            monkeypatch.setattr(place, now)
        monkeypatch.setattr("tornado.ioloop.IOLoop.time", now)


class Comm:
    """A connection that keeps what is written."""

    def __init__(self):
        self.written = []

    async def write(self, payload, **_):
        self.written += payload
        return 1

    def closed(self):
        return False

    async def close(self):
        pass


def test_a_stream_goes_on_when_the_clock_was_set_back(monkeypatch):
    clock = Clock(monkeypatch)

    async def scene():
        stream, comm = BatchedSend(interval="1ms"), Comm()
        stream.start(comm)
        stream.send("first")
        while not comm.written:
            await asyncio.sleep(0)
        clock.back = 60.0
        stream.send("second")
        await asyncio.sleep(0.05)
        assert comm.written == ["first"], "this is what Dask does; else nothing is to be tested"
        assert is_stalled(stream)
        resume(stream)
        while len(comm.written) < 2:
            await asyncio.sleep(0.001)
        assert not is_stalled(stream)
        stream.send("third")
        while len(comm.written) < 3:
            await asyncio.sleep(0.001)
        await stream.close()

    asyncio.run(asyncio.wait_for(scene(), 20))


@pytest.mark.parametrize("stream", [None, SimpleNamespace(), SimpleNamespace(next_deadline=None)])
def test_a_stream_that_is_not_held_up_is_left_alone(stream):
    assert not is_stalled(stream)
    resume(stream)
