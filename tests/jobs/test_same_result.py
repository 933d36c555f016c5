"""One digest: on one rank in this process, on any number of ranks, under faults, resumed."""

import pytest

from nbelastic import chaos
from tests.support.clusters import sizes, until
from tests.support.exact_training import LONG, SIZES, SameResult, train_alone

PATIENT = {"np": 4, "min_np": 1, "stall_timeout": 5, "heartbeat_timeout": 8, "block": False}


@pytest.fixture(scope="module")
def alone():
    return train_alone(LONG, **SIZES)


@pytest.mark.parametrize(("backend", "processes"), [("gloo", 0), ("shm", 2)])
def test_ranks_that_die_join_and_leave_change_no_bit(crew, tmp_path, alone, backend, processes):
    work = SameResult(tmp_path, seconds=0.03, processes=processes, hold=2)
    job = crew.fit(work, backend=backend, **PATIENT)
    until(lambda: job.status.state == "running" or job.done(), "it runs")
    plan = chaos.inject(
        job,
        chaos.kill(rank=2, step=4),
        chaos.partition(rank=0, step=9),
        chaos.fail(rank=1, step=14),
    )
    (tmp_path / "go").touch()  # the faults are known to all ranks before they happen
    work.check(job.results(120), alone)
    assert plan.wait(10)
    assert len(set(sizes(job))) > 1


def test_a_slow_rank_computes_less_and_changes_no_bit(crew, tmp_path, alone):
    work = SameResult(tmp_path, slow=1)
    job = crew.fit(work, np=4)
    work.check(job.results(), alone)
    assert [quotas for *_, quotas in job.results()] == [[2, 3], [1, 2], [2], [2]]


def test_a_job_that_resumes_at_another_size_ends_with_the_same_bits(crew, tmp_path, alone):
    work = SameResult(tmp_path, seconds=0.05, hold=9)
    options = {"checkpoint": tmp_path / "checkpoints", "checkpoint_every": 3}
    first = crew.fit(work, np=4, block=False, **options)
    until(lambda: first.status.commits == 8 or first.done(), "commits")
    first.stop()
    until(lambda: "stop" in first.status.reason, "the order to stop")
    (tmp_path / "go").touch()
    first.wait(60)
    assert first.status.state == "stopped"
    second = crew.fit(work, np=3, resume=True, **options)
    work.check(second.results(), alone)
