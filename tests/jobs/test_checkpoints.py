"""Checkpoints of real jobs: what a job that goes on from one comes to, to the last bit."""

import re
from dataclasses import replace
from pathlib import Path

import pytest

from nbelastic.errors import JobStopped
from tests.support.clusters import kinds, until
from tests.support.training import Fault, Workload, check

SAME = ("weights", "moments", "losses", "steps")


def a_workload(directory, **changes):
    directory.mkdir()
    return Workload(directory, epochs=8, seconds=0.03, seed=11, **changes)


@pytest.fixture(scope="module")
def undisturbed(_four_workers, tmp_path_factory):
    """What two ranks come to that nobody disturbs."""
    work = a_workload(tmp_path_factory.mktemp("undisturbed") / "marks")
    return _four_workers.fit(replace(work, seconds=0.0), np=2).results()[0]


def notes(job):
    return [event.detail for event in job.history if event.kind == "checkpoint"]


def files(directory):
    return sorted(path.name for path in Path(directory).rglob("*") if path.is_file())


def went_on_from(job):
    """Return the commit that a job went on from."""
    (found,) = [re.search(r"goes on from .*\(commit (\d+) of job", note) for note in notes(job)[:1]]
    assert found, notes(job)
    return int(found[1])


def interrupted(crew, work, place, *, end, **options):
    """Run a job up to some time after its 13th commit; return it."""
    slow = replace(work, seconds=0.2)  # so that it cannot finish before this process looks
    job = crew.fit(slow, np=2, checkpoint=place, checkpoint_every=4, block=False, **options)
    until(lambda: job.status.commits >= 13 or job.done(), "commits")
    end(job)
    with pytest.raises(JobStopped):
        job.results()
    return job


@pytest.mark.parametrize("order", ["cancel", "stop"])
def test_a_job_that_was_ended_resumes_and_comes_to_the_same(crew, tmp_path, undisturbed, order):
    place = tmp_path / "checkpoints"
    first = a_workload(tmp_path / "first")
    before = interrupted(crew, first, place, end=lambda job: getattr(job, order)())
    assert not [name for name in files(place) if name.endswith(".tmp")]
    second = a_workload(tmp_path / "second")
    job = crew.fit(second, np=2, checkpoint=place, checkpoint_every=4, resume=True)
    results = job.results()
    check(results, second)
    assert {key: results[0][key] for key in SAME} == {key: undisturbed[key] for key in SAME}
    if order == "stop":
        assert went_on_from(job) >= before.status.commits
    else:
        assert went_on_from(job) >= 8
        assert went_on_from(job) % 4 == 0
    assert len({path.name for path in place.iterdir()}) == 2


def test_all_ranks_killed_at_once_go_on_from_their_own_checkpoint(crew, tmp_path, undisturbed):
    faults = tuple(Fault(rank=rank, epoch=3, batch=1) for rank in range(2))
    work = a_workload(tmp_path / "marks", faults=faults)
    job = crew.fit(work, np=2, checkpoint=tmp_path / "here", checkpoint_every=4)
    results = job.results()
    check(results, work)
    assert "restarted" in kinds(job)
    assert any("goes on from" in note for note in notes(job)), notes(job)
    assert {key: results[0][key] for key in SAME} == {key: undisturbed[key] for key in SAME}


def test_a_job_that_has_finished_has_nothing_left_to_do_when_resumed(crew, tmp_path):
    place = tmp_path / "checkpoints"
    first = a_workload(tmp_path / "first")
    before = crew.fit(replace(first, seconds=0.0), np=2, checkpoint=place).results()[0]
    second = a_workload(tmp_path / "second")
    job = crew.fit(second, np=2, checkpoint=place, resume=True)
    check(job.results(), second)
    assert {key: job.result()[key] for key in SAME} == {key: before[key] for key in SAME}
    assert went_on_from(job) == job.status.commits == before["steps"]
    assert job.result()["times"] == []
    assert job.status.headlines == ()
