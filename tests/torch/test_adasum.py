"""Adasum: what it computes, and of which gradients."""

import math

import pytest
import torch

import nbelastic.torch as hvd
from nbelastic.torch.gradients import layout
from nbelastic.torch.ops.operation.reduction import combine
from tests.support.world import run_ranks
from tests.torch.training import assert_equal, make_model, parameters_of


def adasum(vectors):
    """Combine lists of numbers in a tree, by the formula."""
    if len(vectors) == 1:
        return vectors[0]
    pairs = [vectors[at : at + 2] for at in range(0, len(vectors), 2)]
    return adasum([combined(*pair) if len(pair) == 2 else pair[0] for pair in pairs])


def combined(a, b):
    def dot(x, y):
        return math.fsum(p * q for p, q in zip(x, y, strict=True))

    of_a = 1 - dot(a, b) / (2 * dot(a, a)) if any(a) else 1
    of_b = 1 - dot(a, b) / (2 * dot(b, b)) if any(b) else 1
    return [of_a * p + of_b * q for p, q in zip(a, b, strict=True)]


def draw(count, length, seed=0):
    generator = torch.Generator().manual_seed(seed)
    return [torch.randn(length, generator=generator, dtype=torch.float64) for _ in range(count)]


@pytest.mark.parametrize("count", [1, 2, 3, 4, 5, 7])
@pytest.mark.parametrize("length", [1, 2, 33])
def test_it_is_the_formula_over_a_tree_of_any_number_of_ranks(count, length):
    vectors = draw(count, length)
    want = torch.tensor(adasum([vector.tolist() for vector in vectors]), dtype=torch.float64)
    torch.testing.assert_close(combine(vectors), want, rtol=1e-12, atol=1e-12)


def test_zeros_add_nothing_and_what_is_infinite_spoils_all():
    (a,) = draw(1, 8)
    for nothing in (torch.zeros_like(a), torch.full_like(a, 1e-170)):  # its square is zero
        assert torch.equal(combine([a, nothing]), a)
        assert torch.equal(combine([nothing, a]), a)
    assert combine([torch.empty(0), torch.empty(0)]).shape == (0,)
    for bad in (math.inf, math.nan):
        assert not combine([a, a.clone().fill_(bad)]).isfinite().any()


def test_parts_are_combined_one_by_one():
    parts = [[part.float() for part in draw(2, 5, rank)] for rank in range(3)]

    def rank_main(context):
        first, second = parts[context.rank]
        return hvd.grouped_allreduce([first, torch.empty(0), second], op=hvd.Adasum)

    for first, _, second in run_ranks(3, rank_main):
        assert_equal([first, second], [combine(part).float() for part in zip(*parts, strict=True)])


@pytest.mark.parametrize("size", [2, 3])
@pytest.mark.parametrize("compression", [hvd.Compression.none, hvd.Compression.bf16])
def test_gradients_of_each_parameter_are_combined(monkeypatch, size, compression):
    monkeypatch.setattr(layout, "BUCKET_BYTES", 200)

    def gradients(model, rank):
        inputs, targets = torch.full((1, 6), 1.0 + rank), torch.full((1, 3), float(rank))
        torch.nn.functional.mse_loss(model(inputs), targets).backward()
        return [parameter.grad for parameter in model.parameters()]

    def rank_main(context):
        model = make_model().float()
        optimizer = torch.optim.SGD(model.parameters(), 0.1)
        optimizer = hvd.DistributedOptimizer(optimizer, op=hvd.Adasum, compression=compression)
        context.flag = context.rank == 1
        gradients(model, context.rank)
        optimizer.step()
        assert context.agreed == [True]
        return [*(parameter.grad for parameter in model.parameters()), *parameters_of(model)]

    results = run_ranks(size, rank_main)
    for result in results[1:]:
        assert_equal(result, results[0])
    every = [gradients(make_model().float(), rank) for rank in range(size)]
    precise = compression is hvd.Compression.none
    for number, got in enumerate(results[0][:6]):
        want = combine([theirs[number].flatten() for theirs in every]).float()
        torch.testing.assert_close(
            got.flatten(), want, rtol=1e-6 if precise else 0.05, atol=1e-7 if precise else 2e-2
        )


def test_what_only_some_use_is_added_and_complex_numbers_are_pairs():
    def rank_main(context):
        kinds = (torch.float32, torch.complex64, torch.float32, torch.complex64)
        weights = [torch.nn.Parameter(torch.ones(2, dtype=dtype)) for dtype in kinds]
        optimizer = hvd.DistributedOptimizer(torch.optim.SGD(weights, 1.0), op=hvd.Adasum)
        used, unused, by_all = weights[context.rank], *weights[2:]
        (used.abs().sum() * 3 + by_all.real.sum() + 2 * by_all.imag.sum()).backward()
        optimizer.step()
        assert unused.grad is None
        return [weight.detach().real.tolist() for weight in weights[:2]], by_all.grad.tolist()

    assert run_ranks(2, rank_main) == [([[-2.0, -2.0], [-2.0, -2.0]], [1 + 2j] * 2)] * 2
