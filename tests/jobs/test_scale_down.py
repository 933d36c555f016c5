"""Ranks leave as planned by any scale-down, signal or notice: nothing is rolled back."""

import json
import urllib.request

import dask

from nbelastic.collectives.topology import HOST_VARIABLE
from tests.support.clusters import a_crew, a_worker, kinds, sizes, until
from tests.support.metadata import aws_notice, metadata
from tests.support.training import Workload, check, check_nothing_redone

ROUTES = ["distributed.http.scheduler.api", "distributed.http.health"]


def post(crew, path, **body):
    address = crew.client.scheduler_info()["services"]["dashboard"]
    url = f"http://127.0.0.1:{address}/api/v1/{path}"
    data = json.dumps(body).encode() if body else None
    with urllib.request.urlopen(urllib.request.Request(url, data), timeout=60) as answer:
        return json.load(answer)


def test_N4_N9_ranks_leave_as_planned_and_the_target_has_what_jobs_want(tmp_path):
    """By address, and by number, as the operator of Kubernetes does it."""
    routes = dask.config.set({"distributed.scheduler.http.routes": ROUTES})
    with routes, a_crew(n_workers=3) as crew:
        work = Workload(tmp_path, epochs=1000, until_told=True)
        job = crew.fit(work, np=3, min_np=1, max_np=4, block=False)
        until(lambda: job.status.commits > 5 or job.done(), "commits")
        assert post(crew, "adaptive_target")["workers"] == 4
        first = next(rank.worker for rank in job.status.ranks if rank.rank == 1)
        for which, left in (({"workers": [first]}, 2), ({"n": 1}, 1)):
            post(crew, "retire_workers", **which)
            until(lambda left=left: sizes(job)[-1:] == [left] or job.done(), f"{left} ranks")
        (tmp_path / "enough").touch()
        results = job.results(120)
        check(results, work)
        assert sizes(job) == [3, 2, 1]
        assert kinds(job).count("left") == 2
        assert len(list(tmp_path.glob("cleaned-*"))) == 3  # the finally of all that left ran, too
        assert [result["resets"] for result in results] == [[2, 1]]
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
