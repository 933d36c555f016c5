"""Batch normalisation over all ranks does what that of one rank does on all rows."""

import copy

import pytest
import torch

import nbelastic.torch as hvd
from tests.collectives.worlds import KINDS, MAKERS
from tests.support.world import run_ranks

ROWS = [3, 0, 5, 1]


def rows_of(rank, size, dtype, shape):
    generator = torch.Generator().manual_seed(3)
    everything = torch.randn(sum(ROWS[:size]), *shape, generator=generator, dtype=torch.float64)
    start = sum(ROWS[:rank])
    own = everything[start : start + ROWS[rank]] if rank < size else everything
    return (own * 3 + 100).to(dtype)


@pytest.mark.parametrize(
    ("kind", "size"),
    [
        ("gloo", 1),
        ("gloo", 2),
        *(pytest.param(*kind.values, 4, marks=kind.marks) for kind in KINDS),
    ],
)
@pytest.mark.parametrize(("shape", "momentum"), [((4,), 0.1), ((4, 2, 3), None)])
def test_uneven_batches_count_each_sample_once(kind, size, shape, momentum):
    def run(layer, values):
        values.requires_grad_()
        outputs = []
        for _ in range(2):
            output = layer(values)
            outputs.append(output.detach())
            weights = torch.arange(1.0, 5).view(1, 4, *[1] * (len(shape) - 1)).sin()
            (output * weights).square().sum().backward()
        return outputs, values.grad

    def rank_main(context):
        layer = hvd.SyncBatchNorm(4, momentum=momentum).double()
        outputs, grad = run(layer, rows_of(context.rank, size, torch.float64, shape))
        parameters = [hvd.allreduce(p.grad, op=hvd.Sum) for p in layer.parameters()]
        layer.eval()
        evaluated = layer(rows_of(9, size, torch.float64, shape))
        return outputs, grad, parameters, [b.clone() for b in layer.buffers()], evaluated

    kinds = {1: torch.nn.BatchNorm1d, 3: torch.nn.BatchNorm2d}
    plain = kinds[len(shape)](4, momentum=momentum).double()
    expected, grad = run(plain, rows_of(9, size, torch.float64, shape))
    results = run_ranks(size, rank_main, make=MAKERS[kind])
    for step in range(2):
        torch.testing.assert_close(torch.cat([r[0][step] for r in results]), expected[step])
    torch.testing.assert_close(torch.cat([r[1] for r in results]), grad)
    plain.eval()
    for _, _, parameters, buffers, evaluated in results:
        torch.testing.assert_close(parameters, [each.grad for each in plain.parameters()])
        torch.testing.assert_close(buffers, [*plain.buffers()])
        torch.testing.assert_close(evaluated, plain(rows_of(9, size, torch.float64, shape)))


def test_it_trains_with_a_distributed_optimizer_and_joined_ranks():
    def rank_main(context):
        net = torch.nn.Sequential(
            torch.nn.Linear(3, 4), hvd.SyncBatchNorm(4), torch.nn.Linear(4, 1)
        )
        hvd.broadcast_parameters(net.state_dict())
        optimizer = hvd.DistributedOptimizer(torch.optim.SGD(net.parameters(), lr=0.1))
        for _ in range(context.rank + 1):
            optimizer.zero_grad()
            net(torch.randn(5, 3)).square().mean().backward()
            optimizer.step()
        last = hvd.join()
        hvd.broadcast_parameters(net.state_dict(), root_rank=last)
        return last, [value.clone() for value in net.state_dict().values()]

    (_, expected), *others = run_ranks(3, rank_main)
    for last, values in others:
        assert last == 2
        assert all(map(torch.equal, values, expected))


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
