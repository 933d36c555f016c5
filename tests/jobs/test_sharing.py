"""Several jobs on one cluster: nobody is locked out, nothing is lost, and no two are both stuck."""

import contextlib
import time

import dask
import pytest

import nbelastic
from tests.support.clusters import kinds, until
from tests.support.training import step_by_step

SHARING = {"settle": "0.2 s", "protect": "0.5 s", "patience": "60 s"}


@pytest.fixture(autouse=True)
def _soon():
    with dask.config.set({"nbelastic.sharing": SHARING}):  # the scheduler is in this process
        yield


def train(goal):
    """Commit after each step until the goal is written, and return the steps of rank 0."""

    def over(state):
        time.sleep(0.01)
        state.steps = [*state.steps, state.step]
        return goal.exists() and state.step >= int(goal.read_text())

    return step_by_step(over, steps=[]).steps


@contextlib.contextmanager
def started(crew, folder, name, **options):
    goal = folder / name
    job = crew.fit(train, args=(goal,), name=name, block=False, **options)
    try:
        yield job
    finally:  # it ends in two seconds of steps: what the kernel knows may be a second old
        goal.with_suffix(".new").write_text(str(job.status.commits + 200))
        goal.with_suffix(".new").rename(goal)


def trains(job, size=None):
    """Return whether a job trains, with so many ranks; fail if it has ended."""
    status = job.status
    assert not job.done(), status
    return status.state == "running" and status.size == (size or status.size)


def kept_all(job):
    """Check that no rank was lost and nothing was redone."""
    steps = job.result(60)
    assert not {"lost", "restarted"}.intersection(kinds(job)), kinds(job)
    assert steps == list(range(len(steps)))
    redone = [event.figures.get("batches", 0) for event in job.history if event.kind == "phases"]
    assert not any(redone)


def test_a_job_without_max_np_gives_way_to_a_newcomer_and_grows_back(crew, tmp_path):
    with started(crew, tmp_path, "wide") as wide:
        until(lambda: trains(wide, 4), "all four")
        with started(crew, tmp_path, "late", min_np=2) as late:
            until(lambda: trains(late, 2) and trains(wide, 2), "two each")
            assert (wide.status.share, late.status.share) == (2, 2)
            assert wide.status.reason == "2 of 4 slots: shares with late"
            table = {info.name: info for info in nbelastic.jobs(crew.client)}
            assert (table["wide"].slots, table["late"].share) == (2, 2)
        late.result(60)
        until(lambda: trains(wide, 4), "all four again")
        assert wide.status.share is None
    kept_all(wide)
    shares = [event.detail for event in wide.history if event.kind == "share"]
    assert shares[0] == "all → 2: shares with late"
    assert shares[-1].endswith(" → all")  # perhaps by way of 4, while the other one ends


def test_a_preemptible_job_is_suspended_and_goes_on_by_itself(crew, tmp_path):
    with started(crew, tmp_path, "spare", min_np=3, preemptible=True) as spare:
        until(lambda: trains(spare, 4) and spare.status.commits > 20, "it has all")
        with started(crew, tmp_path, "urgent", np=2, priority=1) as urgent:
            until(lambda: trains(urgent, 2), "two for the other")
            until(lambda: spare.status.state == "waiting", "it waits")
            assert spare.status.reason == (
                "suspended: 1 of 4 slots for its state, while others go first: urgent"
            )
            commits = spare.status.commits
            assert commits
        kept_all(urgent)
        until(lambda: trains(spare, 4) and spare.status.commits > commits, "it goes on")
    kept_all(spare)
