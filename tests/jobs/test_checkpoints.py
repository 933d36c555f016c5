"""Checkpoints of real jobs whose ranks are all killed, or that have finished."""

import re
from dataclasses import replace

from tests.support.clusters import kinds
from tests.support.training import Fault, Workload, check

SAME = ("weights", "moments", "losses", "steps")


def a_workload(directory, **changes):
    directory.mkdir()
    return Workload(directory, epochs=8, seconds=0.0, seed=11, **changes)


def went_on_from(job):
    """Return the commit that a job went on from."""
    notes = [event.detail for event in job.history if event.kind == "checkpoint"]
    found = re.findall(r"goes on from .*\(commit (\d+) of job", "\n".join(notes))
    assert len(found) == 1, notes
    return int(found[0])


def test_all_ranks_killed_at_once_go_on_from_their_own_checkpoint(crew, tmp_path):
    expected = crew.fit(a_workload(tmp_path / "undisturbed"), np=2).result()
    faults = tuple(Fault(rank=rank, epoch=3, batch=1) for rank in range(2))
    work = replace(a_workload(tmp_path / "marks", faults=faults), seconds=0.03)
    job = crew.fit(work, np=2, checkpoint=tmp_path / "here", checkpoint_every=4)
    results = job.results()
    check(results, work)
    assert "restarted" in kinds(job)
    assert went_on_from(job) % 4 == 0
    assert {key: results[0][key] for key in SAME} == {key: expected[key] for key in SAME}


def test_a_job_that_has_finished_has_nothing_left_to_do_when_resumed(crew, tmp_path):
    place = tmp_path / "checkpoints"
    first = a_workload(tmp_path / "first")
    before = crew.fit(first, np=2, checkpoint=place).result()
    second = a_workload(tmp_path / "second")
    job = crew.fit(second, np=2, checkpoint=place, resume=True)
    check(job.results(), second)
    assert {key: job.result()[key] for key in SAME} == {key: before[key] for key in SAME}
    assert went_on_from(job) == job.status.commits == before["steps"]
    assert job.result()["times"] == []
    assert job.status.headlines == ()
