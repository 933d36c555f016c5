"""Adasum: what it computes, and of which gradients."""

import math

import pytest
import torch

import nbelastic.torch as hvd
from nbelastic.torch.ops.operation.reduction import combine
from tests.torch.nets import bits
from tests.torch.ranks import on_ranks
from tests.torch.training import make_model


def draw(count, length, seed=0):
    generator = torch.Generator().manual_seed(seed)
    return [torch.randn(length, generator=generator, dtype=torch.float64) for _ in range(count)]


@pytest.mark.parametrize("length", [1, 2, 33])
def test_it_is_the_formula_over_a_tree_of_any_number_of_ranks(length):
    vectors = draw(7, length)
    a, b = vectors[:2]
    half = a @ b / 2
    pair = (1 - half / (a @ a)) * a + (1 - half / (b @ b)) * b
    torch.testing.assert_close(combine([a, b]), pair, rtol=1e-12, atol=1e-12)
    for count in range(1, 8):
        some = vectors[:count]
        pairs = [combine(some[at : at + 2]) for at in range(0, count, 2)]
        assert torch.equal(combine(some), combine(pairs))


def test_zeros_add_nothing_and_what_is_infinite_spoils_all():
    (a,) = draw(1, 8)
    for nothing in (torch.zeros_like(a), torch.full_like(a, 1e-170)):  # its square is zero
        assert torch.equal(combine([a, nothing]), a)
        assert torch.equal(combine([nothing, a]), a)
    assert combine([torch.empty(0), torch.empty(0)]).shape == (0,)
    for bad in (math.inf, math.nan):
        assert not combine([a, a.clone().fill_(bad)]).isfinite().any()


def gradients(model, rank):
    inputs, targets = torch.full((1, 6), 1.0 + rank), torch.full((1, 3), float(rank))
    torch.nn.functional.mse_loss(model(inputs), targets).backward()
    return [parameter.grad for parameter in model.parameters()]


@pytest.mark.parametrize(
    ("compression", "rtol", "atol"),
    [(hvd.Compression.none, 1e-6, 1e-7), (hvd.Compression.bf16, 0.05, 2e-2)],
)
@on_ranks(2, 3)
def test_gradients_of_each_parameter_are_combined(context, compression, rtol, atol):
    model = make_model().float()
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    optimizer = hvd.DistributedOptimizer(optimizer, op=hvd.Adasum, compression=compression)
    context.flag = context.rank == 1
    gradients(model, context.rank)
    optimizer.step()
    assert context.agreed == [True]
    every = [gradients(make_model().float(), rank) for rank in range(context.size)]
    for parameter, parts in zip(model.parameters(), zip(*every, strict=True), strict=True):
        want = combine([part.flatten() for part in parts]).float().view_as(parameter)
        torch.testing.assert_close(parameter.grad, want, rtol=rtol, atol=atol)
    return bits([each for p in model.parameters() for each in (p, p.grad)])


@on_ranks(2)
def test_what_only_some_use_is_added_and_complex_numbers_are_pairs(context):
    kinds = (torch.float32, torch.complex64, torch.float32, torch.complex64)
    weights = [torch.nn.Parameter(torch.ones(2, dtype=dtype)) for dtype in kinds]
    optimizer = hvd.DistributedOptimizer(torch.optim.SGD(weights, 1.0), op=hvd.Adasum)
    used, unused, by_all = weights[context.rank], *weights[2:]
    (used.abs().sum() * 3 + by_all.real.sum() + 2 * by_all.imag.sum()).backward()
    optimizer.step()
    assert unused.grad is None
    assert [weight.detach().real.tolist() for weight in weights[:2]] == [[-2.0, -2.0]] * 2
    assert by_all.grad.tolist() == [1 + 2j] * 2
