import functools
from collections import OrderedDict
from unittest import mock

import pytest
import torch

import nbelastic.torch as hvd
from nbelastic.torch.ops.operation import fusion
from tests.torch.nets import bits
from tests.torch.ranks import on_ranks
from tests.torch.training import assert_equal, loss_of, make_model, parameters_of


def changed_model(rank):
    model = make_model()
    model.append(torch.nn.BatchNorm1d(3).double())
    for parameter in model.parameters():
        parameter.data.add_(rank)
    model[-1].running_mean.add_(rank)
    model[-1].num_batches_tracked.add_(rank)
    return model


@mock.patch.object(fusion.plan, "__defaults__", (256,))  # many chunks
@pytest.mark.parametrize(
    "listed",
    [
        lambda model: model.state_dict(),
        lambda model: model.named_parameters(),
        lambda model: list(model.named_parameters()),
        lambda model: model.parameters(),
        lambda model: dict(list(model.named_parameters())[:: 1 - 2 * (hvd.rank() % 2)]),
    ],
    ids=["state", "named", "list", "tensors", "dict"],
)
@on_ranks(3)
def test_parameters_of_any_form_become_those_of_the_root(context, listed):
    model = changed_model(context.rank)
    addresses = [parameter.data_ptr() for parameter in model.parameters()]
    hvd.broadcast_parameters(listed(model), root_rank=2)
    assert addresses == [parameter.data_ptr() for parameter in model.parameters()]
    whole = isinstance(listed(model), OrderedDict)
    found = [*model.state_dict().values()] if whole else parameters_of(model)
    assert_equal(found, [*changed_model(2).state_dict().values()][: len(found)])


@on_ranks(2)
def test_many_parameters_take_few_broadcasts(context):
    before = context.communicator().completed
    hvd.broadcast_parameters(changed_model(context.rank).state_dict())
    assert context.communicator().completed == before + 3  # the comparison, float64 and int64


def test_what_is_no_parameter_is_refused(twin):
    with pytest.raises(ValueError, match=r"no tensors: epoch; leave them out"):
        hvd.broadcast_parameters({"weight": torch.ones(1), "epoch": 3})
    for wrong in (3, torch.ones(2)):
        with pytest.raises(ValueError, match="params must be"):
            hvd.broadcast_parameters(wrong)


OPTIMIZERS = {
    "sgd": functools.partial(torch.optim.SGD, momentum=0.9, weight_decay=0.1),
    "plain sgd": torch.optim.SGD,
    "adamw": functools.partial(torch.optim.AdamW, amsgrad=True),
    "tensor lr": lambda parameters, lr: torch.optim.Adam(parameters, torch.tensor(lr)),
    "lbfgs": torch.optim.LBFGS,
}


@pytest.mark.parametrize("make_optimizer", OPTIMIZERS.values(), ids=list(OPTIMIZERS))
@pytest.mark.parametrize("root_has_stepped", [False, True])
@on_ranks(2)
def test_optimizer_state_becomes_that_of_the_root(context, make_optimizer, root_has_stepped):
    model = make_model()
    optimizer = make_optimizer(model.parameters(), lr=0.1 * (1 + context.rank))
    for step in range(root_has_stepped * (1 + context.rank)):
        step_once(model, optimizer, step)
    before = parameters_of(model)
    hvd.broadcast_optimizer_state(optimizer, root_rank=1)
    assert_equal(before, parameters_of(model))
    assert all(float(group["lr"]) == pytest.approx(0.2) for group in optimizer.param_groups)
    hvd.broadcast_parameters(model.state_dict(), root_rank=1)
    step_once(model, optimizer, 5)
    return bits(model)


def step_once(model, optimizer, number):
    def closure():
        model.zero_grad()
        loss = loss_of(model, number)
        loss.backward()
        return loss

    optimizer.step(closure)


@on_ranks(2)
def test_a_new_optimizer_has_zeros_as_gradients(context):
    net = torch.nn.Sequential(torch.nn.Embedding(3, 2, sparse=True), torch.nn.Linear(2, 1))
    before = parameters_of(net)
    hvd.broadcast_optimizer_state(torch.optim.SGD(net.parameters()), root_rank=1, model=net)
    assert_equal(before, parameters_of(net))
    assert [parameter.grad.is_sparse for parameter in net.parameters()] == [True, False, False]
