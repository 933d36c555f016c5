"""Types of gradients, in memory and on the wire."""

from __future__ import annotations

import pytest
import torch

import nbelastic.torch as hvd
from nbelastic.elastic.ranks.context import activate
from tests.support.world import run_ranks
from tests.torch.fakes import ChangingContext, LendingCommunicator
from tests.torch.training import SGD, assert_equal, loss_of, make_model


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16, torch.complex128])
def test_all_types_of_parameters_train_with_others(dtype):
    def rank_main(context):
        weight = torch.nn.Parameter(torch.ones(3, 2, dtype=dtype))
        scale = torch.nn.Parameter(torch.ones((), dtype=dtype))
        optimizer = hvd.DistributedOptimizer(torch.optim.SGD([weight, scale], 0.25))
        for _ in range(3):
            optimizer.zero_grad()
            inputs = torch.tensor([1.0, 1.0 + context.rank * 2], dtype=dtype)
            out = (weight @ inputs).sum()
            (out.real if dtype.is_complex else out).backward()
            optimizer.step()
            assert weight.grad.tolist() == [[1.0, 2.0]] * 3
            assert scale.grad is None
        return weight.detach()

    assert_equal(*[[result] for result in run_ranks(2, rank_main)])


def test_bf16_halves_the_bytes_and_keeps_the_range():
    def rank_main(context):
        weight = torch.nn.Parameter(torch.zeros(3))
        optimizer = hvd.DistributedOptimizer(
            torch.optim.SGD([weight], 1.0), compression=hvd.Compression.bf16
        )
        (weight * torch.tensor([1.0, 1e30, 1e-30])).sum().backward()
        optimizer.step()
        return weight.detach()

    for result in run_ranks(2, rank_main):
        torch.testing.assert_close(result, -torch.tensor([1.0, 1e30, 1e-30]), rtol=1e-2, atol=0)
    communicator = LendingCommunicator(generation=1)
    with activate(ChangingContext(communicator)):
        model = make_model()
        optimizer = hvd.DistributedOptimizer(
            SGD(model.parameters()), compression=hvd.Compression.bf16
        )
        loss_of(model, 0).backward()
        optimizer.step()
        assert {made.dtype for made in communicator.made} == {torch.bfloat16}
        assert model[0].weight.grad.dtype is torch.float64
    half = torch.ones(2, dtype=torch.float16)
    assert hvd.Compression.bf16.compress(half)[0].dtype is torch.float16
