"""Status of a job while its driver has no connection to the scheduler."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from nbelastic.cluster import JobClient
from nbelastic.driver.job import Job
from nbelastic.driver.options import Options
from nbelastic.driver.thread import Driver
from nbelastic.messages import AttachRefusal


def test_a_lost_connection_is_the_reason_until_it_is_back() -> None:
    driver = Driver("away", Options(np=2), lambda: None)
    job_client: Any = SimpleNamespace(status="running", attach=lambda: AttachRefusal("taken"))
    driver.adopt_client(job_client)
    job = Job(driver)
    before = job.status.reason
    job_client.status = "connecting"
    driver._look_at_connection()
    assert job.status.reason == "no connection to the scheduler; if it lives, the job goes on there"
    job_client.status = "running"
    driver._look_at_connection()
    assert job.status.reason == before


def cluster_of(names: Any, wanted: Any) -> Any:
    return SimpleNamespace(workers=dict.fromkeys(names), worker_spec=dict.fromkeys(wanted))


@pytest.mark.parametrize("own", [False, True])
def test_a_worker_that_dask_has_closed_for_good_is_said_once_or_started_again(own: bool) -> None:
    driver, asked = Driver("closed", Options(np=2), lambda: None), list[int]()
    driver.owns_cluster = own
    client: Any = SimpleNamespace(cluster=cluster_of((0, 1), (0, 1)))
    client.cluster.scale = asked.append
    driver.adopt_client(JobClient(client, "closed", lambda _: None))

    def look() -> None:
        driver._look_at = 0.0
        driver._look_at_workers()

    look()
    del client.cluster.worker_spec[0], client.cluster.workers[0]  # scaled down
    client.cluster.worker_spec[2] = None  # about to start
    look()
    assert not driver.log.warnings() and not asked
    del client.cluster.workers[1]
    look()
    look()
    assert asked == [2] * own
    assert [each.split("\n")[0] for each in driver.log.warnings()] == (
        [] if own else ["Dask's cluster has closed worker 1 for good"]
    )
    client.cluster = None  # an address
    look()
