"""Hooks in torch for code that was written for torch.distributed."""

from __future__ import annotations

import copy
import importlib
import pickle
import sys
import traceback
from unittest.mock import patch

import pytest
import torch

from nbelastic.cluster.worker.rank.torch_hooks import SYNC_WARNING, advise, hook_torch
from nbelastic.elastic.parameter_samples import sample
from nbelastic.elastic.ranks.context import Context, activate
from nbelastic.elastic.ranks.runtime import RankSpec
from nbelastic.elastic.ranks.session import Session
from nbelastic.elastic.training_checks import watch
from nbelastic.errors import NbelasticError
from nbelastic.messages import Place, RankNote, WeightsSampled


class Notes(list):
    report = list.append


@pytest.fixture(autouse=True)
def _hooked(monkeypatch):
    """Hook torch as in a rank's process, and undo it, since this one goes on."""
    distributed, kind = torch.distributed, torch.nn.SyncBatchNorm
    for module in (distributed, distributed.distributed_c10d):
        monkeypatch.setattr(module, "init_process_group", module.init_process_group)
    for name in ("__init__", "__setstate__"):
        monkeypatch.setattr(kind, name, getattr(kind, name))
    with patch.dict(sys.modules["torch.optim.optimizer"]._global_optimizer_post_hooks):
        hook_torch()
        yield


@pytest.fixture
def session():
    place = Place(0, 2, 0, 2, 0, 1)
    made = Session(RankSpec(job="job", start=3, place=place, bind="127.0.0.1"), Notes())
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
    session.parameters.returned()
    assert session.port == [WeightsSampled(3, 1, 0, sample(expected), ("SGD",))]


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
    session.parameters.returned()
    assert session.port == [WeightsSampled(3, 1, 0, sample([model]), ("Sharding",))]


def test_steps_of_ranks_that_never_met_are_not_sampled_and_what_was_broadcast_instead(session):
    optimizer = torch.optim.SGD(torch.nn.Linear(3, 2).parameters(), 0.1)
    outside = Context()
    with activate(outside):
        step(optimizer)
    assert outside.parameters is None
    step(optimizer)
    session.parameters.returned()
    assert session.port == []
    session.generation = 1
    watch(session, lambda: (1.0,))
    step(optimizer)
    session.parameters.returned()
    assert [each.values for each in session.port] == [(1.0,)]
    session.parameters.close()


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
    remarks = [each.about for each in session.port]
    assert remarks == ["remark", "remark"] * (name is not None)


def test_a_place_of_the_callers_own_is_refused(session):
    with pytest.raises(NbelasticError, match="this is rank 0 of 2"):
        torch.distributed.init_process_group("nbelastic", rank=1, world_size=7)
    assert not torch.distributed.is_initialized()


# -- SyncBatchNorm ---------------------------------------------------------------------------------


LAYER = torch.nn.SyncBatchNorm(4)
MADE = {
    "anew": lambda: torch.nn.SyncBatchNorm(4),
    "copied": lambda: copy.deepcopy(LAYER),
    "unpickled": lambda: pickle.loads(pickle.dumps(LAYER)),
    "without statistics": lambda: torch.nn.SyncBatchNorm(4, track_running_stats=False),
}


@pytest.mark.parametrize("make", MADE.values(), ids=MADE)
def test_a_synchronised_norm_without_a_group_is_warned_of_once_when_it_trains(session, make):
    layers = make().eval(), make().eval()
    for each in layers:
        each.load_state_dict(each.state_dict())
        if each.track_running_stats:
            each(torch.ones(2, 4))
    session.about_to_exchange()
    assert session.port == []
    for each in layers:
        each.train()(torch.ones(2, 4))
    assert session.port == []  # a group may still come
    session.about_to_exchange()
    session.about_to_exchange()
    assert session.port == [RankNote(3, about="warning", detail=SYNC_WARNING)]


def test_with_a_group_or_alone_or_outside_a_job_it_is_right(session):
    layers = [torch.nn.SyncBatchNorm(4)]
    layers[0](torch.ones(2, 4))
    torch.distributed.init_process_group("nbelastic")
    session.about_to_exchange()
    torch.distributed.destroy_process_group()
    session.size = 1
    layers.append(torch.nn.SyncBatchNorm(4))
    layers[1](torch.ones(2, 4))
    session.about_to_exchange()
    assert session.port == []
    context = Context()
    with activate(context):
        layers.append(torch.nn.SyncBatchNorm(4))
        layers[2](torch.ones(2, 4))
        context.about_to_exchange()


def test_a_missing_horovod_is_answered_with_its_name_here():
    with pytest.raises(ModuleNotFoundError) as caught:
        importlib.import_module("horovod.torch")
    advise(caught.value)
    assert "import nbelastic.torch as hvd" in "".join(traceback.format_exception(caught.value))
