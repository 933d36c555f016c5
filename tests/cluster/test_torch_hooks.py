"""Hooks in torch for code that was written for torch.distributed."""

from __future__ import annotations

import importlib
import sys
import traceback
from unittest.mock import patch

import pytest
import torch

from nbelastic.cluster.worker.rank.main import hook_torch
from nbelastic.cluster.worker.rank.program import advise
from nbelastic.elastic.ranks.context import activate
from nbelastic.elastic.ranks.runtime import RankSpec
from nbelastic.elastic.ranks.session import Session
from nbelastic.elastic.training_checks import TrainingChecks, sample
from nbelastic.errors import NbelasticError
from nbelastic.messages import Place, WeightsSampled


@pytest.fixture(autouse=True)
def _hooked(monkeypatch):
    """Hook torch as in a rank's process, and undo it, since this one goes on."""
    distributed = torch.distributed
    for module in (distributed, distributed.distributed_c10d):
        monkeypatch.setattr(module, "init_process_group", module.init_process_group)
    with patch.dict(sys.modules["torch.optim.optimizer"]._global_optimizer_post_hooks):
        hook_torch()
        yield


@pytest.fixture
def session():
    place = Place(0, 2, 0, 2, 0, 1)
    made = Session(RankSpec(job="job", start=3, place=place, bind="127.0.0.1"), [].append)
    made.told = made.report.__self__
    with activate(made):
        yield made
    made.close()


@pytest.mark.parametrize("world", [1, 2])
def test_a_group_of_torch_counts_by_its_size(session, monkeypatch, world):
    monkeypatch.setattr(torch.distributed.distributed_c10d, "get_world_size", lambda: world)
    torch.distributed.init_process_group(
        "gloo", store=torch.distributed.HashStore(), rank=0, world_size=1
    )
    torch.distributed.destroy_process_group()
    assert session.in_torch_group is (world == 2)


# -- optimizers ------------------------------------------------------------------------------------


def step(optimizer):
    optimizer.zero_grad()
    for group in optimizer.param_groups:
        for parameter in group["params"]:
            parameter.grad = torch.ones_like(parameter)
    optimizer.step()


def test_what_the_latest_optimizers_have_stepped_is_sampled_at_the_end(session):
    """Ranks that average their losses alone, and no gradients, train apart."""
    expected = []
    for size in range(1, 6):  # the function drops each
        model = torch.nn.Linear(3, size)
        optimizer = torch.optim.SGD(model.parameters(), 0.1)
        step(optimizer)
        step(optimizer)
        expected = [*expected[-2:], optimizer]
    session.generation = 1
    session.kept(TrainingChecks).returned()
    assert session.told == [WeightsSampled(3, 1, 0, sample(expected))]


def test_of_an_optimizer_that_steps_another_the_shard_within_is_not_compared(session):
    """Each rank's optimizer within a ZeroRedundancyOptimizer has other parameters."""

    class Sharding(torch.optim.SGD):
        def step(self):
            self.optim.step()

    model = torch.nn.Linear(3, 2)
    outer = Sharding(model.parameters(), 0.1)
    outer.optim = torch.optim.SGD([model.bias], 0.1)
    session.generation = 1
    step(outer)
    step(outer)
    session.kept(TrainingChecks).returned()
    assert session.told == [WeightsSampled(3, 1, 0, sample([model]))]


# -- init_process_group ----------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["cpu:gloo,cuda:nccl", None])
def test_back_ends_without_an_address_are_the_jobs_own(session, name):
    for init in (
        torch.distributed.init_process_group,
        torch.distributed.distributed_c10d.init_process_group,
    ):
        init(name)
        try:
            assert torch.distributed.get_backend() == "nbelastic"
            assert torch.distributed.get_world_size() == session.size
        finally:
            torch.distributed.destroy_process_group()
    remarks = [each.about for each in session.told]
    assert remarks == ["remark", "remark"] * (name is not None)


def test_a_place_of_the_callers_own_is_refused(session):
    with pytest.raises(NbelasticError, match="this is rank 0 of 2"):
        torch.distributed.init_process_group("nbelastic", rank=1, world_size=7)
    assert not torch.distributed.is_initialized()


def test_a_missing_horovod_is_answered_with_its_name_here():
    with pytest.raises(ModuleNotFoundError) as caught:
        importlib.import_module("horovod.torch")
    advise(caught.value)
    assert "import nbelastic.torch as hvd" in "".join(traceback.format_exception(caught.value))
