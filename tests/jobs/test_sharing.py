"""Several jobs on one cluster: nobody is locked out, nothing is lost, and no two are both stuck."""

from __future__ import annotations

import contextlib
import threading

import dask
import pytest
from distributed import Client

import nbelastic
from nbelastic.errors import NotEnoughWorkers, OptionError
from tests.support.clusters import Crew, a_crew, kinds, until

SHARING = {"settle": "0.2 s", "protect": "0.5 s", "patience": "60 s"}


@pytest.fixture(scope="module")
def shared():
    with (
        dask.config.set({"nbelastic.sharing": SHARING}),
        a_crew(n_workers=6) as crew,
    ):
        yield crew


@pytest.fixture
def cluster(shared):
    """The cluster, with no job on it before and after."""
    shared.wait_until_whole(6)
    yield shared
    shared.end_jobs()


def train(goal):
    """Commit after each step until the goal is written, and return the steps of rank 0."""
    import time
    from pathlib import Path

    from nbelastic.elastic import ObjectState, run

    def over(step):
        return Path(goal).exists() and step >= int(Path(goal).read_text())

    @run
    def loop(state):
        while not over(state.step):
            time.sleep(0.01)
            state.steps.append(state.step)
            state.step += 1
            state.commit()
        return state.steps

    return loop(ObjectState(step=0, steps=[]))


@contextlib.contextmanager
def started(crew, folder, name, **options):
    goal = folder / name
    job = crew.fit(train, args=(str(goal),), name=name, block=False, **options)
    try:
        yield job
    finally:
        finish(job, goal)


def finish(job, goal):
    """Have a job end some steps from now: its ranks read that in time."""
    goal.with_suffix(".new").write_text(str(job.status.commits + 100))
    goal.with_suffix(".new").rename(goal)


def trains(job, size=None):
    """Return whether a job trains, with so many ranks; fail if it has ended."""
    status = job.status
    assert not job.done(), status
    return status.state == "running" and status.size == (size or status.size)


def held(crew):
    return {each.name: each.slots for each in nbelastic.jobs(crew.client) if each.ended is None}


def kept_all(job):
    """Check that no rank was lost and nothing was redone."""
    steps = job.result(60)
    assert not {"lost", "restarted"}.intersection(kinds(job)), kinds(job)
    assert steps == list(range(len(steps)))
    redone = [event.figures.get("batches", 0) for event in job.history if event.kind == "phases"]
    assert not any(redone)


def test_a_job_without_max_np_gives_way_to_a_newcomer_and_grows_back(cluster, tmp_path):
    with started(cluster, tmp_path, "wide") as wide:
        until(lambda: trains(wide, 6), "all six")
        with started(cluster, tmp_path, "late", min_np=2) as late:
            until(lambda: trains(late, 3) and trains(wide, 3), "three each")
            assert (wide.status.share, late.status.share) == (3, 3)
            assert wide.status.reason == "3 of 6 slots: shares with late"
            table = {info.name: info for info in nbelastic.jobs(cluster.client)}
            assert (table["wide"].slots, table["late"].share) == (3, 3)
        late.result(60)
        until(lambda: trains(wide, 6), "all six again")
        assert wide.status.share is None
    kept_all(wide)
    shares = [event.detail for event in wide.history if event.kind == "share"]
    assert shares[0] == "all → 3: shares with late"
    assert shares[-1].endswith(" → all")  # perhaps by way of 6, while the other one ends


def test_of_two_that_need_most_of_four_workers_one_runs_first(cluster, tmp_path):
    """Submit two jobs at the same instant; check that one runs after the other."""
    four = sorted(cluster.workers())[:4]
    jobs = {}
    together = threading.Barrier(2)

    def submit(name):
        together.wait()
        jobs[name] = cluster.fit(
            train,
            args=(str(tmp_path / name),),
            name=name,
            min_np=3,
            workers=four,
            elastic_timeout=600,
            block=False,
        )

    threads = [threading.Thread(target=submit, args=(name,)) for name in ("one", "two")]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    until(lambda: any(trains(job, 4) for job in jobs.values()), "one trains")
    (first,) = [name for name, job in jobs.items() if trains(job)]
    (second,) = jobs.keys() - {first}
    assert held(cluster) == {first: 4, second: 0}, "a job that waits holds nothing"
    assert jobs[second].status.share == 0
    finish(jobs[first], tmp_path / first)
    kept_all(jobs[first])
    until(lambda: trains(jobs[second], 4), "the other trains")
    finish(jobs[second], tmp_path / second)
    kept_all(jobs[second])


def test_priorities_come_first_and_floors_stay(cluster, tmp_path):
    with (
        started(cluster, tmp_path, "low", min_np=1) as low,
        started(cluster, tmp_path, "middle", min_np=1, priority=3) as middle,
    ):
        until(lambda: trains(low, 1) and trains(middle, 5), "all but a floor")
        with started(cluster, tmp_path, "high", min_np=2, priority=5) as high:
            until(lambda: trains(high, 4) and trains(middle, 1) and trains(low, 1), "floors")
            low.scale(priority=9)
            until(lambda: trains(low, 3) and trains(high, 2) and trains(middle, 1), "as scaled")
        kept_all(high)
    kept_all(low)
    kept_all(middle)


