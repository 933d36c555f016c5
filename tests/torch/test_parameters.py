"""Which parameters take part in a step: not used, shared, frozen, added, sparse."""

import pytest
import torch

import nbelastic.torch as hvd
from nbelastic.elastic.ranks.context import activate
from nbelastic.errors import RanksDisagree
from tests.support.world import run_ranks
from tests.torch.fakes import ChangingContext, TwinCommunicator
from tests.torch.modes import set_mode
from tests.torch.training import (
    SGD,
    loss_of,
    make_model,
)


@pytest.fixture(autouse=True)
def small_buckets(monkeypatch, mode):
    set_mode(monkeypatch, mode, 16, 64)


def make_experts():
    return torch.nn.ModuleList(torch.nn.Linear(3, 1) for _ in range(4))


def test_frozen_parameters_are_not_sent(twin):
    communicator = twin.communicator()
    model = make_model()
    model[2].requires_grad_(False)
    optimizer = hvd.DistributedOptimizer(SGD(model.parameters()))
    loss_of(model, 0).backward()
    optimizer.step()
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    values = sum(parameter.numel() for parameter in trained)
    assert sum(lent.numel() for lent in communicator.lent) == values + len(trained) + 1
    assert model[2].weight.grad is None


def test_unfreezing_in_the_middle_of_a_step_is_refused(twin):
    model = make_model()
    model[0].requires_grad_(False)
    optimizer = hvd.DistributedOptimizer(
        SGD(model.parameters()), model.named_parameters(), backward_passes_per_step=2
    )
    loss_of(model, 0).backward()
    model[0].requires_grad_(True)
    loss_of(model, 0).backward()
    with pytest.raises(RuntimeError, match=r"'0.weight' was added or unfrozen"):
        optimizer.step()


@pytest.mark.parametrize("what", ["parameters", "the generation"])
def test_after_a_change_ranks_compare_and_share_an_order_again(what):
    context = ChangingContext(TwinCommunicator(generation=1))
    model = make_model()
    exchanges = []
    with activate(context):
        optimizer = hvd.DistributedOptimizer(SGD(model.parameters()))
        for step in range(6):
            if step == 3 and what == "parameters":
                model[2].requires_grad_(False)
            elif step == 3:
                context.enter(TwinCommunicator(generation=2))
            loss_of(model, step).backward()
            optimizer.step()
            frozen = step >= 3 and what == "parameters"
            assert len(optimizer._reducer._hooks) == (4 if frozen else 6)
            optimizer.zero_grad()
            exchanges.append(context.communicator().events.count("broadcast"))
            context.communicator().events.clear()
    assert exchanges == [1, 0, 0, 1, 0, 0]


@pytest.mark.parametrize(
    ("make", "op", "message"),
    [
        (make_experts, hvd.Average, "rank 0: it trains 6 tensors; rank 1: it trains 8 tensors"),
        (make_model, hvd.Sum, "rank 0: op=average, .*; rank 1: op=sum, "),
    ],
    ids=["model", "options"],
)
def test_ranks_with_another_optimizer_find_out(make, op, message):
    def rank_main(context):
        model = make() if context.rank else make_model()
        optimizer = hvd.DistributedOptimizer(
            SGD(model.parameters()), op=op if context.rank else hvd.Average
        )
        with pytest.raises(RanksDisagree, match=f"the same model and options.*: {message}"):
            optimizer.step()

    run_ranks(2, rank_main)
