"""A job whose ranks train apart says so: in its status, its history, and where it is shown."""

from __future__ import annotations

import pytest

import nbelastic
from nbelastic.errors import RankFailed
from nbelastic.render import JobSnapshot, text
from tests.support.clusters import kinds


def trains_alone():
    import sys
    import types

    sys.modules.setdefault("transformers", types.ModuleType("transformers")).Trainer = object
    return nbelastic.rank()


def test_ranks_that_never_met_are_warned_of_in_result_history_and_panel(crew):
    try:
        job = crew.fit(trains_alone, np=2)
    finally:
        crew.client.run(lambda: __import__("sys").modules.pop("transformers", None) and None)
    (warning,) = job.status.warnings
    assert "Trainer (transformers)" in warning
    assert kinds(job)[-2:] == ["warning", "finished"]
    headline = "ranks never met: 2 separate trainings"
    assert job.status.headlines == (headline,)
    assert headline in repr(job)
    assert headline in text(JobSnapshot.of(job))


def test_ranks_that_used_an_operation_are_not(crew):
    def meet():
        import nbelastic.torch as hvd

        hvd.barrier()

    assert crew.fit(meet, np=2).status.warnings == ()


def test_a_synchronised_norm_is_warned_of_while_the_job_runs(crew):
    def train():
        import torch

        import nbelastic.torch as hvd

        layer = torch.nn.SyncBatchNorm(3)
        layer(torch.ones(2, 3))
        hvd.barrier()

    job = crew.fit(train, np=2)
    assert ["SyncBatchNorm" in each for each in job.status.headlines] == [True]


@pytest.mark.parametrize("how", ["ddp", "all_reduce"])
def test_process_groups_that_are_not_there_come_with_advice(crew, how):
    def train():
        import torch
        import torch.distributed

        if how == "ddp":
            torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(2, 2))
        else:
            torch.distributed.all_reduce(torch.ones(1))

    with pytest.raises(RankFailed, match=r'init_process_group\("nbelastic"\)') as caught:
        crew.fit(train, np=2)
    assert str(caught.value).count("first: in a rank it needs neither") == 1


def test_a_group_that_no_rank_has_used_is_warned_of(crew):
    def train():
        import torch.distributed

        torch.distributed.init_process_group("gloo")

    job = crew.fit(train, np=2)
    assert job.status.headlines == ("ranks never met: 2 separate trainings",)
