"""Sparse gradients: in steps of micro-batches the same bits on any number of ranks."""

from __future__ import annotations

import pytest
import torch
from torch.utils.data import TensorDataset

import nbelastic.torch as hvd
from nbelastic.data import Batch, Loader
from tests.support.world import run_ranks
from tests.torch.nets import bits
from tests.torch.ranks import on_ranks
from tests.torch.training import filled

ROWS, WORDS = 26, 40


def seeded(seed):
    return torch.Generator().manual_seed(seed)


class Net(torch.nn.Module):
    """Two tables, of which one is used by few rows of data, and a line."""

    def __init__(self, sparse=True, tied=False):
        super().__init__()
        self.table = torch.nn.Embedding(WORDS, 3, sparse=sparse)
        self.rare = torch.nn.Embedding(5, 3, sparse=sparse)
        self.line = torch.nn.Linear(3, WORDS if tied else 2, bias=False)
        filled(self, 3)
        if tied:
            self.line.weight = self.table.weight

    def forward(self, words, rare):
        found = self.table(words).sum(1)
        if rare.ge(0).any():
            found = found + self.rare(rare.clamp(min=0)) * rare.ge(0).unsqueeze(1)
        return torch.tanh(self.line(found)).square().sum(1).mean()


def data():
    words = torch.randint(0, WORDS, (ROWS, 4), generator=seeded(1))
    rare = torch.full((ROWS,), -1)
    rare[[3, 17]] = torch.tensor([2, 4])  # most micro-batches have no gradient of it
    return TensorDataset(words, rare)


def sgd(model):
    return [torch.optim.SGD(model.parameters(), lr=0.3, momentum=0.5)]


def adam(model):
    tables = [model.table.weight, model.rare.weight]
    return [
        torch.optim.SparseAdam(tables, lr=0.05),
        torch.optim.AdamW(model.line.parameters(), lr=0.05),
    ]


def train(optimizers_of, *, micro=2, sparse=True, odd=None, **options):
    """Return the parameters; with `odd` the table is a line, too, where a batch's words are so."""
    tied = odd is not None
    model = Net(sparse=sparse, tied=tied)
    optimizers = [hvd.DistributedOptimizer(each, **options) for each in optimizers_of(model)]
    loader = Loader(data(), Batch(10, micro=micro, exact=True), seed=1)
    for _ in range(2):
        for step in loader:
            for optimizer in optimizers:
                optimizer.zero_grad()
            for words, rare in step:
                if tied and words.sum().item() % 2 != odd:
                    model.table(words).square().sum().backward()
                else:
                    model(words, rare).backward()
            for optimizer in optimizers:
                optimizer.step()
    return bits([*model.parameters()])


@pytest.mark.parametrize(
    "how",
    [
        {"optimizers_of": sgd, "micro": 1},
        {"optimizers_of": sgd, "micro": 5},
        {"optimizers_of": adam},
        {"optimizers_of": sgd, "odd": 0},
        {"optimizers_of": sgd, "odd": 1},
    ],
    ids=["one by one", "two large", "adam", "even", "odd"],
)
def test_sparse_gradients_have_the_same_bits_on_any_number_of_ranks(how):
    """Of 4 ranks and 2 micro-batches, two have none, and know nothing of any gradient."""
    (expected,) = run_ranks(1, lambda _: train(**how))
    for size in (2, 3, 4):
        assert run_ranks(size, lambda _: train(**how)) == [expected] * size


@on_ranks(1)
def test_a_gradient_of_rows_is_not_added_to_that_of_the_step_before(context):
    model = Net()
    optimizer = hvd.DistributedOptimizer(adam(model)[0])
    steps = iter(Loader(data(), Batch(10, micro=2)))
    for words, rare in next(steps):
        model(words, rare).backward()
    optimizer.step()
    assert model.table.weight.grad.is_sparse
    words, rare = next(iter(next(steps)))
    with pytest.raises(RuntimeError, match="added to that of the step before"):
        model(words, rare).backward()


def plain(model):
    return [torch.optim.SGD(model.parameters(), lr=0.3)]


@on_ranks(1, 3)
def test_the_sums_are_those_of_dense_gradients(context):
    assert train(plain) == train(plain, sparse_as_dense=True) == train(plain, sparse=False)
