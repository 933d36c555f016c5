"""The Kubernetes operator's own code that scales workers, without Kubernetes.

dask-kubernetes brings 200 MB of clients of Kubernetes, so the extra ``test`` is without it:
``pip install dask-kubernetes`` before.
"""

from __future__ import annotations

import asyncio
import logging
from types import SimpleNamespace

import dask
import pytest

from tests.support.clusters import a_crew

from .planned import a_job_that_loses_nothing, shrinks

controller = pytest.importorskip("dask_kubernetes.operator.controller.controller")

pytestmark = [pytest.mark.slow, pytest.mark.nightly]

ROUTES = ["distributed.http.scheduler.api", "distributed.http.health"]


class Kubernetes:
    """What the operator asks Kubernetes for: a group of workers, each a deployment."""

    def __init__(self, scheduler, workers):
        self.scheduler = scheduler
        self.workers = workers
        self.deleted = []

    async def address(self, *_, **__):
        return self.scheduler

    async def worker_group(self, *_, **__):
        async def cluster():
            return SimpleNamespace(labels={})

        return SimpleNamespace(cluster=cluster)

    async def deployments(self, *_, **__):
        for number in range(self.workers):
            yield number

    async def deployment(self, name, **_):
        async def delete():
            self.deleted.append(str(name))

        return SimpleNamespace(delete=delete)

    def replace_in(self, monkeypatch):
        """Have the operator ask here."""
        api = SimpleNamespace(asyncio=SimpleNamespace(get=self.deployments), NotFoundError=KeyError)
        monkeypatch.setattr(controller, "kr8s", api)
        monkeypatch.setattr(controller, "get_scheduler_address", self.address)
        monkeypatch.setattr(controller, "DaskWorkerGroup", self.worker_group)
        monkeypatch.setattr(controller, "Deployment", self.deployment)

    def scale(self, number):
        """Change the number of replicas, which the operator sees."""
        change = controller.daskworkergroup_replica_update(
            name="group",
            namespace="default",
            meta=SimpleNamespace(labels={}, annotations={}),
            spec={"cluster": "cluster", "worker": {}},
            new=number,
            body={},
            logger=logging.getLogger("operator"),
        )
        asyncio.run(change)


def test_it_asks_for_what_jobs_want_and_scales_down_as_planned(monkeypatch, tmp_path):
    routes = dask.config.set({"distributed.scheduler.http.routes": ROUTES})
    with routes, a_crew(n_workers=2) as crew:
        port = crew.client.scheduler_info()["services"]["dashboard"]
        kubernetes = Kubernetes(f"http://127.0.0.1:{port}", workers=2)
        kubernetes.replace_in(monkeypatch)
        with a_job_that_loses_nothing(crew, tmp_path, [2, 1], max_np=5) as job:
            assert asyncio.run(controller.get_desired_workers("cluster", "default")) == 5
            names = {rank.name for rank in job.status.ranks}
            kubernetes.scale(1)
            shrinks(job, 1)
            left = names - {rank.name for rank in job.status.ranks}
        assert set(kubernetes.deleted) == left
