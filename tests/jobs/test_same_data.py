"""A job whose ranks build different data ends before it trains."""

from __future__ import annotations

import pytest

from nbelastic.errors import RankFailed


def train():
    import torch
    from torch.utils.data import TensorDataset, random_split

    import nbelastic.torch as hvd

    rows = TensorDataset(torch.arange(50.0).view(-1, 1), torch.arange(50.0))
    part, _ = random_split(rows, [40, 10], generator=torch.Generator().manual_seed(hvd.rank()))
    model = torch.nn.Linear(1, 1)
    optimizer = hvd.DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=1e-4))
    loader = hvd.elastic.Loader(part, hvd.elastic.Batch(8, micro=4))
    state = hvd.elastic.TorchState(model, optimizer, loader=loader, epoch=0)

    @hvd.elastic.run
    def loop(state):
        for state.epoch in range(state.epoch, 1):
            for step in state.loader:
                optimizer.zero_grad()
                for x, y in step:
                    (model(x).squeeze() - y).square().mean().backward()
                optimizer.step()
                raise AssertionError(f"step {step.number} was trained")

    loop(state)


def test_a_split_without_a_seed_ends_the_job_before_it_trains(crew):
    with pytest.raises(RankFailed, match=r"ranks 0 and 1: the indices of its Subset differ"):
        crew.fit(train, np=2).results()
