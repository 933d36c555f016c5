"""Which parameters take part in a step: not used, shared, frozen, added, sparse."""

from __future__ import annotations

import contextlib

import pytest
import torch

import nbelastic.torch as hvd
from nbelastic.elastic.ranks.context import activate
from nbelastic.errors import CollectiveError
from tests.support.world import run_ranks
from tests.torch.fakes import ChangingContext, TwinCommunicator
from tests.torch.modes import set_mode
from tests.torch.training import (
    SGD,
    assert_close,
    assert_equal,
    loss_of,
    make_model,
    parameters_of,
)


@pytest.fixture(autouse=True)
def small_buckets(monkeypatch, mode):
    set_mode(monkeypatch, mode, 16, 64)


def make_experts(count=4):
    """Layers of which each input uses some."""
    generator = torch.Generator().manual_seed(1)
    experts = torch.nn.ModuleList(torch.nn.Linear(3, 1) for _ in range(count)).double()
    for parameter in experts.parameters():
        torch.nn.init.uniform_(parameter, generator=generator)
    return experts


def test_parameters_without_gradient_count_as_zero_where_others_have_one():
    inputs = torch.arange(6, dtype=torch.float64).reshape(2, 3)

    def rank_main(context):
        experts = make_experts()
        optimizer = hvd.DistributedOptimizer(SGD(experts.parameters()))
        for step in range(4):
            optimizer.zero_grad()
            used = experts[(step + context.rank) % 3]  # the fourth is never used
            used(inputs[context.rank]).sum().backward()
            optimizer.step()
            assert experts[3].weight.grad is None
            assert experts[(step + 1 - context.rank) % 3].weight.grad is not None
        return parameters_of(experts)

    results = run_ranks(2, rank_main)
    assert_equal(*results)

    alone = make_experts()
    optimizer = SGD(alone.parameters())
    for step in range(4):
        optimizer.zero_grad()
        sum(alone[(step + rank) % 3](inputs[rank]).sum() / 2 for rank in range(2)).backward()
        optimizer.step()
    assert_close(results[0], parameters_of(alone))
    assert_equal(parameters_of(alone)[6:], parameters_of(make_experts())[6:])  # no weight decay


def test_a_rank_without_data_steps_with_the_others():
    def rank_main(context):
        model = make_model()
        optimizer = hvd.DistributedOptimizer(SGD(model.parameters()), op=hvd.Sum)
        for step in range(3):
            model.zero_grad()
            if context.rank == step % 2:
                loss_of(model, step).backward()
            optimizer.step()
        return parameters_of(model)

    results = run_ranks(2, rank_main)
    assert_equal(*results)
    alone = make_model()
    optimizer = SGD(alone.parameters())
    for step in range(3):
        optimizer.zero_grad()
        loss_of(alone, step).backward()
        optimizer.step()
    assert_close(results[0], parameters_of(alone))


def test_shared_parameters_are_reduced_once():
    def tie(model):
        model[0] = torch.nn.Linear(6, 6).double()
        model[2] = torch.nn.Linear(6, 6).double()
        model[4] = torch.nn.Linear(6, 3).double()
        generator = torch.Generator().manual_seed(1)
        for parameter in model.parameters():
            torch.nn.init.uniform_(parameter, generator=generator)
        model[2].weight = model[0].weight
        return model

    def train(rank, size):
        model = tie(make_model())
        optimizer = SGD(model.parameters())
        if size > 1:
            optimizer = hvd.DistributedOptimizer(optimizer, model.named_parameters())
        for step in range(3):
            optimizer.zero_grad()
            loss_of(model, step, rank, size).backward()
            optimizer.step()
        return parameters_of(model)

    results = run_ranks(2, lambda context: train(context.rank, context.size))
    assert_equal(*results)
    assert_close(results[0], train(0, 1))


def test_parameters_can_be_frozen_unfrozen_and_added_between_steps():
    def train(rank, size):
        model = make_model()
        extra = torch.nn.Linear(3, 1).double()
        torch.nn.init.ones_(extra.weight)
        torch.nn.init.ones_(extra.bias)
        model[0].requires_grad_(False)
        optimizer = SGD(model.parameters())
        if size > 1:
            optimizer = hvd.DistributedOptimizer(optimizer, model.named_parameters())
        for step in range(6):
            if step == 2:
                model[0].requires_grad_(True)
                model[4].requires_grad_(False)
            if step == 4:
                optimizer.add_param_group({"params": extra.parameters()})
            optimizer.zero_grad()
            loss = loss_of(model, step, rank, size)
            if step >= 4:
                loss = loss + extra(model(torch.full((1, 6), 0.1 + rank).double())).sum()
            loss.backward()
            optimizer.step()
        return [*parameters_of(model), *parameters_of(extra)]

    def train_alone():
        """As two ranks would: the average over both of what each adds to the loss."""
        model = make_model()
        extra = torch.nn.Linear(3, 1).double()
        torch.nn.init.ones_(extra.weight)
        torch.nn.init.ones_(extra.bias)
        optimizer = SGD(model.parameters())
        model[0].requires_grad_(False)
        for step in range(6):
            if step == 2:
                model[0].requires_grad_(True)
                model[4].requires_grad_(False)
            if step == 4:
                optimizer.add_param_group({"params": extra.parameters()})
            optimizer.zero_grad()
            loss = loss_of(model, step)
            if step >= 4:
                probes = torch.tensor([[0.1], [1.1]]).double().expand(2, 6)
                loss = loss + extra(model(probes)).mean()
            loss.backward()
            optimizer.step()
        return [*parameters_of(model), *parameters_of(extra)]

    results = run_ranks(2, lambda context: train(context.rank, context.size))
    assert_equal(*results)
    for got, want in zip(results[0], train_alone(), strict=True):
        torch.testing.assert_close(got, want, rtol=1e-6, atol=1e-7)  # 0.1 is rounded to float32


