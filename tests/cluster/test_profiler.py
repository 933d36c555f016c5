"""Dask's profiler does not run in the cluster that is started for one job."""

import pytest
from distributed import LocalCluster

from nbelastic.cluster.dask_compat import runs_here
from nbelastic.driver.attachment import attach_client
from nbelastic.driver.options import Options


@pytest.mark.slow
def test_the_workers_of_a_cluster_for_one_job_have_none():
    client, close = attach_client(None, Options(np=1))
    try:
        assert isinstance(client.cluster, LocalCluster) and runs_here(client)
        found = client.run(lambda dask_worker: "profile" in dask_worker.periodic_callbacks)
        assert set(found.values()) == {False}
    finally:
        close()
