"""What a job's processes listen on, and whom they answer."""

from __future__ import annotations

import asyncio
import contextlib
import http.client
import itertools
import os
import socket
import ssl
import stat

import msgspec
import psutil
import pytest
import torch
from distributed import Client
from distributed.comm.core import connect
from distributed.core import send_recv

import nbelastic
import nbelastic.torch as hvd
from nbelastic.cli.hosts.cluster import HostCluster
from nbelastic.cluster.dask_compat import runs_here
from nbelastic.collectives.rendezvous.handshake import open_channel
from nbelastic.collectives.rendezvous.server import PURPOSE
from nbelastic.driver.attachment import attach_client
from nbelastic.driver.options import Options
from nbelastic.elastic.ranks.context import current
from nbelastic.errors import OptionError
from tests.support.clusters import a_crew


def listen_and_be_asked():
    """Form a group, then say where this process listens, and what a stranger is told there."""
    hvd.init()
    before = listening_in(psutil.Process())
    hvd.allreduce(torch.ones(1))
    ours = [host for host, _ in listening_in(psutil.Process()) - before]
    session = current()
    with socket.create_connection(session._store.address, 10) as connection:
        key = f"{session.spec.job}/{session.generation + 1}"
        open_channel(connection, b"", PURPOSE).send(msgspec.msgpack.encode((key, 0, 1)))
        answer = connection.recv(1)
    return ours, answer, session.secret


def listening_in(process) -> set[tuple[str, int]]:
    """Return the addresses and ports on which a process listens."""
    connections = process.net_connections("tcp")
    return {(each.laddr.ip, each.laddr.port) for each in connections if each.status == "LISTEN"}


def test_a_job_listens_where_dask_does_and_answers_no_stranger():
    with a_crew(host="127.0.0.2") as crew:
        first = crew.fit(listen_and_be_asked, np=2, backend="gloo").results()
        second = crew.fit(listen_and_be_asked, np=2).results()
    assert all(len(ours) >= 2 for ours, _, _ in first), "the store and Gloo"
    for ours, answer, secret in first + second:
        assert ours, "the store; shared memory needs no more"
        assert set(ours) == {"127.0.0.2"}
        assert answer == b"", "without the job's secret there is no answer"
        assert len(secret) == 32
    assert first[0][2] == first[1][2], "all ranks of a job know its secret"
    assert first[0][2] != second[0][2], "each job has its own"


async def _refuses(host, port, scheme):
    """Whether a client without the cluster's certificate has no answer at an address."""
    plain = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    plain.check_hostname, plain.verify_mode = False, ssl.CERT_NONE
    terms = {"ssl_context": plain} if scheme == "tls" else {}

    async def ask():
        comm = await connect(f"{scheme}://{host}:{port}", timeout=2, **terms)
        await send_recv(comm, op="identity")

    with contextlib.suppress(OSError, asyncio.TimeoutError, ValueError):
        await asyncio.wait_for(ask(), 3)  # a HTTP server waits for a line
        return False
    return True


async def _all_refuse(addresses):
    ways = [(*each, scheme) for each in addresses for scheme in ("tcp", "tls")]
    return all(await asyncio.gather(*itertools.starmap(_refuses, ways)))


@pytest.mark.parametrize("started", ["by fit", "for hosts"])
def test_a_cluster_that_is_started_here_is_closed_to_other_users(started, monkeypatch, tmp_path):
    monkeypatch.setenv("HOME", str(tmp_path))
    before = _listening()
    with contextlib.ExitStack() as stack:
        if started == "by fit":
            client, close = attach_client(None, Options(np=1))
            stack.callback(close)
            assert runs_here(client)
            found = client.run(lambda dask_worker: "profile" in dask_worker.periodic_callbacks)
            assert set(found.values()) == {False}, "it has no profiler"
        else:
            cluster = stack.enter_context(HostCluster(lambda: {"localhost": 1}, loopback=True))
            client = stack.enter_context(Client(cluster))
        client.wait_for_workers(1, timeout=60)
        address = client.scheduler.address
        found = _listening() - before
        assert len(found) >= 4  # scheduler, nanny, worker; HTTP
        assert {where for where, _ in found} <= LOOPBACKS
        assert asyncio.run(_all_refuse(found))
        assert {_page(each) for each in found} == {404, None}
        (file,) = (tmp_path / ".cache/nbelastic/clusters").iterdir()
        assert {stat.S_IMODE(each.stat().st_mode) for each in (file, file.parent)} == {0o600, 0o700}
        assert list(nbelastic.jobs(address)) == []  # as another process of the same user
        file.chmod(0o644)
        file.parent.chmod(0o755)
        if os.geteuid() == 0:
            os.chown(file.parent, 65534, -1)  # another user's certificate is not taken
            with pytest.raises(OptionError, match="open to processes of its own user"):
                nbelastic.jobs(address)
            os.chown(file.parent, 0, -1)
    assert not file.exists()


def _page(address):
    """Return the status of the pages that Dask's HTTP servers have; None if it is none of them."""
    asked = http.client.HTTPConnection(*address, timeout=5)
    with contextlib.closing(asked), contextlib.suppress(OSError, http.client.HTTPException):
        asked.request("GET", "/info/main/workers.html")
        return asked.getresponse().status


def test_http_of_named_hosts_is_on_the_loopback_although_their_scheduler_is_not():
    with HostCluster(lambda: {"localhost": 1}) as cluster:
        nbelastic.fit(lambda: None, cluster=cluster, np=1).result()
        with Client(cluster, set_as_default=False) as client:
            found = client.run(lambda dask_worker: dask_worker.http_server.address)
    assert {cluster.scheduler.http_server.address, *found.values()} <= LOOPBACKS


LOOPBACKS = {"127.0.0.1", "::1"}


def _listening() -> set[tuple[str, int]]:
    """Return the addresses and ports on which this process and its children listen."""
    own = psutil.Process()
    found = set()
    for process in (own, *own.children(recursive=True)):
        with contextlib.suppress(psutil.NoSuchProcess):
            found |= listening_in(process)
    return found