def test_frozen_parameters_are_not_sent():
    communicator = TwinCommunicator(generation=1)
    model = make_model()
    model[2].requires_grad_(False)
    with activate(ChangingContext(communicator)):
        optimizer = hvd.DistributedOptimizer(SGD(model.parameters()))
        loss_of(model, 0).backward()
        optimizer.step()
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    values = sum(parameter.numel() for parameter in trained)
    assert sum(lent.numel() for lent in communicator.lent) == values + len(trained) + 1
    assert model[2].weight.grad is None


def test_after_a_change_of_parameters_ranks_compare_and_observe_again():
    communicator = TwinCommunicator(generation=1)
    model = make_model()
    exchanges = []
    with activate(ChangingContext(communicator)):
        optimizer = hvd.DistributedOptimizer(SGD(model.parameters()))
        for step in range(6):
            model[2].requires_grad_(step < 3)
            loss_of(model, step).backward()
            optimizer.step()
            assert len(optimizer._reducer._hooks) == (6 if step < 3 else 4)
            optimizer.zero_grad()
            exchanges.append(communicator.events.count("broadcast"))
            communicator.events.clear()
    assert exchanges == [1, 1, 0, 1, 1, 0]


def test_parameters_that_nobody_used_come_last():
    communicator = TwinCommunicator(generation=1)
    experts = make_experts(3)
    with activate(ChangingContext(communicator)):
        optimizer = hvd.DistributedOptimizer(SGD(experts.parameters()))
        for _ in range(2):
            optimizer.zero_grad()
            experts[1](torch.ones(3).double()).sum().backward()
            optimizer.step()
        layout = optimizer._reducer._agreement.arrange(communicator, list(experts.parameters()))
    assert layout.manifest.order[2:] == [5, 4, 1, 0]
    assert sorted(layout.manifest.order[:2]) == [2, 3]


def test_unfreezing_in_the_middle_of_a_step_is_refused():
    model = make_model()
    model[0].requires_grad_(False)
    with activate(ChangingContext(TwinCommunicator(generation=1))):
        optimizer = hvd.DistributedOptimizer(
            SGD(model.parameters()), model.named_parameters(), backward_passes_per_step=2
        )
        loss_of(model, 0).backward()
        model[0].requires_grad_(True)
        loss_of(model, 0).backward()
        with pytest.raises(RuntimeError, match=r"'0.weight' was added or unfrozen"):
            optimizer.step()


def test_parameters_of_several_types_and_layouts():
    def rank_main(context):
        convolution = torch.nn.Conv2d(2, 2, 3).to(memory_format=torch.channels_last)
        half = torch.nn.Parameter(torch.ones(3, dtype=torch.bfloat16))
        single = torch.nn.Parameter(torch.tensor(1.0, dtype=torch.float64))
        optimizer = hvd.DistributedOptimizer(
            torch.optim.SGD([*convolution.parameters(), half, single], lr=0.0)
        )
        image = torch.full((1, 2, 4, 4), float(context.rank))
        image[0, 1] += 1
        image[..., 0] += 2
        image = image.to(memory_format=torch.channels_last)
        (convolution(image).square().sum() * 0 + convolution(image).sum()).backward()
        (half.sum() * context.rank + (single * 3 * context.rank).float()).sum().backward()
        local = convolution.weight.grad.clone()
        optimizer.step()
        assert convolution.weight.grad.is_contiguous(memory_format=torch.channels_last)
        assert torch.equal(half.grad, torch.full((3,), 0.5, dtype=torch.bfloat16))
        assert torch.equal(single.grad, torch.tensor(1.5, dtype=torch.float64))
        return local, convolution.weight.grad

    (first, reduced), (second, also) = run_ranks(2, rank_main)
    torch.testing.assert_close(reduced, (first + second) / 2)
    assert torch.equal(reduced, also)


def test_sparse_gradients_are_made_dense():
    def rank_main(context):
        table = torch.nn.Embedding(4, 2, sparse=True)
        torch.nn.init.ones_(table.weight)
        optimizer = hvd.DistributedOptimizer(
            torch.optim.SGD(table.parameters(), 1.0), sparse_as_dense=True, op=hvd.Sum
        )
        table(torch.tensor([context.rank, 3])).sum().backward()
        optimizer.step()
        assert table.weight[:, 0].tolist() == [0.0, 0.0, 1.0, -1.0]

    run_ranks(2, rank_main)


def test_ranks_with_other_models_find_out():
    def rank_main(context):
        model = make_model() if context.rank == 0 else make_experts()
        optimizer = hvd.DistributedOptimizer(SGD(model.parameters()))
        if context.rank == 0:
            with contextlib.suppress(CollectiveError):  # rank 1 may have left meanwhile
                optimizer._reducer._agreement.arrange(context.communicator(), [*model.parameters()])
            return
        with pytest.raises(ValueError, match=r"rank 1 is not that of rank 0: it trains 8 .*0 6"):
            optimizer.step()

    run_ranks(2, rank_main)


def test_ranks_with_other_options_find_out():
    def rank_main(context):
        model = make_model()
        op = hvd.Sum if context.rank else hvd.Average
        optimizer = hvd.DistributedOptimizer(SGD(model.parameters()), op=op)
        if context.rank == 0:
            with contextlib.suppress(CollectiveError):  # rank 1 may have left meanwhile
                optimizer._reducer._agreement.arrange(context.communicator(), [*model.parameters()])
            return
        with pytest.raises(ValueError, match="other names, shapes, types or options"):
            optimizer.step()

    run_ranks(2, rank_main)