def test_a_preemptible_job_is_suspended_and_goes_on_by_itself(cluster, tmp_path):
    saved = {"checkpoint": str(tmp_path / "saved"), "checkpoint_every": 10**6}
    options = {"min_np": 4, "preemptible": True, **saved}
    with started(cluster, tmp_path, "spare", **options) as spare:
        until(lambda: trains(spare, 6) and spare.status.commits > 20, "it has all")
        with started(cluster, tmp_path, "urgent", np=3, priority=1) as urgent:
            until(lambda: trains(urgent, 3), "three for the other")
            until(lambda: spare.status.state == "waiting", "it waits")
            assert spare.status.reason == (
                "suspended: 1 of 6 slots for its state, while others go first: urgent"
            )
            commits = spare.status.commits
            assert commits
            saves = tmp_path / "saved"
            until(lambda: [*saves.rglob("*.safetensors")], "its last commit is on disk")
        kept_all(urgent)
        until(lambda: trains(spare, 6) and spare.status.commits > commits, "it goes on")
    kept_all(spare)


def test_a_job_without_a_kernel_gives_way_too(cluster, tmp_path):
    with Client(cluster.cluster, set_as_default=False) as client:
        crew = Crew(cluster.cluster, client)
        with started(crew, tmp_path, "orphan") as orphan:
            until(lambda: trains(orphan, 6), "all six")
            client.close()
    goal = tmp_path / "orphan"
    goal.unlink()
    until(lambda: not nbelastic.jobs(cluster.client)[0].attached, "its kernel is gone")
    with started(cluster, tmp_path, "late", min_np=3) as late:
        until(lambda: trains(late, 3), "three for the other")
        assert held(cluster) == {"orphan": 3, "late": 3}
    kept_all(late)
    found = nbelastic.attach("orphan", cluster=cluster.client)
    until(lambda: trains(found, 6), "with a kernel it grows again")
    finish(found, goal)
    kept_all(found)


def test_a_kernel_that_dies_while_its_job_waits_locks_no_other_out(cluster, tmp_path):
    with started(cluster, tmp_path, "first", np=4) as first:
        until(lambda: trains(first, 4), "it trains")
        with Client(cluster.cluster, set_as_default=False) as client:
            crew = Crew(cluster.cluster, client)
            waiting = crew.fit(train, args=("nowhere",), name="waiting", np=4, block=False)
            until(lambda: waiting.status.share == 0, "it waits")
        with started(cluster, tmp_path, "last", np=4) as last:
            finish(first, tmp_path / "first")
            kept_all(first)
            until(lambda: trains(last, 4), "the last trains")
        kept_all(last)


def test_suspended_jobs_that_lack_workers_run_one_after_the_other(tmp_path):
    """Each keeps a slot that the other needs: the younger one writes its state, and yields."""
    options = {"np": 2, "preemptible": True}
    with (
        dask.config.set({"nbelastic.sharing": {**SHARING, "patience": "0.5 s"}}),
        a_crew(n_workers=4) as crew,
        started(crew, tmp_path, "old", **options) as old,
    ):
        until(lambda: trains(old, 2), "it trains")
        saved = {"checkpoint": str(tmp_path / "saved"), "checkpoint_every": 10**6}
        with started(crew, tmp_path, "young", **options, **saved) as young:
            until(lambda: trains(young, 2) and young.status.commits > 20, "both train")
            leaving = [job.status.ranks[1].worker for job in (old, young)]
            crew.client.retire_workers(leaving)
            until(lambda: trains(old, 2), "the older has two again")
            assert held(crew)["young"] == 0
            assert young.status.state == "waiting"
            assert young.status.reason == (
                "suspended: its state is in its checkpoint, while others go first: old"
            )
            commits = old.status.commits
            until(lambda: old.status.commits > commits, "it goes on")
            finish(old, tmp_path / "old")
            kept_all(old)
            until(lambda: trains(young, 2), "the younger goes on")
        steps = young.result(60)
        assert steps == list(range(len(steps))), "from its last commit"
        assert "lost" not in kinds(young)
        assert kinds(young).count("restarted") == 1


def test_first_come_first_served_is_as_before(cluster, tmp_path):
    with (
        dask.config.set({"nbelastic.sharing": {"policy": "first"}}),
        started(cluster, tmp_path, "wide") as wide,
    ):
        until(lambda: trains(wide, 6), "all six")
        late = cluster.fit(train, args=("nowhere",), min_np=1, elastic_timeout=1.0, block=False)
        assert isinstance(late.exception(60), NotEnoughWorkers)
        assert wide.status.share is None
    kept_all(wide)


def test_rules_that_are_not_possible_are_refused(cluster):
    for setting, message in (
        ({"policy": "fairest"}, r"nbelastic\.sharing\.policy='fairest': must be 'fair' or"),
        ({"settle": "soon"}, r"nbelastic\.sharing\.settle='soon': must be a duration"),
    ):
        refused = pytest.raises(OptionError, match=message)
        with dask.config.set({"nbelastic.sharing": setting}), refused:
            cluster.fit(train, args=("nowhere",))


def test_three_jobs_share_what_an_adaptive_cluster_has_at_most(tmp_path):
    names = ("one", "two", "three")
    with (
        dask.config.set({"nbelastic.sharing": SHARING}),
        a_crew(n_workers=0) as crew,
        contextlib.ExitStack() as stack,
    ):
        crew.cluster.adapt(minimum=0, maximum=6, interval="100 ms", wait_count=10)
        jobs = [
            stack.enter_context(started(crew, tmp_path, name, min_np=1, max_np=4)) for name in names
        ]
        until(lambda: all(trains(job, 2) for job in jobs), "two of six workers each", 120)
        for job, name in zip(jobs, names, strict=True):
            finish(job, tmp_path / name)
            kept_all(job)
