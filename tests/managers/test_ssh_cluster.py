"""Dask's ``SSHCluster`` on a real ssh server, whose hosts are addresses of this machine."""

from __future__ import annotations

import os
import sys

import pytest
from distributed import Client, SSHCluster

from tests.cli.ssh import SshHosts
from tests.support.clusters import Crew, kinds, sizes, until
from tests.support.training import Workload, check

pytestmark = [pytest.mark.slow, pytest.mark.nightly]

STAYS, DIES = "127.0.0.2", "127.0.0.5"


def test_a_host_that_dies_costs_the_batch_in_flight(tmp_path, monkeypatch):
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.setenv("PYTHONPATH", os.getcwd())
    with SshHosts(tmp_path, (STAYS, DIES)) as servers:
        options = {
            "port": servers.port,
            "client_keys": [str(servers.key)],
            "known_hosts": str(tmp_path / ".ssh" / "known_hosts"),
        }
        with (
            SSHCluster(
                [STAYS, STAYS, DIES],
                connect_options=options,
                worker_class="distributed.Worker",
                worker_options={"nthreads": 1},
                scheduler_options={"host": STAYS, "port": 0, "dashboard_address": ":0"},
                remote_python=sys.executable,
            ) as cluster,
            Client(cluster, set_as_default=False) as client,
        ):
            work = Workload(tmp_path, epochs=1000, until_told=True)
            job = Crew(cluster, client).fit(work, np=2, min_np=1, block=False)
            until(lambda: job.status.commits > 5 or job.done(), "commits", 120)
            servers.die(DIES)
            until(lambda: job.status.size == 1 or job.done(), "one rank", 120)
            (tmp_path / "enough").touch()
            check(job.results(120), work)
    assert sizes(job) == [2, 1]
    assert kinds(job).count("lost") == 1
