"""Addresses at which no scheduler answers: an error in bounded time that says what is wrong."""

from __future__ import annotations

import asyncio
import contextlib
import socket
import threading

import dask
import pytest
from distributed import Client, LocalCluster, Status

import nbelastic
from nbelastic.driver import display
from nbelastic.errors import ClusterLost, OptionError


@contextlib.contextmanager
def listening(answer):
    """Listen on a port, and hand each connection to `answer`."""
    with socket.create_server(("127.0.0.1", 0)) as server:

        def serve():
            with contextlib.suppress(OSError):
                while True:
                    answer(server.accept()[0])

        thread = threading.Thread(target=serve)
        thread.start()
        try:
            yield f"tcp://127.0.0.1:{server.getsockname()[1]}"
        finally:
            server.shutdown(socket.SHUT_RDWR)
            thread.join(10)


@pytest.fixture
def told(monkeypatch):
    """Lines that the user was told."""
    lines: list[str] = []
    monkeypatch.setattr(display, "say", lines.append)
    with dask.config.set({"distributed.comm.timeouts.connect": "300ms"}):
        yield lines


def test_it_is_said_at_once_where_a_connection_is_tried_and_why_it_fails(told):
    with pytest.raises(ClusterLost, match=r"tcp://127\.0\.0\.1:1'.*Connection refused"):
        nbelastic.fit(print, cluster="tcp://127.0.0.1:1")
    assert len(told) == 1
    assert told[0].startswith("connecting to tcp://127.0.0.1:1; trying for")
    with pytest.raises(ClusterLost, match="not known"):
        nbelastic.jobs("tcp://no-such-host.invalid:8786")


@pytest.mark.parametrize(
    ("answer", "message"),
    [
        (None, "the connection is accepted, but nothing is answered"),
        (b"", r"it closed the connection .* needs tls://"),
        (b"HTTP/1.0 400 Bad request\r\n\r\n" + b"x" * 100, "no scheduler answers"),
    ],
)
def test_what_takes_connections_is_no_scheduler(told, answer, message):
    limit = "60 s" if answer is not None else "300 ms"
    with contextlib.ExitStack() as kept:

        def say(connection):
            if answer is None:
                kept.enter_context(connection)
            else:
                connection.sendall(answer)
                connection.close()

        with (
            dask.config.set({"distributed.comm.timeouts.connect": limit}),
            listening(say) as address,
            pytest.raises(ClusterLost, match=message),
        ):
            nbelastic.attach("a-job", cluster=address)


@pytest.mark.parametrize(
    ("address", "message"),
    [
        ("10.0.0.5", r"as in tcp://10\.0\.0\.5:8786$"),
        *((each, "must be a scheduler's address") for each in ("", "tcp://h", "tcp://h:99999")),
        ("http://localhost:8787/status", "of a web page, such as Dask's dashboard"),
        ("scheduler.json", "must be a scheduler's address"),
        ("tls://10.0.0.5:8786", "tls:// needs certificates"),
    ],
)
def test_what_is_no_address_is_refused_before_anything_is_tried(told, address, message):
    with pytest.raises(OptionError, match=message) as caught:
        nbelastic.jobs(address)
    assert f"cluster={address!r}" in str(caught.value)
    assert told == []


def test_the_address_of_a_worker_is_said_to_be_one(crew):
    worker = next(iter(crew.client.scheduler_info()["workers"]))
    with pytest.raises(OptionError, match=r"address of a worker; must be that of the scheduler"):
        nbelastic.jobs(worker)


def test_a_cluster_that_was_closed_is_said_so():
    class Closed:
        scheduler_address = "tcp://127.0.0.1:1"
        status = Status.closed

    with pytest.raises(ClusterLost, match="it has been closed"):
        nbelastic.jobs(Closed())


@pytest.mark.slow
def test_a_scheduler_that_has_stopped_answering_its_client_does_not_block_for_ever(told):
    async def never(**_):
        await asyncio.Event().wait()

    with (
        LocalCluster(n_workers=0, processes=False, dashboard_address=":0") as cluster,
        Client(cluster) as client,
        dask.config.set({"distributed.comm.timeouts.tcp": "300ms"}),
    ):
        answers = cluster.scheduler.handlers["echo"]
        cluster.scheduler.handlers["echo"] = never
        with pytest.raises(ClusterLost, match=r"the scheduler has not answered for 0\.3 s"):
            nbelastic.fit(print, cluster=client)
        cluster.scheduler.handlers["echo"] = answers
    assert len(told) == 1
    assert told[0].startswith("the scheduler at inproc:")
