"""Sparse gradients: in steps of micro-batches the same bits on any number of ranks."""

from __future__ import annotations

import pytest
import torch
from torch.utils.data import TensorDataset

import nbelastic.torch as hvd
from nbelastic.collectives.reduction_tree import IDENTITY
from nbelastic.data import Batch, Loader
from nbelastic.torch.gradients.tree_sums import add_rows, as_dense
from tests.support.world import run_ranks
from tests.torch.nets import bits
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


def train(optimizers_of, *, micro=2, exact=True, sparse=True, looks=None, **options):
    model = Net(sparse=sparse)
    optimizers = [hvd.DistributedOptimizer(each, **options) for each in optimizers_of(model)]
    loader = Loader(data(), Batch(10, micro=micro, exact=exact), seed=1)
    for _ in range(2):
        for step in loader:
            for optimizer in optimizers:
                optimizer.zero_grad()
            for words, rare in step:
                model(words, rare).backward()
            for optimizer in optimizers:
                optimizer.synchronize()
            if looks is not None:
                looks(model)
            for optimizer in optimizers:
                with optimizer.skip_synchronize():
                    optimizer.step()
    return [parameter.detach().clone() for parameter in model.parameters()]


@pytest.mark.parametrize("micro", [1, 5])
@pytest.mark.parametrize("optimizers_of", [sgd, adam])
def test_sparse_gradients_have_the_same_bits_on_any_number_of_ranks(optimizers_of, micro):
    """Of 4 ranks and 2 micro-batches, two have none, and know nothing of any gradient."""

    def main(_context):
        return bits(train(optimizers_of, micro=micro))

    expected = run_ranks(1, main)[0]
    for size in (2, 4):
        assert run_ranks(size, main) == [expected] * size


def test_they_stay_sparse_and_have_only_the_rows_that_were_used():
    def main(_context):
        found = []

        def looks(model):
            gradients = [model.table.weight.grad, model.rare.weight.grad]
            for gradient in gradients:
                assert gradient is None or (gradient.is_sparse and gradient.is_coalesced())
            found.append([0 if each is None else each._nnz() for each in gradients])

        train(sgd, looks=looks)
        return found

    found = run_ranks(3, main)
    assert found[0] == found[1] == found[2]
    assert any(rare == 0 for _, rare in found[0])
    assert any(0 < rare < 5 for _, rare in found[0])
    assert all(0 < rows < WORDS for rows, _ in found[0])


@pytest.mark.parametrize("size", [1, 3])
def test_the_sums_are_those_of_dense_gradients(size):
    def plain(model):
        return [torch.optim.SGD(model.parameters(), lr=0.3)]

    def main(_context):
        dense = train(plain, sparse=False)
        assert bits(train(plain, sparse_as_dense=True)) == bits(dense)
        assert bits(train(plain)) == bits(dense)

    run_ranks(size, main)


@pytest.mark.parametrize("first", [False, True])
def test_where_dense_and_sparse_gradients_meet_all_are_dense(first):
    """A table that some micro-batches use as a line, too."""

    def main(_context):
        model = Net(tied=True)
        optimizer = hvd.DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=0.1))
        for step in Loader(data(), Batch(10, micro=2, exact=True), seed=1):
            optimizer.zero_grad()
            for words, rare in step:
                if words.sum().item() % 2 == first:
                    model(words, rare).backward()
                else:
                    model.table(words).square().sum().backward()
            optimizer.step()
        return bits(list(model.parameters()))

    expected = run_ranks(1, main)[0]
    for size in (2, 3):
        assert run_ranks(size, main) == [expected] * size


def test_absent_rows_change_no_bit():
    """Zeros keep their sign, where torch's own sum of sparse tensors starts from 0."""

    def table(rows, *values):
        values = torch.tensor(values).view(-1, 1)
        return torch.sparse_coo_tensor([rows], values, (6, 1), check_invariants=True).coalesce()

    total = add_rows(table([1, 4], -0.0, 2.0), table([0, 4, 5], 1.0, 3.0, IDENTITY))
    assert str(total._values().flatten().tolist()) == "[1.0, -0.0, 5.0, -0.0]"
    assert str(as_dense(total).flatten().tolist()) == "[1.0, -0.0, -0.0, -0.0, 5.0, -0.0]"
