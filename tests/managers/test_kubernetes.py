"""The code of Dask's Kubernetes operator that scales workers, without Kubernetes."""

from __future__ import annotations

import asyncio
import logging
from types import SimpleNamespace

import dask
import pytest

from tests.support.clusters import a_crew

from .planned import a_job_that_loses_nothing, shrinks

controller = pytest.importorskip("dask_kubernetes.operator.controller.controller")

pytestmark = pytest.mark.slow

ROUTES = ["distributed.http.scheduler.api", "distributed.http.health"]


class Deployment:
    """A deployment of one worker; the deleted ones are listed."""

    deleted: list[object] = []  # noqa: RUF012

    def __init__(self, name, namespace):
        self.name = name

    def __await__(self):
        yield from ()
        return self

    async def delete(self):
        self.deleted.append(self.name)


class WorkerGroup:
    def __init__(self, body, namespace):
        pass

    def __await__(self):
        yield from ()
        return self

    async def cluster(self):
        return SimpleNamespace(labels={})


@pytest.fixture
def scale(monkeypatch):
    """Let the operator see a cluster; return what it does when a group is scaled to a number."""

    async def address(*_, **__):
        return f"http://127.0.0.1:{scale_to.port}"

    async def get(*_, **__):
        for number in range(scale_to.workers):
            yield number

    monkeypatch.setattr(controller, "get_scheduler_address", address)
    api = SimpleNamespace(asyncio=SimpleNamespace(get=get), NotFoundError=KeyError)
    monkeypatch.setattr(controller, "kr8s", api)
    monkeypatch.setattr(controller, "DaskWorkerGroup", WorkerGroup)
    monkeypatch.setattr(controller, "Deployment", Deployment)
    monkeypatch.setattr(Deployment, "deleted", [])

    def scale_to(number):
        asyncio.run(
            controller.daskworkergroup_replica_update(
                name="group",
                namespace="default",
                meta=SimpleNamespace(labels={}, annotations={}),
                spec={"cluster": "cluster", "worker": {}},
                new=number,
                body={},
                logger=logging.getLogger("operator"),
            )
        )

    return scale_to


def test_the_operator_asks_for_what_jobs_want_and_scales_down_as_planned(scale, tmp_path):
    routes = dask.config.set({"distributed.scheduler.http.routes": ROUTES})
    with routes, a_crew(n_workers=3) as crew:
        scale.port = crew.client.scheduler_info()["services"]["dashboard"]
        scale.workers = 3
        with a_job_that_loses_nothing(crew, tmp_path, [3, 2], max_np=5) as job:
            assert asyncio.run(controller.get_desired_workers("cluster", "default")) == 5
            names = {rank.name for rank in job.status.ranks}
            scale(2)
            shrinks(job, 2)
            left = names - {rank.name for rank in job.status.ranks}
        assert {str(name) for name in Deployment.deleted} == left
