"""Sparse tensors and gradients."""

from __future__ import annotations

import pytest
import torch

import nbelastic.torch as hvd
from tests.collectives.worlds import MAKERS, SOME_KINDS
from tests.support.world import run_ranks

ROWS = [[1, 2, 2], [3], [2, 7]]


@pytest.mark.parametrize("kind", SOME_KINDS)
@pytest.mark.parametrize("op", [hvd.Average, hvd.Sum])
def test_sparse_tensors_are_reduced_as_dense_ones(kind, op):
    def rank_main(context):
        dense = torch.zeros(9, 4)
        for row in ROWS[context.rank]:
            dense[row] += context.rank + 1
        handles = [
            hvd.sparse_allreduce_async(dense.to_sparse(), name=name, op=op) for name in ("s", None)
        ]
        found = [handles[0](), hvd.synchronize(handles[1])]
        expected = hvd.allreduce(dense, op=op)
        assert all(each.is_sparse for each in found)
        for each in found:
            torch.testing.assert_close(each.to_dense(), expected)
        return found[0]._nnz()

    assert len(set(run_ranks(3, rank_main, make=MAKERS[kind]))) == 1


class Net(torch.nn.Module):
    def __init__(self, sparse: bool) -> None:
        super().__init__()
        self.table = torch.nn.Embedding(10, 3, sparse=sparse)
        self.line = torch.nn.Linear(3, 2)
        generator = torch.Generator().manual_seed(0)
        for parameter in self.parameters():
            torch.nn.init.uniform_(parameter, generator=generator)

    def forward(self, rows):
        return self.line(self.table(rows)).square().sum()


def train(model, optimizers, rows):
    for _ in range(3):
        for optimizer in optimizers:
            optimizer.zero_grad()
        for batch in rows:
            model(torch.tensor(batch)).backward()
        for optimizer in optimizers:
            optimizer.step()
    return [parameter.detach().clone() for parameter in model.parameters()]


@pytest.mark.parametrize("kind", SOME_KINDS)
@pytest.mark.parametrize("as_dense", [True, False])
def test_embeddings_train_as_on_one_rank(kind, as_dense):
    """SGD of all, and SparseAdam of the embedding beside SGD of the rest.

    Of two optimizers of the same parameters the first sees no gradient arrive.
    """

    def optimizers_of(model, wrap=lambda optimizer: optimizer):
        together = [torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.5)]
        apart = [
            torch.optim.SparseAdam([model.table.weight], lr=0.01),
            torch.optim.SGD(model.line.parameters(), lr=0.01),
        ]
        return [[wrap(each) for each in some] for some in (together, apart)]

    def rank_main(context):
        def wrap(optimizer):
            return hvd.DistributedOptimizer(optimizer, op=hvd.Sum, sparse_as_dense=as_dense)

        results = []
        for index in range(2):
            model = Net(sparse=True)
            optimizers = optimizers_of(model, wrap)[index]
            results.append(train(model, optimizers, ROWS[context.rank : context.rank + 1]))
        return results

    expected = []
    for index in range(2):
        model = Net(sparse=True)
        expected.append(train(model, optimizers_of(model)[index], ROWS))
    for found in run_ranks(3, rank_main, make=MAKERS[kind]):
        for mine, theirs in zip(found, expected, strict=True):
            for a, b in zip(mine, theirs, strict=True):
                torch.testing.assert_close(a, b)


def test_a_rank_without_a_sparse_gradient_takes_part():
    def rank_main(context):
        table = torch.nn.Embedding(4, 1, sparse=True)
        torch.nn.init.zeros_(table.weight)
        optimizer = hvd.DistributedOptimizer(torch.optim.SGD(table.parameters(), 1.0), op=hvd.Sum)
        for step in range(4):
            optimizer.zero_grad()
            if step % 2 == context.rank:
                table(torch.tensor([step])).sum().backward()
            optimizer.step()
        return table.weight.flatten().tolist()

    assert run_ranks(2, rank_main) == [[-1.0, -1.0, -1.0, -1.0]] * 2


class Halves:
    """Compression that changes shapes: every number travels as two halves."""

    def compress(self, tensor):
        return torch.cat([tensor.flatten() / 2, tensor.flatten() / 2]), tensor.shape

    def decompress(self, tensor, shape):
        return tensor.view(2, -1).sum(0).view(shape)


def test_a_compression_of_ones_own():
    def rank_main(context):
        assert hvd.allreduce(torch.ones(2, 3), compression=Halves()).tolist() == [[1.0] * 3] * 2
        net = torch.nn.Linear(2, 1)
        torch.nn.init.zeros_(net.weight)
        optimizer = hvd.DistributedOptimizer(
            torch.optim.SGD(net.parameters(), 1.0), compression=Halves()
        )
        for _ in range(2):
            optimizer.zero_grad()
            net(torch.full((1, 2), context.rank + 1.0)).sum().backward()
            optimizer.step()
        return net.weight.flatten().tolist()

    assert run_ranks(2, rank_main) == [[-3.0, -3.0]] * 2
