"""Ranks leave as planned by any scale-down, signal or notice: nothing is rolled back."""

import json
import signal
import urllib.request

import dask

from nbelastic.collectives.topology import HOST_VARIABLE
from tests.support.clusters import a_crew, a_worker, kinds, sizes, until
from tests.support.metadata import aws_notice, metadata
from tests.support.training import Workload, check, check_nothing_redone

ROUTES = ["distributed.http.scheduler.api", "distributed.http.health"]


class DaskGateway:
    """What Dask Gateway's preload does in the scheduler's process."""

    def __init__(self, scheduler):
        self.scheduler = scheduler

    async def scale_down(self, number):
        workers = self.scheduler.workers_to_close(n=number)
        options = {"remove": True, "close_workers": True}
        return await self.scheduler.retire_workers(workers=workers, **options)

    def target(self):
        return self.scheduler.adaptive_target(target_duration=5.0)


def post(crew, path, **body):
    address = crew.client.scheduler_info()["services"]["dashboard"]
    url = f"http://127.0.0.1:{address}/api/v1/{path}"
    data = json.dumps(body).encode() if body else None
    with urllib.request.urlopen(urllib.request.Request(url, data), timeout=60) as answer:
        return json.load(answer)


def by_http(crew, job):
    worker = next(rank.worker for rank in job.status.ranks if rank.rank == 1)
    return post(crew, "retire_workers", workers=[worker])


def by_number_over_http(crew, _):
    """As the operator of Kubernetes does it."""
    return post(crew, "retire_workers", n=1)


def by_gateway(crew, _):
    async def retire(dask_scheduler):
        await DaskGateway(dask_scheduler).scale_down(1)

    crew.client.run_on_scheduler(retire)


def target_by_http(crew):
    return post(crew, "adaptive_target")["workers"]


def target_by_gateway(crew):
    return crew.client.run_on_scheduler(lambda dask_scheduler: DaskGateway(dask_scheduler).target())


def test_N4_N9_ranks_leave_as_planned_and_the_target_has_what_jobs_want(tmp_path):
    routes = dask.config.set({"distributed.scheduler.http.routes": ROUTES})
    with routes, a_crew(n_workers=4) as crew:
        work = Workload(tmp_path, epochs=1000, until_told=True)
        job = crew.fit(work, np=4, min_np=1, max_np=5, block=False)
        until(lambda: job.status.commits > 5 or job.done(), "commits")
        assert (target_by_http(crew), target_by_gateway(crew)) == (5, 5)
        for retire, left in ((by_http, 3), (by_number_over_http, 2), (by_gateway, 1)):
            retire(crew, job)
            until(lambda left=left: sizes(job)[-1:] == [left] or job.done(), f"{left} ranks")
        (tmp_path / "enough").touch()
        results = job.results(120)
        check(results, work)
        assert sizes(job) == [4, 3, 2, 1]
        assert kinds(job).count("left") == 3
        assert len(list(tmp_path.glob("cleaned-*"))) == 4  # the finally of all that left ran, too
        assert [result["resets"] for result in results] == [[3, 2, 1]]
        assert "lost" not in kinds(job)
        check_nothing_redone(results)


def test_a_worker_without_a_nanny_leaves_as_planned_on_sigterm(tmp_path):
    with a_crew(n_workers=1) as crew, a_worker(crew.client, tmp_path, "--no-nanny") as process:
        work = Workload(tmp_path, epochs=1000, until_told=True)
        job = crew.fit(work, np=2, min_np=1, block=False)
        until(lambda: job.status.commits > 5 or job.done(), "commits")
        process.send_signal(signal.SIGTERM)
        until(lambda: process.poll() is not None, "it has ended")
        (tmp_path / "enough").touch()
        results = job.results(120)
    check(results, work)
    assert sizes(job) == [2, 1]
    assert "left" in kinds(job)
    assert "lost" not in kinds(job)
    check_nothing_redone(results)


def test_a_spot_machine_is_left_and_its_worker_ends(tmp_path):
    """A worker on a host of its own, with a metadata service of its own."""
    with metadata("aws") as service, a_crew(n_workers=1) as crew:
        variables = {"NBELASTIC_METADATA_URL": service.url, HOST_VARIABLE: "spot"}
        words = ["--no-nanny", "--name", "w3"]
        with a_worker(crew.client, tmp_path, *words, **variables) as process:
            work = Workload(tmp_path, epochs=1000, until_told=True)
            job = crew.fit(work, np=2, min_np=1, block=False)
            until(lambda: job.status.commits > 5 or job.done(), "commits")
            service.notice = aws_notice(120)
            until(lambda: process.poll() is not None or job.done(), "it has ended")
            (tmp_path / "enough").touch()
            results = job.results(120)
        check(results, work)
        assert sizes(job) == [2, 1]
        assert "lost" not in kinds(job)
        (notice,) = (event for event in job.history if event.kind == "notice")
        assert notice.detail.startswith("worker w3 leaves in ")
        assert notice.detail.endswith(": AWS spot (terminate)")
        check_nothing_redone(results)
        assert not any("token" in path for path, _ in service.asked[1:]), "once"
