"""Dask Gateway's own service in the scheduler, with a gateway that listens only."""

from __future__ import annotations

import asyncio

import pytest

from tests.support.clusters import a_crew, until

from .planned import a_job_that_loses_nothing, shrinks

preload = pytest.importorskip("dask_gateway.scheduler_preload")

pytestmark = pytest.mark.slow


class Gateway:
    """What the service tells the gateway's server."""

    token = "token"

    def __init__(self):
        self.reports = []

    async def heartbeat(self, report):
        self.reports.append(report)

    async def shutdown(self):
        """It is never idle."""


def test_it_asks_for_what_jobs_want_and_scales_down_as_planned(tmp_path):
    gateway = Gateway()
    with a_crew(n_workers=0) as crew:

        async def start():
            service = preload.GatewaySchedulerService(crew.cluster.scheduler, gateway=gateway)
            service.listen(("127.0.0.1", 0))
            return service

        async def stop():
            service.stop()
            await asyncio.gather(service.heartbeat_task, return_exceptions=True)

        service = crew.cluster.sync(start)  # as with the scheduler, before any worker comes
        try:
            crew.cluster.scale(2)
            crew.client.wait_for_workers(2, timeout=120)
            with a_job_that_loses_nothing(crew, tmp_path, [2, 1], max_np=5) as job:
                crew.cluster.sync(service.adapt, minimum=1, maximum=9)
                until(lambda: gateway.reports and gateway.reports[-1]["count"] == 5, "it asks")
                crew.cluster.sync(service.scale, 1)
                shrinks(job, 1)
            until(lambda: len(gateway.reports[-1]["closing_workers"]) == 1, "it reports")
        finally:
            crew.cluster.sync(stop)
