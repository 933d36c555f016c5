"""Batch normalisation over all ranks does what that of one rank does on all rows."""

import copy

import pytest
import torch

import nbelastic.torch as hvd
from tests.collectives.worlds import SOME_KINDS
from tests.torch.nets import bits
from tests.torch.ranks import on_ranks

ROWS = [3, 0, 5, 1]


def run(layer, values):
    """Return the outputs of two passes, and the gradient of the values."""
    values = values.clone().requires_grad_()
    outputs = [layer(values) for _ in range(2)]
    for output in outputs:
        weights = torch.arange(1.0, 5).view(1, 4, *[1] * (output.dim() - 2)).sin()
        (output * weights).square().sum().backward()
    return [*(output.detach() for output in outputs), values.grad]


@pytest.mark.parametrize(("shape", "momentum"), [((4,), 0.1), ((4, 2, 3), None)])
@on_ranks(1, 4, kinds=SOME_KINDS)
def test_uneven_batches_count_each_sample_once(context, shape, momentum):
    rank, rows = context.rank, ROWS[: context.size]
    generator = torch.Generator().manual_seed(3)
    whole = torch.randn(sum(rows), *shape, generator=generator, dtype=torch.float64) * 3 + 100
    kind = {1: torch.nn.BatchNorm1d, 3: torch.nn.BatchNorm2d}[len(shape)]
    layer, plain = (each(4, momentum=momentum).double() for each in (hvd.SyncBatchNorm, kind))
    for found, expected in zip(run(layer, whole.split(rows)[rank]), run(plain, whole), strict=True):
        torch.testing.assert_close(found, expected.split(rows)[rank])
    sums = [hvd.allreduce(each.grad, op=hvd.Sum) for each in layer.parameters()]
    torch.testing.assert_close(sums, [each.grad for each in plain.parameters()])
    torch.testing.assert_close([*layer.buffers()], [*plain.buffers()])
    torch.testing.assert_close(layer.eval()(whole), plain.eval()(whole))


@on_ranks(3)
def test_it_trains_with_a_distributed_optimizer_and_joined_ranks(context):
    net = torch.nn.Sequential(torch.nn.Linear(3, 4), hvd.SyncBatchNorm(4), torch.nn.Linear(4, 1))
    hvd.broadcast_parameters(net.state_dict())
    optimizer = hvd.DistributedOptimizer(torch.optim.SGD(net.parameters(), lr=0.1))
    for _ in range(context.rank + 1):
        optimizer.zero_grad()
        net(torch.randn(5, 3)).square().mean().backward()
        optimizer.step()
    assert hvd.join() == 2
    hvd.broadcast_parameters(net.state_dict(), root_rank=2)
    return bits(net.state_dict())


def test_modules_are_converted_in_place():
    net = torch.nn.Sequential(
        torch.nn.BatchNorm2d(3, eps=0.1, momentum=None),
        torch.nn.Sequential(torch.nn.SyncBatchNorm(2), torch.nn.BatchNorm1d(2, affine=False)),
    )
    net[0].eval()
    before = copy.deepcopy(net.state_dict())
    parameters = list(net.parameters())
    assert hvd.SyncBatchNorm.convert_sync_batchnorm(net) is net
    assert all(isinstance(each, hvd.SyncBatchNorm) for each in (net[0], net[1][0], net[1][1]))
    assert (net[0].eps, net[0].momentum, net[0].training) == (0.1, None, False)
    assert all(a is b for a, b in zip(parameters, net.parameters(), strict=True))
    assert before.keys() == net.state_dict().keys()
    single = hvd.convert_sync_batchnorm(torch.nn.BatchNorm1d(2))
    assert isinstance(single, hvd.SyncBatchNorm)
    assert hvd.convert_sync_batchnorm(single) is single


def test_wrong_inputs():
    layer = hvd.SyncBatchNorm(2)
    with pytest.raises(ValueError, match="at least 2 dimensions"):
        layer(torch.ones(2))
    with pytest.raises(ValueError, match="2 features, the input 3"):
        layer(torch.ones(1, 3))
