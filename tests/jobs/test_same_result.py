"""One digest: on one rank in this process, on any number of ranks, under faults, resumed."""

import functools

import pytest
import torch

import nbelastic
from nbelastic import chaos
from tests.support.clusters import sizes, until
from tests.support.same_result import SameResult, check_ledger, ledger_of

EPOCHS = 4
PATIENT = {"np": 4, "min_np": 1, "stall_timeout": 5, "heartbeat_timeout": 8, "block": False}


@functools.cache
def undisturbed(directory):
    """Train in this process, without a job, and return what came out."""
    threads = torch.get_num_threads()
    nbelastic.init()
    try:
        return SameResult(directory, EPOCHS)()
    finally:
        nbelastic.shutdown()
        torch.set_num_threads(threads)


@pytest.fixture(scope="module")
def alone(tmp_path_factory):
    directory = tmp_path_factory.mktemp("alone")
    result = undisturbed(directory)
    check_ledger(directory, EPOCHS)
    assert result["exact"] == ""
    return result, ledger_of(directory)


def check(results, work, alone):
    right, ledger = alone
    for result in results:
        assert result["digest"] == right["digest"]
        assert (result["steps"], result["rate"]) == (right["steps"], right["rate"])
        assert result["exact"] == ""
    assert ledger_of(work.marks) == ledger


@pytest.mark.parametrize(("backend", "processes"), [("gloo", 0), ("shm", 2)])
def test_ranks_that_die_join_and_leave_change_no_bit(crew, tmp_path, alone, backend, processes):
    work = SameResult(tmp_path, EPOCHS, seconds=0.03, loader_processes=processes, hold=2)
    job = crew.fit(work, backend=backend, **PATIENT)
    until(lambda: job.status.state == "running" or job.done(), "it runs")
    plan = chaos.inject(
        job,
        chaos.kill(rank=2, step=4),
        chaos.partition(rank=0, step=9),
        chaos.fail(rank=1, step=14),
    )
    (tmp_path / "go").touch()  # the faults are known to all ranks before they happen
    check(job.results(120), work, alone)
    assert plan.wait(10)
    assert len(set(sizes(job))) > 1


def test_a_slow_rank_computes_less_and_changes_no_bit(crew, tmp_path, alone):
    work = SameResult(tmp_path, EPOCHS, slow=1)
    job = crew.fit(work, np=4)
    check(job.results(), work, alone)
    assert [result["quotas"] for result in job.results()] == [[2, 3], [1, 2], [2], [2]]
    (event,) = (event for event in job.history if event.kind == "straggler")
    assert event.rank == 1
    assert event.figures == {"times": 3.0, "micro_batches": 1.0, "before": 2.0, "of": 8.0}
    assert event.detail.startswith("takes 3.0 times as long")


def test_a_job_that_resumes_at_another_size_ends_with_the_same_bits(crew, tmp_path, alone):
    work = SameResult(tmp_path, EPOCHS, seconds=0.05, hold=9)
    options = {"checkpoint": tmp_path / "checkpoints", "checkpoint_every": 3}
    first = crew.fit(work, np=4, block=False, **options)
    until(lambda: first.status.commits == 8 or first.done(), "commits")
    first.stop()
    until(lambda: "stop" in first.status.reason, "the order to stop")
    (tmp_path / "go").touch()
    first.wait(60)
    assert first.status.state == "stopped"
    second = crew.fit(work, np=3, resume=True, **options)
    check(second.results(), work, alone)
